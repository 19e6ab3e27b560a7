"""`anyprec quantize NET --images DIR --out net.apm`: a float network and pictures in, a model file for every width out.

The work is post_training/quantize.py's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from anyprec.arguments import positive, whole
from anyprec.choices import FIRST_LAST, PTQ_METHODS
from anyprec.cli.output import print_json, print_next
from anyprec.errors import AnyprecError
from anyprec.preprocessing import CHANNELS, FILTERS, Preprocessing
from anyprec.widths import parse_widths

EXAMPLE = "anyprec quantize mobilenetv1_100 --images photos --out mobilenet.apm"

PACKABLE = tuple(method for method in PTQ_METHODS if method != "aciq")
PHOTO_MEAN, PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("net", metavar="NET", help="ONNX file, timm name, or module:function (file.py:function)")
    parser.add_argument("--images", required=True, metavar="DIR", help="folder of pictures; no labels are needed")
    parser.add_argument("--out", required=True, metavar="MODEL.apm", help="the model file to write, such as net.apm")
    parser.add_argument("--widths", default="1-8", metavar="BITS", help="for example 2,4,8 (default: 1-8)")
    parser.add_argument("--method", choices=PACKABLE, default="gptq", help="of `anyprec ptq` (default: gptq)")
    parser.add_argument("--count", type=positive, default=512, metavar="N", help="pictures to look at (default: 512)")
    parser.add_argument(
        "--tune-steps",
        type=whole(0, 10**6),
        default=100,
        metavar="N",
        help="of gptq, for each width that needs it (default: 100)",
    )
    parser.add_argument("--weights", metavar="FILE", help="weights of a timm network (default: its pretrained ones)")
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
    from anyprec.onnx_import.network import OnnxNetwork
    from anyprec.post_training.gptq import GptqSettings
    from anyprec.post_training.named_network import named_network
    from anyprec.post_training.quantize import check_output, network_name, preprocessing_of_timm, quantize

    widths = parse_widths(args.widths)
    labels = read_labels(args.labels) if args.labels else None
    given = numbers(args.mean, "--mean"), numbers(args.std, "--std")
    check_output(Path(args.out))
    size = (args.size, args.size) if args.size else None
    net, how = named_network(args.net, size=size, weights=args.weights)
    how = how or preprocessing_of_timm(net)
    shape = net.input_shapes[0] if isinstance(net, OnnxNetwork) else None
    chosen = chosen_preprocessing(args, given, how, shape)
    assumed = how is None and None in given
    report = quantize(
        net,
        args.images,
        args.out,
        widths=widths,
        method=args.method,
        preprocessing=chosen,
        labels=labels,
        name=network_name(args.net),
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
            "preprocessing": chosen.to_dict(), "normalization_assumed": assumed, "results": results,
            "pack": facts["pack"],
        })  # fmt: skip
    else:
        print(report)
        if assumed:
            print(f"  {args.net} does not say how pictures are normalized: as for ImageNet; else give --mean and --std")
        print_next("run", args.out, "photo.jpg")
    return 0


def chosen_preprocessing(
    args: argparse.Namespace,
    given: tuple[tuple[float, ...] | None, tuple[float, ...] | None],
    known: Preprocessing | None,
    shape: tuple[int, ...] | None,
) -> Preprocessing:
    """What the network says of itself, and what the options say instead. shape: (C, H, W) of an ONNX file."""
    if shape is not None and (len(shape) != 3 or shape[0] not in CHANNELS):
        sizes = ", ".join(map(str, shape))
        raise AnyprecError(f"{args.net} takes (N, {sizes}), and a picture is (N, 3, H, W) or (N, 1, H, W); in Python: "
                           "anyprec.quantize with tensors")  # fmt: skip
    size: Any = args.size or (known.size if known else shape[1:] if shape else None)
    if size is None:
        raise AnyprecError(f"the input size of {args.net} is not known; give it with --size, such as --size 224")
    mean, std = given
    if shape is not None and shape[0] == 1 and (mean is None or std is None):
        raise AnyprecError(f"{args.net} takes gray pictures; give --mean and --std, a number each, such as 0.5")
    mean = mean or (known.mean if known else PHOTO_MEAN)
    if shape is not None and len(mean) != shape[0]:
        raise AnyprecError(f"--mean has {len(mean)} numbers, {args.net} takes {shape[0]} channels; give one for each")
    return Preprocessing(
        mean=mean,
        std=std or (known.std if known else PHOTO_STD),
        size=size,
        to=args.resize or (known.to if known and not args.size else None),
        filter=args.filter or (known.filter if known else "bilinear"),
    )


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise AnyprecError(f"{option} {text!r} is not numbers with commas, such as 0.5,0.5,0.5") from error
