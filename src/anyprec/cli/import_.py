"""`anyprec import CHECKPOINT --out FILE.pt`: weights made elsewhere in, an anyprec model checkpoint out.

Reads checkpoints of the paper's released code (all is inferred), and float weights of textbook CIFAR ResNets
or of any network of the zoo (`--net`). Verb module of anyprec.cli.
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
    parser.add_argument("checkpoint", metavar="CHECKPOINT.pth", type=Path, help="a file written by torch.save")
    parser.add_argument("--out", metavar="FILE.pt", type=Path, required=True, help="where the model goes")
    parser.add_argument("--net", metavar="NAME", help="network of a file of float weights, where it cannot be told")
    parser.add_argument(
        "--widths",
        metavar="BITS",
        help="widths for a file of float weights (default: 1,2,4,8,32), such as 1-8,32",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
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
