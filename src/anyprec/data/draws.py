"""All chance in the data pipeline: (seed, epoch, position) in, random numbers out; nothing is remembered.

Philox is a counter-based generator, so the numbers of any position are computed without those before it: this
is what lets a run resume in the middle of an epoch. Only raw 64-bit words are used, which numpy keeps the
same from release to release (its `permutation` and `random` may change). Called by `loader` and `catalog`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Streams that must not share words; they sit in the top quarter of Philox's 256-bit counter.
SHUFFLE, AUGMENT, BALANCE, TURN = 0, 1, 2, 3


def _words(stream: int, seed: int, epoch: int, first: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` words of one stream from block `first` on; a block is four words."""
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Philox(counter=(stream << 192) + first, key=key).random_raw(count)


def shuffle(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """A permutation of 0..count-1, by sorting random words. 1.28 million take 0.15 s, once an epoch."""
    return np.argsort(_words(SHUFFLE, seed, epoch, 0, count), kind="stable").astype(np.int64)


def uniform(seed: int, epoch: int, first: int, count: int, each: int) -> npt.NDArray[np.float64]:
    """`each` numbers in [0, 1) for each of `count` positions from `first` on; `each` is a multiple of 4."""
    assert each % 4 == 0, "a Philox block is four words: positions would share blocks"
    words = _words(AUGMENT, seed, epoch, first * (each // 4), count * each)
    return ((words >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(count, each)  # (count, each)


def alternating_coins(count: int, seed: int, epoch: int) -> npt.NDArray[np.bool_]:
    """One coin an image, tossed once; in every second epoch all coins are turned over."""
    heads = (_words(TURN, seed, 0, 0, count) >> np.uint64(63)).astype(bool)
    return heads ^ bool(epoch % 2)


def balance(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A fixed order of all images whose every prefix is as class-balanced as the classes allow.

    Each class is shuffled; then come all first images of the classes, all second ones, and so on:
    labels 0 0 0 1 1 may give 1 0 0 1 0. A prefix of n is part of every longer prefix.
    """
    words, place = _places(labels)
    return np.lexsort((words, place)).astype(np.int64)


def stratify(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A fixed order of all images whose every part has each class about as often as the whole has it.

    Of 8 images of class 0 and 4 of class 1, the last 3 are two of class 0 and one of class 1. Where all classes are of
    one size it is the order of `balance`.
    """
    words, place = _places(labels)
    return np.lexsort((words, (2 * place + 1) / np.bincount(labels)[labels])).astype(np.int64)


def _places(labels: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """(random words, the place of each image in its class when shuffled by them, from 0)."""
    words = _words(BALANCE, 0, 0, 0, len(labels))
    by_class = np.lexsort((words, labels))  # class by class, shuffled inside
    counts = np.bincount(labels)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    place = np.empty(len(labels), dtype=np.int64)
    place[by_class] = np.arange(len(labels)) - starts
    return words, place
