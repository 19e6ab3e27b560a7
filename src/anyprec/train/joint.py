"""One joint training step: all widths forward and backward, widest first, gradients added up (paper, Algorithm 1).

Work that no width changes is done once a step: the weights' tanh and max (`quantise_once`) and the float stem.
Called by run.py for every batch; the optimiser step is its caller's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyprec.data import IGNORED
from anyprec.errors import RecipeError
from anyprec.train.layers import quantise_once
from anyprec.train.switch import set_bits

LOSSES = ("hard", "soft", "recursive", "recursive+label")


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy with probabilities `target`; its gradient is that of their KL divergence. Classes on axis 1."""
    return -(target * F.log_softmax(logits, 1)).sum(1).mean()


def width_loss(
    mode: str,
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | None,
    label_weight: float,
    count: Tensor | float | None = None,
) -> Tensor:
    """The loss of one width. `teacher` is the detached output of a wider width; None for the widest of all.

    hard: labels. soft, recursive: the teacher. recursive+label: label_weight * labels + (1 - label_weight) * teacher.
    Of masks (labels (N, H, W)) it is the mean over the labelled pixels, or their sum divided by `count`.
    """
    if labels.dim() == 3:
        return pixel_loss(mode, logits, labels, teacher, label_weight, count)
    if teacher is None or mode == "hard":
        return F.cross_entropy(logits, labels)
    distilled = soft_cross_entropy(logits, teacher.softmax(1))
    if mode == "recursive+label":
        return label_weight * F.cross_entropy(logits, labels) + (1 - label_weight) * distilled
    return distilled


def pixel_loss(
    mode: str,
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | None,
    label_weight: float,
    count: Tensor | float | None,
) -> Tensor:
    """`width_loss` of masks. Pixels without a label do not count, for the teacher neither: most of them are padding."""
    if logits.dim() != 4 or logits.shape[2:] != labels.shape[1:]:
        raise RecipeError(
            f"the network gives {tuple(logits.shape)} for masks of {tuple(labels.shape)}; segmentation needs a network "
            "that gives (N, classes, H, W), such as deeplab-small"
        )
    count = (labels != IGNORED).sum().clamp(min=1) if count is None else count
    if teacher is None or mode == "hard":
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / count
    log_p = F.log_softmax(logits, 1)
    known = (labels != IGNORED).unsqueeze(1)
    distilled = -(teacher.softmax(1) * log_p * known).sum() / count
    if mode == "recursive+label":
        hard = F.nll_loss(log_p, labels, ignore_index=IGNORED, reduction="sum") / count
        return label_weight * hard + (1 - label_weight) * distilled
    return distilled


def is_split(model: nn.Module) -> bool:
    """Whether the model is body(stem(x)), with a stem that knows no width: so the zoo makes them. Other networks may
    have parts of those names, too, that mean something else.
    """
    return hasattr(model, "zoo_name")


@contextmanager
def stem_once(model: nn.Module, images: Tensor) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Yields (z, body): z is the stem's output, computed once; on leaving, the gradients all widths left in z go on
    into the stem in one backward pass. A network not of the zoo runs whole for every width.
    """
    if not is_split(model):
        yield images, model
        return
    whole = model.stem(images)  # type: ignore[operator]
    leaf = whole.detach().requires_grad_(whole.requires_grad)
    body: Callable[..., Tensor] = model.body  # type: ignore[assignment]
    if hasattr(model, "aspp"):  # a DeepLab, whose body has to be told the size of the images
        yield leaf, lambda z: body(z, images.shape[2:])
    else:
        yield leaf, body
    if leaf.grad is not None:
        whole.backward(leaf.grad)


def joint_step(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    widths: Sequence[int],
    *,
    loss: str = "hard",
    label_weight: float = 0.5,
    width_weights: Mapping[int, float] | None = None,
    count: Tensor | float | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Adds the gradients of all `widths` to the parameters; returns bits -> (loss, number of right answers).

    `width_weights` multiplies the loss of a width in the sum, 1 where it says nothing. Labels (N, H, W) are masks, and
    answers then pixels; `count` is what their losses are divided by, the number of labelled pixels if it is not given.
    """
    if loss not in LOSSES:
        raise RecipeError(f"loss={loss!r} is not known; choose one of {', '.join(LOSSES)}")
    results: dict[int, tuple[Tensor, Tensor]] = {}
    teacher: Tensor | None = None
    with quantise_once(model), autocast(), stem_once(model, images) as (z, body):
        for bits in sorted(widths, reverse=True):  # widest first: narrower widths learn from its output
            set_bits(model, bits)
            logits = body(z)
            logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
            value = width_loss(loss, logits, labels, teacher, label_weight, count)
            weight = (width_weights or {}).get(bits, 1.0)
            backward(value if weight == 1 else weight * value)
            if teacher is None or loss != "soft":
                teacher = logits.detach()
            right = (logits.detach().argmax(1) == labels).sum()
            results[bits] = (value.detach(), right)
    return results


def choose_widths(widths: Sequence[int], sampling: str, random_widths: int, seed: int, step: int) -> list[int]:
    """The widths of one step: all of them, or the lowest, the highest and some at random between ("sandwich")."""
    ordered = sorted(widths)
    if sampling == "all" or len(ordered) <= 2 + random_widths:
        return ordered
    between = random.Random(f"{seed}/{step}").sample(ordered[1:-1], random_widths)
    return sorted([ordered[0], *between, ordered[-1]])
