"""What the numbers of a tensor may be: FORMAT.md section 4. Called by the writer and the reader.

native/format/reader.cpp (check_bytes) has the same rules; tests/format/test_verdicts.py compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from anyprec.errors import BadTensor


def check_content(name: str, array: np.ndarray, weights: Mapping[str, Any], clips: Collection[str]) -> None:
    """`weights` are those of GRAPH, `clips` the names of its clip ops."""
    kind, _, rest = name.partition(".")
    if kind.startswith("plane"):
        check_plane(name, array, math.prod(weights[rest]["shape"]))
    elif kind == "tail":
        check_floats(name, array.view("<f4"))
    elif kind != "codes":
        check_floats(name, array, kind == "table" and rest in clips)


def check_plane(name: str, plane: np.ndarray, count: int) -> None:
    if count % 8 and plane[-1] >> (count % 8):
        raise BadTensor(f"tensor {name!r} has bits past its end set; the file is damaged or badly written")


def check_floats(name: str, numbers: np.ndarray, clip: bool = False) -> None:
    """No NaN, no infinity; but a clip (rows of lower and upper bound) may have -inf and inf where it has no bound."""
    good = np.isfinite(numbers)
    if clip:
        good |= numbers == np.array([-np.inf, np.inf], np.float32)
    if not good.all():
        at = int(np.argmin(good.reshape(-1)))
        allowed = "a clip may have -inf as its lower and inf as its upper bound" if clip else "all must be finite"
        raise BadTensor(f"tensor {name!r} has {numbers.reshape(-1)[at]} as number {at}; {allowed}")
