"""The check of `pack`: a model file just written and the module it was made from in, a Check or an error out.

Float sums in another order move single values across the border between two codes, and every layer behind adds to it:
outputs alone cannot tell rounding from a mistake. So the module is led along the file. At every quantizer the file's
codes are compared with the module's, given the same codes before: they must be equal, or the module's number must lie
at the border between the two. Then the module goes on with the file's codes. No difference grows, a wrong operation
shows where it happens, and the outputs must agree but for float rounding. docs/cli/pack.md, "The check".
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyprec.errors import InputError, UnsupportedOperation, VerificationFailed
from anyprec.format.graph import Graph
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.observe import preserve_state, run_call
from anyprec.nn.switching import Setting, bits, setting_name
from anyprec.packing.answers import Mismatch, PackedAnswers, open_answers
from anyprec.packing.images import SEED, noise
from anyprec.packing.lower import ComparisonPoint, GraphDraft
from anyprec.packing.operations import operation_name
from anyprec.packing.recorder import Recorder, tensors_in
from anyprec.packing.steps import Example, NetworkTrace, TraceStep
from anyprec.packing.trace import at_length, run_recorded
from anyprec.packing.views import Axis, View
from anyprec.widths import FLOAT

# Of a code's step: how far beyond the border a number of the module may lie, besides float rounding of large numbers.
BORDER = 1e-3
ROUNDING = 4e-6  # of the largest number of a tensor: float32 sums of some thousand products
FLOATS = 1e-4  # of the largest number of a tensor: values that are compared as floats, behind several operations
MOVED = 0.002  # share of codes at one place that may lie on the other side of a border; a few always may
FEW = 4
INPUT_PLACES = {"convolution": 0, "mm": 0, "addmm": 1}  # among the arguments; the weight is the next


@dataclass(frozen=True)
class ProfileCheck:
    """How far the file is from the module in one profile."""

    difference: float  # the largest between an output of the file and of the module, both run by themselves
    spread: float  # standard deviation of the module's outputs, to compare it with
    answers: int  # images (pixels, where outputs are maps)
    same_answers: int  # of them, those where both have the same largest output
    codes: int  # compared, given the same codes before
    moved_codes: int  # of them, those on the other side of a border
    led_answers: int  # images (pixels) of the run in which the module goes on with the file's codes
    led_same_answers: int  # of them, those where both have the same largest output
    led_difference: float  # the largest between outputs of that run, as a share of the largest output
    tolerance_used: float  # the largest difference as a share of what rounding may explain; above 1 is refused
    alive: bool  # the outputs depend on the image: else the check says little


@dataclass(frozen=True)
class VerificationReport:
    """What the check looked at, and how long it took; it found nothing wrong."""

    engine: str  # the instruction set the file ran on, or "oracle"
    images: int
    other_size: tuple[int, ...] | None  # H, W (or L) at which it was checked as well, where the file takes any size
    profiles: dict[str, ProfileCheck]
    seconds: float

    def __str__(self) -> str:
        size = f", one of {' x '.join(map(str, self.other_size))}" if self.other_size else ""
        dead = f"; at {', '.join(self.dead)} the outputs are the same for every image, which shows little"
        return (
            f"agrees with the module on {self.images} images{size} ({self.engine}, {self.seconds:.2f} s)"
            f"{dead if self.dead else ''}"
        )

    @property
    def dead(self) -> list[str]:
        """Profiles whose outputs do not depend on the image."""
        return [name for name, found in self.profiles.items() if not found.alive]


# --- The module, led along the file -----------------------------------------------------------------------


class GuidedRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records a run as trace.py does, and puts the file's value in the place of each quantizer's, once compared."""

    def __init__(self, model: nn.Module, plan: VerificationPlan, row: int, values: Mapping[str, np.ndarray]) -> None:
        super().__init__(model, barred=plan.trace.barred)
        self.plan, self.row, self.given = plan, row, values
        self.rounds = bool(plan.rounded) and plan.settings[row] != FLOAT
        self.compared = self.moved = 0
        self.tolerance_used = self.led_difference = 0.0
        self.led_answers = self.led_same_answers = 0

    def ahead(self, kinds: tuple[str, ...]) -> TraceStep:
        """The step of one of these kinds that comes next, if the run goes as it was traced."""
        done = len(self.steps)
        found = next((step for step in self.plan.order[done:] if step.kind in kinds), None)
        if found is None:
            raise Mismatch("the module runs more operations than it did on another number of images")
        return found

    def watch(self, module: nn.Module) -> Callable[..., Any]:
        forward = super().watch(module)
        if not isinstance(module, ActQuantizer):
            return forward

        def followed(y: Tensor, width: int) -> Tensor:
            out: Tensor = forward(y, width)
            if not self.in_leaf or not isinstance(self.leaf_value, View):
                return out
            step = self.ahead(("any", "activation"))
            point = self.plan.points.get(step.name)
            return out if point is None else self.follow(step.name, point, self.leaf_value, y, out)

        return followed

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An 8-bit first or last layer is float in the module: it gets the file's input and the rounded weight."""
        place = INPUT_PLACES.get(operation_name(func))
        now = None if place is None or self.in_leaf or not self.rounds else self.value_of(args[place])
        if place is not None and isinstance(now, View):
            step = self.ahead(("conv", "linear"))
            if step.name in self.plan.rounded and self.value_of(args[place + 1]) is None:
                y, weight = args[place : place + 2]
                rounded = torch.from_numpy(self.plan.rounded[step.name]).to(weight).permute(0, 3, 1, 2)
                rounded = rounded.reshape(weight.shape) if step.kind == "conv" else rounded.flatten(1).t()
                point = self.plan.points.get(step.name)
                y = y if point is None else self.follow(step.name, point, now, y, None)
                args = (*args[:place], y, rounded, *args[place + 2 :])
        return super().execute(func, args, kwargs)

    def follow(self, name: str, point: ComparisonPoint, now: View, y: Tensor, out: Tensor | None) -> Tensor:
        """The file's value, as the module has it. `out` is what the module's quantizer made of y; None: it has none."""
        top, left, bottom, right = point.pad
        if any(point.pad):  # zeros that the file's convolution adds itself
            y, out = unpadded(y, point.pad), None if out is None else unpadded(out, point.pad)
        found = in_module(self.given[point.value], point.view, now, y)
        width, r = point.codes.bits[self.row], float(point.codes.ranges[self.row])
        if width == FLOAT:
            self.check_floats(name, found, y if out is None else out)
            value = found
        else:
            levels = 2**width - 1
            step = r / levels * (2 if point.codes.signed else 1)
            if point.codes.divisors is not None:
                y = y / torch.from_numpy(point.codes.divisors).to(y)
            value = found * step - (r if point.codes.signed else 0)
            self._check_codes(name, found, y / step + (levels / 2 if point.codes.signed else 0), levels)
            if out is not None:
                self._check_rounding(name, (out - value) / step)
        return F.pad(value, (left, right, top, bottom)) if any(point.pad) else value

    def _check_codes(self, name: str, codes: Tensor, numbers: Tensor, levels: int) -> None:
        """`numbers` are the module's, in steps of a code, before they are clipped and rounded."""
        beyond = (numbers.clamp(0, levels) - codes).abs() - 0.5  # of a border
        moved = beyond > 0
        count = int(moved.sum())
        self.compared += codes.numel()
        self.moved += count
        noise = ROUNDING * float(numbers.abs().max())
        most = BORDER + noise
        self.tolerance_used = max(self.tolerance_used, float(beyond.max()) / most)
        wrong = ~(beyond <= most)
        if wrong.any():
            raise Mismatch(
                f"{name!r}: {int(wrong.sum())} of {codes.numel()} codes are not the module's, one of them off by "
                f"{float(beyond.max()) + 0.5:.3g} steps"
            )
        # Sums that are exactly on a border in integers are next to it in the module's floats, however many they are: at
        # 1 bit, without a norm in between, every sum of 0 is.
        count = int((beyond > noise).sum())
        if count > FEW + MOVED * codes.numel():
            raise Mismatch(f"{name!r}: {count} of {codes.numel()} codes are on the other side of a border")

    def _check_rounding(self, name: str, apart: Tensor) -> None:
        """The module's quantizer rounds to the file's codes, or to one next to it."""
        wrong = ~((apart - apart.round()).abs() <= BORDER) | (apart.abs() > 1.5)
        if wrong.any():
            raise Mismatch(
                f"{name!r}: the module's quantizer makes other values of {int(wrong.sum())} of {wrong.numel()}"
            )

    def check_outputs(self, names: Sequence[str], found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
        """Those of the network, at the end of the run."""
        for name, ours, theirs in zip(names, found, wanted, strict=True):
            self.check_floats(name, ours, theirs)
            largest = float(theirs.abs().max())
            gap = float((ours - theirs).abs().max())
            self.led_difference = max(self.led_difference, gap / largest if largest else 0.0)
        answers = [largest_outputs(outputs[0]) for outputs in (found, wanted)]
        self.led_answers, self.led_same_answers = answers[0].numel(), int((answers[0] == answers[1]).sum())

    def check_floats(self, name: str, found: Tensor, wanted: Tensor) -> None:
        gap, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
        if not gap <= FLOATS * largest:
            raise Mismatch(f"{name!r}: its numbers differ by up to {gap:.3g} (they go up to {largest:.3g})")
        if gap:
            self.tolerance_used = max(self.tolerance_used, gap / (FLOATS * largest))


def largest_outputs(output: Tensor) -> Tensor:
    """The answers: of classes (N, C) and maps (N, C, H, W) along C, of sequences (N, L, C) along the last.

    Of single numbers (N,): whether they are above zero.
    """
    if output.dim() == 1:
        return output > 0
    return output.argmax(-1 if output.dim() == 3 else 1)


def as_tensor(values: np.ndarray, like: Tensor) -> Tensor:
    """An output of the file, as the module has it: images (N, H, W, C), others in torch's order."""
    image = values.ndim == 4 and like.dim() == 4
    tensor = torch.from_numpy(np.ascontiguousarray(values.transpose(0, 3, 1, 2) if image else values))
    if tensor.numel() != like.numel():
        raise Mismatch(f"the file has a value of shape {tuple(values.shape)} where the module has {tuple(like.shape)}")
    return tensor.reshape(like.shape).to(like)


def in_module(values: np.ndarray, view: View, now: View, like: Tensor) -> Tensor:
    """A value of the file, as the module has it; `view` is the traced one, `now` has the sizes of this run."""
    order = [axis for dim in view.dims for axis in dim]
    sizes: dict[Axis, int] = {}
    for dim, other, size in zip(view.dims, now.dims, like.shape, strict=True):
        if len(dim) == 1:  # zeros around an image are no part of the value
            sizes[dim[0]] = size
        else:
            sizes.update(zip(dim, (axis.size for axis in other), strict=True))
    stored = [next(axis for axis in order if axis.kind == "batch"), *view.axes]
    if values.size != like.numel() or math.prod(sizes[axis] for axis in stored) != values.size:
        raise Mismatch(f"the file has a value of shape {tuple(values.shape)} where the module has {tuple(like.shape)}")
    tensor = torch.from_numpy(np.ascontiguousarray(values)).reshape([sizes[axis] for axis in stored])
    moved = tensor.permute([stored.index(axis) for axis in order]).reshape(like.shape)
    return torch.empty_like(like).copy_(moved)  # with its strides: torch breaks operations down by them


def unpadded(t: Tensor, pad: tuple[int, int, int, int]) -> Tensor:
    top, left, bottom, right = pad
    t = t[..., left : t.shape[-1] - right]
    return t[..., top : t.shape[-2] - bottom, :] if top or bottom else t


# --- The check --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerificationPlan:
    """What is known of a packed network beside its Graph."""

    graph: Graph
    trace: NetworkTrace
    settings: Sequence[Setting]
    points: Mapping[str, ComparisonPoint]
    rounded: Mapping[str, np.ndarray]

    @property
    def order(self) -> tuple[TraceStep, ...]:
        """The steps as a Recorder counts them: without one that stands for the rank of the input."""
        return tuple(step for step in self.trace.steps if step.name not in self.trace.added)

    def name(self, row: int) -> str:
        return self.graph.profiles[row].name


def make_verification_plan(
    graph: Graph, trace: NetworkTrace, draft: GraphDraft, settings: Sequence[Setting]
) -> VerificationPlan:
    made = {op.name for op in graph.ops}
    points = {name: point for name, point in draft.points.items() if point.value in made}  # the others nothing reads
    return VerificationPlan(graph, trace, settings, points, draft.rounded)


def verify(model: nn.Module, path: Path, plan: VerificationPlan) -> VerificationReport:
    """Raises VerificationFailed where the file at `path` is not the module, in any profile."""
    start = time.perf_counter()
    trace = plan.trace
    model = in_single_precision(model)
    probe = path.with_name(f"{path.name}.values")
    found: dict[str, ProfileCheck] = {}
    with exact_products():
        try:
            answers = open_answers(path, plan.graph, list(dict.fromkeys(p.value for p in plan.points.values())), probe)
            for row in range(len(plan.settings)):
                found[plan.graph.profiles[row].name] = check_profile(model, answers, plan, row)
            check_one_image(model, answers, plan)
            other = check_other_size(model, answers, plan) if trace.free else None
        finally:
            probe.unlink(missing_ok=True)
    return VerificationReport(answers.engine, len(trace.example.tensors[0]), other, found, time.perf_counter() - start)


def check_profile(model: nn.Module, answers: PackedAnswers, plan: VerificationPlan, row: int) -> ProfileCheck:
    """The module by itself, as trace.py ran it, and led along the file."""
    example, by_itself = plan.trace.example, [t.float().cpu() for t in plan.trace.results[row]]
    difference = spread = float("nan")
    try:
        alone = [
            as_tensor(y[: len(wanted)], wanted)
            for y, wanted in zip(answers.outputs(arrays(example, plan), plan.name(row)), by_itself, strict=True)
        ]
        difference = max(float((a - b).abs().max()) for a, b in zip(alone, by_itself, strict=True))
        spread = max(float(wanted.std()) for wanted in by_itself)
        fewer = replace(example, tensors=tuple(t[::2].contiguous() for t in example.tensors))
        follower = guided_run(model, answers, plan, row, fewer)  # not as many as in trace.py: that must not matter
    except Mismatch as apart:
        found = f"outputs differ by up to {difference:.3g} (their standard deviation is {spread:.3g})"
        raise verification_error(plan.settings[row], found, apart) from None
    first = [largest_outputs(outs[0]) for outs in (alone, by_itself)]
    return ProfileCheck(
        difference=difference,
        spread=spread,
        answers=first[0].numel(),
        same_answers=int((first[0] == first[1]).sum()),
        codes=follower.compared,
        moved_codes=follower.moved,
        led_answers=follower.led_answers,
        led_same_answers=follower.led_same_answers,
        led_difference=follower.led_difference,
        tolerance_used=follower.tolerance_used,
        alive=any(bool((wanted != wanted[:1]).any()) for wanted in by_itself),
    )


def guided_run(
    model: nn.Module, answers: PackedAnswers, plan: VerificationPlan, row: int, example: Example
) -> GuidedRecorder:
    """One run of the module along the file; raises Mismatch where they part."""
    example = replace(example, tensors=tuple(t.to(in_type_of(model, t)) for t in example.tensors))
    try:
        outputs, values = answers.values(arrays(example, plan), plan.name(row))
    except InputError as error:
        raise Mismatch(f"the input, which the file does not take ({error})") from None
    follower = GuidedRecorder(model, plan, row, values)
    with bits(model, plan.settings[row]):
        # Random numbers, if it draws any (Python's, numpy's: trace.py sees torch's), are others than in trace.py.
        run = run_recorded(model, example, follower, seed=SEED)
    if [step.name for step in run.steps] != [step.name for step in plan.trace.steps]:
        raise Mismatch(f"the module runs other operations when given {len(example.tensors[0])} images")
    ours = [as_tensor(values, wanted) for values, wanted in zip(outputs, run.made, strict=True)]
    follower.check_outputs(plan.graph.outputs, ours, run.made)
    return follower


def arrays(example: Example, plan: VerificationPlan) -> dict[str, np.ndarray]:
    """The inputs as the file takes them, by name."""
    return {
        value.name: as_array(tensor, len(value.shape), value.integer)
        for value, tensor in zip(plan.trace.inputs, example.tensors, strict=True)
    }


def as_array(x: Tensor, rank: int, integer: bool = False) -> np.ndarray:
    """(N, H, W, C) of images, the order of torch of others; `rank` axes besides N."""
    x = x.cpu() if integer else x.float().cpu()
    if x.dim() == 4:
        x = x.permute(0, 2, 3, 1)
    return np.ascontiguousarray(x.reshape(len(x), *(1,) * (rank + 1 - x.dim()), *x.shape[1:]).numpy())


def verification_error(setting: Setting, found: str, apart: Mismatch) -> VerificationFailed:
    return VerificationFailed(
        f"the packed network does not compute what the module does at {setting_name(setting)}: {found}, first at "
        f"{apart}; no file was written. Please report it; verify=False (--no-verify) writes the file all the same"
    )


def check_other_size(model: nn.Module, answers: PackedAnswers, plan: VerificationPlan) -> tuple[int, ...] | None:
    """One image (or sequence) of another size, in one profile: the file says that it takes any."""
    row = max((r for r, setting in enumerate(plan.settings) if setting != FLOAT), default=0)
    for size, other in other_inputs(plan.trace):
        try:
            guided_run(model, answers, plan, row, other)
        except Mismatch as apart:
            if not accepts(model, plan, row, other):
                continue
            ours, theirs = (" x ".join(map(str, n)) for n in (size, plan.trace.size[: len(size)]))
            what = "images" if plan.trace.is_image else "sequences"
            found = f"{what} of {ours} are not answered as those of {theirs}"
            raise verification_error(plan.settings[row], found, apart) from None
        except (ValueError, AssertionError):  # too small for this network; trace.py has seen the other run
            continue
        return size
    return None


def check_one_image(model: nn.Module, answers: PackedAnswers, plan: VerificationPlan) -> None:
    """One image by itself, in one profile. Networks that need more than one, or give it another rank, are let be."""
    row = max((r for r, setting in enumerate(plan.settings) if setting != FLOAT), default=0)
    one = replace(plan.trace.example, tensors=tuple(t[:1] for t in plan.trace.example.tensors))
    try:
        guided_run(model, answers, plan, row, one)
    except Mismatch as apart:  # perhaps only recorded in other steps: torch does some things otherwise for one image
        if accepts(model, plan, row, one) and answers_differ(model, plan, row, one):
            raise UnsupportedOperation(
                f"the network answers one image by itself otherwise than in a batch (first at {apart}); a packed one "
                "gives one answer to one image"
            ) from None
    except (ValueError, AssertionError):
        pass


def other_inputs(trace: NetworkTrace) -> Iterator[tuple[tuple[int, ...], Example]]:
    """Two images, or two sequences, of other sizes."""
    tensors = [t[:2].cpu() for t in trace.example.tensors]  # a batch of 1 is the same as no batch at all
    if not trace.is_image:
        for more in (-1, 3):
            length = tensors[0].shape[1] + more
            yield (length,), replace(trace.example, tensors=tuple(at_length(tensors, length)))
        return
    height, width = trace.size
    for h, w in ((smaller_size(height), smaller_size(width) + 32), (height + 32, width + 64)):
        h = 1 if height == 1 else h
        made = []
        for t in tensors:
            if t.dim() == 4 and t.shape[2:] == (height, width):
                image = F.interpolate(t.float(), size=(h, w))
                t = image + 0.1 * t.float().std() * noise(tuple(image.shape))
            made.append(t)
        yield (h, w), replace(trace.example, tensors=tuple(made))


def accepts(model: nn.Module, plan: VerificationPlan, row: int, example: Example) -> bool:
    example = replace(example, tensors=tuple(t.to(in_type_of(model, t)) for t in example.tensors))
    try:
        with bits(model, plan.settings[row]), torch.no_grad(), preserve_state(model):
            run_call(model, example.call(), "the example")
    except (ValueError, AssertionError):
        return False
    return True


def answers_differ(model: nn.Module, plan: VerificationPlan, row: int, one: Example) -> bool:
    """Whether the module gives the first image other outputs by itself than in the batch, by over a hundredth."""
    made = []
    for example in (one, plan.trace.example):
        tensors = [t.to(in_type_of(model, t)).clone() for t in example.tensors]
        with bits(model, plan.settings[row]), torch.no_grad(), preserve_state(model):
            made.append(tensors_in(run_call(model, example.call(tensors), "the example")))
    pairs = [(alone.flatten(), batch[:1].flatten()) for alone, batch in zip(*made, strict=True)]
    return any(a.numel() != b.numel() or float((a - b).abs().max()) > 0.01 * float(b.abs().max()) for a, b in pairs)


def smaller_size(size: int) -> int:
    """A size that networks which halve the image many times take as well: 224 -> 96, 32 -> 16; others stay."""
    return size // 64 * 32 if size >= 96 else size // 2 if size in (32, 64) else size


# --- Surroundings -----------------------------------------------------------------------------------------


def in_single_precision(model: nn.Module) -> nn.Module:
    """The model itself, or a copy on the CPU in float32: the file has numbers of half precision, but not its sums."""
    parameters = list(model.parameters())
    if all(p.device.type == "cpu" and p.dtype not in (torch.float16, torch.bfloat16) for p in parameters):
        return model
    return copy.deepcopy(model).float().cpu()


def in_type_of(model: nn.Module, x: Tensor) -> torch.dtype:
    """Of the model's floats, for inputs that are floats."""
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(floats, x.dtype) if x.is_floating_point() else x.dtype


@contextmanager
def exact_products() -> Iterator[None]:
    """Products of the module in float32, whatever the user has set for speed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
