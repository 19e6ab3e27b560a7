"""`anyprec quantize NET --images DIR --out net.apm`: a float network and pictures in, a model file for every width out.

The work is post_training/quantize.py's.
"""

from __future__ import annotations

import argparse

from anyprec.arguments import positive
from anyprec.choices import FIRST_LAST, PTQ_METHODS
from anyprec.cli.output import print_json, print_next
from anyprec.errors import AnyprecError
from anyprec.preprocessing import FILTERS, Preprocessing
from anyprec.widths import parse_widths

EXAMPLE = "anyprec quantize mobilenetv1_100 --images photos --out mobilenet.apm"

PACKABLE = tuple(method for method in PTQ_METHODS if method != "aciq")
PHOTO_MEAN, PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("net", metavar="NET", help="a timm name, or module:function (file.py:function) that makes it")
    parser.add_argument("--images", required=True, metavar="DIR", help="folder of pictures; no labels are needed")
    parser.add_argument("--out", required=True, metavar="MODEL.apm", help="the model file to write, such as net.apm")
    parser.add_argument("--widths", default="1-8", metavar="BITS", help="for example 2,4,8 (default: 1-8)")
    parser.add_argument("--method", choices=PACKABLE, default="gptq", help="of `anyprec ptq` (default: gptq)")
    parser.add_argument("--count", type=positive, default=512, metavar="N", help="pictures to look at (default: 512)")
    parser.add_argument(
        "--tune-steps", type=int, default=100, metavar="N", help="of gptq, for each width that needs it (default: 100)"
    )
    parser.add_argument("--size", type=positive, metavar="N", help="side of the network's input (default: NET says)")
    parser.add_argument("--resize", type=positive, metavar="N", help="short side before the middle is cut out")
    parser.add_argument("--mean", metavar="R,G,B", help="of x/255 (default: NET says, or ImageNet's)")
    parser.add_argument("--std", metavar="R,G,B", help="of x/255 (default: NET says, or ImageNet's)")
    parser.add_argument("--filter", choices=FILTERS, help="of the resize (default: NET says, or bilinear)")
    parser.add_argument("--labels", metavar="FILE.txt", help="names of the classes, one a line")
    parser.add_argument(
        "--first-last", choices=FIRST_LAST, default="float", help="first and last layers (default: float)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from anyprec.cli.pack import read_labels
    from anyprec.post_training.gptq import GptqSettings
    from anyprec.post_training.named_network import named_network
    from anyprec.post_training.quantize import preprocessing_of_timm, quantize

    widths = parse_widths(args.widths)
    labels = read_labels(args.labels) if args.labels else None
    net, how = named_network(args.net)
    report = quantize(
        net,
        args.images,
        args.out,
        widths=widths,
        method=args.method,
        preprocessing=chosen_preprocessing(args, how or preprocessing_of_timm(net)),
        labels=labels,
        name=args.net.rpartition(":")[2],
        first_last=args.first_last,
        count=args.count,
        gptq=GptqSettings(tune_steps=args.tune_steps),
        progress=not args.json,
    )
    if args.json:
        facts = report.to_dict()
        results = {
            str(k): {"agreement": report.agreement[k], "error": report.error[k], "bytes": report.pack.bytes[str(k)]}
            for k in report.agreement
        }
        print_json({
            "net": args.net, "out": str(args.out), "images": report.images, "held_out": report.held_out,
            "results": results, "pack": facts["pack"],
        })  # fmt: skip
    else:
        print(report)
        print_next("run", args.out, "photo.jpg")
    return 0


def chosen_preprocessing(args: argparse.Namespace, known: Preprocessing | None) -> Preprocessing:
    """What the network says of itself, and what the options say instead."""
    size = args.size or (known.size if known else None)
    if size is None:
        raise AnyprecError(f"the input size of {args.net} is not known; give it with --size, such as --size 224")
    return Preprocessing(
        mean=numbers(args.mean, "--mean") or (known.mean if known else PHOTO_MEAN),
        std=numbers(args.std, "--std") or (known.std if known else PHOTO_STD),
        size=size,
        to=args.resize or (known.to if known and not args.size else None),
        filter=args.filter or (known.filter if known else "bilinear"),
    )


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise AnyprecError(f"{option} {text!r} is not numbers with commas, such as 0.5,0.5,0.5") from error
