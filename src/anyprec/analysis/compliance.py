"""Update Compliance Average: how far the gradients of two widths point the same way (paper, Appendix A.1).

UCA(k, k') = 1/(N L) sum over steps n, layers l of <g_ln, g'_ln> / (|g_ln| |g'_ln|), where g and g' are the gradients of
the loss at k and at k' alone. `train_observed` trains by a recipe and records it; `Compliance.observe` is for a
training loop of your own. Training is left as it was, to the bit; a step that is observed takes twice the time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anyprec.choices import LOSSES
from anyprec.errors import AnyprecError, CheckpointError, RecipeError
from anyprec.files import append_line, locked, write_text
from anyprec.nn.observe import preserve_state
from anyprec.nn.switching import set_bits
from anyprec.training.evaluate import to_tensor
from anyprec.training.joint import next_teacher, width_loss
from anyprec.training.processes import Processes
from anyprec.training.recipe import Recipe
from anyprec.training.run import TrainingRun
from anyprec.training.run_folder import clear_run
from anyprec.widths import check_widths

FILE = "compliance.jsonl"  # in the folder of a run: a line for every step that was observed

LAYERS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)

Pair = tuple[int, int]  # the narrower width first
Gradients = dict[int, dict[str, Tensor]]  # bits -> layer -> its gradient as one vector


# --- Gradients ------------------------------------------------------------------------------------------------------


def shared_layers(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Layer -> the parameters that all widths share: weight and bias of every convolution and linear layer.

    The float first and last layer are among them. Norms and learned scales are not: each width has its own.
    """
    layers = {
        name: [p for p in module.parameters(recurse=False) if p.requires_grad]
        for name, module in model.named_modules()
        if isinstance(module, LAYERS)
    }
    return {name: parameters for name, parameters in layers.items() if parameters}


def width_gradients(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    widths: Iterable[int],
    *,
    loss: str = "hard",
    label_weight: float = 0.5,
    label_smoothing: float = 0.0,
    teacher: Tensor | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Gradients:
    """What each width alone would contribute to a joint step on this batch. The model is left as it was.

    Options are those of `joint_step`.
    """
    if loss not in LOSSES:
        raise RecipeError(f"loss={loss!r} is not known; choose one of {', '.join(LOSSES)}")
    layers = shared_layers(model)
    if not layers:
        raise AnyprecError(f"{type(model).__name__} has no convolution or linear layer that is trained")
    parameters = [p for group in layers.values() for p in group]
    modes = [(module, module.training) for module in model.modules()]
    found: Gradients = {}
    answers = [] if teacher is None else [teacher.softmax(1)]
    with preserve_state(model), torch.enable_grad():
        for module, mode in modes:  # batch statistics, where training uses them
            module.training = mode
        for bits in sorted(check_widths(widths), reverse=True):  # as in joint_step: the wider one teaches
            set_bits(model, bits)
            with autocast():
                logits = model(images)
                logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
                value = width_loss(loss, logits, labels, teacher, label_weight, smoothing=label_smoothing)
            parts = torch.autograd.grad(value, parameters, allow_unused=True)
            grads = iter(torch.zeros_like(p) if g is None else g for p, g in zip(parameters, parts, strict=True))
            found[bits] = {
                name: torch.cat([next(grads).detach().flatten() for _ in group]) for name, group in layers.items()
            }
            teacher = next_teacher(loss, logits, teacher, answers)
    return dict(sorted(found.items()))


def layer_cosines(gradients: Mapping[int, Mapping[str, Tensor]]) -> dict[Pair, dict[str, float]]:
    """Pair of widths -> layer -> cosine of the angle between their gradients; NaN where one of them is zero."""
    # Double: squares of gradients of 1e-25 would vanish in single precision.
    doubled = {bits: {name: g.double() for name, g in layers.items()} for bits, layers in gradients.items()}
    result: dict[Pair, dict[str, float]] = {}
    for a, b in combinations(sorted(gradients), 2):
        result[a, b] = {}
        for name, g in doubled[a].items():
            other = doubled[b][name]
            norms = (g.norm() * other.norm()).item()
            result[a, b][name] = torch.dot(g, other).item() / norms if norms > 0 else math.nan
    return result


# --- The average ----------------------------------------------------------------------------------------------------


@dataclass
class Compliance:
    """The record of a training: a mean over the layers for every step observed and every pair of widths.

    A layer whose gradient is zero at one of two widths has no angle there; it is left out of that mean.
    """

    widths: tuple[int, ...]
    steps: list[int] = field(default_factory=list)
    cosines: dict[Pair, list[float]] = field(default_factory=dict)  # pair -> one mean a step

    def __post_init__(self) -> None:
        self.widths = check_widths(self.widths)
        if len(self.widths) < 2:
            raise AnyprecError(f"widths={self.widths} is one width; update compliance compares two or more")
        for pair in combinations(self.widths, 2):
            self.cosines.setdefault(pair, [])

    def observe(
        self, model: nn.Module, images: Tensor, labels: Tensor, step: int | None = None, **options: Any
    ) -> None:
        """Record the gradients of one batch, before the step that uses it. Options are those of `width_gradients`."""
        gradients = width_gradients(model, images, labels, self.widths, **options)
        self.add(layer_cosines(gradients), step)

    def add(self, cosines: Mapping[Pair, Mapping[str, float]], step: int | None = None) -> None:
        self.steps.append((self.steps[-1] + 1 if self.steps else 0) if step is None else step)
        for pair, record in self.cosines.items():
            record.append(_mean(cosines[pair].values()))

    def table(self, first: int | None = None, last: int | None = None) -> dict[int, dict[int, float]]:
        """bits -> bits -> UCA over all steps; over the `first` observed ones, or over the `last`, where given."""
        if first is not None and last is not None:
            raise AnyprecError("give first or last, not both")
        for name, count in (("first", first), ("last", last)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise AnyprecError(f"{name}={count!r} is not a number of steps; give 1 or more")
        part = slice(first) if last is None else slice(-last, None)
        table = {a: {b: 1.0 for b in self.widths} for a in self.widths}
        for (a, b), record in self.cosines.items():
            table[a][b] = table[b][a] = _mean(record[part])
        return table

    # A line: {"step": 7, "cosines": {"1,2": 0.93, ...}}; null where no layer had an angle.

    def line(self) -> str:
        """The last step as a line of JSON."""
        last = {f"{a},{b}": None if math.isnan(r[-1]) else r[-1] for (a, b), r in self.cosines.items()}
        return json.dumps({"step": self.steps[-1], "cosines": last})

    @classmethod
    def load(cls, path: str | Path, before: int | None = None) -> Compliance:
        """The record of a run: its folder, or the file in it. `before` stops at that step."""
        path = Path(path) / FILE if Path(path).is_dir() else Path(path)
        steps, pairs = _read(path, before)
        if not steps:
            raise CheckpointError(f"{path} holds no whole step; train with train_observed first")
        return cls(tuple(sorted({bits for pair in pairs for bits in pair})), steps, pairs)


def _read(path: Path, before: int | None) -> tuple[list[int], dict[Pair, list[float]]]:
    pairs: dict[Pair, list[float]] = {}
    steps: list[int] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines(True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()  # the run was killed while it wrote this one
        for text in lines:
            line = json.loads(text)
            if before is not None and line["step"] >= before:
                break
            for name, value in line["cosines"].items():
                a, b = map(int, name.split(","))
                pairs.setdefault((a, b), []).append(math.nan if value is None else float(value))
            steps.append(int(line["step"]))
            if any(len(values) != len(steps) for values in pairs.values()):
                raise ValueError("a pair is missing, or one too many")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; train with train_observed first") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged in line {len(steps) + 1}; train anew") from error
    return steps, pairs


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def compliance_table(table: Mapping[int, Mapping[int, float]]) -> str:
    """Aligned, upper triangle, three digits, as the paper prints it."""
    widths: Sequence[int] = list(table)
    lines = [f"{'bits':>5}" + "".join(f"{b:>8}" for b in widths)]
    for i, a in enumerate(widths):
        cells = "".join(f"{'-':>8}" if j < i else f"{table[a][b]:>8.3f}" for j, b in enumerate(widths))
        lines.append(f"{a:>5}{cells}")
    return "\n".join(lines)


# --- A training by a recipe -----------------------------------------------------------------------------------------


class ObservedRun(TrainingRun):
    """A run that records compliance before every `every`-th step; the record resumes as the run does."""

    every: int
    compliance: Compliance

    def begin(self, every: int) -> None:
        self.every = every
        file = self.out / FILE
        done = self.epoch * self.steps + self.step
        # Lines after the checkpoint are those of steps that will run again.
        steps, pairs = _read(file, done) if done and file.exists() else ([], {})
        self.compliance = Compliance(self.recipe.widths, steps, pairs)
        lines = file.read_text(encoding="utf-8").splitlines(True)[: len(steps)] if steps else []
        write_text(file, "".join(lines))

    def _step(self, images: Any, labels: Any) -> dict[int, float]:
        number = self.epoch * self.steps + self.step
        if number % self.every == 0:
            device, recipe = self.processes.device, self.recipe
            x, y = to_tensor(images, device), torch.from_numpy(labels).to(device)
            self.compliance.observe(
                self.model, x, y, number, loss=recipe.loss, label_weight=recipe.label_weight,
                label_smoothing=recipe.label_smoothing, teacher=self._taught(images), autocast=self._autocast,
            )  # fmt: skip
            append_line(self.out / FILE, self.compliance.line())
        return super()._step(images, labels)


def train_observed(
    recipe: Recipe,
    out: str | Path,
    *,
    every: int = 1,
    data_root: str | Path | None = None,
    download: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    device: str | None = None,
    model: nn.Module | None = None,
    progress: bool = True,
) -> tuple[Compliance, dict[int | str, dict[str, float]]]:
    """`train`, and the compliance of every `every`-th step, which is also written to compliance.jsonl in `out`.

    Returns (compliance, what `train` returns). The model that comes out is the one `train` makes.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise AnyprecError(f"every={every!r} is not a number of steps; give 1 or more")
    Compliance(recipe.widths)  # one width alone is refused before anything is read
    processes = Processes(device)
    try:
        if processes.world > 1:
            raise AnyprecError("update compliance is recorded by one process; start it without torchrun")
        with locked(out):
            if overwrite and not resume:
                clear_run(Path(out))
                (Path(out) / FILE).unlink(missing_ok=True)
            run = ObservedRun(recipe, Path(out), processes, data_root, download, resume, model, progress)
            run.begin(every)
            results = run.go()
        return run.compliance, results
    finally:
        processes.close()
