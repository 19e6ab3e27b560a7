"""Adversarial images (FGSM, PGD) against one width, and what every other width makes of them (paper, Appendix A.2).

A model and a data set in; `attack_matrix` gives attacked width x defending width, accuracies in percent, with the
defense of a width drawn at random per image beside them. Called by cli/attack.py and by users. docs/cli/attack.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyprec.choices import ATTACK_SCALES, ATTACKS
from anyprec.data import ArrayData, FileData, batches, draws, preprocessing_of
from anyprec.data.loader import normalizer
from anyprec.errors import AnyprecError, DataError
from anyprec.nn.switching import bits, widths_of
from anyprec.preprocessing import Preprocessing
from anyprec.progress import Progress
from anyprec.training.evaluate import to_tensor
from anyprec.widths import check_bits, check_widths

RANDOM = "random"  # the defense that draws a width for every image
ALL = "all"  # the attack on all widths at once, the strongest there is against RANDOM
START, DEFENSE = 0, 1  # streams of random numbers


@dataclass(frozen=True)
class Attack:
    """What the attacker may do. The defaults are the paper's.

    epsilon is the most any value of the input moves, in one of two scales. "input": of the network's input, after
    mean and deviation, as the paper has it (a float ResNet-20 falls to 69 % there, the paper's to 70 %; under the
    other scale it falls to 31 %). "pixel": of x/255. 0.007 of CIFAR-10's input is 0.0017 of x/255, half a gray level.
    fgsm: one step of epsilon along the sign of the gradient (Goodfellow et al., ICLR 2015). pgd: `steps` such steps of
    `step_size` (2.5 epsilon / steps unless given), each brought back to within epsilon, from a random start (Madry et
    al., ICLR 2018).
    """

    kind: str = "fgsm"
    epsilon: float = 0.007
    scale: str = "input"
    steps: int = 10
    step_size: float | None = None
    random_start: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, given, allowed in (("attack", self.kind, ATTACKS), ("scale", self.scale, ATTACK_SCALES)):
            if given not in allowed:
                raise AnyprecError(f"{name}={given!r} is not known; choose {' or '.join(allowed)}")
        if not _is_number(self.epsilon) or not 0 <= self.epsilon < 1e6:
            raise AnyprecError(f"epsilon={self.epsilon!r} is not allowed; give a number of 0 or more, such as 0.007")
        if self.step_size is not None and (not _is_number(self.step_size) or not 0 < self.step_size < 1e6):
            raise AnyprecError(f"step_size={self.step_size!r} is not allowed; give a number above 0, or leave it out")
        for name, low in (("steps", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
                raise AnyprecError(f"{name}={value!r} is not allowed; give a whole number of {low} or more")

    @property
    def step(self) -> float:
        """The length of one step, in the scale of epsilon."""
        if self.kind == "fgsm":
            return self.epsilon
        return 2.5 * self.epsilon / self.steps if self.step_size is None else self.step_size


@dataclass(frozen=True)
class Robustness:
    """Accuracies in percent. Defending keys are widths and "random"; attacked ones widths, and "all" if asked for."""

    attack: Attack
    images: int
    clean: dict[int | str, float]  # defending -> without an attack
    matrix: dict[int | str, dict[int | str, float]]  # attacked -> defending -> under it

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: keys are strings."""
        return {
            "attack": asdict(self.attack),
            "images": self.images,
            "clean": {str(k): v for k, v in self.clean.items()},
            "matrix": {str(a): {str(d): v for d, v in row.items()} for a, row in self.matrix.items()},
        }


# --- Images ---------------------------------------------------------------------------------------------------------


class PixelBounds:
    """How far an attack may go: epsilon around each value, and the values that pixels 0..255 become."""

    def __init__(self, attack: Attack, mean: Sequence[float], std: Sequence[float]) -> None:
        channels = len(std)
        # The loader's own arithmetic: no pixel it makes lies outside.
        black, white = normalizer(tuple(mean), tuple(std), (1, 1, channels))(
            np.array([0, 255], np.uint8).repeat(channels).reshape(2, 1, 1, channels)
        )
        self.black, self.white = (torch.from_numpy(v).view(1, channels, 1, 1) for v in (black, white))
        unit = torch.tensor(std, dtype=torch.float64) if attack.scale == "pixel" else torch.ones(channels).double()
        self.unit = unit.view(1, channels, 1, 1)  # divides lengths in the attack's scale, which gives the input's
        self.epsilon = attack.epsilon / self.unit
        self.step = attack.step / self.unit

    def around(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(lowest, highest) values allowed. x + epsilon may round up, beyond the limit: then it is the float below."""
        epsilon = self.epsilon.to(x.device)
        exact = x.double()
        low, high = (exact - epsilon).to(x.dtype), (exact + epsilon).to(x.dtype)
        low = torch.where(exact - low.double() > epsilon, torch.nextafter(low, x), low)
        high = torch.where(high.double() - exact > epsilon, torch.nextafter(high, x), high)
        return torch.maximum(low, self.black.to(x)), torch.minimum(high, self.white.to(x))


def perturb(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    widths: int | Iterable[int],
    attack: Attack,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    first: int = 0,
) -> Tensor:
    """Adversarial images against the model at a width; at several, against the sum of their losses.

    images:    (N, C, H, W), normalized by `mean` and `std`, as the loader gives them
    first:     number of the first image; a random start depends on it and on the seed alone, not on the batch
    """
    if images.ndim != 4 or images.shape[1] != len(std) or len(mean) != len(std):
        raise DataError(
            f"images have shape {tuple(images.shape)}, mean and std {len(mean)} and {len(std)} values; "
            "give (N, C, H, W) and one value a channel"
        )
    targets = check_widths([widths] if isinstance(widths, int) else widths)
    limits = PixelBounds(attack, mean, std)
    low, high = limits.around(images)
    x = images.detach()
    if attack.kind == "pgd" and attack.random_start:
        count, values = len(x), x[0].numel() if len(x) else 0
        noise = draws.uniform(attack.seed, START, first, count, -(-values // 4) * 4)[:, :values] * 2 - 1
        start = torch.from_numpy(noise.reshape(x.shape)).to(x.device) * limits.epsilon.to(x.device)
        x = (x.double() + start).to(x.dtype).clamp(low, high)
    step = limits.step.to(x)
    for _ in range(1 if attack.kind == "fgsm" else attack.steps):
        x = (x + step * input_gradient(model, x, labels, targets).sign()).clamp(low, high)
    return x


def input_gradient(model: nn.Module, images: Tensor, labels: Tensor, widths: Iterable[int]) -> Tensor:
    """Of the summed cross-entropy at the widths, straight-through where values are rounded."""
    total = torch.zeros_like(images)
    for width in widths:
        x = images.detach().requires_grad_()
        with torch.enable_grad(), bits(model, width):
            total += torch.autograd.grad(F.cross_entropy(_scores(model, x), labels, reduction="sum"), x)[0]
    return total


def _scores(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(x)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        raise AnyprecError(f"{type(model).__name__} does not give one score a class; attacks are for classification")
    return logits.float()


# --- Accuracies -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def attack_matrix(
    model: nn.Module,
    data: ArrayData | FileData,
    widths: Iterable[int] | None = None,
    attack: Attack | str = "fgsm",
    *,
    attack_all: bool = False,
    augment: str = "none",
    preprocessing: Preprocessing | None = None,
    batch_size: int = 250,
    device: str | torch.device = "cpu",
    progress: bool = False,
) -> Robustness:
    """Attack every width, defend with every width (all the model has, unless given) and with one drawn per image.

    `preprocessing` is that of the model's training; by default it follows from the data set and `augment`.
    `attack_all` adds the row "all": an attacker who knows that the width is drawn, and attacks them all at once.
    """
    if isinstance(attack, str):
        attack = Attack(attack)
    if not isinstance(data, (ArrayData, FileData)):
        raise DataError(f"data is a {type(data).__name__}; attacks are for images with one label each")
    defending = check_widths(widths_of(model) if widths is None else widths)
    attacked: list[tuple[int | str, tuple[int, ...]]] = [(k, (k,)) for k in defending]
    if attack_all:
        attacked.append((ALL, defending))
    for width in defending:  # a width the model lacks is refused before any image is read
        with bits(model, width):
            pass
    columns: list[int | str] = [*defending, RANDOM]
    right = np.zeros((1 + len(attacked), len(columns)), np.int64)  # the first row is the clean one
    how = preprocessing or preprocessing_of(data, augment)
    was_training = model.training
    model.eval()
    first = 0
    try:
        with Progress("attack", total=len(data), unit="img") if progress else nullcontext() as bar:
            for images, labels in batches(data, batch_size, augment=augment, preprocessing=how):
                x, y = to_tensor(images, device), torch.from_numpy(labels).to(device)
                right[0] += _right(model, x, y, defending, attack.seed, first, 0)
                for row, (_, targets) in enumerate(attacked, 1):
                    moved = perturb(model, x, y, targets, attack, mean=how.mean, std=how.std, first=first)
                    right[row] += _right(model, moved, y, defending, attack.seed, first, row)
                first += len(labels)
                if bar is not None:
                    bar.update(len(labels))
    finally:
        model.train(was_training)
    table = (100 * right / len(data)).tolist()
    clean, *rows = (dict(zip(columns, row, strict=True)) for row in table)
    return Robustness(attack, len(data), clean, {name: row for (name, _), row in zip(attacked, rows, strict=True)})


def _right(
    model: nn.Module, x: Tensor, y: Tensor, widths: Sequence[int], seed: int, first: int, row: int
) -> np.ndarray:
    """Right answers at each width, and with a width drawn for every image."""
    answers = np.empty((len(widths), len(y)), bool)
    for i, width in enumerate(widths):
        with bits(model, width):
            answers[i] = (_scores(model, x).argmax(1) == y).cpu().numpy()
    drawn = (draws.uniform(seed, DEFENSE + row, first, len(y), 4)[:, 0] * len(widths)).astype(np.int64)
    return np.append(answers.sum(1), answers[drawn, np.arange(len(y))].sum())  # (widths + 1,)


def attack_dedicated(
    models: Mapping[int, nn.Module],
    data: ArrayData | FileData,
    attack: Attack | str = "fgsm",
    **options: Any,
) -> dict[int, dict[str, float]]:
    """bits -> {"clean", "attacked"}: models of one width each, attacked and defending at that width.

    Options are those of `attack_matrix`.
    """
    results = {}
    for width, model in models.items():
        found = attack_matrix(model, data, [check_bits(width)], attack, **options)
        results[width] = {"clean": found.clean[width], "attacked": found.matrix[width][width]}
    return results


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
