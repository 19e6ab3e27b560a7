"""3 x 3 convolutions of training by Winograd F(4x4, 3x3): x and weight in, the convolution and its gradients out.

A tile of 4 x 4 outputs takes 36 products a pair of channels instead of 144. Torch has no such convolution for training
on CPUs; ours is in the engine (native/run/winograd_training.cpp). `bench/train_step.py --net vgg-speed` times a step
with and without it. In float32: the sums differ from torch's by rounding. Used by AnyConv2d in training mode, after
`use_winograd` (recipes: `winograd = true`). With `bf16`, both factors of the backward products are rounded to bfloat16
(recipes: `gradients = "bf16"`), on CPUs that multiply it: `_native.winograd_has_bf16`.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016; points 0, 1, -1, 2, -2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from anyprec import _native

LEAST_CHANNELS = 16  # in and out: below, transforming costs more than it saves


def fits(conv: nn.Conv2d) -> bool:
    """Whether a convolution is of the kind that is computed here."""
    return (
        conv.kernel_size == (3, 3)
        and conv.stride == conv.dilation == (1, 1)
        and conv.padding in ((1, 1), 1, "same")
        and conv.padding_mode == "zeros"
        and conv.groups == 1
        and min(conv.in_channels, conv.out_channels) >= LEAST_CHANNELS
    )


def has_bf16() -> bool:
    """Whether the backward products may be of bfloat16: the CPU multiplies it, and ANYPREC_ISA allows it."""
    return bool(_native.winograd_has_bf16())


def convolved(x: Tensor, kernel: Tensor, bf16: bool = False) -> Tensor:
    """x (N, C, H, W) and kernel (3, 3, C, K) -> (N, K, H, W) in channels_last."""
    n, _, h, w = x.shape
    y = x.new_empty(n, h, w, kernel.shape[3])
    _native.winograd_convolve(_lines(x), kernel.contiguous().numpy(), y.numpy(), torch.get_num_threads(), bf16)
    return y.permute(0, 3, 1, 2)


def _lines(x: Tensor) -> np.ndarray:
    """(N, C, H, W) as an array (N, H, W, C), which it is already in channels_last."""
    return np.asarray(x.detach().permute(0, 2, 3, 1).contiguous().numpy())


class Winograd(torch.autograd.Function):
    """x (N, C, H, W) and weight (K, C, 3, 3), float32, padding 1 -> (N, K, H, W) in channels_last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bf16: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bf16 = bf16
        return convolved(x, weight.permute(2, 3, 1, 0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        wants_x, wants_weight, _ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if wants_x:  # the convolution of grad with the kernels turned by 180 degrees
            grad_x = convolved(grad, weight.flip(2, 3).permute(2, 3, 0, 1), ctx.bf16)
        if wants_weight:
            made = weight.new_empty(3, 3, weight.shape[1], weight.shape[0])
            _native.winograd_kernel_gradient(_lines(x), _lines(grad), made.numpy(), torch.get_num_threads(), ctx.bf16)
            grad_weight = made.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
        return grad_x, grad_weight, None


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, bf16: bool = False) -> Tensor:
    y: Tensor = Winograd.apply(x, weight, bf16)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.view(1, -1, 1, 1)
