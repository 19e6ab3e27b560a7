"""Do exported models answer as the engine does? Top-1 in ONNX Runtime and OpenVINO over a whole test set.

    python bench/export_parity.py cifar10-vgg --dataset cifar10 --data DIR [--bits 1,2,4,8]

Exports every width (`anyprec export`), runs all test images through each ONNX model in both engines, each in a process
of its own, and compares with `anyprec run`'s engine. Writes bench/results/export_parity.csv, model by model: rows of
others stay.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import os
import tempfile
from pathlib import Path

import numpy as np

import anyprec
from anyprec.data import batches, load_data
from anyprec.export.stock_engine import TITLES, EngineFailed, run_elsewhere


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--splits", default="test", help="test, or train,test where the test set is small")
    parser.add_argument("--data", default=os.environ.get("ANYPREC_DATA"))
    parser.add_argument("--bits", help="such as 1,2,4,8 (default: all)")
    parser.add_argument("--images", type=int, help="the first so many (default: all)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    sets = [load_data(args.dataset, split, args.data) for split in args.splits.split(",")]
    loaded = [batch for data in sets for batch in batches(data, 500)]
    x = np.concatenate([images for images, _ in loaded])[: args.images].transpose(0, 3, 1, 2).copy()
    labels = np.concatenate([y for _, y in loaded])[: args.images]
    rows = []
    with tempfile.TemporaryDirectory() as folder, anyprec.load(args.model, threads=args.threads) as ours:
        bits = args.bits.split(",") if args.bits else None
        report = anyprec.export_onnx(args.model, Path(folder) / "net.onnx", bits, check=False)
        for file in report.files:
            answers = np.concatenate([ours(x[i : i + 500], bits=file.profile) for i in range(0, len(x), 500)])
            for engine, title in TITLES.items():
                row = {
                    "model": Path(args.model).stem, "bits": file.profile, "engine": title,
                    "version": importlib.metadata.version(engine).partition("-")[0], "images": len(x),
                }  # fmt: skip
                try:
                    ((made,),) = run_elsewhere(engine, [file.path], x, args.threads)
                except EngineFailed as error:
                    rows.append({**row, "failed": str(error)})
                    print(rows[-1], flush=True)
                    continue
                same = made.argmax(1) == answers.argmax(1)
                rows.append({
                    **row,
                    "same top-1 %": f"{100 * same.mean():.2f}",
                    "engine %": f"{100 * (made.argmax(1) == labels).mean():.2f}",
                    "anyprec %": f"{100 * (answers.argmax(1) == labels).mean():.2f}",
                    "mean difference": f"{np.abs(made - answers).mean() / answers.std():.1e}",
                    "bytes": file.bytes, "int8 layers": file.int8_layers, "float layers": file.float_layers,
                    "failed": "",
                })  # fmt: skip
                print(rows[-1], flush=True)
    target = Path(__file__).parent / "results" / "export_parity.csv"
    kept = list(csv.DictReader(target.open(newline=""))) if target.exists() else []
    rows = [*(row for row in kept if row["model"] != Path(args.model).stem), *rows]
    with open(target, "w", newline="") as out:
        writer = csv.DictWriter(out, max(rows, key=len), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
