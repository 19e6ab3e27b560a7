"""`anyprec ptq MODEL --method bs,bc,aciq --data DIR`: quantize a float model without training; a table of accuracies.

MODEL is a run folder or checkpoint of ours that has a float width, or float weights of a network of the zoo. With
`--out` each model that a checkpoint can hold (bs, bc) is saved for `evaluate` and `pack`. The work is methods.py's.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anyprec.arguments import positive
from anyprec.cli.evaluate import check_fits, model_file, preprocessing_for, recipe_of, sized_as_trained
from anyprec.cli.import_ import from_float
from anyprec.data import DATASETS, batches, load_data
from anyprec.data.catalog import Data
from anyprec.errors import CheckpointError, RecipeError, UncalibratedBits
from anyprec.files import locked, make_folder, write_text
from anyprec.nn.switching import widths_of
from anyprec.post_training.aciq import mean_bits
from anyprec.post_training.methods import METHODS, NESTING, check_method, integer_widths, ptq
from anyprec.preprocessing import Preprocessing
from anyprec.progress import Progress
from anyprec.training.checkpoint import load_model, load_state, save_model, training_facts
from anyprec.training.evaluate import evaluate, to_tensor
from anyprec.training.processes import usable_device
from anyprec.training.recipe import Recipe
from anyprec.training.run import eval_augment
from anyprec.widths import FLOAT, parse_widths
from anyprec.zoo.reference import find_layout, from_reference
from anyprec.zoo.weights import read_state_dict

SEEN_AT_ONCE = 128  # training images a batch

Results = dict[int | str, dict[str, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a run folder or checkpoint with a float width, or a file of float weights")
    parser.add_argument(
        "--method", action="append", metavar="NAME", help=f"{', '.join(METHODS)}, or several with commas (default: all)"
    )
    parser.add_argument("--widths", default="1-8", help="for example 1,2,4,8 (default: 1-8)")
    parser.add_argument("--data", metavar="DIR", help="folder that holds the data set (the embedded digits need none)")
    parser.add_argument("--dataset", help="name of the data set (default: the one of the model's recipe)")
    parser.add_argument("--net", metavar="NAME", help="network of a file of float weights, where it cannot be told")
    parser.add_argument("--quantizer", choices=NESTING, default="lsq", help="grid of bs and bc (default: lsq, linear)")
    parser.add_argument("--images", type=positive, default=512, help="training images to look at (default: 512)")
    parser.add_argument("--limit", type=positive, help="test on this many images (default: all)")
    parser.add_argument("--batch-size", type=positive, default=500, help="of testing (default: 500)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps, ... (default: cpu)")
    parser.add_argument("--out", metavar="DIR", help="save results in DIR, and models as DIR/bs and DIR/bc")
    parser.add_argument("--overwrite", action="store_true", help="replace what --out holds")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else on stdout")


def run(args: argparse.Namespace) -> int:
    methods = parse_methods(args.method)
    widths = integer_widths(parse_widths(args.widths))
    source, recipe = float_model(args.model, args.net, args.dataset)
    source.to(usable_device(args.device))
    with locked(args.out) if args.out else nullcontext():
        return compare(args, methods, widths, source, recipe)


def compare(
    args: argparse.Namespace, methods: list[str], widths: tuple[int, ...], source: nn.Module, recipe: Recipe
) -> int:
    training = load_data(recipe.data, "train", args.data, limit=args.images)
    test = load_data(recipe.data, "test", args.data, limit=args.limit)
    kept = kept_facts(args.model, training, test, recipe)
    loader = training_batches(training, recipe, args.device)
    at_once = min(args.batch_size, recipe.eval_batch_size) if test.task == "segmentation" else args.batch_size
    out = open_folder(args.out, methods, args.overwrite)

    def tested(model: nn.Module, settings: tuple[int, ...]) -> Results:
        return evaluate(
            model, test, settings, augment=eval_augment(recipe.augment), batch_size=at_once, device=args.device,
            progress=not args.json, preprocessing=Preprocessing.from_dict(kept["preprocessing"]),
        )  # fmt: skip

    done: dict[str, Results] = {}
    spent: dict[str, Any] = {}
    with Progress("ptq", total=1 + len(methods), unit="network") if not args.json else nullcontext() as bar:
        plain = tested(source, (FLOAT,))[FLOAT]
        if bar is not None:
            bar.update()
        for method in methods:
            model = ptq(source, loader, method, widths, quantizer=args.quantizer, progress=not args.json)
            done[method] = tested(model, widths)
            if method == "aciq":
                spent = {str(k): bits for k, bits in mean_bits(model).items() if k in widths}
            elif out is not None:
                accuracy = {**done[method], FLOAT: plain} if args.limit is None else {}
                save(model, out / method, recipe, method, args, accuracy, kept)
            if bar is not None:
                bar.update(method=method)
    record = {
        "model": str(args.model), "network": str(source.zoo_name), "data": recipe.data,
        "training_images": len(training), "test_images": len(test), "float": plain,
        "methods": {method: {str(k): v for k, v in results.items()} for method, results in done.items()},
        "aciq_mean_bits": spent,  # width -> of weights, of input channels
    }  # fmt: skip
    if out is not None:
        write_text(out / "ptq.json", json.dumps(record, indent=2) + "\n")
    print(json.dumps(record) if args.json else table(record))
    return 0


def parse_methods(given: list[str] | None) -> list[str]:
    methods = [name.strip() for text in given or [",".join(METHODS)] for name in text.split(",")]
    for method in methods:
        check_method(method)
    return list(dict.fromkeys(methods))


def open_folder(path: str | None, methods: list[str], overwrite: bool) -> Path | None:
    """Made before the work: an --out that cannot be written is better known now than after it."""
    if path is None:
        return None
    out = Path(path)
    held = [name for name in ("ptq.json", *(f"{method}/model.pt" for method in methods)) if (out / name).exists()]
    if held and not overwrite:
        raise RecipeError(f"{out} holds {held[0]} already; add --overwrite to replace it, or change --out")
    for method in methods:
        make_folder(out if method == "aciq" else out / method)
    return out


def float_model(path: str, net: str | None, dataset: str | None) -> tuple[nn.Module, Recipe]:
    """A model of the zoo that has a float width, and what is known of its data."""
    file = model_file(path)
    try:
        load_state(file)
    except CheckpointError:
        if not file.is_file():
            raise
        state = read_state_dict(file)
        model = from_float(state, net, (FLOAT,)) if find_layout(state) is None else from_reference(state)
        if dataset is None:
            raise RecipeError(
                f"{file} holds weights alone; name the data set they are for with --dataset, such as cifar10"
            ) from None
        if dataset not in DATASETS:
            raise RecipeError(f"--dataset {dataset!r} is not known; choose one of {', '.join(DATASETS)}") from None
        recipe = Recipe(net=str(model.zoo_name), data=dataset, augment=DATASETS[dataset].augment, widths=(FLOAT,))
        return model.eval(), recipe
    if net is not None:
        raise RecipeError(f"--net is for files of float weights; {file} says that of its network itself")
    model = load_model(file).eval()
    if FLOAT not in widths_of(model):
        raise UncalibratedBits(
            f"{file} has no float width, only {widths_of(model)}; give a model trained with 32 among its widths"
        )
    return model, recipe_of(file, dataset)


def kept_facts(path: str, training: Data, test: Data, recipe: Recipe) -> dict[str, Any]:
    """Preprocessing and classes of the source's own training; of weights alone, those of the data set named."""
    file = model_file(path)
    try:
        record = load_state(file)
    except CheckpointError:  # a file of float weights
        return training_facts(training, eval_augment(recipe.augment))
    how = preprocessing_for(file, test)
    facts = training_facts(training, eval_augment(recipe.augment))
    check_fits(record, training)
    sized_as_trained(training, record, file)
    return facts if how is None else {"preprocessing": how.to_dict(), "classes": list(training.classes)}


def training_batches(data: Any, recipe: Recipe, device: str) -> list[torch.Tensor]:
    """Augmented as in training: norms hold the statistics of such images, zero borders and all.

    ResNet-20 on CIFAR-10, calibrated at 8 bit: 92.1 % with random crops, 87.3 % without (float: 91.6 %).
    """
    most = recipe.batch_size if data.task == "segmentation" else SEEN_AT_ONCE
    size = len(data) // -(-len(data) // most)  # 300 images: 3 batches of 100
    source = batches(data, size, augment=recipe.augment, train=True, seed=recipe.seed)
    return [to_tensor(images, device) for images, _ in source]


def save(
    model: nn.Module,
    folder: Path,
    recipe: Recipe,
    method: str,
    args: argparse.Namespace,
    results: Results,
    kept: dict[str, Any],
) -> None:
    """A folder as `train` leaves one. The accuracy is kept if it is that of the whole test set."""
    extra = {
        "recipe": {**recipe.to_dict(), "net": str(model.zoo_name)},
        "test": {str(k): v for k, v in results.items()},
        **kept,
        "ptq": {"method": method, "source": Path(args.model).name, "images": args.images, "quantizer": args.quantizer},
    }
    save_model(model, folder / "model.pt", extra)


def table(record: dict[str, Any]) -> str:
    """Method by width, percent."""
    measure = "miou" if "miou" in record["float"] else "accuracy"
    widths = list(next(iter(record["methods"].values())))
    lines = [
        f"{record['network']} on {record['data']}: {'mIoU' if measure == 'miou' else 'accuracy'} in percent over "
        f"{record['test_images']} test images; {record['training_images']} training images seen",
        "method  " + "".join(f"{k:>8}" for k in (*widths, "float")),
    ]
    for method, results in record["methods"].items():
        figures = [*(results[k][measure] for k in widths), record["float"][measure]]
        lines.append(f"{method:<8}" + "".join(f"{figure:>8.2f}" for figure in figures))
    if spent := record["aciq_mean_bits"]:
        means = "".join(f"{f'{spent[k][0]:.1f}/{spent[k][1]:.1f}':>8}" for k in widths)
        lines.append(f"aciq spent these bits on average, weights/inputs:\n{'':<8}{means}")
    return "\n".join(lines)
