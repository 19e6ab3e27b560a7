"""`anyprec export MODEL --bits 4 --out net.onnx`: a model file in, ONNX models for other engines out, checked.

The work is export/export.py's. Verb module of anyprec.cli.
"""

from __future__ import annotations

import argparse
import re

from anyprec.cli.output import print_json
from anyprec.errors import AnyprecError

EXAMPLE = "anyprec export cifar10-vgg --bits 4 --out net.onnx"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model file (.apm), or the name of one: `anyprec models`")
    parser.add_argument(
        "--out", required=True, metavar="NET.onnx",
        help="the file to write; with several bits NET-4bit.onnx, NET-float.onnx, NET-NAME.onnx",
    )  # fmt: skip
    parser.add_argument(
        "--bits",
        metavar="LIST",
        help="widths such as 4 or 1,2,4,8,32, names of mixed profiles (default: all there are)",
    )
    parser.add_argument(
        "--size", metavar="H,W", help="size of the images (or length of texts), where the model file takes any"
    )
    parser.add_argument("--opset", type=int, metavar="N", help="13 to 21 (default: the lowest that will do, 13 or 18)")
    parser.add_argument("--no-check", action="store_true", help="do not run the models beside the engine")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    from anyprec.export.export import export_onnx

    report = export_onnx(
        args.model, args.out, listed(args.bits), size=parse_size(args.size), opset=args.opset, check=not args.no_check
    )  # fmt: skip
    if args.json:
        print_json(report.to_dict())
    else:
        print(report)
    return 0 if report.agrees else 1


def listed(bits: str | None) -> list[str] | None:
    """Widths as 1,2,4 or 1-4, and names of profiles."""
    if bits is None:
        return None
    found: list[str] = []
    for part in filter(None, map(str.strip, bits.split(","))):
        ends = re.fullmatch(r"(\d+)-(\d+)", part)
        found += map(str, range(int(ends[1]), int(ends[2]) + 1)) if ends else [part]
    if not found:
        raise AnyprecError(f"--bits {bits!r} names no width; give 4, 1,2,4,8 or the name of a profile")
    return found


def parse_size(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = re.split(r"[,x]", text.strip())
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,8}", part) for part in parts):
        raise AnyprecError(f"--size {text!r} is no size; give height and width, such as 224,224, or a length: 128")
    return tuple(map(int, parts))
