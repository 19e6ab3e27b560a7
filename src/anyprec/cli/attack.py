"""`anyprec attack RUN`: accuracy at each width on images made to fool each width. The work is attack.py's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anyprec.arguments import real, seed, whole
from anyprec.choices import ATTACK_SCALES, ATTACKS
from anyprec.cli.model_arguments import add_model_arguments
from anyprec.cli.output import print_json
from anyprec.errors import AnyprecError, DataError
from anyprec.widths import FLOAT, parse_widths

if TYPE_CHECKING:
    from torch import nn

    from anyprec.analysis.attack import Attack, Robustness

EXAMPLE = "anyprec attack runs/digits --attack pgd --steps 10"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--widths", metavar="BITS", help="to attack and to defend with, such as 1,2,4,8,32 (default: all it has)"
    )
    parser.add_argument("--attack", choices=ATTACKS, default="fgsm", help="default: fgsm")
    parser.add_argument("--epsilon", type=real, metavar="E", help="largest change of a value (default: 0.007)")
    parser.add_argument(
        "--scale",
        choices=ATTACK_SCALES,
        default="input",
        help="unit of epsilon: the normalized input (default), or x/255",
    )
    parser.add_argument("--steps", type=whole(1, 1_000_000), metavar="N", help="steps of pgd (default: 10)")
    parser.add_argument(
        "--step-size",
        type=real,
        metavar="E",
        help="step size of pgd, in the unit of epsilon (default: 2.5 epsilon / steps)",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="seed of random starts and of the random defense (default: 0)"
    )
    parser.add_argument("--all-widths", action="store_true", help="also attack all widths at once")
    parser.add_argument(
        "--dedicated",
        action="append",
        default=[],
        metavar="RUN",
        help="also attack this model of one width; may be repeated",
    )
    parser.add_argument("--split", choices=("test", "train"), default="test", help="of the data set (default: test)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from anyprec.analysis.attack import attack_dedicated, attack_matrix
    from anyprec.data import ArrayData, FileData, load_data
    from anyprec.training.checkpoint import load_model
    from anyprec.training.processes import usable_device
    from anyprec.training.run import eval_augment
    from anyprec.training.trained_run import checkpoint_of, preprocessing_for, recipe_of

    attack = attack_of(args)
    path = checkpoint_of(args.model)
    recipe = recipe_of(path, args.dataset)
    model = load_model(path).to(usable_device(args.device))
    models = dedicated_models(args.dedicated, args.device)
    data = load_data(recipe.data, args.split, args.data, limit=args.limit)
    if not isinstance(data, (ArrayData, FileData)):
        raise DataError(f"{data.name} has no label for a whole image; attacks are for classification")
    options: dict[str, Any] = {
        "augment": eval_augment(recipe.augment), "preprocessing": preprocessing_for(path, data),
        "batch_size": args.batch_size, "device": args.device, "progress": not args.json,
    }  # fmt: skip
    widths = parse_widths(args.widths) if args.widths else None
    found = attack_matrix(model, data, widths, attack, attack_all=args.all_widths, **options)
    dedicated = attack_dedicated(models, data, attack, **options)
    if args.json:
        record = {"model": str(path), "dataset": data.name, "split": args.split, **found.to_dict()}
        if dedicated:
            record["dedicated"] = {str(k): row for k, row in dedicated.items()}
        print_json(record)
    else:
        print(f"{found.images:,} {args.split} images of {data.name}; {described(attack)}; accuracy in %")
        print(matrix_table(found, dedicated))
    return 0


def attack_of(args: argparse.Namespace) -> Attack:
    from anyprec.analysis.attack import Attack

    for name in ("steps", "step_size"):
        if getattr(args, name) is not None and args.attack == "fgsm":
            option = "--" + name.replace("_", "-")
            raise AnyprecError(f"{option} goes with --attack pgd; fgsm takes one step of epsilon")
    given = {name: getattr(args, name) for name in ("epsilon", "steps", "step_size") if getattr(args, name) is not None}
    return Attack(args.attack, scale=args.scale, seed=args.seed, **given)


def dedicated_models(paths: list[str], device: str) -> dict[int, nn.Module]:
    """bits -> model, each of one width."""
    from anyprec.nn.switching import widths_of
    from anyprec.training.checkpoint import load_model
    from anyprec.training.trained_run import checkpoint_of

    models: dict[int, nn.Module] = {}
    for path in paths:
        model = load_model(checkpoint_of(path)).to(device)
        widths = widths_of(model)
        if len(widths) != 1:
            has = ", ".join(map(str, widths))
            raise AnyprecError(f"--dedicated {path} has the widths {has}; give a model trained for one width")
        if widths[0] in models:
            raise AnyprecError(f"--dedicated {path} is the second model of {widths[0]} bit; give one a width")
        models[widths[0]] = model
    return dict(sorted(models.items()))


def described(attack: Attack) -> str:
    of = "the normalized input" if attack.scale == "input" else "x/255"
    how = f"{attack.kind.upper()}, epsilon {attack.epsilon:g} of {of}"
    return how if attack.kind == "fgsm" else f"{how}, {attack.steps} steps of {attack.step:g}"


def matrix_table(found: Robustness, dedicated: Mapping[int, Mapping[str, float]]) -> str:
    """A row for every attacked width, a column for every defending one."""
    from anyprec.analysis.attack import ALL

    columns = list(found.clean)
    extra = [k for k in dedicated if k not in columns]
    heads = [*columns, *extra]
    rows: list[tuple[str, Mapping[int | str, float]]] = [("no attack", found.clean)]
    rows += [("all widths" if a == ALL else f"attack on {shown(a)}", row) for a, row in found.matrix.items()]
    if dedicated:
        rows.append(("dedicated", {k: row["clean"] for k, row in dedicated.items()}))
        rows.append(("dedicated, attacked", {k: row["attacked"] for k, row in dedicated.items()}))
    width = max(len(name) for name, _ in rows)
    lines = [" " * width + "".join(f"{shown(head):>8}" for head in heads)]
    for name, row in rows:
        lines.append(f"{name:<{width}}" + "".join(f"{row[h]:>8.2f}" if h in row else " " * 8 for h in heads).rstrip())
    return "\n".join(lines)


def shown(width: int | str) -> str:
    return "float" if width == FLOAT else str(width)
