"""Rewrites: functions of torch that hide what they compute, replaced by the operations they are. Used by trace.py.

Attention is spelled out instead of one fused kernel, and circular padding joins parts instead of writing into an empty
tensor. x[:, :100] of a shorter x becomes a slice that takes all; torch itself would not say that there was one. The
fused encoder layers of torch.nn are switched off. Methods that hand a tensor's numbers to Python or numpy are no
operations, so a Recorder does not see them: they are reported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

TORCH_ATTENTION, TORCH_PAD = F.scaled_dot_product_attention, F.pad
LEAVES_TORCH = {getattr(Tensor, name): name for name in ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr")}


class Rewrites(TorchFunctionMode):
    """Calls of names that were imported before; those that torch's own functions make go to `spelled_out`'s.

    looked_at: told of methods that read a tensor's numbers outside torch, by name, with the tensor.
    """

    def __init__(self, looked_at: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.looked_at = looked_at

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LEAVES_TORCH:
            self.looked_at(LEAVES_TORCH[func], args[0])
        if func is TORCH_ATTENTION:
            return attention(*args, **kwargs)
        if func is TORCH_PAD:
            return pad(*args, **kwargs)
        if func is Tensor.__getitem__ and not kwargs:
            return func(*said_slices(*args))
        return func(*args, **kwargs)


@contextmanager
def spelled_out(looked_at: Callable[[str, Tensor], None]) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    F.scaled_dot_product_attention, F.pad = attention, pad
    try:
        with Rewrites(looked_at):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
        F.scaled_dot_product_attention, F.pad = TORCH_ATTENTION, TORCH_PAD


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    made: Tensor = circular_pad(input, pad) if mode == "circular" else TORCH_PAD(input, pad, mode, value)
    return made


def said_slices(x: Tensor, index: Any) -> tuple[Tensor, Any]:
    """x and index, with slices done already whose ends lie outside of x."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = [0 if p is None or p is Ellipsis or isinstance(p, bool) else dims_of(p) for p in parts]
    dim = 0
    for number, part in enumerate(parts):
        if part is Ellipsis:
            dim += x.dim() - sum(taken)
        elif isinstance(part, slice) and dim < x.dim() and ends_outside(part, x.shape[dim]):
            x = torch.ops.aten.slice.Tensor(x, dim, part.start, part.stop, 1 if part.step is None else part.step)
            parts[number] = slice(None)
        dim += taken[number]
    return x, tuple(parts) if isinstance(index, tuple) else parts[0]


def dims_of(part: Any) -> int:
    """Dimensions that a part of an index takes: those of a mask, else one."""
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


def ends_outside(part: slice, size: int) -> bool:
    if part.step is not None and (type(part.step) is not int or part.step < 1):
        return False
    ends = [end for end in (part.start, part.stop) if end is not None]
    return all(type(end) is int for end in ends) and any(not -size <= end <= size for end in ends)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As the documentation of scaled_dot_product_attention has it."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        attn_mask = causal if attn_mask is None else attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    return (F.dropout(weights, dropout_p) if dropout_p else weights) @ value


def circular_pad(x: Tensor, amounts: Sequence[int]) -> Tensor:
    for i in range(len(amounts) // 2):
        dim, before, after = x.dim() - 1 - i, amounts[2 * i], amounts[2 * i + 1]
        size = x.shape[dim]
        parts = [x.narrow(dim, size - before, before)] if before > 0 else []
        parts.append(x.narrow(dim, max(-before, 0), size - max(-before, 0) - max(-after, 0)))
        parts += [x.narrow(dim, 0, after)] if after > 0 else []
        x = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
    return x
