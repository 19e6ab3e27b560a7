"""Resident memory of a process that has loaded a model and called it at one width: docs/results.md.

    python bench/memory.py [MODEL] [--bits 8,4,2,1] [--isa avx2]

A process of its own for each figure, Python and numpy included; without MODEL, ResNet-50 with random weights. Linux.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from anyprec.bench import random_networks
from anyprec.format import write

CHILD = """
import sys
import numpy as np
import anyprec
def resident():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))
before = resident()
path, bits, isa, options = sys.argv[1], int(sys.argv[2]), sys.argv[3] or None, eval(sys.argv[4])
m = anyprec.load(path, isa=isa, **options)
for _ in range(5):
    m(np.zeros((1, *m.input_shape), np.float32), bits=bits, layout="NHWC")
print(before, resident())
"""
CASES = {"as it is": {}, "max_bits": {"max_bits": None}, "keep_copy=False": {"keep_copy": False}}


def measure(path: Path, bits: int, isa: str, options: dict[str, object]) -> tuple[float, float]:
    given = {name: bits if name == "max_bits" else value for name, value in options.items()}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(bits), isa, repr(given)],
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = map(float, done.stdout.split())
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--bits", default="8,4,2,1", type=lambda text: [int(bits) for bits in text.split(",")])
    parser.add_argument("--isa", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            args.model = Path(folder) / "resnet50.apm"
            write(random_networks.resnet_graph(50), args.model)
        print(f"{'MiB resident':>16}" + "".join(f"{bits:>5} bit" for bits in args.bits))
        for name, options in CASES.items():
            figures = [measure(args.model, bits, args.isa, options) for bits in args.bits]
            print(f"{name:>16}" + "".join(f"{after:>9.0f}" for _, after in figures))
        print(f"of it Python and numpy: {figures[0][0]:.0f}")


if __name__ == "__main__":
    main()
