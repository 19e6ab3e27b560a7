"""Batches for training and testing: a data set in, (images (n, H, W, C) float32, labels (n,) int64) out.

Of photographs with masks the labels are (n, H, W), IGNORED where a pixel has no class.
What a batch holds depends on (seed, epoch, position in the epoch) alone: a run can start at any batch, and
`world` processes share the batch one process would get. Called by training, evaluation and calibration.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from anyprec.data import draws
from anyprec.data.augment import Augment, Pixels, find_augment, prepared
from anyprec.data.masks import IGNORED, VOID, MaskData
from anyprec.data.sets import ArrayData, FileData
from anyprec.errors import DataError
from anyprec.preprocessing import CHANNELS, Preprocessing

Batch = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def steps_per_epoch(data: ArrayData | FileData | MaskData, batch_size: int, drop_last: bool) -> int:
    """Batches in one epoch. 100 images in batches of 32: 3 with `drop_last`, else 4."""
    _check_count("batch_size", batch_size, 1)
    if drop_last and batch_size > len(data):
        raise DataError(
            f"batch_size={batch_size} is more than the {len(data)} images of {data.name}, and incomplete "
            "batches are dropped: nothing would be left; choose a smaller batch or drop_last=False"
        )
    return len(data) // batch_size if drop_last else -(-len(data) // batch_size)


def batches(
    data: ArrayData | FileData | MaskData,
    batch_size: int,
    *,
    augment: str | Augment = "none",
    train: bool = False,
    seed: int = 0,
    epoch: int = 0,
    start: int = 0,
    rank: int = 0,
    world: int = 1,
    drop_last: bool | None = None,
    preprocessing: Preprocessing | None = None,
    prefetch: int = 2,
) -> Iterator[Batch]:
    """One epoch of batches from batch `start` on.

    batch_size: of all processes together; this one gets rows rank::world of each batch
    train:      shuffle, augment at random, drop the last incomplete batch; else none of these
    drop_last:  overrides that; a kept last batch may leave some ranks fewer rows, or none
    preprocessing: of testing; by default what follows from the data set and `augment`
    prefetch:   batches a background thread prepares ahead; 0 prepares each when asked for
    """
    if not isinstance(data, (ArrayData, FileData, MaskData)):
        raise DataError(f"data is a {type(data).__name__}, must be ArrayData, FileData or MaskData; see load_data()")
    drop_last = train if drop_last is None else bool(drop_last)
    steps = steps_per_epoch(data, batch_size, drop_last)
    how = find_augment(augment)
    if how.side and isinstance(data, ArrayData):
        raise DataError(
            f"augment={how.name!r} cuts photographs of any size, but {data.name} holds arrays; "
            "choose none, crop, crop-flip or svhn"
        )
    masked = isinstance(data, MaskData)
    if bool(how.cut[0]) != masked and how != find_augment("none"):
        fit = "none, voc, camvid or one with a size, such as voc-321x321" if masked else "one that does not cut masks"
        raise DataError(f"augment={how.name!r} does not go with {data.name}; choose {fit}")
    _check_count("seed", seed, 0, 2**64 - 1)
    _check_count("epoch", epoch, 0, 2**64 - 1)
    if not masked:
        _check_count("start", start, 0, steps)
    _check_count("world", world, 1)
    _check_count("rank", rank, 0, world - 1)
    _check_count("prefetch", prefetch, 0)
    if batch_size % world:
        raise DataError(f"batch_size={batch_size} cannot be shared by {world} processes; choose a multiple of {world}")

    if isinstance(data, MaskData):
        plan = _mask_plan(data, batch_size, how, train, drop_last, seed, epoch)
        _check_count("start", start, 0, len(plan))

        def prepare_masks(step: int) -> Batch:
            first = step * batch_size
            chance = draws.uniform(seed, epoch, first, len(plan[step]), how.each)[rank::world] if train else None
            return _masked(data, plan[step][rank::world], how, chance)

        todo = range(start, len(plan))
        return _prefetched(prepare_masks, todo, prefetch) if prefetch else (prepare_masks(step) for step in todo)

    order = draws.shuffle(len(data), seed, epoch) if train else np.arange(len(data))
    turned = draws.alternating_coins(len(data), seed, epoch) if train and how.turns else None
    if not train:
        read = testing_reader(data, preprocessing or preprocessing_of(data, how))
    else:
        normalize = normalizer(data.mean, data.std, how.shape(data.shape))

    def prepare(step: int) -> Batch:
        first = step * batch_size
        rows = order[first : first + batch_size]
        if not train:
            rows = rows[rank::world]
            return read(rows), data.labels[rows]
        chance = draws.uniform(seed, epoch, first, len(rows), how.each)[rank::world] if how.each else None
        rows = rows[rank::world]
        if turned is not None and chance is not None:
            chance[:, 2] = np.where(turned[rows], 0.0, 1.0)  # what `apply` mirrors by
        return normalize(_pixels(data, rows, how, chance)), data.labels[rows]

    todo = range(start, steps)
    return _prefetched(prepare, todo, prefetch) if prefetch else (prepare(step) for step in todo)


def _mask_plan(
    data: MaskData, batch_size: int, how: Augment, train: bool, drop_last: bool, seed: int, epoch: int
) -> list[npt.NDArray[np.int64]]:
    """The rows of each batch. In testing only images of one size share a batch, so that none has to be padded: what is
    said of an image then depends on the image alone.
    """
    if train:
        order = draws.shuffle(len(data), seed, epoch)
        groups = [order]
    else:
        sizes = data.sizes
        order = np.lexsort((sizes[:, 1], sizes[:, 0]))  # stable: images of one size stay in order
        changes = np.flatnonzero((np.diff(sizes[order], axis=0) != 0).any(axis=1)) + 1
        groups = np.split(order, changes)
    batches = [group[i : i + batch_size] for group in groups for i in range(0, len(group), batch_size)]
    return [rows for rows in batches if len(rows) == batch_size] if drop_last else batches


def _masked(data: MaskData, rows: npt.NDArray[np.int64], how: Augment, chance: npt.NDArray[np.float64] | None) -> Batch:
    if len(rows) == 0:  # as in _pixels
        return np.empty((0, 1, 1, 3), np.float32), np.empty((0, 1, 1), np.int64)
    if chance is not None and how.cut[0]:
        images, masks = data.cut(rows, how, chance)
    else:
        images, masks = data.read(rows)
    labels = np.where(masks == VOID, IGNORED, masks.astype(np.int64))
    return normalizer(data.mean, data.std, (images.shape[1], images.shape[2], 3))(images), labels  # (n, H, W) int64


def preprocessing_of(data: ArrayData | FileData | MaskData, augment: str | Augment = "none") -> Preprocessing:
    """What testing does to the images of a data set that is trained with `augment`; with masks they keep their size."""
    if isinstance(data, MaskData):
        return Preprocessing(data.mean, data.std)
    return find_augment(augment).preprocessing(data.shape, data.mean, data.std)


def check_channels_fit(data: ArrayData | FileData | MaskData, channels: int) -> None:
    if data.shape[2] != channels:
        has, takes = (CHANNELS.get(n, f"{n}-channel") for n in (data.shape[2], channels))
        raise DataError(
            f"{data.name} has {has} images, the network takes {takes} ones; name one like that of its training"
        )


def testing_pixels(data: ArrayData | FileData, how: Preprocessing) -> Callable[[npt.NDArray[np.int64]], Pixels]:
    """A function from rows of the data set to (n, H, W, C) uint8: what `how` makes of the pictures they are."""
    if isinstance(data, FileData):
        return lambda rows: data.read(rows, lambda image, _: how.pixels(image))
    check_channels_fit(data, how.channels)
    return lambda rows: prepared(data.read(rows), how)


def testing_reader(
    data: ArrayData | FileData, how: Preprocessing
) -> Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]]:
    """The same, normalized: (n, H, W, C) float32."""
    pixels = testing_pixels(data, how)
    shape = (*(how.size or data.shape[:2]), how.channels)
    normalize = normalizer(how.mean, how.std, shape)

    def read(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        # The last, incomplete batch may have fewer images than there are processes.
        return normalize(pixels(rows) if len(rows) else np.empty((0, *shape), np.uint8))

    return read


def _pixels(
    data: ArrayData | FileData,
    rows: npt.NDArray[np.int64],
    how: Augment,
    chance: npt.NDArray[np.float64] | None,
) -> Pixels:
    if len(rows) == 0:  # a kept last batch had fewer images than there are processes
        return np.empty((0, *how.shape(data.shape)), np.uint8)
    if how.side:
        assert isinstance(data, FileData)
        return data.read(rows, how.view, chance)
    return how.apply(data.read(rows), chance)


def normalizer(
    mean: tuple[float, ...], std: tuple[float, ...], shape: tuple[int, int, int]
) -> Callable[[Pixels], npt.NDArray[np.float32]]:
    """A function that maps pixels to (x / 255 - mean) / std: one multiplication, one addition, in float32."""
    width = shape[1]
    # One factor per byte of a row: numpy's inner loop is then a whole row long, not one pixel. 0.25 ms for
    # 128 CIFAR images.
    factor = np.tile(1.0 / (255.0 * np.array(std)), width).astype(np.float32)  # (W * C,)
    offset = np.tile(-np.array(mean) / np.array(std), width).astype(np.float32)

    def normalize(images: Pixels) -> npt.NDArray[np.float32]:
        rows = images.reshape(*images.shape[:2], len(factor)).astype(np.float32)  # (n, H, W * C)
        rows *= factor
        rows += offset
        return rows.reshape(images.shape)  # (n, H, W, C) float32

    return normalize


def _prefetched(prepare: Callable[[int], Batch], todo: range, ahead: int) -> Iterator[Batch]:
    """Prepare batches in a thread, at most `ahead` of them waiting; it ends when the iterator does."""
    ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
    room = threading.Semaphore(ahead)
    stop = threading.Event()

    def work() -> None:
        try:
            for step in todo:
                room.acquire()
                if stop.is_set():
                    return
                ready.put(prepare(step))
        except BaseException as error:
            ready.put(error)  # raised again where the batch is asked for

    thread = threading.Thread(target=work, name="anyprec-batches", daemon=True)
    thread.start()
    try:
        for _ in todo:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            room.release()
            yield item
    finally:
        stop.set()
        room.release()  # the thread may be waiting for room
        thread.join()


def _check_count(name: str, value: int, low: int, high: int | None = None) -> None:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        allowed = f"{low} or more" if high is None else f"{low}..{high}"
        raise DataError(f"{name}={value!r} is not allowed; give a whole number, {allowed}")
