"""3 x 3 convolutions of training by Winograd F(4x4, 3x3): input and weight in, output out, with gradients.

A tile of 4 x 4 outputs takes 36 products a pair of channels instead of 144. Torch has no such convolution for training
on CPUs; `bench/train_step.py --net vgg-speed` times a step with and without it. In float32: the sums differ from
torch's by rounding. Used by AnyConv2d in training mode, after `use_winograd` (recipes: `winograd = true`).

    tile: 6 x 6 inputs -> B -> 36 values; kernel: 3 x 3 -> G -> 36; 36 matrix products; A -> 4 x 4 outputs

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016; points 0, 1, -1, 2, -2.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST_CHANNELS = 64  # in and out: below, transforming costs more than it saves
TILE, WINDOW = 4, 6  # outputs and inputs along a side of a tile
CHUNK_BYTES = 24 << 20  # of transformed inputs at a time: what one step of the loops works on stays in the cache
INPUT = (
    (4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0), (0, 4, 0, -5, 0, 1),
)  # fmt: skip
KERNEL = (
    (1 / 4, 0, 0), (-1 / 6, -1 / 6, -1 / 6), (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6), (1 / 24, -1 / 12, 1 / 6), (0, 0, 1),
)  # fmt: skip
OUTPUT = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))


@functools.cache
def matrices() -> tuple[Tensor, Tensor, Tensor]:
    """The transforms of both axes at once: (36, 36) of inputs, (36, 9) of kernels, (16, 36) of outputs."""
    made = []
    for rows in (INPUT, KERNEL, OUTPUT):
        one = torch.tensor(rows, dtype=torch.float64)
        made.append(torch.kron(one, one).float())
    return made[0], made[1], made[2]


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


class Winograd(torch.autograd.Function):
    """x (N, C, H, W) and weight (K, C, 3, 3), float32, padding 1 -> (N, K, H, W) in channels_last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        to_input, to_kernel, to_output = matrices()
        (n, c, h, w), k = x.shape, weight.shape[0]
        down, across = -(-h // TILE), -(-w // TILE)  # tiles
        u = (to_kernel @ weight.permute(2, 3, 1, 0).reshape(9, c * k)).view(WINDOW**2, c, k)
        y = x.new_empty((n, k, h, w)).contiguous(memory_format=torch.channels_last)
        lines, made = x.permute(0, 2, 3, 1), y.permute(0, 2, 3, 1)  # (N, H, W, C)
        per_image = WINDOW**2 * down * across * c * x.element_size()
        step = max(1, CHUNK_BYTES // per_image)
        kept = []
        for first in range(0, n, step):
            part = lines[first : first + step]
            count = len(part)
            padded = x.new_zeros(count, TILE * down + 2, TILE * across + 2, c)
            padded[:, 1 : h + 1, 1 : w + 1] = part
            of_n, of_h, of_w, of_c = padded.stride()
            tiles = padded.as_strided(
                (WINDOW, WINDOW, count, down, across, c), (of_h, of_w, of_n, TILE * of_h, TILE * of_w, of_c)
            ).reshape(WINDOW**2, -1)
            v = (to_input @ tiles).view(WINDOW**2, -1, c)  # (36, tiles, C)
            kept.append(v)
            out = (to_output @ torch.bmm(v, u).view(WINDOW**2, -1)).view(TILE, TILE, count, down, across, k)
            whole = out.permute(2, 3, 0, 4, 1, 5).reshape(count, TILE * down, TILE * across, k)
            made[first : first + count] = whole[:, :h, :w]
        ctx.save_for_backward(u, *kept)
        ctx.sizes = n, c, h, w, k, down, across, step
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        to_input, to_kernel, to_output = matrices()
        u, *kept = ctx.saved_tensors
        n, c, h, w, k, down, across, step = ctx.sizes
        (grad,) = grads
        wants_x, wants_weight = ctx.needs_input_grad
        lines = grad.permute(0, 2, 3, 1)
        grad_u = torch.zeros_like(u) if wants_weight else None
        grad_x = grad.new_empty((n, c, h, w)).contiguous(memory_format=torch.channels_last) if wants_x else None
        back, across_u = to_input.t().contiguous(), u.transpose(1, 2)
        for first, v in zip(range(0, n, step), kept, strict=True):
            part = lines[first : first + step]
            count = len(part)
            padded = grad.new_zeros(count, TILE * down, TILE * across, k)
            padded[:, :h, :w] = part
            tiles = padded.view(count, down, TILE, across, TILE, k).permute(2, 4, 0, 1, 3, 5).reshape(TILE**2, -1)
            m = (to_output.t().contiguous() @ tiles).view(WINDOW**2, -1, k)
            if grad_u is not None:
                torch.baddbmm(grad_u, v.transpose(1, 2), m, out=grad_u)
            if grad_x is not None:
                windows = (back @ torch.bmm(m, across_u).view(WINDOW**2, -1)).view(
                    WINDOW, WINDOW, count, down, across, c
                )
                grad_x.permute(0, 2, 3, 1)[first : first + count] = overlap_add(windows)[:, 1 : h + 1, 1 : w + 1]
        grad_weight = None
        if grad_u is not None:
            flat = (to_kernel.t() @ grad_u.view(WINDOW**2, c * k)).view(3, 3, c, k)
            grad_weight = flat.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
        return grad_x, grad_weight


def overlap_add(windows: Tensor) -> Tensor:
    """(6, 6, N, down, across, C), each 4 apart, summed where they overlap: (N, 4 down + 4, 4 across + 4, C)."""
    _, _, count, down, across, c = windows.shape
    padded = windows.new_zeros(count, TILE * (down + 1), TILE * (across + 1), c)
    cells = padded.view(count, down + 1, TILE, across + 1, TILE, c).permute(2, 4, 0, 1, 3, 5)
    cells[:, :, :, :down, :across] = windows[:TILE, :TILE]
    cells[:2, :, :, 1:, :across] += windows[TILE:, :TILE]
    cells[:, :2, :, :down, 1:] += windows[:TILE, TILE:]
    cells[:2, :2, :, 1:, 1:] += windows[TILE:, TILE:]
    return padded


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = Winograd.apply(x, weight)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.view(1, -1, 1, 1)
