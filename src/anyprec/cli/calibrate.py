"""`anyprec calibrate MODEL --widths 3,5,6,7`: norms for widths not trained. The work is calibrate.py's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from anyprec.arguments import positive
from anyprec.cli.evaluate import add_model_arguments, check_fits, model_file, recipe_of, sized_as_trained
from anyprec.data import batches, load_data
from anyprec.files import locked
from anyprec.nn.calibrate import calibrate
from anyprec.nn.switching import widths_of
from anyprec.training.checkpoint import load_model, load_record, save_model
from anyprec.training.evaluate import to_tensor
from anyprec.training.processes import usable_device
from anyprec.widths import Profile, parse_widths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--widths", default="3,5-7", help="default: 3,5-7")
    parser.add_argument("--profile", action="append", default=[], metavar="FILE", help="also this mixed profile (JSON)")
    parser.add_argument("--batches", type=positive, default=20, help="training batches to look at (default: 20)")
    parser.add_argument("--out", metavar="FILE", help="write the model here (default: back into MODEL)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    path = model_file(args.model)
    recipe = recipe_of(path, args.dataset)
    record = load_record(path)
    model = load_model(path).to(usable_device(args.device))
    data = load_data(recipe.data, "train", args.data, limit=args.limit)
    check_fits(record, data)
    sized_as_trained(data, record, path)
    most = recipe.batch_size if data.task == "segmentation" else len(data)
    size = min(args.batch_size, most, len(data))
    source = batches(data, size, augment=recipe.augment, train=True, seed=recipe.seed)
    loader = [to_tensor(images, args.device) for _, (images, _) in zip(range(args.batches), source, strict=False)]
    profiles = [Profile.load(p) for p in args.profile]
    calibrate(model, loader, parse_widths(args.widths), profiles=profiles, progress=not args.json)
    out = Path(args.out or path)
    with locked(out.parent):
        save_model(model, out, record["extra"])
    done = {"model": str(out), "widths": list(widths_of(model)), "profiles": [p.name for p in profiles]}
    print(json.dumps(done) if args.json else f"{out} now has widths {', '.join(map(str, done['widths']))}")
    return 0
