"""`anyprec ptq RUN --method bs,bc,aciq,gptq --data DIR`: quantize a float model without training; print accuracies.

RUN is a run folder or checkpoint of ours that has a float width, or float weights of a network of the zoo. With
`--out` each model that a checkpoint can hold (all but aciq) is saved for `evaluate` and `pack`. The work: methods.py.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyprec.arguments import positive
from anyprec.choices import NESTING_QUANTIZERS, PTQ_METHODS
from anyprec.cli.output import print_json
from anyprec.errors import RecipeError
from anyprec.files import locked, make_folder, write_text
from anyprec.preprocessing import Preprocessing
from anyprec.progress import Progress
from anyprec.widths import FLOAT, parse_widths

if TYPE_CHECKING:
    from torch import nn

    from anyprec.training.recipe import Recipe

EXAMPLE = "anyprec ptq runs/digits --method bc --widths 1-8 --out runs/ptq"

Results = dict[int | str, dict[str, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="RUN", help="a run folder or checkpoint (.pt) with a float width, or a file of float weights"
    )
    parser.add_argument(
        "--method", action="append", metavar="NAME",
        help=f"{', '.join(PTQ_METHODS)}, or several with commas (default: all)",
    )  # fmt: skip
    parser.add_argument("--widths", default="1-8", metavar="BITS", help="for example 1,2,4,8 (default: 1-8)")
    parser.add_argument("--data", metavar="DIR", help="folder that holds the data set (the embedded digits need none)")
    parser.add_argument("--dataset", metavar="NAME", help="the data set (default: the one of the model's recipe)")
    parser.add_argument("--net", metavar="NAME", help="network of a file of float weights, if its names do not tell")
    parser.add_argument(
        "--normalization", choices=("dataset", "imagenet"),
        help="mean and deviation of pixels that a file of float weights expects (default: those of the data set)",
    )  # fmt: skip
    parser.add_argument(
        "--quantizer", choices=NESTING_QUANTIZERS, default="lsq", help="grid of bs and bc (default: lsq, linear)"
    )
    parser.add_argument(
        "--images", type=positive, default=512, metavar="N", help="training images to use (default: 512)"
    )
    parser.add_argument(
        "--tune-steps", type=int, default=100, metavar="N", help="of gptq, for each width that needs it (default: 100)"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="test on this many images (default: all)")
    parser.add_argument(
        "--batch-size", type=positive, default=500, metavar="N", help="images per test batch (default: 500)"
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, mps, ... (default: cpu)")
    parser.add_argument("--out", metavar="DIR", help="save results in DIR, and models as DIR/bs, DIR/bc, DIR/gptq")
    parser.add_argument("--overwrite", action="store_true", help="replace what --out holds")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from anyprec.post_training.methods import integer_widths
    from anyprec.post_training.source import float_model
    from anyprec.training.processes import usable_device

    methods = parse_methods(args.method)
    widths = integer_widths(parse_widths(args.widths))
    source, recipe = float_model(args.model, args.net, args.dataset, args.normalization)
    source.to(usable_device(args.device))
    with locked(args.out) if args.out else nullcontext():
        return compare(args, methods, widths, source, recipe)


def compare(
    args: argparse.Namespace, methods: list[str], widths: tuple[int, ...], source: nn.Module, recipe: Recipe
) -> int:
    from anyprec.post_training.aciq import mean_bits
    from anyprec.post_training.gptq import GptqSettings
    from anyprec.post_training.methods import ptq
    from anyprec.post_training.source import kept_facts, training_batches
    from anyprec.training.evaluate import evaluate
    from anyprec.training.run import eval_augment, load_normalized

    training = load_normalized(recipe, "train", args.data, limit=args.images)
    test = load_normalized(recipe, "test", args.data, limit=args.limit)
    kept = kept_facts(args.model, training, test, recipe)
    how = Preprocessing.from_dict(kept["preprocessing"])
    loader = training_batches(training, recipe, args.device, how)
    at_once = min(args.batch_size, recipe.eval_batch_size) if test.task == "segmentation" else args.batch_size
    settings = GptqSettings(tune_steps=args.tune_steps)
    out = open_folder(args.out, methods, args.overwrite)

    def tested(model: nn.Module, settings: tuple[int, ...]) -> Results:
        return evaluate(
            model, test, settings, augment=eval_augment(recipe.augment), batch_size=at_once, device=args.device,
            progress=not args.json, preprocessing=how,
        )  # fmt: skip

    done: dict[str, Results] = {}
    spent: dict[str, Any] = {}
    with Progress("ptq", total=1 + len(methods), unit="network") if not args.json else nullcontext() as bar:
        plain = tested(source, (FLOAT,))[FLOAT]
        if bar is not None:
            bar.update()
        for method in methods:
            model = ptq(source, loader, method, widths, quantizer=args.quantizer, gptq=settings, progress=not args.json)
            done[method] = tested(model, widths)
            if method == "aciq":
                spent = {str(k): bits for k, bits in mean_bits(model).items() if k in widths}
            elif out is not None:
                accuracy = {**done[method], FLOAT: plain} if args.limit is None else {}
                save(model, out / method, recipe, method, args, accuracy, kept)
            if bar is not None:
                bar.update(method=method)
    record = {
        "model": str(args.model), "network": str(source.zoo_name), "dataset": recipe.data,
        "training_images": len(training), "test_images": len(test), "float": plain,
        "methods": {method: {str(k): v for k, v in results.items()} for method, results in done.items()},
        "aciq_mean_bits": spent,  # width -> of weights, of input channels
    }  # fmt: skip
    if out is not None:
        write_text(out / "ptq.json", json.dumps(record, indent=2) + "\n")
    if args.json:
        print_json(record)
    else:
        print(table(record))
    return 0


def parse_methods(given: list[str] | None) -> list[str]:
    from anyprec.post_training.methods import check_method

    methods = [name.strip() for text in given or [",".join(PTQ_METHODS)] for name in text.split(",")]
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
    from anyprec.training.checkpoint import save_model

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
        f"{record['network']} on {record['dataset']}: {'mIoU' if measure == 'miou' else 'accuracy'} in percent over "
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
