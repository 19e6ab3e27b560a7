"""Nested 8-bit codes of least error over all widths: wanted weights and second moments in, codes and scales out.

Tensors only; gptq.py takes them out of a network. Shapes: K widths, G groups of a convolution, o outputs and c weights
an output in each. At width k a layer should give what `wanted[k]` (G, o, c) gives, on inputs whose second moments are
`moments[k]` (G, c, c); the error of weights q is the sum over outputs of (wanted - q) moments (wanted - q)^T.
The sum over widths of importance_k * error_k is made small by 1. a range per output, 2. one pass over the columns that
pushes each width's rounding error on to the columns still to come, by its own inverse moments (GPTQ, Frantar et al.,
ICLR 2023, arXiv:2210.17323), 3. sweeps that choose each column anew, given all others, and scales fitted in between.
Each choice looks at all codes, and at what every prefix of them stands for at its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CODES = 256
RANGES = 24  # tried per output, from a fifth of the largest |weight| to all of it


@dataclass
class NestedProblem:
    """What is known of one layer. The moments are damped: none is singular."""

    widths: tuple[int, ...]
    wanted: Tensor  # (K, G, o, c)
    moments: Tensor  # (K, G, c, c)
    importance: Tensor  # (K,)


def choose_codes(problem: NestedProblem, sweeps: int = 4) -> tuple[Tensor, Tensor]:
    """Codes (G, o, c) uint8 and scales (K, G, o)."""
    codes, scales = round_in_range(problem)
    codes = push_errors_on(problem, scales)
    scales = fit_scales(problem, codes, scales)
    for _ in range(sweeps):
        codes = sweep(problem, codes, scales)
        scales = fit_scales(problem, codes, scales)
    return codes, scales


def all_values(widths: Sequence[int]) -> Tensor:
    """(K, 256): v_k of the first k bits of each 8-bit code."""
    codes = torch.arange(CODES)
    return torch.stack([(2 * (codes >> (8 - k)) + 1 - (1 << k)) / (1 << k) for k in widths])


def summed_error(problem: NestedProblem, codes: Tensor, scales: Tensor) -> float:
    return float((problem.importance * errors(problem, codes, scales)).sum())


def errors(problem: NestedProblem, codes: Tensor, scales: Tensor) -> Tensor:
    """(K,)"""
    off = problem.wanted - made_weights(problem, codes, scales)
    return torch.einsum("kgoc,kgcd,kgod->k", off, problem.moments, off)


def made_weights(problem: NestedProblem, codes: Tensor, scales: Tensor) -> Tensor:
    """(K, G, o, c)"""
    return scales[..., None] * all_values(problem.widths).to(scales)[:, codes.long()]


def round_in_range(problem: NestedProblem) -> tuple[Tensor, Tensor]:
    """Codes of the widest width's weights in the range, per output, of least summed error, columns taken one by one."""
    wanted, weight = problem.wanted, problem.moments.diagonal(dim1=2, dim2=3)[:, :, None]  # (K, G, 1, c)
    source = wanted[max(range(len(problem.widths)), key=lambda i: problem.widths[i])]
    top = source.abs().amax(-1).clamp_min(1e-12)
    best = torch.full_like(top, torch.inf)
    codes = torch.zeros_like(source, dtype=torch.uint8)
    scales = torch.zeros_like(wanted[..., 0])
    values = all_values(problem.widths).to(wanted)
    for share in torch.linspace(0.2, 1.0, RANGES).tolist():
        tried = (source / (2 * share * top[..., None]) + 0.5).mul_(CODES).floor_().clamp_(0, CODES - 1).to(torch.uint8)
        v = values[:, tried.long()]
        s = (weight * wanted * v).sum(-1) / (weight * v * v).sum(-1)
        off = (weight * (wanted - s[..., None] * v).square()).sum(-1)  # (K, G, o)
        total = torch.einsum("k,kgo->go", problem.importance, off)
        better = total < best
        best = torch.where(better, total, best)
        codes = torch.where(better[..., None], tried, codes)
        scales = torch.where(better, s, scales)
    return codes, scales.clamp_min(1e-12)


def push_errors_on(problem: NestedProblem, scales: Tensor) -> Tensor:
    """GPTQ with one code for all widths: each width keeps its own account of the errors made so far."""
    # Columns that matter most first: later ones can make good what they lose.
    order = problem.moments.diagonal(dim1=2, dim2=3).mean((0, 1)).argsort(descending=True)
    left = problem.wanted[..., order].clone()
    inverse = torch.linalg.inv(problem.moments[:, :, order][..., order].double())
    upper = torch.linalg.cholesky(inverse, upper=True).float()  # (K, G, c, c)
    codes = torch.zeros(left.shape[1:], dtype=torch.uint8, device=left.device)
    steps = scales[..., None] * all_values(problem.widths).to(left)[:, None, None]  # (K, G, o, 256)
    for j in range(left.shape[-1]):
        pivot = upper[:, :, j, j]
        cost = problem.importance[:, None] / pivot.square()  # (K, G)
        chosen = cheapest(left[..., j], scales, cost, problem.widths)
        codes[..., j] = chosen.to(torch.uint8)
        made = steps.gather(-1, chosen.expand(left.shape[:-1])[..., None])[..., 0]
        error = (left[..., j] - made) / pivot[..., None]
        left[..., j + 1 :] -= error[..., None] * upper[:, :, None, j, j + 1 :]
    return codes[..., order.argsort()]


def cheapest(target: Tensor, scales: Tensor, cost: Tensor, widths: Sequence[int]) -> Tensor:
    """The code of least summed cost for one column: target, scales (K, G, o), cost (K, G) -> (G, o) int64.

    Prefixes are summed up from the shortest. The widest width is not tried out: its best code under a prefix is the
    one nearest to its target. So widths 1, 2, 4, 8 look at 16 prefixes, not at 256 codes.
    """
    *narrow, widest = sorted(range(len(widths)), key=lambda i: widths[i])
    total = torch.zeros(*target.shape[1:], 1, dtype=target.dtype, device=target.device)
    for i in narrow:
        bits = widths[i]
        values = (2 * torch.arange(1 << bits, device=target.device) + 1 - (1 << bits)).to(target) / (1 << bits)
        off = target[i][..., None] - scales[i][..., None] * values
        total = total.repeat_interleave((1 << bits) // total.shape[-1], dim=-1) + cost[i][:, None, None] * off.square()
    bits, scale = widths[widest], scales[widest][..., None]
    under = (1 << bits) // total.shape[-1]  # codes under each prefix
    first = torch.arange(total.shape[-1], device=target.device) * under
    nearest = ((target[widest][..., None] / scale + 1) * (1 << (bits - 1))).floor_()  # the bin that it lies in
    codes = torch.minimum(torch.maximum(nearest, first), first + (under - 1))  # (G, o, prefixes)
    off = target[widest][..., None] - scale * (2 * codes + 1 - (1 << bits)) / (1 << bits)
    best = (total + cost[widest][:, None, None] * off.square()).argmin(-1, keepdim=True)
    return codes.gather(-1, best)[..., 0].long() << (8 - bits)


def sweep(problem: NestedProblem, codes: Tensor, scales: Tensor) -> Tensor:
    """Each column chosen anew, given all others: the summed error never grows."""
    codes = codes.clone()
    made = made_weights(problem, codes, scales)
    pull = torch.einsum("kgoc,kgcd->kgod", problem.wanted - made, problem.moments)  # (K, G, o, c)
    table = scales[..., None] * all_values(problem.widths).to(scales)[:, None, None]
    for j in range(codes.shape[-1]):
        own = problem.moments[:, :, j, j]  # (K, G)
        target = made[..., j] + pull[..., j] / own[..., None]
        chosen = cheapest(target, scales, problem.importance[:, None] * own, problem.widths)
        new = table.gather(-1, chosen.expand(target.shape)[..., None])[..., 0]
        pull -= (new - made[..., j])[..., None] * problem.moments[:, :, None, j]
        made[..., j] = new
        codes[..., j] = chosen.to(torch.uint8)
    return codes


def fit_scales(problem: NestedProblem, codes: Tensor, scales: Tensor) -> Tensor:
    """Scales of least error for these codes; where that would not be positive, those that are."""
    v = all_values(problem.widths).to(scales)[:, codes.long()]  # (K, G, o, c)
    through = torch.einsum("kgoc,kgcd->kgod", v, problem.moments)
    fitted = (through * problem.wanted).sum(-1) / (through * v).sum(-1)
    return torch.where(fitted > 0, fitted, scales)
