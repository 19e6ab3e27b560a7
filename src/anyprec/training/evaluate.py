"""Evaluation: accuracy (and loss) of a model at each width over a data set. Called by run.py and the CLI.

Accuracy is top-1 for images; for masks it is that of the labeled pixels, and mean IoU comes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from anyprec.data import IGNORED, ArrayData, FileData, MaskData, batches
from anyprec.data.confusion import Counts, confusion, mean_iou, pixel_accuracy
from anyprec.errors import RecipeError
from anyprec.nn.switching import Setting, bits, widths_of
from anyprec.preprocessing import Preprocessing
from anyprec.progress import Progress


def to_tensor(images: np.ndarray, device: str | torch.device = "cpu") -> torch.Tensor:
    """(N, H, W, C) float32 -> (N, C, H, W), channels last in memory: no copy is made."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).to(device)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: ArrayData | FileData | MaskData,
    settings: Sequence[Setting] | None = None,
    *,
    augment: str = "none",
    preprocessing: Preprocessing | None = None,
    batch_size: int = 500,
    device: str | torch.device = "cpu",
    progress: bool = False,
    rank: int = 0,
    world: int = 1,
    confusions: dict[int | str, Counts] | None = None,
) -> dict[int | str, dict[str, float]]:
    """Accuracy on a data set: bits (or profile name) -> {"accuracy": percent, "loss": ...}, and "miou" for masks.

    model: an any-precision network; it does not change.
    data: what anyprec.data.load_data returns.
    settings: widths, profiles or dicts of layer bits; by default all the model's widths.
    preprocessing: that of the model's training; by default it follows from the data set and `augment`.
    batch_size, device: images per forward pass, and where it runs.
    progress: shows a progress line.
    rank, world: with several processes, each takes its share of the images; all return the result over all images.
    confusions: a dict to put each setting's confusion matrix into (masks only).
    """
    settings = list(settings) if settings is not None else list(widths_of(model))
    names = [setting if isinstance(setting, int) else getattr(setting, "name", "mixed") for setting in settings]
    masked = isinstance(data, MaskData)
    classes = data.num_classes
    right, loss = np.zeros(len(settings)), np.zeros(len(settings))
    counts = np.zeros((len(settings), classes, classes) if masked else (0,), np.int64)
    for setting in settings:  # a width the model lacks is refused before any image is read
        with bits(model, setting):
            pass
    was_training = model.training
    model.eval()
    try:
        with Progress("evaluate", total=len(data), unit="img") if progress else _NoProgress() as bar:
            source = batches(
                data, batch_size * world, augment=augment, preprocessing=preprocessing, rank=rank, world=world
            )
            for images, labels in source:
                if not len(labels):
                    continue  # the last batch had fewer images than there are processes
                x, y = to_tensor(images, device), torch.from_numpy(labels).to(device)
                for i, setting in enumerate(settings):
                    with bits(model, setting):
                        logits = model(x).float()
                    if masked:
                        check_map(logits, y, classes)
                        counts[i] += confusion(labels, logits.argmax(1).cpu().numpy(), classes)
                        loss[i] += F.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum").item()
                        continue
                    check_scores(logits, classes, data.name)
                    right[i] += (logits.argmax(1) == y).sum().item()
                    loss[i] += F.cross_entropy(logits, y, reduction="sum").item()
                bar.update(world * len(labels))
    finally:
        model.train(was_training)
    if world > 1:
        totals = torch.from_numpy(np.stack([right, loss])).to(device)
        torch.distributed.all_reduce(totals)
        right, loss = totals.cpu().numpy()
        if masked:
            pixels = torch.from_numpy(counts).to(device)
            torch.distributed.all_reduce(pixels)
            counts = pixels.cpu().numpy()
    if masked:
        if confusions is not None:
            confusions.update(zip(names, counts, strict=True))
        return {
            name: {"miou": mean_iou(c), "accuracy": pixel_accuracy(c), "loss": float(v / max(c.sum(), 1))}
            for name, c, v in zip(names, counts, loss, strict=True)
        }
    count = len(data)
    return {
        name: {"accuracy": float(100 * r / count), "loss": float(v / count)}
        for name, r, v in zip(names, right, loss, strict=True)
    }


def check_map(logits: torch.Tensor, labels: torch.Tensor, classes: int) -> None:
    if logits.dim() != 4 or logits.shape[2:] != labels.shape[1:] or logits.shape[1] != classes:
        raise RecipeError(
            f"the network gives {tuple(logits.shape)} for masks of {tuple(labels.shape)} and {classes} classes; "
            "segmentation needs a network that gives (N, classes, H, W), such as deeplab-small"
        )


def check_scores(logits: torch.Tensor, classes: int, name: str) -> None:
    if logits.dim() != 2 or logits.shape[1] < classes:
        raise RecipeError(
            f"the network gives {tuple(logits.shape[1:])} for an image, {name} has {classes} classes; "
            "name a data set like that of its training"
        )


class _NoProgress:
    """Stands in for a progress bar nobody asked for."""

    def __enter__(self) -> _NoProgress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, n: int = 1, **fields: object) -> None:
        pass


def accuracy_table(results: dict[int | str, dict[str, float]], title: Iterable[str] = ("bits", "accuracy")) -> str:
    """Aligned columns for the terminal; 32 is shown as 'float'. Of masks a third one, mean IoU."""
    if results and all("miou" in r for r in results.values()):
        head = "  ".join(f"{t:>9}" for t in ("bits", "mIoU", "pixels right"))
        rows = [
            f"{'float' if k == 32 else k:>9}  {r['miou']:>7.2f} %  {r['accuracy']:>10.2f} %" for k, r in results.items()
        ]
        return "\n".join([head, *rows])
    head = "  ".join(f"{t:>9}" for t in title)
    rows = [f"{'float' if k == 32 else k:>9}  {r['accuracy']:>7.2f} %" for k, r in results.items()]
    return "\n".join([head, *rows])
