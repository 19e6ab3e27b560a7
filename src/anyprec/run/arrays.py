"""Arrays of a call to what the engine takes, and its answers to what a caller gets: shapes, layouts, types, names.

Every mistake is an InputError that says what was given and what the model takes. Called by model.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from anyprec.choices import LAYOUTS
from anyprec.errors import InputError

MOST_WHOLE = 2**24  # of inputs that hold whole numbers: float32 has all up to it


class InputInfo(NamedTuple):
    """One input of the file, in Python: a call reads it several times, and each look into the engine takes a while."""

    name: str
    shape: tuple[int, ...]  # without N; 0 where free
    integer: bool


def in_order(infos: Sequence[InputInfo], inputs: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """The inputs in the order of the file, from those given by place and by name."""
    if not named and len(inputs) == len(infos):
        return list(inputs)
    names = [info.name for info in infos]
    listed = f"{len(names)} input{'s' if len(names) > 1 else ''} ({', '.join(names)})"
    if len(inputs) > len(names):
        raise InputError(f"{len(inputs)} inputs are given; the model takes {listed}")
    for name in named:
        if name not in names:
            raise InputError(f"there is no input {name!r}; the model takes {listed}")
        if name in names[: len(inputs)]:
            raise InputError(f"input {name!r} is given twice, by its place and by its name")
    for name in names[len(inputs) :]:
        if name not in named:
            raise InputError(f"input {name!r} is missing; the model takes {listed}")
    return [*inputs, *(named[name] for name in names[len(inputs) :])]


def input_arrays(infos: Sequence[InputInfo], given: list[Any], layout: str) -> list[np.ndarray]:
    """Each as the engine takes it, in the file's order; all with the same N."""
    arrays = [input_array(x, info, layout) for x, info in zip(given, infos, strict=True)]
    for x, info in zip(arrays, infos, strict=True):
        if len(x) != len(arrays[0]):
            raise InputError(f"input {info.name!r} has N = {len(x)}, and {infos[0].name!r} has {len(arrays[0])}")
    return arrays


def input_array(x: Any, info: InputInfo, layout: str) -> np.ndarray:
    x = np.asarray(x)
    first = info.name == "input"
    title = "input" if first else f"input {info.name!r}"
    x = image_axes(x, info, title, layout) if len(info.shape) == 3 else x
    fits = x.ndim == len(info.shape) + 1
    if len(info.shape) != 3:
        fits = fits and all(size in (0, have) for size, have in zip(info.shape, x.shape[1:], strict=True))
    if not fits:
        wanted = ", ".join("any" if size == 0 else str(size) for size in info.shape)
        raise InputError(f"{title} has shape {x.shape}; the model takes (N, {wanted})")
    if info.integer:
        return np.ascontiguousarray(whole_numbers(x, title))
    if x.dtype != np.uint8 or not first:
        if x.dtype.kind != "f":
            images = ", or uint8 images" if first and len(info.shape) == 3 else ""
            raise InputError(f"{title} is {x.dtype}; give float32{images}")
        x = single_precision(x, title)
    return np.ascontiguousarray(x)


def single_precision(x: np.ndarray, title: str) -> np.ndarray:
    if x.dtype.itemsize <= 4:
        return x.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        made = x.astype(np.float32)
    if np.isinf(made).any() and not np.isinf(x).any():
        raise InputError(f"{title} has numbers beyond float32, up to {np.abs(x).max():.3g}; scale them first")
    return made


def image_axes(x: np.ndarray, info: InputInfo, title: str, layout: str) -> np.ndarray:
    """An image's array with four axes."""
    if x.ndim in (3, 4) and not fits_layout(info.shape, x.shape, layout):
        other = "NHWC" if layout == "NCHW" else "NCHW"
        if fits_layout(info.shape, x.shape, other):
            raise InputError(
                f"{title} has shape {x.shape}, which is not layout={layout!r}: the model takes images of "
                f"{info.shape[2]} channels; it fits with layout={other!r}, given to the call or to load"
            )
    if x.ndim == 3:
        x = x[None]
    elif x.ndim == 2:
        x = x[:, :, None, None] if layout == "NCHW" else x[:, None, None, :]
    if x.ndim != 4:
        raise InputError(f"{title} has shape {x.shape}; give images ({layout}), one image of three axes, or (N, F)")
    return x


def fits_layout(wanted: Sequence[int], shape: tuple[int, ...], layout: str) -> bool:
    given = shape[-3:] if layout == "NHWC" else (*shape[-2:], shape[-3])  # H, W, C
    return all(want in (0, have) for want, have in zip(wanted, given, strict=True))


def whole_numbers(x: np.ndarray, title: str) -> np.ndarray:
    """Whole numbers as float32, which holds them exactly up to 2^24."""
    if x.dtype.kind not in "iuf":
        raise InputError(f"{title} is {x.dtype}; give whole numbers")
    if x.dtype.kind == "f" and not (x == np.rint(x)).all():
        raise InputError(f"{title} has numbers that are not whole")
    if x.size and (x.min() < -MOST_WHOLE or x.max() > MOST_WHOLE):
        raise InputError(f"{title} has numbers beyond -2^24 .. 2^24")
    return x.astype(np.float32, copy=False)


def output_array(y: np.ndarray, layout: str, single: bool, is_map: bool) -> np.ndarray:
    """What the engine gives (N, H, W, C) in the caller's layout: vectors without H and W, one image without N.

    is_map: of one pixel it is not a vector.
    """
    if y.ndim == 4 and y.shape[1] == y.shape[2] == 1 and not is_map:
        y = y[:, 0, 0, :]
    elif y.ndim == 4 and layout == "NCHW":
        y = np.ascontiguousarray(y.transpose(0, 3, 1, 2))
    return y[0] if single else y


def check_layout(layout: str) -> str:
    if layout not in LAYOUTS:
        raise InputError(f"layout={layout!r} is not known; choose 'NCHW' or 'NHWC'")
    return layout


def check_threads(threads: int) -> int:
    if isinstance(threads, bool) or not isinstance(threads, (int, np.integer)) or not 1 <= threads <= 1024:
        raise InputError(f"threads={threads!r} is not a number of threads; give 1 or more")
    return int(threads)
