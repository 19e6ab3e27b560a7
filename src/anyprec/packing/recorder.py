"""Recorder: sees every tensor operation of a network that runs, and keeps a TraceStep for each. Used by trace.py.

operations/ says which steps an operation is. One that cannot be packed becomes a step of the kind `refused`, so that
the run goes on and all of them are found; it is an error only if an output of the network comes from it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from anyprec.errors import UnsupportedOperation
from anyprec.format.graph import INPUT
from anyprec.nn.layers import AnyActivation, AnyLayer
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.operations import tensors_in as every_tensor
from anyprec.packing.layout import reshape_value, settle
from anyprec.packing.operations import operation_name, record
from anyprec.packing.operations.layers import borders, layer_input, layer_output
from anyprec.packing.operations.recurrent import RECURRENT, record_recurrent
from anyprec.packing.steps import REFUSED, Refused, Shape, TraceStep
from anyprec.packing.views import Axis, View

ShortcutKey = tuple[int, int]  # the operation by its number, and which of its shortcuts
HALF = (torch.float16, torch.bfloat16)
LEAVES: dict[type[nn.Module], str] = {AnyLayer: "any", AnyActivation: "activation"}
OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
# What these make depends on the sizes of a value only, so it is a constant.
FILLED = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
UNFILLED = ("empty_like", "new_empty", "new_empty_strided")
OVERWRITES = ("copy", "fill", "zero")  # in place; what was there before does not matter


@dataclass(frozen=True)
class Unusable:
    """Stands for a value that no step makes. An error only if an output of the network comes from it."""

    why: str


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every tensor operation while it is active; `values` says how a tensor lies in the value of a step."""

    def __init__(
        self, model: nn.Module, watched: Collection[str] = (), barred: Collection[ShortcutKey] = frozenset()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.barred, self.shortcuts = barred, dict[ShortcutKey, bool]()  # see `shortcut`
        self.operation = self.asked = 0  # operations recorded so far; shortcuts asked for in the one at hand
        self.ranges = {name: (inf, -inf) for name in watched}  # least and largest number of these values so far
        self.paths = paths_of(model)
        self.within: list[nn.Module] = []  # the modules being called, innermost last
        self.in_leaf = False
        self.leaf_value: View | Unusable | None = None  # what the leaf being called reads
        self.steps: dict[str, TraceStep] = {}
        self.inputs: dict[str, Shape] = {}
        self.batch = Axis(1, "batch")
        self.values: Any = WeakTensorKeyDictionary()  # tensor -> View or Unusable
        # Memory, held so that it is never reused:
        self.written: dict[int, tuple[Any, str]] = {}  # of constants that values were written into; by what, and where
        self.refilled: dict[int, Any] = {}  # of values that became constants: filled in place
        self.half = any(p.dtype in HALF for p in model.parameters())
        self.decisions: list[str] = []  # where the network looks at values of its input

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """The inputs of the network, by name: images (N, C, H, W) are stored (H, W, C), others in torch's order."""
        self.batch = Axis(len(next(iter(tensors.values()))), "batch")
        for name, tensor in tensors.items():
            self.values[tensor] = self.as_input(name, tuple(tensor.shape[1:]), tensor.is_floating_point())
            if name != INPUT:
                attributes = {"shape": list(self.inputs[name]), "integer": not tensor.is_floating_point()}
                self.steps[name] = TraceStep(name, "input", (), self.inputs[name], attributes)
            self.see(self.values[tensor], tensor)

    def as_input(self, name: str, shape: Shape, floats: bool) -> View:
        axes = [(Axis(n),) if n > 1 else () for n in shape]
        order = (*axes[1:], axes[0]) if len(shape) == 3 else tuple(axes)
        stored = (*shape[1:], shape[0]) if len(shape) == 3 else shape or (1,)
        if len(shape) == 1 and name == INPUT and floats:
            stored = (1, 1, *shape)  # a vector is an image of one pixel where the file is of format 1
        self.inputs[name] = stored
        return View(name, tuple(axis for part in order for axis in part), ((self.batch,), *axes))

    # --- What operations ask ---

    def shape(self, value: str) -> Shape:
        return self.inputs[value] if value in self.inputs else self.steps[value].shape

    def view_of(self, item: object) -> View:
        """How this tensor lies in a value."""
        if self.is_constant(item):
            raise Refused("it mixes a value with a constant in a way that has no operation")
        view = self.values[item]
        assert isinstance(view, View)
        return view

    def is_constant(self, item: object) -> bool:
        return not isinstance(item, Tensor) or item not in self.values

    def shortcut(self, applies: bool) -> bool:
        """Whether numbers of a constant may decide which steps an operation becomes.

        A switched norm has other numbers at every width, all 1 at one of them perhaps, but the steps must be the same:
        trace.py bars what does not apply at every width.
        """
        key, self.asked = (self.operation, self.asked), self.asked + 1
        self.shortcuts[key] = applies
        return applies and key not in self.barred

    def add(self, kind: str, inputs: tuple[str, ...], shape: Shape, *, helper: bool = False, **more: Any) -> str:
        """A new step; gives its name. A helper moves numbers or holds constants for another."""
        name = self._free_name(kind, helper)
        self.steps[name] = TraceStep(name, kind, inputs, tuple(shape), where=self.place(), **more)
        return name

    def add_constant(self, numbers: Tensor) -> str:
        shape = tuple(numbers.shape) or (1,)
        constants = {"numbers": numbers.detach().reshape(shape).clone()}  # the network may change it in place later
        return self.add("constant", (), shape, helper=True, constants=constants, attributes={"shape": list(shape)})

    def path(self) -> str:
        return self.paths.get(self.within[-1], "") if self.within else ""

    def _free_name(self, kind: str, helper: bool) -> str:
        """The module's path where the module is this operation, or else the path and the kind; then a number."""
        path = self.path()
        whole = not helper and path and (self.in_leaf or not any(True for _ in self.within[-1].children()))
        name = path if whole else f"{path}.{kind}" if path else kind
        name = re.sub(r"[^!-~]", "_", name)[:180]  # FORMAT.md: at most 200 printable bytes
        number, free = 1, name
        while free in self.steps or free == INPUT:
            number, free = number + 1, f"{name}_{number + 1}"
        return free

    # --- Recording ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.in_leaf:
            return self.execute(func, args, kwargs)
        name = operation_name(func)
        overwrites = name in OVERWRITES and func._schema.is_mutable
        read = tensors_in((args[1:] if overwrites else args, kwargs))
        known = [v for t in read if (v := self.value_of(t)) is not None]
        before = args
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and self.value_of(args[0]) is None:
            self._keep_numbers(args[0])
            before = (args[0].clone(), *args[1:])  # a constant, as it is now
        out = self.execute(func, args, kwargs)
        made = tensors_in(out)
        if torch.Tag.nondeterministic_seeded in func.tags:
            why = f"{name}{self.place()} draws random numbers; a packed network gives one answer to one image"
            if func._schema.is_mutable:
                self._overwrite(made[0], name)
            self.values.update(dict.fromkeys(made, Unusable(why)))
            return out
        if overwrites and not known:
            self._set_constant(made[0], name)
        if not known or name in FILLED:
            return out
        if name in UNFILLED:
            why = f"{name}{self.place()}: its numbers are never set; use torch.zeros_like"
            self.values.update(dict.fromkeys(made, Unusable(why)))
            return out
        if not made:
            if name not in ("sym_size", "sym_numel", "is_same_size"):
                self.looked_at(name)
            return out
        spoilt = next((v for v in known if isinstance(v, Unusable)), None)
        views: list[View | Unusable | None]
        views = self._record(func, before, kwargs, made) if spoilt is None else [spoilt] * len(made)
        if func._schema.is_mutable:
            self._overwrite(made[0], name)
        for tensor, view in zip(made, views, strict=True):
            if view is None:
                view = Unusable(f"{name}{self.place()}: only its first result has an operation")
            self.values[tensor] = view
            self.see(view, tensor)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> list[View | Unusable | None]:
        before = len(self.steps)
        self.operation, self.asked = self.operation + 1, 0
        try:
            found = record(self, func, args, kwargs, made)
            views: list[View | None] = [*found, *[None] * (len(made) - len(found))]
            for view, tensor in zip(views, made, strict=True):
                if view is not None:
                    assert view.shape == tuple(tensor.shape), (operation_name(func), view.shape, tuple(tensor.shape))
            return [*views]
        except Refused as refused:
            for name in list(self.steps)[before:]:
                del self.steps[name]
            inputs = tuple({self.values[t].value for t in tensors_in((args, kwargs)) if t in self.values})
            return [self.refuse(operation_name(func), refused, inputs, tensor) for tensor in made]

    def refuse(self, what: str, reason: Refused, inputs: tuple[str, ...], made: Tensor) -> View | Unusable:
        """A value that stands for what cannot be packed, so that the run goes on and finds what else cannot."""
        if made.dim() < 1 or len(made) != self.batch.size:
            return Unusable(f"{what}{self.place()}: {reason}")
        shape = tuple(made.shape[1:])
        axes = [(Axis(n),) if n > 1 else () for n in shape]
        order = (*axes[1:], axes[0]) if len(shape) == 3 else tuple(axes)
        stored = (*shape[1:], shape[0]) if len(shape) == 3 else shape or (1,)
        name = self.add(
            REFUSED, inputs, stored, attributes={"what": what, "place": self.place(), "reason": str(reason)}
        )
        return View(name, tuple(axis for part in order for axis in part), ((self.batch,), *axes))

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def value_of(self, tensor: Tensor) -> View | Unusable | None:
        if tensor in self.values:
            known: View | Unusable = self.values[tensor]
            return known
        if self.written and tensor.untyped_storage().data_ptr() in self.written:
            what = self.written[tensor.untyped_storage().data_ptr()][1]
            return Unusable(f"{what} writes a value into a part of a constant; use torch.cat or F.pad instead")
        return None

    def _overwrite(self, target: Tensor, what: str) -> None:
        """A value changed in place spoils other views of the same memory; mostly nothing reads them any more."""
        storage = target.untyped_storage()
        if target not in self.values or storage.data_ptr() in self.refilled:
            self.written[storage.data_ptr()] = storage, f"{what}{self.place()}"
        for other in list(self.values):
            if other is not target and overlaps(other, target):
                self.values[other] = Unusable(f"{what}{self.place()} changes another view of its input in place")

    def _keep_numbers(self, target: Tensor) -> None:
        """Before a constant is changed in place: steps that read it have the numbers it had."""
        place = target.untyped_storage().data_ptr()
        for step in self.steps.values():
            for name, numbers in step.constants.items():
                if numbers.untyped_storage().data_ptr() == place:
                    step.constants[name] = numbers.clone()

    def _set_constant(self, target: Tensor, what: str) -> None:
        """Numbers that do not come from the input, written over a tensor: all of a value is a constant then."""
        if self.value_of(target) is None:
            return
        storage = target.untyped_storage()
        self._overwrite(target, what)
        if target.numel() * target.element_size() == storage.nbytes():
            self.values.pop(target, None)
            self.written.pop(storage.data_ptr(), None)
            self.refilled[storage.data_ptr()] = storage
        else:
            why = f"{what}{self.place()} fills a part of a value; use torch.cat or torch.where instead"
            self.values[target] = Unusable(why)

    def looked_at(self, what: str, tensor: Tensor | None = None) -> None:
        """Values leave torch: for Python's `if`, as a list or as an array. Called by rewrites.py too."""
        if tensor is None or (not self.in_leaf and self.value_of(tensor) is not None):
            self.decisions.append(
                f"the network decides by the values of its input ({what}{self.place()}); a packed one runs the same "
                "operations on every image"
            )

    def place(self) -> str:
        """' in module 'layers.0' (GELU), net.py:12': where the operation at hand was written."""
        line = source_line()
        at = f", {line}" if line else ""
        if not self.path():
            return f" in the network's own forward{at}"
        return f" in module {self.path()!r} ({type(self.within[-1]).__name__}){at}"

    # --- Modules ---

    def watch(self, module: nn.Module) -> Callable[..., Any]:
        """The module's forward, watched. Not a hook: some networks call `module.forward(x)`, which knows none."""
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.within.append(module)
            try:
                if isinstance(module, RECURRENT) and not self.in_leaf and any(map(self.value_of, tensors_in(args))):
                    return self._recurrent(module, forward, args, kwargs)
                return forward(*args, **kwargs)
            finally:
                self.within.pop()

        return watched

    def _recurrent(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """nn.LSTM and nn.GRU as they are: torch would unroll them, position by position."""
        given = self.value_of(args[0]) if isinstance(args[0], Tensor) else Unusable("it reads a PackedSequence")
        self.in_leaf = True
        try:
            out = forward(*args, **kwargs)
        finally:
            self.in_leaf = False
        made = tensors_in(out)
        found: list[View | Unusable | None]
        if isinstance(given, Unusable):
            found = [given] * len(made)
        else:
            try:
                if given is None or len(args) > 1 or kwargs:
                    raise Refused("a first state of its own has no operation; start from zeros (no second argument)")
                found = [*record_recurrent(self, module, given)]
                found += [None] * (len(made) - len(found))
            except Refused as refused:
                inputs = () if given is None else (given.value,)
                name = type(module).__name__
                why = Unusable(f"{name}{self.place()}: {refused}")
                found = [self.refuse(name, refused, inputs, made[0]), *[why] * (len(made) - 1)]
        for tensor, view in zip(made, found, strict=True):
            self.values[tensor] = view or Unusable(
                f"{type(module).__name__}{self.place()}: the cell state after the last position has no operation"
            )
        return out

    def leaf(self, module: nn.Module, kind: str) -> Callable[..., Any]:
        """The module's `at_bits`, which becomes one step."""
        at_bits: Callable[..., Any] = module.at_bits  # type: ignore[assignment]

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self.in_leaf:
                return at_bits(*args, **kwargs)
            given = (*args, *kwargs.values())[0]
            if torch.is_autocast_enabled(given.device.type) and self.value_of(given) is not None:
                name = type(module).__name__
                self.decisions.append(
                    f"{name} in module {self.paths.get(module, '')!r}: autocast rounds values, which has no operation; "
                    "run it without, in float32"
                )
            self.leaf_value = self.value_of(given)
            self.in_leaf = True
            self.within.append(module)
            try:
                return self._leaf(kind, given, at_bits(*args, **kwargs))
            finally:
                self.within.pop()
                self.in_leaf = False

        return recorded

    def _leaf(self, kind: str, given: Tensor, output: Tensor) -> Tensor:
        view = self.leaf_value
        if view is None:
            return output  # a layer that reads a constant makes a constant
        if output is given:
            output = output.clone()  # at 32 bits an activation may give back its very input, but is another value
        if isinstance(view, View):
            module = self.within[-1]
            try:
                reads = layer_input(self, module, view) if kind == "any" else view
                shape, made = layer_output(self, module, reads, output) if kind == "any" else (None, view)
                shape = self.shape(reads.value) if shape is None else shape
                around = {"around": borders(module, self.shape(reads.value))} if kind == "any" else {}
                name = self.add(kind, (reads.value,), shape, module=module, reads=reads, attributes=around)
                view = made.with_value(name)
            except Refused as refused:
                view = self.refuse(type(module).__name__, refused, (view.value,), output)
        self.values[output] = view
        self.see(view, output)
        return output

    def see(self, view: View | Unusable, tensor: Tensor) -> None:
        """Called where operations are not recorded."""
        if isinstance(view, View) and view.value in self.ranges:
            low, high = self.ranges[view.value]
            self.ranges[view.value] = min(low, float(tensor.min())), max(high, float(tensor.max()))

    # --- The end of a run ---

    def output(self, tensor: Tensor, as_images: bool) -> str:
        """The value of the file that is this output: images (H, W, C), others in torch's order."""
        view = self.value_of(tensor) or Unusable("an output of the network does not depend on its input")
        if isinstance(view, Unusable):
            raise UnsupportedOperation(view.why)
        if view.dims[:1] != ((self.batch,),):
            raise UnsupportedOperation(
                f"an output of the network, {tuple(tensor.shape)}, has not the images of the batch as its first "
                "dimension; a packed network gives one answer to one image"
            )
        dims = view.dims[1:]
        if len(dims) == 3:
            return settle(self, view, (dims[1], dims[2], dims[0])).value
        if as_images and len(dims) == 1:
            value = settle(self, view, dims).value if len(view.axes) > 1 else view.value
            return reshape_value(self, value, (1, 1, *map(lambda a: a.size, dims[0]))) if dims[0] else value
        return settle(self, view, dims or ((),)).value


def source_line() -> str:
    """file:line of the innermost code that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(OURS) and not file.startswith("<"):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share numbers: the halves that `chunk` makes share memory, but no number."""
    storage = a.untyped_storage()
    if storage.data_ptr() != b.untyped_storage().data_ptr():
        return False
    if a.dtype != b.dtype:
        return True
    taken = torch.zeros(storage.nbytes() // a.element_size(), dtype=torch.bool)
    taken.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def tensors_in(item: Any) -> list[Tensor]:
    return list(every_tensor(item))


def paths_of(model: nn.Module) -> dict[nn.Module, str]:
    """Names of modules. What is in a table of a switched norm is called like the norm, whatever the table's width."""
    paths = {module: name for name, module in model.named_modules()}
    for norm in [module for module in paths if isinstance(module, SwitchNorm)]:
        for table in norm.tables.values():
            for inner, module in table.named_modules():
                paths[module] = ".".join(filter(None, (paths[norm], inner)))
    return paths


@contextmanager
def watched(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Inside, the recorder sees every forward and every leaf."""
    methods = [
        (module, "forward", recorder.watch(module))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    for kind, name in LEAVES.items():
        methods += [(m, "at_bits", recorder.leaf(m, name)) for m in model.modules() if isinstance(m, kind)]
    before = [module.__dict__.get(name) for module, name, _ in methods]  # some tools put a forward there
    for module, name, method in methods:
        module.__dict__[name] = method
    try:
        yield
    finally:
        for (module, name, _), own in zip(methods, before, strict=True):
            if own is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = own
