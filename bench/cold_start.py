"""A cold start of ResNet-50: loading the file, the first answer and a later one, each in a process of its own.

    python bench/cold_start.py [--rounds 10] [--rivals onnxruntime,openvino] [--max-bits]

Processes take turns; importing the library is not counted, since a service pays for it once, for all its models. The
file is in the page cache. Load: until the library has the file (ONNX Runtime and OpenVINO compile the network then;
anyprec reads and checks the file, and prepares the weights of a width at the first call). Medians, to
bench/results/cold_start.csv. Ours loads all widths; with --max-bits only the planes that a width needs.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from anyprec.bench.rivals import TITLES, open_rival
from anyprec.bench.suite import NETS, RIVAL_NETS, cache_name, made_file, made_onnx
from anyprec.bench.timing import prepare_rivals
from anyprec.progress import Progress

HERE = Path(__file__).resolve().parent
WIDTHS = (8, 4, 2, 1)
FIGURES = ("load_ms", "first_ms", "later_ms")


def one_start(order: dict) -> dict[str, float]:
    """In the process that starts: milliseconds of each part."""
    x = np.random.default_rng(0).random((1, 3, 224, 224), np.float32)
    if order["engine"] == "anyprec":
        from anyprec.run.model import load

        started = time.perf_counter()
        model = load(order["model"], max_bits=order["max_bits"], threads=1)

        def run():
            return model(x, bits=order["bits"])
    else:
        __import__(order["engine"])
        started = time.perf_counter()
        run = open_rival(order["engine"], order["variant"], order["folder"], x, 1).run
    loaded = time.perf_counter()
    run()
    answered = time.perf_counter()
    later = []
    for _ in range(5):
        begun = time.perf_counter()
        run()
        later.append(time.perf_counter() - begun)
    times = (loaded - started, answered - loaded, min(later))
    return {name: 1e3 * seconds for name, seconds in zip(FIGURES, times, strict=True)}


def in_a_process(order: dict) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", json.dumps(order)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rivals", default="onnxruntime,openvino", help="or none")
    parser.add_argument("--max-bits", action="store_true", help="load only the planes of the width that is run")
    parser.add_argument("--cache", type=Path, default=HERE.parent / "build" / "bench", help="made models are kept here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one_start(json.loads(args.one))))
        return
    cache, net = args.cache / cache_name(), NETS["resnet50"]
    model = str(made_file(cache, "resnet50", net.make))
    orders = {
        f"anyprec {bits} bit": {
            "engine": "anyprec", "model": model, "bits": bits, "max_bits": bits if args.max_bits else None
        }
        for bits in WIDTHS
    }  # fmt: skip
    rivals = [name for name in args.rivals.split(",") if name != "none"]
    if rivals:
        folder = str(cache / net.rivals)
        assert net.rivals in RIVAL_NETS
        prepare_rivals(model, folder, (224, 224), rivals, str(made_onnx(cache, net.rivals)))
        for name in rivals:
            orders[f"{TITLES[name]} int8"] = {"engine": name, "variant": "int8", "folder": folder}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in orders}
    with Progress("cold start", total=args.rounds * len(orders), unit="process") as bar:
        for _ in range(args.rounds):
            for name, order in orders.items():
                found[name].append(in_a_process(order))
                bar.update()
    rows = []
    for name, starts in found.items():
        medians = {figure: statistics.median(start[figure] for start in starts) for figure in FIGURES}
        beyond = statistics.median(start["first_ms"] - start["later_ms"] for start in starts)
        rows.append({"engine": name} | {figure: f"{value:.1f}" for figure, value in medians.items()})
        rows[-1]["first_beyond_later_ms"] = f"{beyond:.1f}"
        print("  ".join(f"{value:>16}" for value in rows[-1].values()))
    with (HERE / "results" / "cold_start.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
