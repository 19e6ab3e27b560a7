"""Trains the network of cifar10-vgg from nothing, in two stages and one command: docs/results.md.

    python bench/train_vgg.py --data DIR --out runs/vgg --weights resnet56-4bfd9763.th

A teacher at 8 bit (a ResNet-56 from published float weights), float stage with it, a second teacher at 8 bit (the
float network), joint stage with both, model file. Two processes share each step of a training; gradients are bf16 where
the CPU multiplies it. Trainings and teachers that are done are not repeated, and a training goes on where it stopped.
Without --weights the float stage has no teacher, and the network is its own in the joint one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from anyprec.nn.winograd import has_bf16

FLOAT, JOINT = "cifar10-vgg-float-longer", "cifar10-vgg-taught"


def run(*argv: object, processes: int = 1) -> None:
    """As a user would type it; several processes by torchrun, one thread each."""
    words = [str(part) for part in argv]
    print("anyprec", " ".join(words), flush=True)
    launcher = []
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    threads = {"OMP_NUM_THREADS": "1"} if processes > 1 else {}
    command = [sys.executable, *launcher, "-m", "anyprec", *words]
    if subprocess.run(command, env=os.environ | threads, check=False).returncode:
        raise SystemExit(f"anyprec {words[0]} failed; mend the cause and run this script again: it goes on from here")


def train(recipe: str, out: Path, args: argparse.Namespace, *settings: str) -> Path:
    """The checkpoint of the finished run."""
    if not (out / "model.pt").exists():
        faster = ["gradients=bf16"] if has_bf16() else []
        more = [word for setting in (*faster, *settings, *args.set) for word in ("--set", setting)]
        begun = ["--resume"] if (out / "last.pt").exists() else []
        run("train", recipe, "--data", args.data, "--out", out, *more, *begun, processes=args.processes)
    return out / "model.pt"


def teacher(source: Path, name: str, args: argparse.Namespace, *options: str) -> Path:
    """A model file at 8 bit from a float checkpoint or from float weights."""
    path, folder = args.out / f"{name}.apm", args.out / f"{name}-8bit"
    if not path.exists():
        quantized = ("--method", "bc", "--widths", 8, "--dataset", "cifar10", "--data", args.data)
        run("ptq", source, *quantized, *options, "--out", folder, "--overwrite")
        run("pack", folder / "bc", "--data", args.data, "--out", path)
    return path


def taught_by(teachers: list[Path]) -> str:
    return f"teacher={json.dumps([str(path) for path in teachers])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder that holds CIFAR-10")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="runs and model files")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="float weights of a ResNet-56, a second teacher")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="of the trainings (default: 2)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of both recipes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    teachers = []
    if args.weights:
        teachers = [teacher(args.weights, "resnet56", args, "--normalization", "imagenet")]
    start = train(FLOAT, args.out / "float", args, *(["loss=wider+label", taught_by(teachers)] if teachers else []))
    teachers.insert(0, teacher(start, "vgg-float", args))
    train(JOINT, args.out / "joint", args, f"init={start}", taught_by(teachers))
    run("pack", args.out / "joint", "--data", args.data, "--out", args.out / "cifar10-vgg.apm")
    run("run", args.out / "cifar10-vgg.apm", "--dataset", "cifar10", "--data", args.data, "--bits", "1-8")


if __name__ == "__main__":
    main()
