"""Where an exported model first parts from ours: the codes of every quantizer on both sides, layer by layer.

    python bench/export_trace.py random:vit --bits 4,8 [--images 64] [--shake 0.05]
    python bench/export_trace.py vit-float-0.apm --dataset digits

Our side is the numpy oracle, with which the engine agrees bit for bit; the other is the exported ONNX model, run with
all codes as further outputs. Of each image: the first quantizer whose codes differ, with all codes before it equal, and
how far our number before rounding lies from the border between the two codes, in steps. A border within float's
rounding is two correct answers; anything else is a fault. Writes bench/results/export_trace.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from export_parity import inputs_of

import anyprec
from anyprec.export.stock_engine import TITLES, run_elsewhere
from anyprec.format.file import read
from anyprec.format.graph import Graph, Op
from anyprec.models.catalog import find
from anyprec.run.oracle import OracleRun
from anyprec.widths import FLOAT

OUT = Path(__file__).resolve().parent / "results" / "export_trace.csv"
AT_ONCE = 8  # images a run of the oracle


class TracedRun(OracleRun):
    """Keeps, for every quantizer, the number before rounding."""

    def __init__(self, graph: Graph, x: np.ndarray, profile: str) -> None:
        super().__init__(graph, x, profile)
        self.before: dict[str, np.ndarray] = {}

    def step(self, op: Op) -> np.ndarray:
        if op.kind == "quantize" and self.profile.act_bits(op.name, op.bits) != FLOAT:
            given = self.float_in(op)
            self.before[op.name] = self.affine(op, given) if op.attributes["affine"] else given
        return super().step(op)


def show_codes(path: str | Path) -> list[str]:
    """Makes the codes of all quantizers outputs of an ONNX model; their names, in the order of execution."""
    import onnx

    model = onnx.load(path)
    made: dict[str, str] = {}  # quantizer -> the tensor of its codes: behind the clip, where it has one
    for node in model.graph.node:
        for kind, tag in (("QuantizeLinear", ".codes"), ("Clip", ".clipped")):
            if node.op_type == kind and node.output[0].endswith(tag):
                made[node.output[0].removesuffix(tag)] = node.output[0]
    for name in made.values():
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.UINT8, None))
    onnx.save(model, path)
    return list(made)


def as_ours(theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Their (N, C, H, W) as (N, H, W, C); of sizes that fit both ways, the one that differs less.

    Tokens may be rows, (N * tokens, C), those of an image together.
    """
    fits = [theirs.reshape(ours.shape)]
    if theirs.ndim == 4 and theirs.transpose(0, 2, 3, 1).shape == ours.shape:
        fits.append(theirs.transpose(0, 2, 3, 1))
    return min(fits, key=lambda one: int((one != ours).sum()))


def trace(graph: Graph, profile: str, x: np.ndarray, outputs: list[np.ndarray], names: list[str]) -> dict[str, Any]:
    """Images whose codes or answers differ, where they begin to, and the largest distance from a border there."""
    answers = outputs[0]
    images = (o if len(o) == len(x) else o.reshape(len(x), -1, o.shape[-1]) for o in outputs[1:])
    codes = dict(zip(names, images, strict=True))
    other = with_moved = moved_codes = all_codes = 0
    firsts: dict[str, int] = {}
    farthest = 0.0
    for start in range(0, len(x), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        given = x[part].transpose(0, 2, 3, 1) if x.ndim == 4 else x[part]
        run = TracedRun(graph, np.ascontiguousarray(given), profile)
        for op in graph.ops:
            run.step(op)
        ours = run.values[graph.outputs[0]]
        other += int((answers[part].argmax(1) != ours.reshape(answers[part].shape).argmax(1)).sum())
        parted: set[int] = set()
        for name in names:
            mine = run.values[name]
            moved = as_ours(codes[name][part], mine) != mine
            all_codes, moved_codes = all_codes + moved.size, moved_codes + int(moved.sum())
            for image in np.flatnonzero(moved.reshape(len(mine), -1).any(1)):
                if int(image) not in parted:
                    parted.add(int(image))
                    firsts[name] = firsts.get(name, 0) + 1
                    at = run.before[name][image][moved[image]].astype(np.float64)
                    farthest = max(farthest, float(np.abs(at - np.floor(at) - 0.5).max()))
        with_moved += len(parted)
    return {
        "other answers": other, "images with moved codes": with_moved, "moved codes": moved_codes, "codes": all_codes,
        "farthest from a border, steps": f"{farthest:.1e}",
        "first moved in": " ".join(f"{name}:{count}" for name, count in sorted(firsts.items())),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--splits", default="test")
    parser.add_argument("--data", default=os.environ.get("ANYPREC_DATA"))
    parser.add_argument("--bits", default="1,2,4,8")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--shake", type=float, default=0.0)
    args = parser.parse_args()
    stem = Path(args.model).stem + (f" shaken {args.shake:g}" if args.shake else "")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model, x, _ = inputs_of(args, Path(folder))
        graph = read(find(model))
        for bits in args.bits.split(","):
            (file,) = anyprec.export_onnx(model, Path(folder) / "net.onnx", bits, check=False).files
            names = show_codes(file.path)
            for engine, title in TITLES.items():
                (outputs,) = run_elsewhere(engine, [file.path], x)
                row = {"model": stem, "bits": bits, "engine": title, "images": len(x)}
                rows.append(row | trace(graph, bits, x, outputs, names))
                print(rows[-1], flush=True)
    kept = list(csv.DictReader(OUT.open(newline=""))) if OUT.exists() else []
    with OUT.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*(row for row in kept if row["model"] != stem), *rows])


if __name__ == "__main__":
    main()
