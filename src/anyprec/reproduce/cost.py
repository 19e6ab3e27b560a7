"""What a training costs: seconds of a step, measured on a small batch of made-up images; from it the ETA and dry runs.

`measure(training)` builds the network and times a step at all its widths and at one; `estimate(training, rates)` is
seconds for the whole of it. Called by the command line before it starts, and by dry.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from anyprec.data.augment import find_augment
from anyprec.files import write_text
from anyprec.nn.layers import use_winograd
from anyprec.reproduce.store import Training
from anyprec.training.joint import choose_widths, joint_step
from anyprec.training.optimizers import make_optimizer
from anyprec.training.recipe import Recipe
from anyprec.zoo import ZOO, build


@dataclass(frozen=True)
class DatasetFacts:
    """Of a data set: images to train with and to test with, their shape as read, classes."""

    train: int
    test: int
    shape: tuple[int, int, int]  # (H, W, C)
    classes: int


FACTS = {
    "digits": DatasetFacts(1_397, 400, (8, 8, 1), 10),
    "cifar10": DatasetFacts(50_000, 10_000, (32, 32, 3), 10),
    "svhn": DatasetFacts(604_388, 26_032, (32, 32, 3), 10),
    "imagenet": DatasetFacts(1_281_167, 50_000, (224, 224, 3), 1000),
    "camvid": DatasetFacts(367, 233, (180, 240, 3), 11),
    "voc": DatasetFacts(10_582, 1_449, (375, 500, 3), 21),
    "voc-animals": DatasetFacts(976, 445, (192, 256, 3), 21),
}
EVALUATION = 0.35  # of the time of a training step: forward passes alone, measured on ResNet-8
GUESS_BATCHES = (4, 16)  # images of the measured steps, when only an ETA is wanted


Line = tuple[float, float]  # seconds of a step that do not depend on the batch, and seconds an image


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a training step, at one width and at all of them, from steps at two sizes of batch."""

    one: Line
    all: Line
    widths: int
    batches: tuple[int, int]  # images of the measured steps

    def step(self, batch: int, widths: int) -> float:
        one, every = (fixed + each * batch for fixed, each in (self.one, self.all))
        if self.widths == 1:
            return one * widths
        return one + (every - one) * (widths - 1) / (self.widths - 1)


def group(training: Training) -> str:
    """Trainings of one group differ in widths and loss alone, and share a rate."""
    recipe = training.recipe
    how = [recipe.winograd, recipe.gradients] if recipe.winograd else []
    return json.dumps(
        [recipe.net, recipe.net_options, recipe.quantizer, recipe.data, recipe.augment, *how], sort_keys=True
    )


def steps(recipe: Recipe) -> int:
    return recipe.epochs * ((recipe.limit or FACTS[recipe.data].train) // recipe.batch_size)


def estimate(training: Training, rates: dict[str, StepTimes]) -> float:
    """Seconds on the machine that was measured, evaluations and observed steps included."""
    recipe, facts = training.recipe, FACTS[training.recipe.data]
    tests = 1 + (recipe.epochs // recipe.eval_every if recipe.eval_every else 0)
    count = steps(recipe) * (1 + (1 / training.observe if training.observe else 0))
    count += EVALUATION * facts.test * tests / recipe.batch_size
    return count * rates[group(training)].step(recipe.batch_size, widths_a_step(recipe))


def widths_a_step(recipe: Recipe) -> int:
    return len(choose_widths(recipe.widths, recipe.sampling, recipe.sandwich_random, recipe.seed, 0))


def measure(training: Training, batches: tuple[int, int] = GUESS_BATCHES, repeat: int = 2) -> StepTimes:
    """On the device a training would use."""
    recipe = training.recipe
    widths = recipe.widths
    one = line(recipe, widths[-1:] if len(widths) == 1 else widths[-2:-1], batches, repeat)
    every = line(recipe, widths, batches, repeat) if len(widths) > 1 else one
    return StepTimes(one, every, len(widths), batches)


def line(recipe: Recipe, widths: Sequence[int], batches: tuple[int, int], repeat: int) -> Line:
    low, high = (step_seconds(recipe, widths, batch, repeat) for batch in batches)
    each = max((high - low) / (batches[1] - batches[0]), 0.25 * high / batches[1])  # noise may not make it free
    return max(high - each * batches[1], 0.0), each


def step_seconds(recipe: Recipe, widths: Sequence[int], batch: int, repeat: int) -> float:
    """The best of some steps; the first is not counted. On a CPU: seconds of one core, whatever else it has to do."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make(recipe, tuple(widths)).to(device).train()
    images, labels = (t.to(device) for t in example(recipe, model, batch))
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = images.contiguous(memory_format=torch.channels_last)
    if recipe.winograd and device.type == "cpu":
        use_winograd(model, recipe.gradients)
    optimizer = make_optimizer(model, recipe)
    best = float("inf")
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    for i in range(repeat + 1):
        started = clock()
        optimizer.zero_grad(set_to_none=True)
        joint_step(model, images, labels, widths, loss=recipe.loss, label_weight=recipe.label_weight)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i:
            best = min(best, clock() - started)
    return best


def make(recipe: Recipe, widths: tuple[int, ...] | None = None) -> nn.Module:
    facts = FACTS[recipe.data]
    options = {"in_channels": facts.shape[2], "num_classes": facts.classes, **recipe.net_options}
    return build(recipe.net, widths=widths or recipe.widths, quantizer=recipe.quantizer, scale=recipe.scale, **options)


def example(recipe: Recipe, model: nn.Module, batch: int) -> tuple[Tensor, Tensor]:
    """(images, labels) as the loader would give them, of noise."""
    facts = FACTS[recipe.data]
    height, width, channels = find_augment(recipe.augment).shape(facts.shape)
    masked = ZOO[recipe.net].task == "segmentation"
    shape = (batch, height, width) if masked else (batch,)
    return torch.randn(batch, channels, height, width), torch.randint(0, facts.classes, shape)


def rates_of(trainings: Sequence[Training], path: Path | None = None) -> dict[str, StepTimes]:
    """A rate for every group, measured once and kept in `path`."""
    known: dict[str, StepTimes] = {}
    if path is not None and path.exists():
        try:
            for key, value in json.loads(path.read_text()).items():
                known[key] = StepTimes(
                    tuple(value["one"]), tuple(value["all"]), value["widths"], tuple(value["batches"])
                )
        except (ValueError, TypeError, KeyError):
            known = {}
    widest: dict[str, Training] = {}
    for training in trainings:
        key = group(training)
        if key not in widest or len(training.recipe.widths) > len(widest[key].recipe.widths):
            widest[key] = training
    found = {key: known.get(key) or measure(training) for key, training in widest.items()}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({k: asdict(rate) for k, rate in {**known, **found}.items()}, indent=1) + "\n")
    return found


def memory(recipe: Recipe, batch: int) -> tuple[int, int]:
    """(bytes that do not depend on the batch, bytes an image) of a training step, from what autograd keeps of it.

    Weights, gradients and the optimizer's state; activations of one width, since the graph of a width is freed before
    the next one is built. Temporary buffers are not counted.
    """
    model = make(recipe).train()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    copies = {"adam": 4, "adamw": 4, "sgd": 3 if recipe.momentum else 2}[recipe.optimizer]
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    images, _ = example(recipe, model, batch)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(images)  # alive until the hooks are off, so no storage is counted twice
    activations = sum(size for pointer, size in kept.items() if pointer not in own)
    del output
    return copies * parameters, activations // batch
