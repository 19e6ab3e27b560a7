"""The gradients that quantizers put in place of those of rounding, as autograd functions.

Called by quantizers.py and act_quantizer.py; equations: paper, section "Training".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PART = 1 << 16  # elements: 256 kB, and four tensors are read or written at a time


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
    r * clip_round(y / r, levels), but one new tensor in place of four, made a part at a time so that every pass finds
    the part in the cache; and for r two dot products in place of five passes.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, r: Tensor, levels: int) -> Tensor:
        y = _dense(y)
        value = torch.empty_like(y)
        for part, out in zip(_parts(y), _parts(value), strict=True):
            torch.div(part, r, out=out).clamp_(0, 1)
            out = out.round_() if levels == 1 else out.mul_(levels).round_().div_(levels)
            out.mul_(r)
        ctx.save_for_backward(y, r, value)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad,) = grads
        y, r, value = ctx.saved_tensors
        if grad.stride() != y.stride():
            grad = torch.empty_like(y).copy_(grad)
        # As in _ClipRound, hardtanh leaves out the ends that the equation has in.
        low, high = -torch.finfo(y.dtype).tiny, float(torch.nextafter(r, r.new_tensor(torch.inf)))
        grad_y = torch.empty_like(y)
        of_range = 0.0
        for g, a, v, out in zip(_parts(grad), _parts(y), _parts(value), _parts(grad_y), strict=True):
            torch.ops.aten.hardtanh_backward(g, a, low, high, grad_input=out)
            if ctx.needs_input_grad[1]:
                of_range += float(torch.dot(g, v)) - float(torch.dot(out, a))
        grad_r = r.new_tensor(of_range).div_(r) if ctx.needs_input_grad[1] else None
        return grad_y, grad_r, None


def _dense(y: Tensor) -> Tensor:
    """y itself where its elements fill their memory in some order without gaps, else a copy of which that holds."""
    known = (torch.contiguous_format, torch.channels_last) if y.dim() == 4 else (torch.contiguous_format,)
    return y if any(y.is_contiguous(memory_format=layout) for layout in known) else y.contiguous()


def _parts(y: Tensor) -> tuple[Tensor, ...]:
    """A dense tensor in the order of its memory, in parts that stay in the cache."""
    return torch.split(y.as_strided((y.numel(),), (1,)), PART)


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
