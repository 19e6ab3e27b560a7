"""Does `pack` write what the module computes, and what does its check cost? Every network of the zoo, and foreign ones.

    python bench/pack_check.py [NAME ...]

Networks are untrained, with norms and ranges of random images; the zoo's are of their full size (segmentation at
129 x 129). "difference" is the largest between an output of the file and of the module, each run by itself, over the
standard deviation of the outputs; "moved" are codes on the other side of a border, given the same codes before;
"tolerance used" is the largest difference as a share of what `pack` allows for rounding.
Writes bench/results/pack_check.csv.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

import torch
from foreign import FOREIGN
from torch import Tensor, nn

import anyprec
from anyprec.nn.calibrate import calibrate
from anyprec.packing.packing import PackReport, pack
from anyprec.zoo import ZOO, build

WIDTHS = (1, 2, 4, 8, 32)
SEGMENTED = 129
OF_ANY_DEPTH = {"resnet-cifar": {"blocks": (2, 2, 2)}, "resnet-he": {"depth": 32}}


def zoo_network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    entry = ZOO[name]
    height, width, channels = entry.shape
    if entry.task == "segmentation":
        height, width = min(height, SEGMENTED), min(width, SEGMENTED)
    model = build(name, widths=WIDTHS, **OF_ANY_DEPTH.get(name, {})).eval()
    x = torch.randn(4, channels, height, width)
    calibrate(model, [x], WIDTHS[:-1], progress=False)
    return model, x


def foreign_network(name: str) -> tuple[nn.Module, Tensor]:
    net, x = FOREIGN[name]()
    return anyprec.convert(net, widths=WIDTHS, example=x), x


def row_of(name: str, x: Tensor, report: PackReport) -> dict[str, str]:
    assert report.check is not None
    found = report.check.profiles
    return {
        "network": name,
        "input": " x ".join(map(str, x.shape[1:])),
        **{f"difference {k}": f"{p.difference / max(p.spread, 1e-30):.0e}" for k, p in found.items()},
        "moved": f"{sum(p.moved_codes for p in found.values())} of {sum(p.codes for p in found.values())}",
        "tolerance used": f"{max(p.tolerance_used for p in found.values()):.2f}",
        "same top-1": f"{sum(p.same_answers for p in found.values())} of {sum(p.answers for p in found.values())}",
        "pack s": f"{report.seconds:.2f}",
        "of it check s": f"{report.check.seconds:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these networks (default: all)")
    names = parser.parse_args().names
    rows = []
    for name in names or (*ZOO, *FOREIGN):
        model, x = zoo_network(name) if name in ZOO else foreign_network(name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "net.apm"
            if not rows:  # what is done once in a process: imports, kernels that torch makes on first use
                pack(model, path, example=x, keep_float=True)
            rows.append(row_of(name, x, pack(model, path, example=x, keep_float=True)))
        print("  ".join(f"{key} {value}," for key, value in rows[-1].items()), flush=True)
    if not names:
        with open(Path(__file__).parent / "results" / "pack_check.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
