"""Looking over a network before it is converted: which modules run, in which order, and which can change.

An untouched `nn.Module` comes in; `ModuleTrace` (one run on the example) and `ConversionPlan` (layers, norms, and the
reason for every module left alone) go out. Called by convert.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from anyprec.errors import NothingConverted, UnknownLayer
from anyprec.nn.layers import ANY_LAYERS, WEIGHT_HOOKS, own_method
from anyprec.nn.observe import (
    ModelCall,
    batch_statistics,
    move_to_device,
    preserve_state,
    run_call,
    untrained_norms,
)
from anyprec.nn.operations import OperationWatch
from anyprec.nn.own_forward import WeightUse, probe
from anyprec.nn.products import CHOICES, ProductProbe

RMS_NORM: tuple[type[nn.Module], ...] = (nn.RMSNorm,) if hasattr(nn, "RMSNorm") else ()  # from torch 2.4 on
NORMS: tuple[type[nn.Module], ...] = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, *RMS_NORM)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
TORCH_QUANTIZED = ("torch.ao.nn.", "torch.nn.quantized", "torch.nn.qat", "torch.nn.intrinsic")


def torch_kind(module: nn.Module) -> type[nn.Module] | None:
    """The torch layer a module is, or derives from, if an any-layer stands for it."""
    return next((kind for kind in ANY_LAYERS if isinstance(module, kind)), None)


def _is_lazy(module: nn.Module) -> bool:
    return isinstance(module, LazyModuleMixin)


class ModuleTrace:
    """One run of the network on the example: the modules called, in order, and the output."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.within = {  # module -> the attention it is a part of
            part: whole
            for whole in model.modules()
            if isinstance(whole, nn.MultiheadAttention)
            for part in whole.modules()
            if part is not whole
        }
        self.uses = {m: WeightUse() for m in self.names if m not in self.within and has_forward_of_its_own(m)}
        known = (*NORMS, nn.MultiheadAttention)
        self.watched = [
            m for m in self.names if (torch_kind(m) or isinstance(m, known) or m in self.uses) and m not in self.within
        ]
        self.lazy = set(filter(_is_lazy, self.watched))  # the run ends that
        self.order: list[nn.Module] = []  # a module called twice is in it twice
        self.ran: set[nn.Module] = set()
        self.oddly: set[nn.Module] = set()  # called with more than the input, or with keywords
        self.call: ModelCall | None = None
        self.output: Any = None
        self.multiply_adds: dict[nn.Module | None, int] = {}  # by the innermost module that runs
        self.projected: dict[nn.Module, int] = {}  # attention -> multiply-adds of its projections
        self.decisions: dict[str, str] = {}  # file:line -> the operation that makes the network depend on values
        self.products: dict[nn.Module, dict[int, str]] = {}  # who multiplies two values -> number of a product -> kind
        if example is None:
            return
        args = example if isinstance(example, tuple) else () if isinstance(example, Mapping) else (example,)
        kwargs = dict(example) if isinstance(example, Mapping) else {}
        self.call = move_to_device((args, kwargs), model, "the example")
        hooks = [m.register_forward_pre_hook(self._saw, with_kwargs=True) for m in self.watched]
        norms = untrained_norms(model).values()
        watch = OperationWatch(model, self.call)
        for module, found in self.uses.items():
            module.forward = probe(module, found)
        try:
            with preserve_state(model), torch.no_grad(), batch_statistics(norms), watch:
                self.output = run_call(model, self.call, "the example")
        finally:
            for hook in hooks:
                hook.remove()
            for module in self.uses:
                del module.forward
        self.multiply_adds, self.decisions = watch.multiply_adds, watch.decisions

    def find_products(self, model: nn.Module) -> None:
        """`products`, by another run: watching functions keeps torch from its fused attention."""
        if self.call is None:
            return
        watch = OperationWatch(model, self.call)
        probed = ProductProbe(watch)
        norms = untrained_norms(model).values()
        with preserve_state(model), torch.no_grad(), batch_statistics(norms), watch, probed:
            run_call(model, self.call, "the example")
        self.products = probed.products()

    def _saw(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.order.append(module)
        self.ran.add(module)
        if isinstance(module, nn.MultiheadAttention):
            q, k, v = (*args, *(kwargs.get(n) for n in ("query", "key", "value")[len(args) :]))[:3]
            work = module.embed_dim * (q.numel() + k.numel() + v.numel() + q.numel())
            self.projected[module] = self.projected.get(module, 0) + work
            return
        if module in self.uses:
            return
        allowed = {"output_size"} if isinstance(module, TRANSPOSED) else set()
        if not args or len(args) + len(kwargs) > 1 + len(allowed) or set(kwargs) - allowed:
            self.oddly.add(module)

    def layers(self) -> list[nn.Module]:
        """Layers in the order they run; without an example, in the order of definition."""
        return [m for m in (self.watched if self.call is None else self.order) if self.is_layer(m)]

    def run_order(self) -> list[str]:
        """Names in the order of execution; an attention ends with its output projection."""
        order = []
        for module in self.order:
            name = self.names[module]
            order.append(name)
            if isinstance(module, nn.MultiheadAttention):
                order.append(f"{name}.out_proj" if name else "out_proj")
        return order

    def is_layer(self, module: nn.Module) -> bool:
        """Of a kind we know, or with a forward that is one."""
        if module in self.within:
            return False
        use = self.uses.get(module)
        return (
            bool(torch_kind(module)) or isinstance(module, nn.MultiheadAttention) or (use is not None and use.calls > 0)
        )

    def objection(self, module: nn.Module) -> str | None:
        if module in self.lazy:
            return "lazy: it had no shape yet; run the network once, then convert"
        if self.call is None:
            return None
        if module not in self.ran:
            return "never ran on the example"
        return "is called with more than its input, or by keyword" if module in self.oddly else None


class ConversionPlan:
    """Which layers and norms change (`layers`, `norms`), and why each of the others does not (`kept`)."""

    def __init__(self, model: nn.Module, trace: ModuleTrace, keep: tuple[str, ...], attention: str = "float") -> None:
        self.layers: dict[str, nn.Module] = {}
        self.norms: dict[str, nn.Module] = {}
        self.attentions: dict[str, nn.MultiheadAttention] = {}
        self.kept: dict[str, str] = {}
        self.holders: dict[Tensor, list[str]] = {}  # parameter -> who holds it; more than one: tied
        asked = kept_by_request(model, trace, keep)
        for name, module in model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.holders.setdefault(parameter, []).append(name)
            if module in trace.within:
                if module._parameters and trace.within[module] not in self.attentions.values():
                    self.kept[name] = "part of MultiheadAttention, which reads its weight without calling it"
            elif isinstance(module, nn.MultiheadAttention):
                if reason := trace.objection(module) or attention_objection(module) or asked.get(module):
                    self.kept[name] = reason
                else:
                    self.attentions[name] = module
            elif trace.is_layer(module):
                reason = trace.objection(module) or layer_objection(module, torch_kind(module), trace)
                self._sort(self.layers, name, module, reason or asked.get(module))
            elif isinstance(module, NORMS):
                self._sort(self.norms, name, module, trace.objection(module) or norm_objection(module))
            elif reason := other_objection(name, module):
                self.kept[name] = reason
        self.products: dict[str, nn.Module] = {}  # modules some of whose products of two values are to be integer
        for module, found in trace.products.items():
            name = trace.names.get(module, "")
            if not set(found.values()) & set(CHOICES[attention]) or isinstance(module, nn.MultiheadAttention):
                continue
            kept = product_objection(module, trace) or next(
                (f"as asked (keep={pattern!r})" for pattern in keep if _matches(name, pattern)), None
            )
            if kept is None:
                self.products[name] = module
            else:
                self.kept[name] = f"its products of two values stay float: {kept}"
        if not self.layers and not self.attentions:
            raise NothingConverted(self._nothing(model, bool(asked)))

    def _sort(self, into: dict[str, nn.Module], name: str, module: nn.Module, reason: str | None) -> None:
        if reason is None:
            into[name] = module
        else:
            self.kept[name] = reason

    def _nothing(self, model: nn.Module, asked: bool) -> str:
        kinds = ", ".join(kind.__name__ for kind in ANY_LAYERS)
        reasons = [f"{name or 'it'}: {reason}" for name, reason in self.kept.items()]
        shown = reasons[:6] + [f"and {len(reasons) - 6} more"] * (len(reasons) > 6)
        if not any(map(torch_kind, model.modules())):
            shown = [f"it has no {kinds}", *shown]
        hint = "; with keep=() no layer stays float on purpose" if asked else ""
        return f"nothing in {type(model).__name__} could be converted: {'; '.join(shown)}{hint}"


def kept_by_request(model: nn.Module, trace: ModuleTrace, keep: tuple[str, ...]) -> dict[nn.Module, str]:
    """The layers `keep` names, and why.

    First and last are so among all layers of a kind we know, convertible or not: a first layer that has to
    stay float leaves no need to keep the second one.
    """
    ran = trace.layers()
    asked: dict[nn.Module, str] = {}
    names: dict[nn.Module, list[str]] = {}  # a module may have several
    for name, module in model.named_modules(remove_duplicate=False):
        if trace.is_layer(module):
            names.setdefault(module, []).append(name)
    for pattern in keep:
        if pattern in ("first", "last"):
            for module in ran[:1] if pattern == "first" else ran[-1:]:
                asked.setdefault(module, f"the {pattern} layer to run (keep={pattern!r})")
            continue
        found = [module for module, given in names.items() if any(_matches(name, pattern) for name in given)]
        if not found:
            known = [name for given in names.values() for name in given]
            near = get_close_matches(str(pattern).rstrip(".*"), known, n=3, cutoff=0.4) or known[:3]
            hint = f"its layers are called {', '.join(near)} and so on" if near else "it has none to convert"
            raise UnknownLayer(f"keep={pattern!r} matches no layer of {type(model).__name__}; {hint}")
        for module in found:
            asked.setdefault(module, f"as asked (keep={pattern!r})")
    return asked


def _matches(name: str, pattern: object) -> bool:
    """'head' and 'head.*' both mean all that is in head."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), str(pattern)) for i in range(len(parts)))


OWN_METHODS = ("forward", "_conv_forward", "_output_padding")


def has_forward_of_its_own(module: nn.Module) -> bool:
    """Whether to look into its forward: its class replaces a torch layer's, or is not torch's and has a weight."""
    weight = _weight(module)
    if weight is None or is_lazy(weight) or weight.is_meta or weight.dim() < 2 or not weight.is_floating_point():
        return False
    if isinstance(module, (*NORMS, torch.jit.ScriptModule, nn.MultiheadAttention)):
        return False
    if any(method in module.__dict__ for method in OWN_METHODS):
        return False
    if kind := torch_kind(module):
        return own_method(module, kind, OWN_METHODS) is not None and not _is_quantized(module)
    return not type(module).__module__.startswith("torch.") and not any(True for _ in module.children())


def _weight(module: nn.Module) -> Tensor | None:
    """A parameter, or computed by something that any-layers know how to ask."""
    hooks = module._forward_pre_hooks.values()
    if (
        "weight" in module._parameters
        or parametrize.is_parametrized(module, "weight")
        or any(isinstance(hook, WEIGHT_HOOKS) for hook in hooks)
    ):
        weight = getattr(module, "weight", None)
        return weight if isinstance(weight, Tensor) else None
    return None


def _is_quantized(module: nn.Module) -> bool:
    return type(module).__module__.startswith(TORCH_QUANTIZED)


def layer_objection(module: nn.Module, kind: type[nn.Module] | None, trace: ModuleTrace) -> str | None:
    """Why a layer of a kind we know, or one that multiplies like one, cannot be converted."""
    name = type(module).__name__
    weight = _weight(module)
    if weight is None:
        return "its weight is computed before each call, in a way that is not known"
    if _is_quantized(module):
        return f"{name} is a quantized module already"
    method = None if kind is None else own_method(module, kind, OWN_METHODS)
    if method is not None and module not in trace.uses:
        return f"{name} has a {method} of its own, put in its place"
    if module in trace.uses and trace.call is None:
        return f"{name} has a {method or 'forward'} of its own; give an example, to see how it uses its weight"
    if module in trace.uses and trace.uses[module].calls != 1:
        calls = trace.uses[module].calls
        how = f"{calls} times" if calls else "not as a factor of its input"
        return f"{name} has a {method or 'forward'} of its own that uses its weight {how}, not once"
    if not weight.is_floating_point():
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, not real floating point"
    if weight.is_meta:
        return "its weight is on the meta device; load it first"
    return "its weight is empty" if weight.numel() == 0 else None


def attention_objection(module: nn.MultiheadAttention) -> str | None:
    """Why the projections of an attention cannot be converted."""
    if own_method(module, nn.MultiheadAttention, ("forward", "merge_masks")):
        return f"{type(module).__name__} has a forward of its own"
    if type(module.out_proj).forward is not nn.Linear.forward or "forward" in module.out_proj.__dict__:
        return "its output projection is not a plain Linear"
    if any(parametrize.is_parametrized(part) for part in (module, module.out_proj)):
        return "its parameters are computed by a parametrization"
    weights = [module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    given = [w for w in weights if w is not None]
    if any(not isinstance(w, nn.Parameter) or w.is_meta or not w.is_floating_point() for w in given):
        return "its weights are not parameters of real numbers that can be read"
    return None


def product_objection(module: nn.Module, trace: ModuleTrace) -> str | None:
    """Why products of two values that a module makes cannot have quantized operands."""
    if module in trace.within or trace.is_layer(module) or isinstance(module, (*NORMS, torch.jit.ScriptModule)):
        return f"{type(module).__name__} is a layer"
    if type(module).__module__.startswith("torch.nn."):
        return f"{type(module).__name__} is a module of torch"
    return "its forward has been replaced" if "forward" in module.__dict__ else None


def norm_objection(module: nn.Module) -> str | None:
    """Why a norm cannot be switched. One with a forward of its own can: its tables are copies of it."""
    if parametrize.is_parametrized(module):
        return "its parameters are computed by a parametrisation"
    if "forward" in module.__dict__:
        return "its forward has been replaced"
    if any(m is not module and (torch_kind(m) or isinstance(m, NORMS)) for m in module.modules()):
        return f"{type(module).__name__} has layers of its own inside"
    if not any(t is not None for t in (*module._parameters.values(), *module._buffers.values())):
        return "has neither parameters nor statistics"
    return None


def other_objection(name: str, module: nn.Module) -> str | None:
    """Why a module of another kind is left alone; None for those that hold nothing to convert."""
    kind = type(module).__name__
    if "parametrizations" in name.split("."):
        return None  # part of a layer that has its own line
    if type(module).__module__.startswith(TORCH_QUANTIZED):
        return f"{kind} is a quantized module already"
    if isinstance(module, torch.jit.ScriptModule):
        return "compiled by TorchScript; convert the network before scripting it"
    held = [n for n, p in module._parameters.items() if p is not None]
    if held and any(True for _ in module.children()):
        return f"{kind} uses parameters of its own ({', '.join(held[:4])}), which stay float"
    return f"{kind} is not a kind of layer that can be converted" if held else None
