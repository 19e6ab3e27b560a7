"""Tracing: a network and an example in, the operations it runs as a list of Steps out. Called by packing.py.

The network runs for real, on the example, and every tensor operation that reads a value made from the input is
recorded (operations.py says as what). So Python control flow, functional calls and outputs of any class need no care,
and whatever does not come from the input is a constant. Two calls are one step each, `AnyLayer.at_bits` and
`AnyActivation.at_bits`: lower.py asks the modules for their numbers. No other module is known by its type, so what a
subclass, a hook or a replaced forward adds is recorded like anything else.

It runs once in every profile: the operations must be the same, their constants (those of a switched norm) may differ.
Runs at two more image sizes show whether the network takes any size (`Trace.free`), and which value a resized map takes
its size from.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from anyprec.errors import AnyprecError, DataError, UnsupportedOperation
from anyprec.format.graph import INPUT
from anyprec.nn.layers import AnyActivation, AnyLayer
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.observe import move_to_device, preserve_state, run_call
from anyprec.nn.switching import Setting, bits, setting_name
from anyprec.packing.operations import operation_name, record
from anyprec.packing.steps import NetworkTrace, Refused, Size, TraceStep, size_of

LEAVES: dict[type[nn.Module], str] = {AnyLayer: "any", AnyActivation: "activation"}
# Added to H and W: once so that networks which halve the size five times still fit, once to make sizes odd.
OTHER_SIZES = ((32, 64), (33, 67))
MEASURED_AT_ONCE = 32  # images
KEPT = 2**22  # numbers of an output: of larger ones (maps) the first image's are kept

Recorded = tuple[list[TraceStep], tuple[str, ...], list[Tensor]]  # steps, names of the outputs, the outputs


@dataclass(frozen=True)
class Unusable:
    """Stands for a value that no step makes. An error only if an output of the network comes from it."""

    why: str


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every tensor operation while it is active; `values` says which step made a tensor."""

    def __init__(self, model: nn.Module, watched: Collection[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ranges = {name: (inf, -inf) for name in watched}  # least and largest number of these values so far
        self.paths = paths_of(model)
        self.within: list[nn.Module] = []  # the modules being called, innermost last
        self.in_leaf = False
        self.leaf_value: str | Unusable | None = None  # what the leaf being called reads
        self.steps: dict[str, TraceStep] = {}
        self.values: Any = WeakTensorKeyDictionary()  # tensor -> name of its step, or Unusable
        self.written: dict[int, Any] = {}  # memory of constants that values were written into; held, so never reused

    # --- What operations.py asks ---

    def name_of(self, item: object) -> str:
        """The step that made this tensor."""
        if self.is_constant(item):
            raise Refused("it mixes a value with a constant in a way that has no operation")
        value = self.values[item]
        assert isinstance(value, str)
        return value

    def is_constant(self, item: object) -> bool:
        return not isinstance(item, Tensor) or item not in self.values

    def add(self, kind: str, inputs: tuple[str, ...], like: Tensor, **more: Any) -> str:
        """A new step whose value has the size of the tensor `like`; gives its name."""
        name = self._free_name(kind)
        self.steps[name] = TraceStep(name, kind, inputs, size_of(like), **more)
        return name

    def path(self) -> str:
        return self.paths.get(self.within[-1], "") if self.within else ""

    def _free_name(self, kind: str) -> str:
        """The module's path where the module is this operation, or else the path and the kind; then a number."""
        path = self.path()
        whole = path and (self.in_leaf or not any(True for _ in self.within[-1].children()))
        name = path if whole else f"{path}.{kind}" if path else kind
        name = re.sub(r"[^!-~]", "_", name)[:180]  # FORMAT.md: at most 200 printable bytes
        number, free = 1, name
        while free in self.steps or free == INPUT:
            number, free = number + 1, f"{name}_{number + 1}"
        return free

    # --- Recording ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = [] if self.in_leaf else [v for t in tensors_in((args, kwargs)) if (v := self.value_of(t)) is not None]
        out = self.execute(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and not self.in_leaf:
            name = f"{operation_name(func)}{self._where()}"
            why = f"{name} draws random numbers; a packed network gives one answer to one image"
            self.values.update({tensor: Unusable(why) for tensor in tensors_in(out)})
            return out
        if not known:
            return out
        made = tensors_in(out)
        if not made:
            raise UnsupportedOperation(
                f"the network decides by the values of its input ({operation_name(func)}{self._where()}); a packed one "
                "runs the same operations on every image"
            )
        value: str | Unusable
        try:
            spoilt = next((v for v in known if isinstance(v, Unusable)), None)
            value = record(self, func, args, kwargs, made[0]) if spoilt is None else spoilt
        except Refused as refused:
            value = Unusable(f"{operation_name(func)}{self._where()}: {refused}")
        if func._schema.is_mutable:
            self._overwrite(made[0], operation_name(func))
        self.values[made[0]] = value
        self.see(value, made[0])
        for tensor in made[1:]:
            self.values[tensor] = Unusable(
                f"{operation_name(func)}{self._where()}: only its first result has an operation"
            )
        return out

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def value_of(self, tensor: Tensor) -> str | Unusable | None:
        if tensor in self.values:
            known: str | Unusable = self.values[tensor]
            return known
        if self.written and tensor.untyped_storage().data_ptr() in self.written:
            return Unusable("a value is written into a part of a constant; write it with torch.cat or F.pad instead")
        return None

    def _overwrite(self, target: Tensor, what: str) -> None:
        """A value changed in place spoils other views of the same memory; mostly nothing reads them any more."""
        storage = target.untyped_storage()
        if target not in self.values:
            self.written[storage.data_ptr()] = storage
        for other in list(self.values):
            if other is not target and other.untyped_storage().data_ptr() == storage.data_ptr():
                self.values[other] = Unusable(f"{what}{self._where()} changes another view of its input in place")

    def _where(self) -> str:
        if not self.path():
            return " in the network's own forward"
        return f" in module {self.path()!r} ({type(self.within[-1]).__name__})"

    def watch(self, module: nn.Module) -> Callable[..., Any]:
        """The module's forward, watched. Not a hook: some networks call `module.forward(x)`, which knows none."""
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.within.append(module)
            try:
                return forward(*args, **kwargs)
            finally:
                self.within.pop()

        return watched

    def leaf(self, module: nn.Module, kind: str) -> Callable[..., Any]:
        """The module's `at_bits`, which becomes one step."""
        at_bits: Callable[..., Any] = module.at_bits  # type: ignore[assignment]

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self.in_leaf:
                return at_bits(*args, **kwargs)
            given = (*args, *kwargs.values())[0]
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
        value = self.leaf_value
        if value is None:
            return output  # a layer that reads a constant makes a constant
        if output is given:
            output = output.clone()  # at 32 bits an activation may give back its very input, but is another value
        if isinstance(value, str):
            try:
                value = self.add(kind, (value,), output, module=self.within[-1])
            except Refused as refused:
                value = Unusable(f"{type(self.within[-1]).__name__}{self._where()}: {refused}")
        self.values[output] = value
        self.see(value, output)
        return output

    def see(self, value: str | Unusable, tensor: Tensor) -> None:
        """Called where operations are not recorded."""
        if isinstance(value, str) and value in self.ranges:
            low, high = self.ranges[value]
            self.ranges[value] = min(low, float(tensor.min())), max(high, float(tensor.max()))


def tensors_in(item: Any) -> list[Tensor]:
    return list(_tensors(item))


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (Mapping, tuple, list)):
        for part in item.values() if isinstance(item, Mapping) else item:
            yield from _tensors(part)


def paths_of(model: nn.Module) -> dict[nn.Module, str]:
    """Names of modules. What is in a table of a switched norm is called like the norm, whatever the table's width."""
    paths = {module: name for name, module in model.named_modules()}
    for norm in [module for module in paths if isinstance(module, SwitchNorm)]:
        for table in norm.tables.values():
            for inner, module in table.named_modules():
                paths[module] = ".".join(filter(None, (paths[norm], inner)))
    return paths


def trace(model: nn.Module, x: Tensor, key: str | None, settings: Sequence[Setting]) -> NetworkTrace:
    """The model's steps, with their constants in every setting; its mode, bits and random numbers stay as they were.

    `x` has several images, so that no batch of 1 hides what is done to the batch; `key` names the argument it is.
    """
    every = [_run_at(model, setting, x, key) for setting in settings]
    first, outputs, _ = every[0]
    for setting, (steps, _, _) in zip(settings, every, strict=True):
        _check_same(first, steps, settings[0], setting)
    size = size_of(x)
    all_numbers = [
        replace(step, at=tuple(steps[number].constants for steps, _, _ in every)) for number, step in enumerate(first)
    ]
    results = tuple(tuple(t[:1] if t.numel() > KEPT else t for t in made) for _, _, made in every)
    fixed = NetworkTrace(tuple(all_numbers), outputs, size, False, x, key, results)
    runs, inputs = [all_numbers], [size]
    for down, right in OTHER_SIZES if x.dim() > 2 else ():
        more = (down, right)[4 - x.dim() :]
        other_x = x.new_zeros(2, x.shape[1], *(n + m for n, m in zip(x.shape[2:], more, strict=True)))
        try:
            other, _, _ = _run_at(model, settings[0], other_x, key)
        except (AnyprecError, AssertionError):
            if len(runs) == 1:
                return fixed
            break  # odd sizes are more than a network with skips across its strides can take
        if len(other) != len(first) or not all(a.same_but_for_size(b) for a, b in zip(first, other, strict=True)):
            return fixed
        runs.append(other)
        inputs.append(size_of(other_x))
    if len(runs) == 1:
        return fixed
    followed = [_follow(number, runs, inputs) for number in range(len(first))]
    if None in followed:
        return fixed
    return replace(fixed, steps=tuple(step for step in followed if step is not None), free=True)


def _run_at(model: nn.Module, setting: Setting, x: Tensor, key: str | None) -> Recorded:
    with bits(model, setting):
        return run_recorded(model, x, key, Recorder(model))


def _check_same(first: list[TraceStep], other: list[TraceStep], at_first: Setting, at_other: Setting) -> None:
    same = [a.same_but_for_numbers(b) for a, b in zip(first, other, strict=False)]
    if len(first) == len(other) and all(same):
        return
    number = same.index(False) if False in same else len(same)
    where = next(steps[number].name for steps in (first, other) if len(steps) > number)
    raise UnsupportedOperation(
        f"the network runs other operations at {setting_name(at_other)} than at {setting_name(at_first)} (from "
        f"{where!r} on); a packed one runs the same at every width"
    )


def input_of(model: nn.Module, example: Any) -> tuple[Tensor, str | None]:
    """The example's one tensor, and its name where the network takes it by name."""
    given = tensors_in(example)
    if not given and hasattr(example, "__array__"):
        given = [torch.as_tensor(example)]
    if len(given) != 1 or not 2 <= given[0].dim() <= 4 or 0 in given[0].shape or not given[0].is_floating_point():
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in given) or "none"
        raise DataError(
            f"the example holds these tensors: {shapes}; pack needs one float tensor, such as images (N, C, H, W)"
        )
    x = move_to_device(given[0].detach(), model, "the example")
    home = next((p for p in model.parameters() if p.is_floating_point()), x)
    key = next(iter(example)) if isinstance(example, Mapping) else None
    return x.to(home.dtype), key


def value_ranges(model: nn.Module, example: Any, names: Collection[str]) -> dict[str, tuple[float, float]]:
    """Least and largest number of some values of a trace, over all images of the example, at the bits that are set."""
    x, key = input_of(model, example)
    x = torch.cat([x, x]) if len(x) == 1 else x
    recorder = Recorder(model, names)
    for images in x.tensor_split(-(-len(x) // MEASURED_AT_ONCE)):
        recorder.steps.clear()  # so that the same steps get the same names again
        run_recorded(model, images, key, recorder)
    return recorder.ranges


def run_recorded(model: nn.Module, x: Tensor, key: str | None, recorder: Recorder, seed: int | None = None) -> Recorded:
    recorder.values[x] = INPUT
    recorder.see(INPUT, x)
    with preserve_state(model), torch.no_grad(), _watched(model, recorder), recorder:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
        output = run_call(model, ((x,), {}) if key is None else ((), {key: x}), "the example")
    made = tensors_in(output)
    if not made:
        raise UnsupportedOperation(f"the network returns a {type(output).__name__} without tensors; nothing to pack")
    outputs = []
    for tensor in made:
        value = recorder.value_of(tensor) or Unusable("an output of the network does not depend on its input")
        if isinstance(value, Unusable):
            raise UnsupportedOperation(value.why)
        outputs.append(value)
    return list(recorder.steps.values()), tuple(outputs), made


@contextmanager
def _watched(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Inside, the recorder sees every forward and every leaf."""
    watched = [
        (module, "forward", recorder.watch(module))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    for kind, name in LEAVES.items():
        watched += [(m, "at_bits", recorder.leaf(m, name)) for m in model.modules() if isinstance(m, kind)]
    before = [module.__dict__.get(name) for module, name, _ in watched]  # some tools put a forward there
    for module, name, method in watched:
        module.__dict__[name] = method
    try:
        yield
    finally:
        for (module, name, _), own in zip(watched, before, strict=True):
            if own is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = own


def _follow(number: int, runs: list[list[TraceStep]], inputs: list[Size]) -> TraceStep | None:
    """A resize to a size that changed with the image's takes it from the value that changed alike; None: from none."""
    step = runs[0][number]
    wanted = [steps[number].size[1:] for steps in runs]
    if step.kind != "resize" or step.attributes["size"] is None or len(set(wanted)) == 1:
        return step
    like = INPUT if [size[1:] for size in inputs] == wanted else None
    for i in reversed(range(number)):
        if like is None and [steps[i].size[1:] for steps in runs] == wanted:
            like = runs[0][i].name
    return None if like is None else replace(step, attributes={**step.attributes, "size": None, "like": like})
