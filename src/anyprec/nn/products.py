"""Products of two values, as attention has them: a forward that multiplies two activations, with quantized operands.

    forward(x):  scores = q @ k.transpose(-2, -1)           ->   left(q) @ right(k.transpose(-2, -1))
                 F.scaled_dot_product_attention(q, k, v)    ->   two products, spelled out

`ProductProbe` finds such products on the example (candidates.py); convert.py gives the module that makes them a class
of `own_products_class`. Where both operands are quantized, `pack` writes an integer product (ARITHMETIC.md, 8.6).
Torch's own MultiheadAttention is in attention.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from anyprec.errors import AnyprecError, UnsupportedOperation
from anyprec.nn.layers import ProductOperand
from anyprec.nn.observe import InputQuantizer
from anyprec.nn.operations import OperationWatch, tensors_in
from anyprec.widths import FLOAT

# What `convert(attention=...)` may be -> the kinds of products that get quantized operands.
CHOICES: dict[str, tuple[str, ...]] = {"float": (), "scores": ("scores",), "integer": ("scores", "values")}
DEFAULT = "float"

ATTENTION = F.scaled_dot_product_attention
SECOND = {torch.matmul: "other", torch.bmm: "mat2", Tensor.matmul: "other", Tensor.bmm: "mat2"}
MATMULS = {*SECOND, Tensor.__matmul__}
SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax, torch.nn.functional.softmax}


def check_choice(attention: str) -> str:
    if attention not in CHOICES:
        raise AnyprecError(f"attention={attention!r} is not known; choose {', '.join(map(repr, CHOICES))}")
    return attention


class AnyProduct(nn.Module):
    """The operands of one product: `left` and `right` quantize them, each with a sign and ranges of its own."""

    def __init__(self, widths: Iterable[int], clip: str) -> None:
        super().__init__()
        self.left, self.right = (ProductOperand(InputQuantizer(widths, clip)) for _ in range(2))

    @property
    def is_idle(self) -> bool:
        """In float, and nobody looks at what the quantizers are given."""
        sides = (self.left, self.right)
        return all(side.act_bits == FLOAT and not side.act.observed for side in sides)


def spelled_attention(
    first: AnyProduct | None,
    second: AnyProduct | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention as its documentation has it, with quantized operands. Dropout comes after rounding:
    its factor would leave the range."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    query, key = query * (query.shape[-1] ** -0.5 if scale is None else scale), key.transpose(-2, -1)
    scores = query @ key if first is None else first.left(query) @ first.right(key)
    if is_causal and attn_mask is None:
        attn_mask = torch.ones(query.shape[-2], key.shape[-1], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    if second is not None:
        weights, value = second.left(weights), second.right(value)
    return (F.dropout(weights, dropout_p) if dropout_p else weights) @ value


# --- Finding products -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    entries: tuple[tuple[nn.Module, int], ...]  # the modules that run, outermost first, and the number of each run
    kind: str  # "scores", or "values": its left operand comes from a softmax
    of_values: bool  # both operands come from the input


class ProductProbe(TorchFunctionMode):
    """Active while the example runs inside `watch`; `products` says which modules multiply two values."""

    def __init__(self, watch: OperationWatch) -> None:
        super().__init__()
        self.watch = watch
        self.calls: list[_Call] = []
        self.soft: Any = WeakTensorKeyDictionary()  # tensors made of a softmax, number by number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is ATTENTION:
            sides = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)][:3]
            self._note("scores", sides[:2])
            self._note("values", sides[2:])
        elif func in MATMULS:
            sides = [*args, *kwargs.values()][:2]
            self._note("values" if sides[0] in self.soft else "scores", sides)
        out = func(*args, **kwargs)
        if func not in MATMULS and isinstance(out, Tensor):
            made = [t for t in tensors_in((args, kwargs)) if t in self.soft and t.numel() == out.numel()]
            if func in SOFTMAX or made:
                self.soft[out] = True
        return out

    def _note(self, kind: str, sides: Iterable[Tensor]) -> None:
        of_values = all(side in self.watch.from_input for side in sides)
        self.calls.append(_Call(tuple(self.watch.entries), kind, of_values))

    def products(self) -> dict[nn.Module, dict[int, str]]:
        """Module -> the number of each product of two values among all its products, in a run of it -> its kind.

        Products of modules inside it that multiply no two values count as its own, as they do when it runs.
        """
        owners = {call.entries[-1][0] for call in self.calls if call.of_values and call.entries}
        counts: dict[tuple[nn.Module, int], int] = {}
        found: dict[nn.Module, dict[int, str]] = {}
        for call in self.calls:
            entry = next((entry for entry in reversed(call.entries) if entry[0] in owners), None)
            if entry is None:
                continue
            number = counts[entry] = counts.get(entry, -1) + 1
            if call.of_values:
                found.setdefault(entry[0], {})[number] = call.kind
        return found


# --- Running them -----------------------------------------------------------------------------------------


class _Running(threading.local):
    def __init__(self) -> None:
        self.calls: list[ProductCalls] = []


_running = _Running()


class ProductCalls(TorchFunctionMode):
    """Active during one forward of a module with `any_products`: its products get their operands quantized. Only the
    innermost such module looks at a call."""

    def __init__(self, products: nn.ModuleDict, name: str) -> None:
        super().__init__()
        self.products, self.name = products, name
        self.number = 0

    def __enter__(self) -> ProductCalls:
        _running.calls.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _running.calls.pop()

    def take(self) -> AnyProduct | None:
        key = str(self.number)
        self.number += 1
        if key not in self.products:
            return None
        product = self.products[key]
        assert isinstance(product, AnyProduct)
        return product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _running.calls[-1] is not self:
            return func(*args, **kwargs)
        if func is ATTENTION:
            both = self.take(), self.take()
            # `pack` turns torch's fast path off, to see the same operations at every width.
            idle = torch.backends.mha.get_fastpath_enabled() and all(p is None or p.is_idle for p in both)
            return func(*args, **kwargs) if idle else spelled_attention(*both, *args, **kwargs)
        if func in MATMULS and (product := self.take()) is not None:
            left = args[0] if args else kwargs.pop("input")
            right = args[1] if len(args) > 1 else kwargs.pop(SECOND[func])
            return func(product.left(left), product.right(right), *args[2:], **kwargs)
        return func(*args, **kwargs)


class OwnProducts(nn.Module):
    """A module whose forward multiplies two values; `any_products` has the operands of each product, by its number."""

    own: type[nn.Module]  # the class it was
    any_products: nn.ModuleDict

    def init_products(self, products: dict[int, AnyProduct]) -> None:
        self.any_products = nn.ModuleDict({str(number): product for number, product in products.items()})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with ProductCalls(self.any_products, self.own.__name__) as calls:
            out = self.own.forward(self, *args, **kwargs)
        if calls.number <= max(map(int, self.any_products)):
            raise UnsupportedOperation(
                f"{self.own.__name__} made {calls.number} products here, and more on the example that it was converted "
                "with; convert it with attention='float'"
            )
        return out


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def own_products_class(own: type[nn.Module]) -> type[nn.Module]:
    """The class for modules of class `own`; it stays an instance of it."""
    if own not in _classes:
        _classes[own] = type(f"Any{own.__name__}", (OwnProducts, own), {"__module__": __name__, "own": own})
    return _classes[own]
