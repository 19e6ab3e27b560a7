"""`anyprec import CHECKPOINT --out FILE.pt`: weights made elsewhere in, an anyprec model checkpoint out.

Reads checkpoints of the paper's released code (all is inferred), and float weights of textbook CIFAR ResNets
or of any network of the zoo (`--net`). Verb module of anyprec.cli.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from anyprec.errors import AnyprecError, CheckpointError
from anyprec.nn.switching import widths_of
from anyprec.widths import DEFAULT_WIDTHS, FLOAT, parse_widths
from anyprec.zoo.reference import find_layout, from_reference, indices
from anyprec.zoo.registry import ZOO, build
from anyprec.zoo.weights import load_float, read_state_dict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a file written by torch.save")
    parser.add_argument("--out", metavar="FILE.pt", type=Path, required=True, help="where the model goes")
    parser.add_argument("--net", metavar="NAME", help="network of a file of float weights, where it cannot be told")
    parser.add_argument(
        "--widths",
        metavar="LIST",
        help="widths for a file of float weights (default: 1,2,4,8,32), such as 1-8,32",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    from anyprec.training.checkpoint import save_model

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


def from_float(state: Mapping[str, Tensor], net: str | None, widths: tuple[int, ...]) -> nn.Module:
    """A zoo network with these float weights; which one is told from the names where `net` does not say."""
    name, options = infer_net(state) if net is None else (net, {})
    kernels = [value.shape[1] for value in state.values() if value.dim() == 4]
    classes = [value.shape[0] for value in state.values() if value.dim() == 2]
    if not kernels or not classes:
        raise CheckpointError("the file has no convolution or no linear layer; expected the weights of a zoo network")
    model = build(name, widths=widths, in_channels=kernels[0], num_classes=classes[-1], **options)
    load_float(model, state)
    return model.eval()


def infer_net(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """A textbook CIFAR ResNet by its names; its depth by the number of blocks in a stage."""
    if not {"conv1.weight", "layer3.0.bn2.weight", "linear.weight"} <= set(state):
        shown = ", ".join(list(state)[:3])
        raise CheckpointError(
            f"cannot tell the network of these {len(state)} tensors ({shown}, ...); expected a checkpoint of "
            "the reference code, or float weights of a textbook CIFAR ResNet (conv1, layer1.0.conv1, ..., "
            "linear); name another network of the zoo with --net"
        )
    depth = 2 + 6 * len(indices({name: tuple(value.shape) for name, value in state.items()}, r"layer3\.(\d+)\."))
    name = f"resnet{depth}-he"
    return (name, {}) if name in ZOO else ("resnet-he", {"depth": depth})


def report(model: nn.Module, args: argparse.Namespace, reference: bool) -> None:
    options = {key: value for key, value in model.zoo_options.items() if key != "widths"}  # type: ignore[union-attr, operator]
    record = {
        "network": model.zoo_name,
        "widths": list(widths_of(model)),
        "options": options,
        "parameters": sum(p.numel() for p in model.parameters()),
        "source": "reference checkpoint" if reference else "float weights",
        "out": str(args.out),
    }
    if args.json:
        print(json.dumps(record))
        return
    print(f"network     {record['network']}  ({ZOO[str(model.zoo_name)].about})")
    print("widths     ", ", ".join(map(str, widths_of(model))))
    print("options    ", ", ".join(f"{key}={value}" for key, value in options.items()))
    print(f"parameters  {record['parameters']:,}")
    print(f"saved       {args.out}  (from {record['source']})")
    if not reference and any(k != FLOAT for k in widths_of(model)):
        print("Float weights run at 32 bits as they are; calibrate or train the model for the other widths.")
