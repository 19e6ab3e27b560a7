"""Do exported models answer as the engine does? Top-1 in ONNX Runtime and OpenVINO over a whole test set.

    python bench/export_parity.py cifar10-vgg --dataset cifar10 --data DIR [--bits 1,2,4,8]
    python bench/export_parity.py random:convnext --images 64 [--shake 0.05]

Exports every width (`anyprec export`), runs all test images through each ONNX model in both engines, each in a process
of its own, and compares with `anyprec run`'s engine. Writes bench/results/export_parity.csv, model by model: rows of
others stay. random:NET is a network of timm or transformers with random weights (`make networks` installs them), run on
noise. --shake adds noise of this deviation to its parameters: as they are, many values are exactly 0, which is in the
middle of two signed codes.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import anyprec
from anyprec.data import batches, load_data
from anyprec.export.stock_engine import TITLES, EngineFailed, run_elsewhere

BERT = {
    "config": "BertConfig", "vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128,
}  # fmt: skip
# source, name, size of the images (tokens), options
RANDOM: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "vit": ("timm", "test_vit", 160, {}),
    "convnext": ("timm", "test_convnext", 64, {}),
    "bert": ("transformers", "BertForSequenceClassification", 12, BERT),
}


def random_network(name: str, folder: Path, count: int, shake: float) -> tuple[Path, np.ndarray]:
    """Its model file at 1, 2, 4, 8 bit, and inputs."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "networks"))
    from catalog import Network, build

    source, network, size, options = RANDOM[name]
    net, example = build(Network(source, network, size, "packs", options))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=shake)
    model = anyprec.convert(net.eval(), (1, 2, 4, 8), example=example)
    anyprec.pack(model, folder / "net.apm", example=example)
    texts = isinstance(example, dict)
    x = torch.randint(0, BERT["vocab_size"], (count, size)) if texts else torch.randn(count, *example.shape[1:])
    return folder / "net.apm", x.numpy()


def inputs_of(args: argparse.Namespace, folder: Path) -> tuple[str | Path, np.ndarray, np.ndarray | None]:
    """The model file, its inputs, (N, C, H, W) where they are images, and their labels, where they have any."""
    if args.model.startswith("random:"):
        return *random_network(args.model.removeprefix("random:"), folder, args.images or 64, args.shake), None
    sets = [load_data(args.dataset, split, args.data) for split in args.splits.split(",")]
    loaded = [batch for data in sets for batch in batches(data, 500)]
    x = np.concatenate([images for images, _ in loaded])[: args.images].transpose(0, 3, 1, 2).copy()
    return args.model, x, np.concatenate([y for _, y in loaded])[: args.images]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--splits", default="test", help="test, or train,test where the test set is small")
    parser.add_argument("--data", default=os.environ.get("ANYPREC_DATA"))
    parser.add_argument("--bits", help="such as 1,2,4,8 (default: all)")
    parser.add_argument("--images", type=int, help="the first so many (default: all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shake", type=float, default=0.0, help="of random:NET: noise added to its parameters")
    args = parser.parse_args()

    stem = Path(args.model).stem + (f" shaken {args.shake:g}" if args.shake else "")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model, x, labels = inputs_of(args, Path(folder))
        ours = anyprec.load(model, threads=args.threads)
        bits = args.bits.split(",") if args.bits else None
        report = anyprec.export_onnx(model, Path(folder) / "net.onnx", bits, check=False)
        for file in report.files:
            answers = np.concatenate([ours(x[i : i + 500], bits=file.profile) for i in range(0, len(x), 500)])
            for engine, title in TITLES.items():
                row = {
                    "model": stem, "bits": file.profile, "engine": title,
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
                    "engine %": "" if labels is None else f"{100 * (made.argmax(1) == labels).mean():.2f}",
                    "anyprec %": "" if labels is None else f"{100 * (answers.argmax(1) == labels).mean():.2f}",
                    "mean difference": f"{np.abs(made - answers).mean() / answers.std():.1e}",
                    "bytes": file.bytes, "int8 layers": file.int8_layers, "float layers": file.float_layers,
                    "failed": "",
                })  # fmt: skip
                print(rows[-1], flush=True)
    target = Path(__file__).parent / "results" / "export_parity.csv"
    kept = list(csv.DictReader(target.open(newline=""))) if target.exists() else []
    rows = [*(row for row in kept if row["model"] != stem), *rows]
    with open(target, "w", newline="") as out:
        writer = csv.DictWriter(out, max(rows, key=len), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
