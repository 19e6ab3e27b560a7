"""Norms as a model file has them: multiplied into the table (scale, shift) of an op. Called by unpack.py.

`Norm` is one of the network, `Tables` compares the tables of two graphs; a norm is set to a x + b, then to statistics
that do not change a and b.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from anyprec.format.graph import Graph
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.switching import bits

SAME = 1e-5  # relative: numbers that went through the float32 of a table


@dataclass(frozen=True)
class Norm:
    """A norm of the network: `reads` is the module that is called, `tables` what it uses at each width.

    A plain batch norm, such as that of a float shortcut, is the table of every width.
    """

    name: str
    reads: nn.Module
    tables: dict[int, Any]

    @property
    def channels(self) -> int:
        return int(next(iter(self.tables.values())).num_features)

    @property
    def shared(self) -> bool:
        return self.reads in self.tables.values()


def norms_of(model: nn.Module, widths: Sequence[int]) -> list[Norm]:
    """Switched norms, and batch norms that are the same at every width."""
    found: list[Norm] = []
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, SwitchNorm):
            inside.update(module.tables.values())
            found.append(Norm(name, module, {k: module.tables[str(k)] for k in widths}))
        elif isinstance(module, _BatchNorm) and module not in inside:
            found.append(Norm(name, module, dict.fromkeys(widths, module)))
    return found


class Tables:
    """Tables (2, C) of scale and shift, of the file and of the network with A and B known, by op and width."""

    def __init__(self, theirs: Graph, plain: Graph) -> None:
        self.file, self.plain = theirs, plain
        self.rows = {int(profile.name): row for row, profile in enumerate(theirs.profiles)}
        kinds = {"conv", "linear", "affine", "quantize"}  # a clip's table has bounds, a dequantize's no channels
        self.affine = [op.name for op in theirs.ops if op.kind in kinds]

    def theirs(self, op: str, bits: int) -> np.ndarray:
        return self.of(self.file, op, bits)

    def ours(self, op: str, bits: int) -> np.ndarray:
        return self.of(self.plain, op, bits)

    def moved(self, other: Graph, op: str, bits: int) -> np.ndarray:
        """How far the shift is from that of the network with A and B known."""
        moved: np.ndarray = self.of(other, op, bits)[1] - self.ours(op, bits)[1]
        return moved

    def of(self, graph: Graph, op: str, bits: int) -> np.ndarray:
        if op not in graph.tables:
            return np.array([[1.0], [0.0]])
        table: np.ndarray = graph.tables[op][self.rows[bits]]
        return table.astype(np.float64)


def set_affine(table: Any, a: np.ndarray, b: np.ndarray) -> None:
    """Let a norm be a x + b in evaluation."""
    table.running_mean.zero_()
    table.running_var.fill_(1.0)
    table.weight.copy_(torch.from_numpy(a * math.sqrt(1 + table.eps)))
    table.bias.copy_(torch.from_numpy(b))


def set_moments(table: Any, mean: Tensor, variance: Tensor) -> None:
    """Other statistics, and gamma and beta such that the norm stays the same in evaluation."""
    a = table.weight.double() / (table.running_var.double() + table.eps).sqrt()
    b = table.bias.double() - a * table.running_mean.double()
    table.running_mean.copy_(mean)
    table.running_var.copy_(variance)
    table.weight.copy_(a * (variance + table.eps).sqrt())
    table.bias.copy_(b + a * mean)


def is_multiple(numbers: np.ndarray, mark: np.ndarray) -> bool:
    if numbers.shape != mark.shape:
        return False
    ratio = numbers / mark
    return bool(ratio[0] != 0 and np.allclose(ratio, ratio[0], rtol=10 * SAME, atol=0))


def measured_inputs(
    model: nn.Module, norms: Sequence[Norm], k: int, batches: Iterable[Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and mean square of each channel that a norm reads at k bits."""
    sums: dict[str, list[Any]] = {norm.name: [0, 0.0, 0.0] for norm in norms}

    def watch(total: list[Any]) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            x = given[0].double()
            axes = [0, *range(2, x.dim())]
            total[0] += x.numel() // x.shape[1]
            total[1] = total[1] + x.sum(axes)
            total[2] = total[2] + x.square().sum(axes)

        return hook

    hooks = [norm.reads.register_forward_pre_hook(watch(sums[norm.name])) for norm in norms]
    try:
        with bits(model, k):
            for images in batches:
                model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: (total / count, squares / count) for name, (count, total, squares) in sums.items()}
