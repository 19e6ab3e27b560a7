"""Watching one run of a network: tensor operations in, multiply-adds per module and decisions by value out.

`OperationWatch` is active while candidates.py runs the example. The counts go into the report of convert.py; a decision
(`if x.sum() > 0`) is noted with the line of source that makes it, since `pack` runs the same operations on every input.
"""

from __future__ import annotations

import math
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten
TORCH, OURS, PYTHON = str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"]


def _convolution(out: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    transposed = len(rest) > 4 and rest[4]  # bias, stride, padding, dilation, transposed, ...
    return (x if transposed else out).numel() * weight[0].numel()


def _attention(out: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    queries = q.numel() // q.shape[-1]
    return queries * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _encoder_layer(out: Tensor, x: Tensor, *rest: Any) -> int:
    """torch's fused ones: every matrix of theirs reads each token once; then scores and their use."""
    weights = [t for t in rest if isinstance(t, Tensor) and t.is_floating_point() and t.dim() == 2]
    return math.prod(x.shape[:-1]) * (sum(w.numel() for w in weights) + 2 * x.shape[-2] * x.shape[-1])


def _rnn_layer(out: Any, x: Tensor, input_weight: Tensor, hidden_weight: Tensor, *rest: Any) -> int:
    return x.shape[0] * x.shape[1] * (input_weight.numel() + hidden_weight.numel())


# Multiply-adds of the operations that have most of them, from the first result and the arguments.
MULTIPLY_ADDS: dict[Any, Callable[..., int]] = {
    aten.mm: lambda out, a, b, *_: out.numel() * a.shape[-1],
    aten.bmm: lambda out, a, b, *_: out.numel() * a.shape[-1],
    aten.mv: lambda out, a, b, *_: a.numel(),
    aten.dot: lambda out, a, b, *_: a.numel(),
    aten.addmm: lambda out, c, a, b, *_: out.numel() * a.shape[-1],
    aten.addmv: lambda out, c, a, b, *_: a.numel(),
    aten.baddbmm: lambda out, c, a, b, *_: out.numel() * a.shape[-1],
    aten.addbmm: lambda out, c, a, b, *_: a.numel() * b.shape[-1],
    aten.linear: lambda out, a, b, *_: out.numel() * a.shape[-1],
    aten.convolution: _convolution,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_attention_math: _attention,
    aten._native_multi_head_attention: lambda out, q, k, v, *rest: _encoder_layer(out, q, *rest),
    aten._transformer_encoder_layer_fwd: _encoder_layer,
    aten.mkldnn_rnn_layer: _rnn_layer,
}
# What makes Python, or the shape of a tensor, depend on values.
DECISIONS = {aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten._unique2,
             aten.unique_dim, aten.allclose}  # fmt: skip


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`multiply_adds` by module, the innermost one that runs (None: outside of all); `decisions`, one a line."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.multiply_adds: dict[nn.Module | None, int] = {}
        self.decisions: dict[str, str] = {}  # file:line -> operation
        self.within: list[nn.Module] = []
        self.entries: list[tuple[nn.Module, int]] = []  # the same, with the number of each call
        self.entered = 0
        self.from_input: Any = WeakTensorKeyDictionary()
        for tensor in tensors_in(inputs):
            self.from_input[tensor] = True
        self.modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self.hooks: list[Any] = []

    def __enter__(self) -> OperationWatch:
        for module in self.modules:
            self.hooks.append(module.register_forward_pre_hook(self._enters))
            self.hooks.append(module.register_forward_hook(self._leaves, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()

    def _enters(self, module: nn.Module, args: Any) -> None:
        self.within.append(module)
        self.entries.append((module, self.entered))
        self.entered += 1

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self.within:
            while self.within.pop() is not module:
                pass
            del self.entries[len(self.within) :]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = list(tensors_in(out))
        packet = func._overloadpacket
        if packet in MULTIPLY_ADDS and made:
            module = self.within[-1] if self.within else None
            count = MULTIPLY_ADDS[packet](made[0], *args)
            self.multiply_adds[module] = self.multiply_adds.get(module, 0) + count
        if any(tensor in self.from_input for tensor in tensors_in((args, kwargs or {}))):
            for tensor in made:
                self.from_input[tensor] = True
            if packet in DECISIONS:
                self.decisions.setdefault(source_line(), str(packet).removeprefix("aten.").lstrip("_"))
        return out


def source_line() -> str:
    """file:line of the innermost code on the stack that belongs neither to torch, nor to Python, nor to us."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def _is_users(file: str) -> bool:
    return not file.startswith((TORCH, OURS)) and ("site-packages" in file or not file.startswith(PYTHON))


def tensors_in(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (Mapping, tuple, list)):
        for value in item.values() if isinstance(item, Mapping) else item:
            yield from tensors_in(value)
