"""The gradients that quantizers put in place of those of rounding, as autograd functions.

Called by quantizers.py and act_quantizer.py; equations: paper, section "Training".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _StraightThrough(torch.autograd.Function):
    """Forward: the value v that x was snapped to. Backward: that of 2x - 1, as if nothing were snapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor) -> Tensor:
        return v.view_as(v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * grad, None


class _ClipRound(torch.autograd.Function):
    """round(clip(y, 0, 1) * levels) / levels; the gradient passes where 0 <= y <= 1, and is zero elsewhere.

    Keeps y, as clamp would. A mask of one byte an element is smaller, but on CPUs making and applying it
    nearly doubles the time: 7.5 ms against 4.2 ms for 128 x 16 x 32 x 32 on one core.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, levels: int) -> Tensor:
        ctx.save_for_backward(y)
        code = y.clamp(0, 1)
        return code.round_() if levels == 1 else code.mul_(levels).round_().div_(levels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        # hardtanh leaves its two ends out, the paper has them in: move each end out by the least normal step.
        step = torch.finfo(y.dtype)
        return torch.ops.aten.hardtanh_backward(grad, y, -step.tiny, 1 + step.eps), None


class _ClipRoundInRange(torch.autograd.Function):
    """r round(clip(y / r, 0, 1) levels) / levels, with a gradient for the range r, a number above 0. For CPUs.

    d/dy is 1 where 0 <= y <= r and 0 elsewhere; d/dr is (value - y) / r there, 1 above, 0 below. The same values as
    r * clip_round(y / r, levels), but one new tensor in place of three, and for r two dot products in place of five
    passes. (Smaller parts that stay in the cache were tried: calling torch more often took what they saved.)
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, r: Tensor, levels: int) -> Tensor:
        value = (y / r).clamp_(0, 1)
        value = (value.round_() if levels == 1 else value.mul_(levels).round_().div_(levels)).mul_(r)
        ctx.save_for_backward(y, r, value)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad,) = grads
        y, r, value = ctx.saved_tensors
        # As in _ClipRound, hardtanh leaves out the ends that the equation has in.
        low, high = -torch.finfo(y.dtype).tiny, float(torch.nextafter(r, r.new_tensor(torch.inf)))
        grad_y = torch.ops.aten.hardtanh_backward(grad, y, low, high)
        if not ctx.needs_input_grad[1]:
            return grad_y, None, None
        return grad_y, (_product_sum(grad, value) - _product_sum(grad_y, y)).div_(r), None


def _product_sum(a: Tensor, b: Tensor) -> Tensor:
    """The sum of a * b, without the products in memory where both fill theirs in the same order."""
    if a.stride() != b.stride() or not _is_dense(a):
        return (a * b).sum()
    flat = (a.numel(),), (1,)
    return torch.dot(a.as_strided(*flat), b.as_strided(*flat))


def _is_dense(a: Tensor) -> bool:
    return a.is_contiguous() or (a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last))


class _ScaleGradient(torch.autograd.Function):
    """Identity forward; the gradient is multiplied by `factor`. LSQ balances step and weight gradients so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | Tensor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def straight_through(x: Tensor, v: Tensor) -> Tensor:
    made: Tensor = _StraightThrough.apply(x, v)  # type: ignore[no-untyped-call]
    return made


def clip_round(y: Tensor, levels: int) -> Tensor:
    made: Tensor = _ClipRound.apply(y, levels)  # type: ignore[no-untyped-call]
    return made


def clip_round_in_range(y: Tensor, r: Tensor, levels: int) -> Tensor:
    """r * clip_round(y / r, levels) for r > 0."""
    if y.device.type != "cpu" or y.dtype != r.dtype or y.numel() == 0 or torch.compiler.is_compiling():
        return r * clip_round(y / r, levels)
    made: Tensor = _ClipRoundInRange.apply(y, r, levels)  # type: ignore[no-untyped-call]
    return made


def scale_gradient(x: Tensor, factor: float | Tensor) -> Tensor:
    made: Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return made
