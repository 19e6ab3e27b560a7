"""What a change of bits costs: `m.bits = k` itself, and calls that alternate between widths against calls that do not.

    python bench/switching.py [MODEL.apm]

The network is small (a CIFAR ResNet-20 on 8 x 8 images, or the file given), so that a cost of microseconds would show.
Alternating and steady calls take turns; medians of the differences. Writes bench/results/switching.csv.
bench/scheduling.py measures the same through the scheduler, with the functions of this file.
"""

from __future__ import annotations

import csv
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

import anyprec
from anyprec.bench import random_networks as graphs
from anyprec.format.file import write

Times = npt.NDArray[np.float64]  # microseconds


@contextmanager
def small_model() -> Iterator[anyprec.PackedModel]:
    """The file named on the command line, or a CIFAR ResNet-20 for 8 x 8 images."""
    with tempfile.TemporaryDirectory() as folder:
        path = sys.argv[1] if len(sys.argv) > 1 else f"{folder}/net.apm"
        if len(sys.argv) < 2:
            write(graphs.resnet20_graph(size=8), path)
        yield anyprec.load(path)


def alternate(widths: Sequence[int], call: Callable[[int], float], rounds: int) -> tuple[Times, Times]:
    """`call(bits)` gives microseconds: of calls after one at another width, and of calls after one at the same."""
    changed, same = [], []
    for i in range(rounds):
        bits, other = widths[i % len(widths)], widths[(i + 1) % len(widths)]
        call(other)
        changed.append(call(bits))
        same.append(call(bits))
    return np.array(changed), np.array(same)


def save_row(name: str, row: dict[str, float], digits: int) -> None:
    """Prints a figure a line, and writes them all to bench/results/NAME.csv."""
    for label, value in row.items():
        print(f"{label:38} {value:8.{digits}f}")
    with open(Path(__file__).parent / "results" / f"{name}.csv", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([row.keys(), [f"{v:.{digits}f}" for v in row.values()]])


def main() -> None:
    with small_model() as m:
        height, width, channels = m.input_shape
        x = np.random.default_rng(0).standard_normal((1, channels, height or 8, width or 8)).astype(np.float32)
        widths = [k for k in m.widths if k in (1, 2, 4, 8)]
        for k in widths:
            m(x, bits=k)  # from here on every width has been used
        setting = []
        for i in range(2000):
            start = time.perf_counter()
            m.bits = widths[i % len(widths)]
            setting.append(1e6 * (time.perf_counter() - start))

        def call(bits: int) -> float:
            start = time.perf_counter()
            m(x, bits=bits)
            return 1e6 * (time.perf_counter() - start)

        changed, same = alternate(widths, call, rounds=2000)
    row = {
        "setting m.bits, us": float(np.median(setting)),
        "call after another width, us": float(np.median(changed)),
        "call after the same width, us": float(np.median(same)),
        "cost of the change, us": float(np.median(changed - same)),
    }
    save_row("switching", row, digits=2)


if __name__ == "__main__":
    main()
