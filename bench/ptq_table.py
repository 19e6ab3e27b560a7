"""Post-training methods on the public CIFAR-10 ResNet-20: test accuracy at each width, of the packed file.

    python bench/ptq_table.py --weights resnet20-12fca82f.th --data DIR [--methods gptq,bs,bc,aciq] [--limit N]

Each method sees the same training images, without labels; the result is packed, the file is checked to truncate
exactly, and the engine runs it on the test images. `aciq` cannot be packed and runs in torch. Writes
bench/results/ptq_resnet20.csv, method by method: those that are not asked for keep their rows.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import anyprec
from anyprec.data import batches, load_data
from anyprec.nn.switching import any_layers
from anyprec.post_training import GptqSettings, ptq
from anyprec.zoo.float_weights import from_float
from anyprec.zoo.weights import read_state_dict

OUT = Path(__file__).resolve().parent / "results" / "ptq_resnet20.csv"
FIELDS = ("method", "bits", "accuracy", "test_images", "training_images", "cpu_seconds")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # that the weights were trained with
AT_ONCE = 250


def inputs(pixels: np.ndarray) -> torch.Tensor:
    """(N, H, W, C) uint8 -> (N, C, H, W)"""
    scaled = (pixels.astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)))


def training_images(data: Any) -> list[torch.Tensor]:
    """Augmented as usual, at the mean and deviation of the weights."""
    scale, shift = np.float32(data.std), np.float32(data.mean)
    made = []
    for images, _ in batches(data, 128, augment="crop-flip", train=True, seed=0):
        pixels = images * scale + shift  # back to x/255; zero borders are the mean
        made.append(torch.from_numpy(np.ascontiguousarray(((pixels - MEAN) / STD).transpose(0, 3, 1, 2))).float())
    return made


def packed_accuracy(model: torch.nn.Module, x: torch.Tensor, labels: np.ndarray, widths: list[int]) -> dict[int, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.apm"
        anyprec.pack(model, path, example=x[:4], widths=widths)
        whole, found = anyprec.load(path), {}
        for k in widths:
            cut = anyprec.load(path, max_bits=k)
            assert np.array_equal(cut(x[:8].numpy(), bits=k), whole(x[:8].numpy(), bits=k)), "truncated it differs"
            answers = [whole(part.numpy(), bits=k).argmax(1) for part in x.split(AT_ONCE)]
            found[k] = 100 * float((np.concatenate(answers) == labels).mean())
    return found


@torch.no_grad()
def torch_accuracy(model: torch.nn.Module, x: torch.Tensor, labels: np.ndarray, widths: list[int]) -> dict[int, float]:
    found = {}
    for k in widths:
        with anyprec.bits(model, k):
            answers = torch.cat([model(part).argmax(1) for part in x.split(AT_ONCE)]).numpy()
        found[k] = 100 * float((answers == labels).mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--methods", default="gptq,bs,bc,aciq")
    parser.add_argument("--widths", default="1,2,3,4,8")
    parser.add_argument("--images", type=int, default=1024, help="training images seen")
    parser.add_argument("--limit", type=int, help="test on this many images")
    parser.add_argument("--tune-steps", type=int, default=GptqSettings.tune_steps)
    args = parser.parse_args()
    widths = [int(k) for k in args.widths.split(",")]
    net = from_float(read_state_dict(Path(args.weights)), None, (32,))
    seen = training_images(load_data("cifar10", "train", args.data, limit=args.images))
    test = load_data("cifar10", "test", args.data, limit=args.limit)
    x, labels = inputs(test.read(np.arange(len(test)))), np.asarray(test.labels)
    rows = list(csv.DictReader(OUT.open())) if OUT.exists() else []
    for method in args.methods.split(","):
        start = time.process_time()
        model = ptq(net, seen, method, widths, gptq=GptqSettings(tune_steps=args.tune_steps), progress=True)
        seconds = time.process_time() - start
        if method != "aciq":
            assert all(torch.equal(m.codes(8) >> 6, m.codes(2)) for m in any_layers(model).values())
        measure = torch_accuracy if method == "aciq" else packed_accuracy
        rows = [row for row in rows if row["method"] != method]
        for k, accuracy in measure(model, x, labels, widths).items():
            print(f"{method:>5} {k} bit  {accuracy:6.2f} %", flush=True)
            figures = (method, k, f"{accuracy:.2f}", len(test), args.images, f"{seconds:.0f}")
            rows.append(dict(zip(FIELDS, map(str, figures), strict=True)))
        with OUT.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
