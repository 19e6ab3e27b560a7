"""What a change of bits costs: `m.bits = k` itself, and calls that alternate between widths against calls that do not.

    python bench/switching.py [MODEL.apm]

The network is small (the digits ResNet of the demo, or the file given), so that a cost of microseconds would show.
Alternating and steady calls take turns; medians of the differences. Writes bench/results/switching.csv.
"""

from __future__ import annotations

import csv
import sys
import tempfile
import time
from pathlib import Path

import graphs
import numpy as np

import anyprec
from anyprec.format.file import write


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = sys.argv[1] if len(sys.argv) > 1 else f"{folder}/net.apm"
        if len(sys.argv) < 2:
            write(graphs.resnet20_graph(size=8), path)
        m = anyprec.load(path)
        height, width, channels = m.input_shape
        x = np.random.default_rng(0).standard_normal((1, channels, height or 8, width or 8)).astype(np.float32)
        widths = [k for k in m.widths if k in (1, 2, 4, 8)]
        for k in widths:
            m(x, bits=k)  # from here on every width has been used

        def call(k: int) -> float:
            start = time.perf_counter()
            m(x, bits=k)
            return 1e6 * (time.perf_counter() - start)

        setting, changed, same = [], [], []
        for i in range(2000):
            k, other = widths[i % len(widths)], widths[(i + 1) % len(widths)]
            start = time.perf_counter()
            m.bits = k
            setting.append(1e6 * (time.perf_counter() - start))
            call(other)
            changed.append(call(k))  # after a call at another width
            same.append(call(k))  # after a call at this one
    row = {
        "setting m.bits, us": np.median(setting),
        "call after another width, us": np.median(changed),
        "call after the same width, us": np.median(same),
        "cost of the change, us": np.median(np.array(changed) - np.array(same)),
    }
    for name, value in row.items():
        print(f"{name:32} {value:8.2f}")
    with open(Path(__file__).parent / "results" / "switching.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([row.keys(), [f"{v:.2f}" for v in row.values()]])


if __name__ == "__main__":
    main()
