"""Table 6: segmentation with DeepLab V3, any-precision against dedicated; masks at every width; the packed network."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from anyprec.data import MaskData
from anyprec.data.masks import VOID
from anyprec.nn.switching import bits as at_bits
from anyprec.packing.packing import pack
from anyprec.report.record import Claim, Picture, Row, Table, write_csv
from anyprec.reproduce import paper
from anyprec.reproduce.experiment import BITS, Context, Experiment, Finding, gaps, paper_row, per_width, values_of
from anyprec.reproduce.plots import figure
from anyprec.reproduce.scales import SEGMENTATION, PaperNetwork, Segmentation
from anyprec.reproduce.store import Training, width_name
from anyprec.run.accuracy import measure
from anyprec.run.model import load
from anyprec.run.segmentation import colors
from anyprec.training.evaluate import to_tensor
from anyprec.widths import DEFAULT_WIDTHS, FLOAT

METRICS = {"mIoU": "miou", "pixel accuracy": "accuracy"}
SHOWN = 3  # images in the picture
WIDTHS = tuple(bits for bits in DEFAULT_WIDTHS if bits != FLOAT)


def trainings(scale: str) -> list[Training]:
    found = []
    for one in SEGMENTATION[scale]:
        found += [one.joint(), *one.all_dedicated().values()]
    return found


def run(context: Context) -> Finding:
    tables, claims, pictures, scaled = [], [], [], []
    for i, one in enumerate(SEGMENTATION[context.scale]):
        done = i / len(SEGMENTATION[context.scale])
        tested = context.store.test(one.joint())
        alone = {bits: context.store.test(t)[bits] for bits, t in one.all_dedicated().items()}
        model, data = context.model(one.joint()), context.test_data(one.joint())
        assert isinstance(data, MaskData)
        context.tell(done + 0.1, f"{one.net.what}: the engine")
        native = in_engine(model, data)
        tables.append(table_of(one, tested, alone, native, paper_too=i == 0))
        claims += claims_of(one.net, tested, alone, native, constant_miou(data))
        pictures.append(draw_masks(context.folder, one.net, model, data))
        scaled += [one.net.scaled] if one.net.scaled else []
    return Finding(tables, claims, pictures, scaled)


def table_of(
    one: Segmentation,
    tested: dict[int, dict[str, float]],
    alone: dict[int, dict[str, float]],
    native: dict[int, dict[str, float]],
    paper_too: bool,
) -> Table:
    rows = []
    for name, metric in METRICS.items():
        if alone:
            rows.append(Row((name, "dedicated"), values_of({b: v[metric] for b, v in alone.items()})))
        rows.append(Row((name, "any-precision"), values_of({b: v[metric] for b, v in tested.items()})))
        rows.append(Row((name, "any-precision, packed"), values_of({b: v[metric] for b, v in native.items()})))
        if paper_too:
            dedicated, ours = paper.TABLE6[name]
            rows += [paper_row((name, "dedicated"), dedicated), paper_row((name, "any-precision"), ours)]
    note = "The paper's: DeepLab V3 on ResNet-50, Pascal VOC 2012." if paper_too else ""
    return Table(
        f"segmentation-{one.joint().recipe.data}", one.net.what, ("metric", "model"), BITS, tuple(rows), note=note
    )


def claims_of(
    net: PaperNetwork,
    tested: dict[int, dict[str, float]],
    alone: dict[int, dict[str, float]],
    native: dict[int, dict[str, float]],
    constant: float,
) -> list[Claim]:
    ours = {bits: values["miou"] for bits, values in tested.items()}
    same = {bits: native[bits]["miou"] - ours[bits] for bits in native}
    claims = [
        Claim(
            f"{net.what}: mIoU at 8 bit is within 2 points of float.",
            abs(ours[8] - ours[FLOAT]) <= 2,
            f"8 bit {ours[8]:.2f}, float {ours[FLOAT]:.2f}.",
        ),
        Claim(
            f"{net.what}: mIoU at 1 bit is clearly above a constant prediction, by half of it or more.",
            ours[1] >= 1.5 * constant,
            f"1 bit {ours[1]:.2f}, the most frequent class everywhere {constant:.2f}.",
        ),
        Claim(
            f"{net.what}: packed and run by the engine, mIoU is the same, within 0.1 point.",
            all(abs(gap) <= 0.1 for gap in same.values()),
            f"Engine minus PyTorch, in points: {per_width(same, 3, sign=True)}.",
        ),
    ]
    if alone:
        apart = gaps(ours, {bits: values["miou"] for bits, values in alone.items()})
        claims.insert(
            0,
            Claim(
                f"{net.what}: any-precision is better than dedicated at 1, 2 and 4 bit, and within 1 point at 8 and "
                f"float.",
                all(apart[bits] > 0 for bits in (1, 2, 4)) and all(apart[bits] >= -1 for bits in (8, FLOAT)),
                f"Any-precision minus dedicated, mIoU in points: {per_width(apart, sign=True)}.",
            ),
        )
    return claims


def in_engine(model: nn.Module, data: MaskData) -> dict[int, dict[str, float]]:
    image = [1 / (255 * s) for s in data.std], [-m / s for m, s in zip(data.mean, data.std, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deeplab.apm"
        height, width = data.shape[:2]
        pack(model, path, example=torch.zeros(1, 3, height, width), widths=WIDTHS, image=image)
        rows = measure(load(path), data, [str(bits) for bits in WIDTHS], batch=1)
    return {int(row.profile): {"miou": row.miou or 0.0, "accuracy": row.accuracy} for row in rows}


def constant_miou(data: MaskData) -> float:
    """Of the most frequent class, everywhere: its share of the pixels, as the other classes have none."""
    counts = np.zeros(data.num_classes, np.int64)
    for i in range(len(data)):
        _, mask = data.pair(i)
        counts += np.bincount(mask[mask != VOID], minlength=data.num_classes)
    return float(100 * counts.max() / counts.sum() / (counts > 0).sum())


def draw_masks(folder: Path, net: PaperNetwork, model: nn.Module, data: MaskData) -> Picture:
    """Rows: images spread over the test set. Columns: the image, the truth, every width."""
    palette = colors(data.classes, data.num_classes)
    name = f"masks-{data.name}"
    titles = ["image", "truth", *(f"{width_name(b)}{'' if b == FLOAT else ' bit'}" for b in DEFAULT_WIDTHS)]
    picked = np.linspace(0, len(data) - 1, min(SHOWN, len(data))).astype(int)
    rows = []
    with figure(folder / f"{name}.png", len(picked), len(titles), (2.1 * len(titles), 1.75 * len(picked))) as axes:
        for i, at in enumerate(picked):
            image, mask = data.pair(int(at))
            shown = [image, colored(mask, palette)]
            for width in DEFAULT_WIDTHS:
                answer = predict(model, image, data, width)
                shown.append(colored(np.where(mask == VOID, VOID, answer).astype(np.uint8), palette))
                known = mask != VOID
                rows.append([int(at), width, float(100 * (answer[known] == mask[known]).mean())])
            for axis, pixels, title in zip(np.atleast_2d(axes)[i], shown, titles, strict=True):
                axis.imshow(pixels)
                axis.axis("off")
                if i == 0:
                    axis.set_title(title, fontsize=10)
    write_csv(folder / f"{name}.csv", ["image", "bits", "pixels right, %"], rows)
    return Picture(name, f"Masks at each width, {net.what}", "Pixels without a class are white in all of them.", True)


@torch.no_grad()
def predict(model: nn.Module, image: np.ndarray, data: MaskData, width: int) -> np.ndarray:
    x = (image.astype(np.float32) / 255 - np.array(data.mean, np.float32)) / np.array(data.std, np.float32)
    device = next(model.parameters()).device
    with at_bits(model, width):
        made: np.ndarray = model(to_tensor(x[None], device)).argmax(1)[0].cpu().numpy()
        return made


def colored(mask: np.ndarray, palette: np.ndarray) -> np.ndarray:
    pixels = np.full((*mask.shape, 3), 255, np.uint8)
    known = mask != VOID
    pixels[known] = palette[mask[known]]
    return pixels


EXPERIMENT = Experiment(
    "table6",
    "Table 6: semantic segmentation",
    "DeepLab V3 on an any-precision ResNet-50 is better than dedicated networks at 1, 2 and 4 bit (mIoU 61.3, 72.1, "
    "74.3 against 59.5, 71.5, 74.1) and within 0.3 points at 8 bit and float.",
    trainings,
    run,
    {"paper": 1800, "medium": 300, "small": 180, "tiny": 6},
)
