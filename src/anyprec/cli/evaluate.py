"""`anyprec evaluate RUN`: accuracy at each width. RUN is a run folder or a checkpoint; the work is evaluate.py's."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from anyprec.cli.model_arguments import add_model_arguments
from anyprec.cli.output import print_json
from anyprec.errors import AnyprecError
from anyprec.widths import Profile, parse_widths

if TYPE_CHECKING:
    from anyprec.data.catalog import Data
    from anyprec.data.confusion import Counts
    from anyprec.nn.switching import Setting

EXAMPLE = "anyprec evaluate runs/digits --widths 1-8,32"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--widths", metavar="BITS", help="for example 1,2,4,8,32 or 1-8 (default: all it has)")
    parser.add_argument(
        "--profile", action="append", default=[], metavar="FILE.json", help="also this mixed profile; may be repeated"
    )
    parser.add_argument("--split", choices=("test", "train"), default="test", help="of the data set (default: test)")
    parser.add_argument(
        "--save", action="store_true", help="store the accuracies in the checkpoint, from where `pack` copies them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from anyprec.data import load_data
    from anyprec.training.checkpoint import load_model
    from anyprec.training.evaluate import accuracy_table, evaluate
    from anyprec.training.processes import usable_device
    from anyprec.training.run import eval_augment
    from anyprec.training.trained_run import checkpoint_of, note_accuracy, preprocessing_for, recipe_of

    path = checkpoint_of(args.model)
    recipe = recipe_of(path, args.dataset)
    if args.save and (args.split != "test" or args.limit):
        raise AnyprecError("--save notes the accuracy on the whole test set; leave out --split and --limit")
    model = load_model(path).to(usable_device(args.device))
    data = load_data(recipe.data, args.split, args.data, limit=args.limit)
    profiles = [Profile.load(p) for p in args.profile]
    widths = parse_widths(args.widths) if args.widths else ()
    settings: list[Setting] | None = [*widths, *profiles] or None
    confusions: dict[int | str, Counts] = {}
    results = evaluate(
        model, data, settings, augment=eval_augment(recipe.augment), preprocessing=preprocessing_for(path, data),
        batch_size=min(args.batch_size, recipe.eval_batch_size) if data.task == "segmentation" else args.batch_size,
        device=args.device, progress=not args.json, confusions=confusions,
    )  # fmt: skip
    if args.save:
        note_accuracy(path, results)
    if args.json:
        by_width = {str(k): {**v, **class_record(confusions.get(k), data)} for k, v in results.items()}
        about = {"model": str(path), "dataset": data.name, "split": args.split, "images": len(data)}
        print_json({**about, "results": by_width})
    else:
        print(accuracy_table(results))
    return 0


def class_record(matrix: Counts | None, data: Data) -> dict[str, Any]:
    """{"iou": {class: percent, or None where it does not occur}}, of masks."""
    from anyprec.data.confusion import class_iou

    if matrix is None:
        return {}
    ious = zip(data.classes, class_iou(matrix).tolist(), strict=True)
    return {"iou": {name: None if math.isnan(iou) else iou for name, iou in ious}}
