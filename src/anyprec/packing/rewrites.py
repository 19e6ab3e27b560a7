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
            return func(*explicit_slices(*args))
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


def explicit_slices(x: Tensor, index: Any) -> tuple[Tensor, Any]:
    """x and index, with all slices done already if an end of one lies outside of x."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = [0 if p is None or p is Ellipsis or isinstance(p, bool) else dims_of(p) for p in parts]
    dims, dim = [], 0
    for part, count in zip(parts, taken, strict=True):
        dims.append(dim)
        dim += x.dim() - sum(taken) if part is Ellipsis else count
    slices = [number for number, part in enumerate(parts) if is_plain(part) and dims[number] < x.dim()]
    if not any(ends_outside(parts[number], x.shape[dims[number]]) for number in slices):
        return x, index
    for number in slices:  # in the order that indexing has, at sizes where no end lies outside
        part = parts[number]
        if part != slice(None):
            x = torch.ops.aten.slice.Tensor(x, dims[number], part.start, part.stop, part.step or 1)
            parts[number] = slice(None)
    return x, tuple(parts) if isinstance(index, tuple) else parts[0]


def dims_of(part: Any) -> int:
    """Dimensions that a part of an index takes: those of a mask, else one."""
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


def is_plain(part: Any) -> bool:
    """A slice whose ends are numbers."""
    if not isinstance(part, slice) or any(type(n) not in (int, type(None)) for n in (part.start, part.stop, part.step)):
        return False
    return part.step is None or part.step > 0


def ends_outside(part: slice, size: int) -> bool:
    return any(end is not None and not -size <= end <= size for end in (part.start, part.stop))


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
