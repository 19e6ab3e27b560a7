"""Any-precision against dedicated models, quantizers and loss modes, on all of CIFAR-10 at equal epochs.

Trains every row of the table with `anyprec train` (two at a time, one thread each), calibrates 3, 5, 6, 7 bit of the
default one, and writes bench/results/cifar10_resnet8.csv and cifar10_calibrated.csv. Runs that are done are not run
again; runs that were cut off resume. About two hours on two cores.

    python bench/cifar10_table.py --data DIR --out runs/table [--only NAME ...] [--report]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPE = "cifar10-resnet8-cpu"
WIDTHS = (1, 2, 4, 8, 32)
DEFAULT = "hard"  # the loss of the recipe
ROWS: dict[str, list[str]] = {
    "hard": ["loss=hard"],
    **{f"dedicated-{k}": [f"widths=[{k}]", "width_weights={}"] for k in WIDTHS},
    "recursive+label": ["loss=recursive+label"],
    "recursive": ["loss=recursive"],
    "soft": ["loss=soft"],
    "dorefa": ["quantizer=dorefa", "scale=mean"],
    "sandwich": ["sampling=sandwich"],
    "no window": ["sign_window=0"],
    "equal weights": ["width_weights={}"],
}


def run_row(name: str, args: argparse.Namespace) -> None:
    out = Path(args.out) / name
    if (out / "model.pt").exists():
        return
    command = [sys.executable, "-m", "anyprec", "train", RECIPE, "--out", str(out), "--data", args.data]
    command += [part for setting in ROWS[name] for part in ("--set", setting)] + ["--resume", "--json"]
    print("start", name, flush=True)
    with open(Path(args.out) / f"{name}.err", "a") as errors:
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=errors,
            check=False,
        )
    print("done " if done.returncode == 0 else "FAILED", name, flush=True)


def results(out: Path) -> dict[str, dict[int, float]]:
    """Row -> bits -> test accuracy after the last epoch; the dedicated models make one row."""
    table: dict[str, dict[int, float]] = {}
    for name in ROWS:
        log = out / name / "log.jsonl"
        if not (out / name / "model.pt").exists():
            continue
        test = json.loads(log.read_text().splitlines()[-1])["test"]
        row = table.setdefault("dedicated" if name.startswith("dedicated") else name, {})
        row.update({int(k): v["accuracy"] for k, v in test.items()})
    return table


def calibrated(args: argparse.Namespace) -> dict[int, float]:
    """Accuracy at 1..8 bit and float of the default row after calibrating the widths that were not trained."""
    model, full = Path(args.out) / DEFAULT / "model.pt", Path(args.out) / DEFAULT / "calibrated.pt"
    anyprec = [sys.executable, "-m", "anyprec"]
    data = ["--data", args.data, "--json"]
    subprocess.run([*anyprec, "calibrate", str(model), "--out", str(full), *data], check=True)
    done = subprocess.run([*anyprec, "evaluate", str(full), *data], check=True, stdout=subprocess.PIPE)
    return {int(k): v["accuracy"] for k, v in json.loads(done.stdout)["results"].items()}


def write(name: str, head: list, rows: list[list]) -> None:
    target = HERE / "results" / name
    target.parent.mkdir(exist_ok=True)
    with open(target, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *rows])
    print(target.read_text())


def report(args: argparse.Namespace) -> None:
    table = results(Path(args.out))
    rows = [[name, *(f"{row[k]:.2f}" if k in row else "" for k in WIDTHS)] for name, row in table.items()]
    write("cifar10_resnet8.csv", ["row", *WIDTHS], rows)
    if DEFAULT in table:
        accuracy = calibrated(args)
        write("cifar10_calibrated.csv", ["bits", "accuracy"], [[k, f"{v:.2f}"] for k, v in accuracy.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the CIFAR-10 batches")
    parser.add_argument("--out", default="runs/table")
    parser.add_argument("--only", nargs="+", choices=tuple(ROWS), help="these rows only")
    parser.add_argument("--report", action="store_true", help="train nothing, write the table of what is there")
    args = parser.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    if not args.report:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: run_row(name, args), args.only or ROWS))
    report(args)


if __name__ == "__main__":
    main()
