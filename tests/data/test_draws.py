"""Chance: pure in (seed, epoch, position), the same for ever, and fair."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anyprec.data import draws

GOLDEN_SHUFFLE = [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
GOLDEN_UNIFORM = [0.42363338425342667, 0.19361870879512466, 0.3801603849409281, 0.36828486804356986]
GOLDEN_BALANCE = [5, 1, 4, 3, 0, 2]

SEEDS = st.integers(0, 2**64 - 1)


def test_golden_numbers_never_change() -> None:
    """A changed number here breaks every resumed run and every stated result."""
    assert draws.shuffle(10, 0, 0).tolist() == GOLDEN_SHUFFLE
    assert draws.uniform(7, 3, 100, 1, 4).tolist() == [GOLDEN_UNIFORM]
    assert draws.balance(np.array([0, 0, 0, 1, 1, 2])).tolist() == GOLDEN_BALANCE


@given(st.integers(1, 300), SEEDS, SEEDS)
def test_shuffle_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = draws.shuffle(count, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(count))
    assert np.array_equal(order, draws.shuffle(count, seed, epoch))


def test_seed_and_epoch_both_matter() -> None:
    orders = {tuple(draws.shuffle(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@given(SEEDS, st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 39), st.sampled_from([4, 8, 24]))
def test_numbers_of_a_position_do_not_depend_on_where_we_start(
    seed: int, first: int, count: int, skip: int, each: int
) -> None:
    whole = draws.uniform(seed, 5, first, count, each)
    skip = min(skip, count - 1)
    assert np.array_equal(whole[skip:], draws.uniform(seed, 5, first + skip, count - skip, each))
    assert whole.min() >= 0 and whole.max() < 1


def test_uniform_is_uniform_and_columns_are_independent() -> None:
    numbers = draws.uniform(1, 0, 0, 20_000, 4)
    assert np.allclose(numbers.mean(axis=0), 0.5, atol=0.01)  # deviation of the mean: 0.002
    assert np.allclose(numbers.var(axis=0), 1 / 12, atol=0.003)
    assert np.abs(np.corrcoef(numbers.T) - np.eye(4)).max() < 0.03


def test_streams_do_not_overlap() -> None:
    words = [draws._words(stream, 0, 0, 0, 1000) for stream in (draws.SHUFFLE, draws.AUGMENT, draws.BALANCE)]
    assert len(set(np.concatenate(words).tolist())) == 3000


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_every_prefix_is_balanced(given_labels: list[int]) -> None:
    labels = np.array(given_labels)
    order = draws.balance(labels)
    assert np.array_equal(np.sort(order), np.arange(len(labels)))
    sizes = np.bincount(labels)
    for n in range(1, len(labels) + 1):
        taken = np.bincount(labels[order[:n]], minlength=len(sizes))
        # A class is behind the fullest by more than one only when it has no more images.
        assert all(count >= taken.max() - 1 or count == size for count, size in zip(taken, sizes, strict=True))


def test_stratify_keeps_the_shares_of_the_classes() -> None:
    labels = np.array([0] * 80 + [1] * 40 + [2] * 8)
    order = draws.stratify(labels)
    assert sorted(order) == list(range(128))
    assert np.bincount(labels[order[-16:]]).tolist() == [10, 5, 1] == np.bincount(labels[order[:16]]).tolist()
    even = np.arange(60) % 6
    assert np.array_equal(draws.stratify(even), draws.balance(even))


def test_turn_gives_every_image_the_other_side_in_the_next_epoch() -> None:
    first = draws.alternating_coins(1000, 3, 0)
    assert 400 < first.sum() < 600
    assert np.array_equal(draws.alternating_coins(1000, 3, 1), ~first) and np.array_equal(
        draws.alternating_coins(1000, 3, 2), first
    )
    assert not np.array_equal(draws.alternating_coins(1000, 4, 0), first)
