"""`anyprec evaluate MODEL`: accuracy at each width. MODEL is a run folder or a model.pt; the work is evaluate.py's."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyprec.arguments import positive
from anyprec.data import DATASETS, FileData, load_data
from anyprec.data.catalog import Data
from anyprec.data.confusion import Counts, class_iou
from anyprec.data.loader import check_channels_fit
from anyprec.errors import AnyprecError, DataError, RecipeError
from anyprec.files import locked
from anyprec.nn.switching import Setting
from anyprec.preprocessing import Preprocessing
from anyprec.training.checkpoint import load_model, load_record, preprocessing_in, save_state
from anyprec.training.evaluate import accuracy_table, evaluate
from anyprec.training.processes import usable_device
from anyprec.training.recipe import Recipe
from anyprec.training.run import eval_augment
from anyprec.widths import Profile, parse_widths
from anyprec.zoo import ZOO


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--widths", help="for example 1,2,4,8,32 or 1-8 (default: all it has)")
    parser.add_argument("--profile", action="append", default=[], metavar="FILE", help="also this mixed profile (JSON)")
    parser.add_argument("--split", choices=("test", "train"), default="test")
    parser.add_argument("--save", action="store_true", help="note the accuracies in the model, for `pack` to hand on")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What `evaluate` and `calibrate` share: a model and the data it was trained on."""
    parser.add_argument("model", help="a run folder of `anyprec train`, or a model file (.pt)")
    parser.add_argument("--data", metavar="DIR", help="folder that holds the data set (the embedded digits need none)")
    parser.add_argument("--dataset", help="name of the data set (default: the one of the model's recipe)")
    parser.add_argument("--limit", type=positive, help="use this many images (default: all)")
    parser.add_argument("--batch-size", type=positive, default=500, help="default: 500; for masks at most the recipe's")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps, ... (default: cpu)")


def model_file(path: str) -> Path:
    return Path(path) / "model.pt" if Path(path).is_dir() else Path(path)


def recipe_of(path: Path, dataset: str | None) -> Recipe:
    """The recipe a model was trained by; `dataset` replaces its data, and is needed where there is no recipe."""
    record = load_record(path)["extra"].get("recipe")
    if record is None:
        if dataset is None:
            raise RecipeError(f"{path} does not say which data set it is for; name it with --dataset, such as cifar10")
        if dataset not in DATASETS:
            raise RecipeError(f"--dataset {dataset!r} is not known; choose one of {', '.join(DATASETS)}")
        record = {"net": "", "data": dataset, "augment": DATASETS[dataset].augment}
    return Recipe.from_dict({**record, "data": dataset or record["data"]})


def preprocessing_for(path: Path, data: Data) -> Preprocessing | None:
    """What the model was trained on is done to `data` too; None, from before that was kept: what `data` usually gets.

    Refuses data the network cannot take, and other classes than those it was trained for.
    """
    record = load_record(path)
    check_fits(record, data)
    classes = record.get("extra", {}).get("classes")
    if classes is not None and list(data.classes) != classes:
        names, others = (", ".join(map(str, some[:3])) for some in (classes, data.classes))
        raise DataError(
            f"{path} was trained for the {len(classes)} classes {names}, ..., {data.name} has {len(data.classes)}: "
            f"{others}, ...; name a data set with the same classes"
        )
    return preprocessing_in(record, path)


def check_fits(record: Mapping[str, Any], data: Data) -> None:
    """Photographs can be made gray, so a gray network takes them in testing."""
    known = ZOO.get(record.get("net") or "")
    if known is None or (isinstance(data, FileData) and record.get("extra", {}).get("preprocessing")):
        return
    check_channels_fit(data, record["net_options"].get("in_channels", known.shape[2]))


def sized_as_trained(data: Data, record: dict[str, Any], path: Path) -> Data:
    """Photographs of another folder, brought to the side the network was trained at; for training batches."""
    how = preprocessing_in(record, path)
    if isinstance(data, FileData) and how is not None and how.size is not None:
        data.size = how.size[0]
    return data


def class_record(matrix: Counts | None, data: Data) -> dict[str, Any]:
    """{"iou": {class: percent, or None where it does not occur}}, of masks."""
    if matrix is None:
        return {}
    ious = zip(data.classes, class_iou(matrix).tolist(), strict=True)
    return {"iou": {name: None if math.isnan(iou) else iou for name, iou in ious}}


def note(path: Path, results: Mapping[int | str, Mapping[str, float]]) -> None:
    """Put the results of uniform widths beside those the training ended with."""
    with locked(path.parent):
        record = load_record(path)
        tested = {str(bits): dict(result) for bits, result in results.items() if isinstance(bits, int)}
        record["extra"] = {**record["extra"], "test": {**record["extra"].get("test", {}), **tested}}
        save_state(record, path)


def run(args: argparse.Namespace) -> int:
    path = model_file(args.model)
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
        note(path, results)
    if args.json:
        print(json.dumps({str(k): {**v, **class_record(confusions.get(k), data)} for k, v in results.items()}))
    else:
        print(accuracy_table(results))
    return 0
