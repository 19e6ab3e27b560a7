"""`anyprec calibrate RUN --widths 3,5,6,7`: norms for widths not trained. The work is calibrate.py's."""

from __future__ import annotations

import argparse
from pathlib import Path

from anyprec.arguments import positive
from anyprec.cli.model_arguments import add_model_arguments
from anyprec.cli.output import print_json
from anyprec.files import locked
from anyprec.widths import Profile, parse_widths

EXAMPLE = "anyprec calibrate runs/digits --widths 3,5-7"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--widths", default="3,5-7", metavar="BITS", help="default: 3,5-7")
    parser.add_argument(
        "--profile", action="append", default=[], metavar="FILE.json", help="also this mixed profile; may be repeated"
    )
    parser.add_argument(
        "--batches", type=positive, default=20, metavar="N", help="training batches to use (default: 20)"
    )
    parser.add_argument("--out", metavar="FILE.pt", help="write the model here (default: back into RUN)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line")


def run(args: argparse.Namespace) -> int:
    from anyprec.data import batches, load_data
    from anyprec.nn.calibrate import calibrate
    from anyprec.nn.switching import widths_of
    from anyprec.training.checkpoint import load_model, load_record, preprocessing_in, save_model
    from anyprec.training.evaluate import to_tensor
    from anyprec.training.processes import usable_device
    from anyprec.training.trained_run import as_trained, check_fits, checkpoint_of, recipe_of

    path = checkpoint_of(args.model)
    recipe = recipe_of(path, args.dataset)
    record = load_record(path)
    model = load_model(path).to(usable_device(args.device))
    data = load_data(recipe.data, "train", args.data, limit=args.limit)
    check_fits(record, data)
    data = as_trained(data, preprocessing_in(record, path))
    most = recipe.batch_size if data.task == "segmentation" else len(data)
    size = min(args.batch_size, most, len(data))
    source = batches(data, size, augment=recipe.augment, train=True, seed=recipe.seed)
    loader = [to_tensor(images, args.device) for _, (images, _) in zip(range(args.batches), source, strict=False)]
    profiles = [Profile.load(p) for p in args.profile]
    calibrate(model, loader, parse_widths(args.widths), profiles=profiles, progress=not args.json)
    out = Path(args.out or path)
    with locked(out.parent):
        save_model(model, out, record["extra"])
    widths, names = list(widths_of(model)), [p.name for p in profiles]
    if args.json:
        print_json({"model": str(path), "out": str(out), "widths": widths, "profiles": names})
    else:
        print(f"{out} now has widths {', '.join(map(str, widths))}")
    return 0
