"""One joint training step: all widths forward and backward, widest first, gradients added up (paper, Algorithm 1).

Work that no width changes is done once a step: the weights' tanh and max (`normalize_weights_once`) and the float stem.
Called by run.py for every batch; the optimizer step is its caller's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyprec.choices import LOSSES
from anyprec.data import IGNORED
from anyprec.errors import RecipeError
from anyprec.nn.layers import normalize_weights_once
from anyprec.nn.split import SplitNetwork
from anyprec.nn.switching import any_layers, set_bits
from anyprec.nn.switching import bits as switched_to
from anyprec.widths import FLOAT, LayerBits


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
    smoothing: float = 0.0,
) -> Tensor:
    """The loss of one width. `teacher` is the detached answer of wider ones or of another network, logits or
    log-probabilities; None for the widest of all.

    hard: labels. soft, recursive, wider: the teacher. With +label: label_weight * labels + the rest * the teacher.
    Of masks (labels (N, H, W)) it is the mean over the labeled pixels, or their sum divided by `count`. `smoothing`
    spreads that share of each label evenly over all classes.
    """
    if labels.dim() == 3:
        return pixel_loss(mode, logits, labels, teacher, label_weight, count, smoothing)
    if teacher is None or mode == "hard":
        return F.cross_entropy(logits, labels, label_smoothing=smoothing)
    distilled = soft_cross_entropy(logits, teacher.softmax(1))
    if mode.endswith("+label"):
        hard = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        return label_weight * hard + (1 - label_weight) * distilled
    return distilled


def pixel_loss(
    mode: str,
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | None,
    label_weight: float,
    count: Tensor | float | None,
    smoothing: float,
) -> Tensor:
    """`width_loss` of masks. Pixels without a label do not count, for the teacher neither: most of them are padding."""
    if logits.dim() != 4 or logits.shape[2:] != labels.shape[1:]:
        raise RecipeError(
            f"the network gives {tuple(logits.shape)} for masks of {tuple(labels.shape)}; segmentation needs a network "
            "that gives (N, classes, H, W), such as deeplab-small"
        )
    count = (labels != IGNORED).sum().clamp(min=1) if count is None else count
    hard = None
    if teacher is None or mode == "hard" or mode.endswith("+label"):
        hard = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing) / count
    if teacher is None or mode == "hard":
        assert hard is not None
        return hard
    log_p = F.log_softmax(logits, 1)
    known = (labels != IGNORED).unsqueeze(1)
    distilled = -(teacher.softmax(1) * log_p * known).sum() / count
    return distilled if hard is None else label_weight * hard + (1 - label_weight) * distilled


def shares_stem(model: nn.Module) -> bool:
    """Whether its stem, which knows no width, can be run once for all of them."""
    return isinstance(model, SplitNetwork) and model.shares_stem


@contextmanager
def stem_once(model: nn.Module, images: Any) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yields (z, body): z is the stem's output, computed once; on leaving, the gradients all widths left in z go on
    into the stem in one backward pass. A network that is no SplitNetwork runs whole for every width.
    """
    if not (isinstance(model, SplitNetwork) and shares_stem(model)):
        yield images, model
        return
    whole, body = model.split(images)
    leaf = whole.detach().requires_grad_(whole.requires_grad)
    yield leaf, body
    if leaf.grad is not None:
        torch.autograd.backward(whole, leaf.grad)


def next_teacher(loss: str, logits: Tensor, teacher: Tensor | None, answers: list[Tensor]) -> Tensor:
    """Who teaches the next narrower width, after this one gave `logits`; `answers` has what "wider" needs."""
    if loss.startswith("wider"):
        answers.append(logits.detach().softmax(1))
        return torch.stack(answers).mean(0).log()
    return logits.detach() if teacher is None or loss != "soft" else teacher


LossFunction = Callable[[Any, Any], Tensor]  # (what the network gives, labels) -> a number


def logits_of(output: Any) -> Tensor | None:
    """The logits in what a network gives: a tensor; `logits` of a dict or of a Hugging Face output; the first tensor of
    a tuple; None if there are none."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        found = output.get("logits")
    else:
        found = getattr(output, "logits", None)
        if found is None and isinstance(output, (tuple, list)):
            found = next((part for part in output if isinstance(part, Tensor)), None)
    return found if isinstance(found, Tensor) else None


def _checked_logits(output: Any, loss: str) -> Tensor:
    logits = logits_of(output)
    if logits is None:
        kind = type(output).__name__
        names = f" with {', '.join(map(repr, output))}" if isinstance(output, Mapping) else ""
        raise RecipeError(
            f"loss={loss!r} needs logits, but the network gives a {kind}{names}; let it give a tensor, a tuple that "
            "begins with one, or `logits`, or pass a function: loss=lambda output, labels: ..."
        )
    if logits.dim() < 2:
        raise RecipeError(
            f"loss={loss!r} needs logits (N, classes), but the network gives {tuple(logits.shape)}; for other tasks "
            "pass a function, such as loss=lambda output, labels: F.mse_loss(output, labels)"
        )
    return logits


def _checked_value(value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        given = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise RecipeError(f"the loss function returned {given}; it must return one number, a tensor with a gradient")
    return value.reshape(())


def _right_answers(output: Any, labels: Any) -> Tensor:
    """How many labels the logits name; NaN where the labels are no classes."""
    logits = logits_of(output)
    if (
        logits is None
        or not isinstance(labels, Tensor)
        or labels.is_floating_point()
        or logits.dim() < 2
        or logits.shape[:1] + logits.shape[2:] != labels.shape
    ):
        return torch.tensor(float("nan"))
    return (logits.detach().argmax(1) == labels).sum()


def _run(network: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return network(**inputs)
    return network(*inputs) if isinstance(inputs, tuple) else network(inputs)


def joint_step(
    model: nn.Module,
    images: Any,
    labels: Any,
    widths: Sequence[int],
    *,
    loss: str | LossFunction = "wider+label",
    label_weight: float = 0.5,
    label_smoothing: float = 0.0,
    width_weights: Mapping[int, float] | None = None,
    teacher: Tensor | None = None,
    count: Tensor | float | None = None,
    mixed: Mapping[str, LayerBits] | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Adds the gradients of all `widths` to the parameters; returns bits -> (loss, number of right answers).

    The optimizer's `zero_grad` before and `step` after are the caller's.

    model: any-precision, in training mode.
    images, labels: one batch. Images: a tensor, a tuple of arguments or a dict of keyword arguments. Labels (N, H, W)
        are masks; right answers are then counted in pixels. With a loss function they are whatever it reads.
    loss: what the narrower widths learn from: one of anyprec.choices.LOSSES, for networks that give logits (or a dict,
        a tuple or a Hugging Face output with them), "hard" for labels alone. Or a function of (output, labels), for
        any task: every width learns by it, and it is given what the network gives. The number of right answers is NaN
        where labels are no classes.
    label_weight: the labels' share of the losses "recursive+label" and "wider+label".
    label_smoothing: spreads this share of each label evenly over all classes.
    width_weights: factor on the loss of a width in the sum; 1 for widths it does not name.
    teacher: logits of another network for this batch. The widest width learns from them, too; "soft" has no other
        teacher, and "wider" takes their probabilities into its mean.
    count: what losses of masks are divided by; by default the number of labeled pixels.
    mixed: bits of layers, by name, for one more pass, which learns as the narrowest width does. It is not among the
        results, and leaves the running statistics of norms as they are.
    autocast: makes the context that forward passes run in, such as torch.autocast.
    backward: takes each loss instead of its own `backward()`, such as one scaled by a GradScaler.
    """
    if not callable(loss) and loss not in LOSSES:
        raise RecipeError(f"loss={loss!r} is not known; choose one of {', '.join(LOSSES)}, or give a function")
    if callable(loss) and label_smoothing:
        raise RecipeError("label_smoothing is for the named losses; smooth the labels in the loss function")
    if teacher is not None and (callable(loss) or loss == "hard"):
        raise RecipeError("a teacher needs a loss that learns from answers: soft, recursive, wider, or one with +label")
    results: dict[int, tuple[Tensor, Tensor]] = {}
    answers = [] if teacher is None else [teacher.softmax(1)]  # probabilities of all so far, for "wider"
    with normalize_weights_once(model), autocast(), stem_once(model, images) as (z, body):

        def run(taught_by: Tensor | None) -> tuple[Any, Tensor, Tensor | None]:
            """Output, loss, and logits where the loss reads them."""
            output = _run(body, z)
            if isinstance(output, Tensor) and output.dtype in (torch.float16, torch.bfloat16):
                output = output.float()
            if callable(loss):
                return output, _checked_value(loss(output, labels)), None
            logits = _checked_logits(output, loss)
            logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
            return output, width_loss(loss, logits, labels, taught_by, label_weight, count, label_smoothing), logits

        for bits in sorted(widths, reverse=True):  # widest first: narrower widths learn from its output
            set_bits(model, bits)
            output, value, logits = run(teacher)
            if logits is not None and not callable(loss):
                teacher = next_teacher(loss, logits, teacher, answers)
            weight = (width_weights or {}).get(bits, 1.0)
            backward(value if weight == 1 else weight * value)
            results[bits] = (value.detach(), _right_answers(output, labels))
        if mixed is not None:
            with switched_to(model, mixed), kept_statistics(model):
                _, value, _ = run(teacher)
                backward(value)
    return results


@contextmanager
def kept_statistics(model: nn.Module) -> Iterator[None]:
    """Running statistics of batch norms are as before afterwards: each belongs to a uniform width."""
    before = {
        buffer: buffer.clone()
        for norm in model.modules()
        if isinstance(norm, nn.modules.batchnorm._BatchNorm)
        for buffer in norm.buffers()
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before.items():
                buffer.copy_(value)


def random_bits(model: nn.Module, widths: Sequence[int], share: float, seed: int, step: int) -> dict[str, int] | None:
    """Bits of every layer for a step's mixed pass, drawn from the integer widths; None in the other steps."""
    draw = random.Random(f"{seed}/{step}/mixed")
    if draw.random() >= share:
        return None
    integers = sorted(bits for bits in widths if bits != FLOAT)
    return {name: draw.choice(integers) for name in any_layers(model)}


def choose_widths(widths: Sequence[int], sampling: str, random_widths: int, seed: int, step: int) -> list[int]:
    """The widths of one step: all of them; the lowest, the highest and some at random between ("sandwich"); or the two
    lowest, which have most to learn, and some at random above them ("lowest"), the widest of which teaches.
    """
    ordered = sorted(widths)
    if sampling == "all" or len(ordered) <= 2 + random_widths:
        return ordered
    if sampling == "lowest":
        return sorted(ordered[:2] + random.Random(f"{seed}/{step}").sample(ordered[2:], random_widths))
    between = random.Random(f"{seed}/{step}").sample(ordered[1:-1], random_widths)
    return sorted([ordered[0], *between, ordered[-1]])
