"""Tables of a plan: rows of the uniform widths and statistics in, the row of each op at mixed bits out.

Norms are folded into tables, and a norm's statistics at mixed bits are those of no uniform width. We give each channel
the mean and deviation that it has at the uniform width it belongs to (moment matching); neither a checkpoint nor torch
is needed. Statistics come from the engine (trial.py). ARITHMETIC.md, sections 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anyprec.format.graph import Op
from anyprec.search.layers import Plan, PlanLayers

F64 = npt.NDArray[np.float64]
CHUNK = 4096  # positions summed in float32 before float64 takes over

Row = npt.NDArray[np.float32]  # of one op's table
Rows = dict[str, Row]  # by op


@dataclass(frozen=True)
class Moments:
    """Of one value, per channel."""

    mean: F64  # (C,)
    std: F64

    @classmethod
    def of(cls, y: npt.NDArray[np.float32]) -> Moments:
        flat = y.reshape(-1, y.shape[-1])
        first = flat[:1]  # taken off first, so that float32 sums of squares lose nothing where the mean is large
        total = squares = np.zeros(y.shape[-1])
        for start in range(0, len(flat), CHUNK):
            part = flat[start : start + CHUNK] - first
            total = total + part.sum(axis=0)
            squares = squares + np.einsum("ij,ij->j", part, part)
        mean = total / len(flat)
        std: F64 = np.sqrt(np.maximum(squares / len(flat) - mean**2, 0))
        return cls(mean + first[0], std)


class PlanTables:
    def __init__(self, layers: PlanLayers) -> None:
        self.layers, self.tables = layers, layers.graph.tables
        self.matched = tuple(op.name for op in layers.graph.ops if self._is_matched(op))

    def _is_matched(self, op: Op) -> bool:
        """A table of one number a channel that differs between widths, behind a layer: a norm may be in it."""
        table = self.tables.get(op.name)
        if table is None or table.ndim != 3 or op.kind not in ("conv", "linear", "affine"):
            return False
        rows = table[list(self.layers.rows.values())]
        is_output = op.name in self.layers.graph.outputs
        return op.name in self.layers.depends and not is_output and not bool((rows == rows[:1]).all())

    def first(self, name: str, plan: Plan) -> Row:
        """An op's row at the width of its layer, in units of the codes that the plan wants from it."""
        source = self.layers.sources[name]
        own = None if source.own is None else plan[source.own]
        out = None if source.out is None else plan[source.out]
        if own is None:
            own = out if out is not None else self.layers.widths[-1]
        row: Row = self.tables[name][self.layers.rows[own]]
        return row if out in (None, own) else row * np.float32(levels(out) / levels(own))

    def width(self, name: str, plan: Plan) -> int:
        """The uniform width whose moments an op shall have: that of the codes it makes, or of its own layer."""
        source = self.layers.sources[name]
        layer = source.out if source.out is not None else source.own
        assert layer is not None, name  # it is behind a layer
        return plan[layer]


def match(row: Row, found: Moments, wanted: Moments) -> tuple[Row, Row]:
    """(new row, [factor, shift] that takes the old value to the new one), per channel.

    y = a s + b has the moments `found`; a' s + b' has those `wanted`. A channel that never changes keeps its row.
    """
    alive = (found.std > 1e-6 * (1 + np.abs(found.mean))) & (wanted.std > 0)
    factor = np.where(alive, wanted.std / np.where(alive, found.std, 1.0), 1.0)
    shift = np.where(alive, wanted.mean - factor * found.mean, 0.0)
    made = np.stack([factor * row[0], factor * row[1] + shift]).astype(np.float32)
    if not np.isfinite(made).all():
        return row, np.stack([np.ones_like(row[0]), np.zeros_like(row[0])])
    return made, np.stack([factor, shift]).astype(np.float32)


def levels(bits: int) -> int:
    return (1 << bits) - 1
