"""`anyprec import FILE --out FILE.pt`: weights or a network made elsewhere in, an anyprec model checkpoint out.

Reads float ONNX networks (.onnx), checkpoints of the paper's released code (all is inferred), and float weights of
textbook CIFAR ResNets or of any network of the zoo (`--net`), by torch.save or as safetensors. Verb module of
anyprec.cli.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from anyprec.cli.output import print_json
from anyprec.errors import AnyprecError
from anyprec.widths import DEFAULT_WIDTHS, FLOAT, parse_widths

if TYPE_CHECKING:
    from torch import nn

EXAMPLE = "anyprec import resnet20.th --widths 1-8,32 --out resnet20.pt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="FILE", type=Path,
        help="a float ONNX network (.onnx), or weights: written by torch.save, or .safetensors",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE.pt", type=Path, required=True, help="checkpoint to write")
    parser.add_argument("--net", metavar="NAME", help="network of a file of float weights, if its names do not tell")
    parser.add_argument(
        "--widths",
        metavar="BITS",
        help="widths for an ONNX network or float weights (default: 1,2,4,8,32), such as 1-8,32",
    )
    parser.add_argument("--size", metavar="C,H,W", help="sizes of an ONNX network's input, where it leaves them free")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    if args.checkpoint.suffix.lower() == ".onnx":
        return run_onnx(args)
    if args.size:
        raise AnyprecError("--size is for ONNX networks")
    from anyprec.training.checkpoint import save_model
    from anyprec.zoo.float_weights import from_float
    from anyprec.zoo.reference import find_layout, from_reference
    from anyprec.zoo.weights import read_state_dict

    state = read_state_dict(args.checkpoint)
    reference = find_layout(state) is not None
    if reference:
        if args.widths or args.net:
            raise AnyprecError("--net and --widths are for float weights; a reference checkpoint brings its own")
        model = from_reference(state)
    else:
        widths = parse_widths(args.widths) if args.widths else DEFAULT_WIDTHS
        model = from_float(state, args.net, widths)
    save_model(model, args.out, extra={"imported_from": args.checkpoint.name})
    report(model, args, reference)
    return 0


def run_onnx(args: argparse.Namespace) -> int:
    """A network of its own: imported, checked, converted, and saved with its graph."""
    import torch

    from anyprec.nn.candidates import torch_kind
    from anyprec.nn.convert import convert
    from anyprec.nn.switching import any_layers
    from anyprec.onnx_import.importing import NET, describe, import_onnx
    from anyprec.training.checkpoint import save_model

    if args.net:
        raise AnyprecError("--net is for float weights; an ONNX file brings its network")
    net = import_onnx(args.checkpoint, input_shape=parse_shape(args.size))
    if len(net.input_shapes) > 1:
        raise AnyprecError(
            f"{args.checkpoint} has {len(net.input_shapes)} inputs; import it in Python: anyprec.import_onnx, convert"
        )
    widths = parse_widths(args.widths) if args.widths else DEFAULT_WIDTHS
    example = torch.randn((4, *net.input_shapes[0]), generator=torch.Generator().manual_seed(0))
    model = convert(net, widths, example)
    changed = any_layers(model)
    kept = [name for name, module in model.named_modules() if torch_kind(module) and name not in changed]
    model.zoo_name, model.zoo_options = NET, describe(net)  # type: ignore[assignment]
    model.zoo_conversion = {"widths": list(widths), "keep": kept}  # type: ignore[assignment]
    save_model(model, args.out, extra={"imported_from": args.checkpoint.name})
    found = net.imported
    record = {
        "checkpoint": str(args.checkpoint), "network": found.network, "widths": list(widths), "opset": found.opset,
        "nodes": found.nodes, "layers": found.layers, "any_precision_layers": len(changed),
        "parameters": found.parameters, "input": list(net.input_shapes[0]), "difference": found.difference,
        "compared_with": found.compared_with, "source": "ONNX network", "out": str(args.out),
    }  # fmt: skip
    if args.json:
        print_json(record)
        return 0
    print(f"network     {found.network}  (opset {found.opset}, {found.nodes} nodes)")
    print("input      ", "N x", " x ".join(map(str, net.input_shapes[0])))
    print("widths     ", ", ".join(map(str, widths)))
    print(f"layers      {found.layers} with weights, {len(changed)} of them any-precision")
    print(f"parameters  {found.parameters:,}")
    print(f"checked     largest difference {found.difference:.1e} of the largest output, by {found.compared_with}")
    print(f"saved       {args.out}")
    print("At 32 bits it is the network as it was; for other widths calibrate it on images, or train it.")
    return 0


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise AnyprecError(f"--size {text!r} is no shape; give the sizes without the batch, such as 3,224,224")
    return tuple(map(int, parts))


def report(model: nn.Module, args: argparse.Namespace, reference: bool) -> None:
    from anyprec.nn.switching import widths_of
    from anyprec.zoo.registry import ZOO

    options = {key: value for key, value in model.zoo_options.items() if key != "widths"}  # type: ignore[union-attr, operator]
    record = {
        "checkpoint": str(args.checkpoint),
        "network": model.zoo_name,
        "widths": list(widths_of(model)),
        "options": options,
        "parameters": sum(p.numel() for p in model.parameters()),
        "source": "reference checkpoint" if reference else "float weights",
        "out": str(args.out),
    }
    if args.json:
        print_json(record)
        return
    print(f"network     {record['network']}  ({ZOO[str(model.zoo_name)].about})")
    print("widths     ", ", ".join(map(str, widths_of(model))))
    print("options    ", ", ".join(f"{key}={value}" for key, value in options.items()))
    print(f"parameters  {record['parameters']:,}")
    print(f"saved       {args.out}  (from {record['source']})")
    if not reference and any(k != FLOAT for k in widths_of(model)):
        print("Float weights run at 32 bits as they are; calibrate or train the model for the other widths.")
