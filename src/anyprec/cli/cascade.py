"""`anyprec cascade MODEL IMAGES...`: calibrates bits="auto", few bits first and more for unsure inputs; stores it.

The work is done by cascade/calibrate.py. Called by anyprec.cli.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from anyprec.arguments import positive, real, whole
from anyprec.cascade.answering import PAYS
from anyprec.cascade.calibrate import CascadePoint, Measured, best_cascade, thinned
from anyprec.cascade.cascade import SCORES, Cascade
from anyprec.cli.calibration_images import add_image_arguments, calibration_images
from anyprec.cli.output import print_json
from anyprec.cli.plot_file import check_picture
from anyprec.cli.tables import table
from anyprec.data import load_data
from anyprec.errors import AnyprecError, CascadeError, UnsupportedBits
from anyprec.format.file import read, write
from anyprec.models.catalog import find
from anyprec.progress import Progress
from anyprec.run.accuracy import measure
from anyprec.run.model import PackedModel, load
from anyprec.search.cost import call_times
from anyprec.widths import FLOAT

EXAMPLE = "anyprec cascade cifar10-vgg photos/ --agreement 99 --out auto.apm"
BATCH = 32
DEFAULT_AGREEMENT = 99.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL.apm", help="a model file (.apm) of `anyprec pack`, or a name of `anyprec models`"
    )
    add_image_arguments(parser, 5000)
    parser.add_argument(
        "--agreement", type=real, metavar="PERCENT", help="how often to answer as the widest width (default: 99)"
    )
    parser.add_argument("--accuracy", type=real, metavar="PERCENT", help="the accuracy to reach instead (--dataset)")
    parser.add_argument(
        "--drop", type=real, metavar="POINTS", help="or that of the widest width, less so many points (--dataset)"
    )
    parser.add_argument(
        "--stages", metavar="FIRST,LAST", help="these two profiles (default: the best first one, then the widest width)"
    )
    parser.add_argument("--score", choices=SCORES, default="margin", help="how sure an answer is (default: margin)")
    parser.add_argument("--out", metavar="FILE.apm", help="write the model with its cascade here; may be MODEL.apm")
    parser.add_argument("--test", action="store_true", help="note its accuracy on the test images of --dataset")
    parser.add_argument(
        "--batch", type=positive, default=1, metavar="N", help="images per call when timed (default: 1)"
    )
    parser.add_argument("--threads", type=whole(1, 1024), default=1, metavar="N", help="threads per call (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--picture", metavar="FILE.png", help="also draw accuracy or agreement against time")


def run(args: argparse.Namespace) -> int:
    check_options(args)
    path = find(args.model)
    with load(path, threads=args.threads, layout="NHWC") as model:
        stages = chosen_stages(args.stages, model)
        given = calibration_images(args, model)
        found = measured(model, given.images, given.labels, stages, args.batch, args.json)
    accuracy = args.accuracy
    if args.drop is not None and found.labels is not None:
        accuracy = 100 * float((found.outputs[found.widest].argmax(1) == found.labels).mean()) - args.drop
    agreement = args.agreement if accuracy is not None or args.agreement is not None else DEFAULT_AGREEMENT
    cascade, point, points = best_cascade(
        found, agreement=agreement, accuracy=accuracy, stages=stages, score=args.score
    )
    saves = point.ms <= PAYS * found.ms[found.widest]
    record: dict[str, Any] = {
        "model": str(args.model), "images": len(given.images), "results": results(found), "widest": found.widest,
        "cascade": {"stages": [asdict(s) for s in cascade.stages], "score": cascade.score},
        "point": asdict(point), "saves_time": saves, "curve": [asdict(p) for p in thinned(points)],
    }  # fmt: skip
    if not args.json:
        print(text(found, cascade, point, thinned(points)))
    if args.picture:
        from anyprec.cascade.plot import draw

        draw(found, cascade, thinned(points), args.picture)
    if not saves:
        note = f"fewer bits save no time here: {point.ms:.3f} ms against {found.ms[found.widest]:.3f} ms"
        record["note"] = note
        if not args.json:
            print(f"note: {note}; bits='auto' stays at {cascade.last} bit on this machine")
    if args.out is not None:
        store(args, path, cascade, record)
    if args.json:
        print_json(record)
    return 0


def check_options(args: argparse.Namespace) -> None:
    wanted = [name for name in ("agreement", "accuracy", "drop") if getattr(args, name) is not None]
    if len(wanted) > 1:
        raise AnyprecError(f"--{wanted[0]} and --{wanted[1]} are two aims; give one of them")
    for name in ("agreement", "accuracy"):
        value = getattr(args, name)
        if value is not None and not 0 < value <= 100:
            raise AnyprecError(f"--{name} {value:g} is not a percentage; give more than 0 and at most 100")
    if args.drop is not None and not 0 <= args.drop < 100:
        raise AnyprecError(f"--drop {args.drop:g} is not a number of points; give 0 or more, such as 0.2")
    for name in ("accuracy", "drop", "test"):
        if getattr(args, name) not in (None, False) and args.dataset is None:
            raise AnyprecError(f"--{name} needs labels; give --dataset NAME instead of images")
    if args.test and args.out is None:
        raise AnyprecError("--test goes with --out FILE.apm, the file that notes the accuracy; give it, too")
    if args.picture:
        check_picture(args.picture)


def chosen_stages(text: str | None, model: PackedModel) -> list[str]:
    if text is None:
        return []
    names = [part.strip() for part in text.split(",")]
    if len(names) != 2 or names[0] == names[1]:
        raise CascadeError(f"--stages {text!r} is not two profiles; write for example 1,8")
    for name in names:
        if name not in model.profiles:
            raise UnsupportedBits(
                f"--stages: {name!r} is not in this model file, which has {', '.join(model.profiles)}"
            )
    if all(name.isdigit() for name in names) and int(names[0]) > int(names[1]):
        raise CascadeError(
            f"--stages {text!r}: the second one answers what the first is unsure of, so it needs more bits; write "
            f"{names[1]},{names[0]}"
        )
    return names


def measured(
    model: PackedModel,
    images: npt.NDArray[Any],
    labels: npt.NDArray[np.int64] | None,
    stages: list[str],
    batch: int,
    quiet: bool,
) -> Measured:
    """Outputs of every profile but float on every image, and times of a call."""
    if len(images) < batch:
        raise CascadeError(f"--batch {batch} needs as many images, and {len(images)} are given")
    names = [name for name in model.profiles if name != str(FLOAT)]
    widths = [name for name in names if name.isdigit()]
    widest = max(widths, key=int) if widths else names[-1]
    used = list(dict.fromkeys([*(stages or names), widest]))
    outputs = {}
    with Progress("cascade", total=len(used) * len(images), unit="img") as bar:
        for name in used:
            made = []
            for first in range(0, len(images), BATCH):
                y = model(images[first : first + BATCH], bits=name)
                y = y[0] if isinstance(y, tuple) else y
                if y.ndim != 2 or y.shape[1] < 2:
                    raise CascadeError(
                        f"{model.name} gives {y.shape[1:]} an image; a cascade needs one score a class to see how sure "
                        "an answer is"
                    )
                made.append(y)
                bar.update(len(y))
            outputs[name] = np.concatenate(made)
    times = call_times(model, used, images[:batch], seconds=3.0, threads=model.threads)
    return Measured(outputs, dict(zip(used, times, strict=True)), widest, labels)


def results(found: Measured) -> dict[str, Any]:
    made = {}
    for name, y in found.outputs.items():
        agreement, accuracy = found.reached(y.argmax(1))
        made[name] = {"latency_ms": found.ms[name], "agreement": agreement, "accuracy": accuracy}
    return made


def text(found: Measured, cascade: Cascade, point: CascadePoint, points: list[CascadePoint]) -> str:
    has_labels = found.labels is not None
    head = ["", "goes on %", "agrees %", *(["right %"] if has_labels else []), "ms"]

    def row(title: str, share: str, agreement: float, accuracy: float | None, ms: float) -> list[str]:
        right = [] if accuracy is None else [f"{accuracy:.2f}"]
        return [title, share, f"{agreement:.2f}", *right, f"{ms:.3f}"]

    rows = [head]
    for name, figures in results(found).items():
        title = f"{name} bit" if name.isdigit() else name
        rows.append(row(title, "", figures["agreement"], figures["accuracy"], figures["latency_ms"]))
    for p in points:
        rows.append(row(f"threshold {p.threshold:.3f}", f"{100 * p.share:.1f}", p.agreement, p.accuracy, p.ms))
    first, last = cascade.stages
    ratio = point.ms / found.ms[found.widest]
    return (
        f"{table(rows, right=range(1, 5))}\n\n{first.profile} bit first, {last.profile} bit for the "
        f"{100 * point.share:.1f} % with a {cascade.score} below {point.threshold:.3f}: {point.ms:.3f} ms, {ratio:.2f} "
        f"of {found.widest} bit"
    )


def store(args: argparse.Namespace, path: Any, cascade: Cascade, record: dict[str, Any]) -> None:
    graph = read(path)
    write(replace(graph, cascade=cascade.text()), args.out)
    record["out"] = str(args.out)
    noted = ""
    if args.test:
        with load(args.out, threads=args.threads) as model:
            data = load_data(args.dataset, "test", args.data)
            accuracy = round(measure(model, data, ["auto"], batch=16, progress=not args.json)[0].accuracy, 2)
        record["test_accuracy"] = accuracy
        write(replace(graph, cascade=replace(cascade, accuracy=accuracy).text()), args.out)
        noted = f", {accuracy:.2f} % of the test images right"
    if not args.json:
        print(f"{args.out} has the cascade{noted}; run it with bits='auto' (--bits auto)")
