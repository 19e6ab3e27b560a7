"""`anyprec search MODEL IMAGES...`: bits per layer. Prints the Pareto front, and stores the plan that was asked for.

The work is done by search/. Called by anyprec.cli.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from anyprec.arguments import duration, positive, real, seed, size, whole
from anyprec.cli.calibration_images import add_image_arguments, calibration_images
from anyprec.cli.output import print_json
from anyprec.cli.plot_file import check_picture
from anyprec.cli.tables import table
from anyprec.data import load_data
from anyprec.errors import AnyprecError
from anyprec.files import make_folder
from anyprec.format.file import read, write
from anyprec.models.catalog import find
from anyprec.progress import Progress
from anyprec.run.accuracy import measure
from anyprec.run.model import PackedModel, load
from anyprec.search.layers import PlanLayers
from anyprec.search.search import COSTS, PlanPoint, SearchResult, SearchSettings, search
from anyprec.search.store import add_profile, check_name
from anyprec.search.tables import Rows
from anyprec.search.trial import PlanTrial
from anyprec.widths import Profile

EXAMPLE = "anyprec search cifar10-vgg photos/ --latency 0.8ms --out fast.apm --name fast"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL.apm", help="a model file (.apm) of `anyprec pack`, or a name of `anyprec models`"
    )
    add_image_arguments(parser, 500)
    limits = parser.add_argument_group("which plan of the front is stored")
    limits.add_argument("--latency", type=duration, metavar="TIME", help="the most accurate within this time an image")
    limits.add_argument("--bytes", type=size, metavar="SIZE", help="the most accurate that reads at most so many bytes")
    limits.add_argument("--accuracy", type=real, metavar="PERCENT", help="the cheapest of this accuracy (--dataset)")
    limits.add_argument(
        "--agreement", type=real, metavar="PERCENT", help="the cheapest that agrees so often with the widest"
    )
    limits.add_argument("--profile", metavar="FILE.json", help="this plan, without a search")
    parser.add_argument("--out", metavar="FILE.apm", help="write the model with the plan here; may be MODEL.apm itself")
    parser.add_argument("--name", metavar="NAME", help="name of the new profile (default: plan)")
    parser.add_argument("--test", action="store_true", help="note its accuracy on the test images of --dataset")
    parser.add_argument("--cost", choices=COSTS, help="what the front trades loss against (default: latency)")
    parser.add_argument(
        "--batch", type=positive, default=1, metavar="N", help="images per call when timed (default: 1)"
    )
    parser.add_argument("--threads", type=whole(1, 1024), default=1, metavar="N", help="threads per call (default: 1)")
    parser.add_argument(
        "--evaluations",
        type=positive,
        default=200,
        metavar="N",
        help="plans to try beside the sensitivities (default: 200)",
    )
    parser.add_argument(
        "--random", type=whole(0, 100), default=16, metavar="N", help="random plans beside (default: 16)"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the random plans (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--picture", metavar="FILE.png", help="also draw the front")


def run(args: argparse.Namespace) -> int:
    path = find(args.model)
    layers = PlanLayers(read(path))
    check_options(args, layers)
    with load(path, threads=args.threads) as model:
        given = calibration_images(args, model)
        if args.profile is not None:
            plan = layers.plan(Profile.load(args.profile))
            name = args.name or Profile.load(args.profile).name
            rows = PlanTrial(layers, given.images, threads=args.threads).rows(plan)
            record: dict[str, Any] = {"model": str(args.model), "images": len(given.images)}
            return finish(args, layers, name, plan, rows, record)
        with Progress("search", unit="plan") as progress:
            result = search(model, layers, given.images, given.labels, settings_of(args), progress.update)
    record = {"model": str(args.model), **result.record()}
    if not args.json:
        print(front_table(result))
    if args.picture:
        from anyprec.search.plot import draw

        draw(result, layers.graph.name, args.picture)
    limited = {"latency_ms": None if args.latency is None else 1e3 * args.latency, "bytes": args.bytes}
    best = result.best(**limited, accuracy=args.accuracy, agreement=args.agreement) if chosen(args) else None
    if best is None:
        if args.json:
            print_json(record)
        return 0
    record["chosen"] = {"plan": dict(layers.named(best.plan)), "latency_ms": best.latency_ms, "bytes": best.bytes}
    if not args.json:
        print(f"\nchosen: {bits_text(best)}, {best.latency_ms:.3f} ms, {best.bytes:,} bytes, loss {best.loss:.4f}")
    return finish(args, layers, args.name or "plan", best.plan, result.rows[best.plan], record)


def chosen(args: argparse.Namespace) -> bool:
    return any(limit is not None for limit in (args.latency, args.bytes, args.accuracy, args.agreement))


def check_options(args: argparse.Namespace, layers: PlanLayers) -> None:
    """Mistakes are told before minutes of work."""
    if args.picture:
        check_picture(args.picture)
    if args.profile is not None and chosen(args):
        raise AnyprecError("--profile gives the plan itself; leave out --latency, --bytes, --accuracy and --agreement")
    wants = args.profile is not None or chosen(args)
    if args.out is not None and not wants:
        raise AnyprecError(
            "--out stores one plan; say which with --latency, --bytes, --accuracy, --agreement or --profile"
        )
    if args.out is None and (args.name or args.test or args.profile):
        given = "--name" if args.name else "--test" if args.test else "--profile"
        raise AnyprecError(f"{given} goes with --out FILE.apm, the file that gets the plan; give it, too")
    if args.out is not None:
        make_folder(Path(args.out).parent)
    for option in ("accuracy", "agreement"):
        value = getattr(args, option)
        if value is not None and not 0 < value <= 100:
            raise AnyprecError(f"--{option} {value:g} is not a percentage; give more than 0 and at most 100")
    if args.accuracy is not None and args.dataset is None:
        raise AnyprecError("--accuracy needs labels; give --dataset NAME instead of images, or ask for an --agreement")
    if args.test and args.dataset is None:
        raise AnyprecError("--test needs the test images of a data set; give --dataset NAME")
    if args.latency is not None and args.bytes is not None:
        raise AnyprecError("--latency and --bytes are two fronts; give one of them")
    if args.profile is not None:
        layers.plan(Profile.load(args.profile))
    check_name(layers.file_graph, args.name or "plan")


def settings_of(args: argparse.Namespace) -> SearchSettings:
    cost = args.cost or ("bytes" if args.bytes is not None else "latency")
    return SearchSettings(
        cost=cost, batch=args.batch, threads=args.threads, evaluations=args.evaluations, random=args.random,
        seed=args.seed,
    )  # fmt: skip


def finish(
    args: argparse.Namespace, layers: PlanLayers, name: str, plan: tuple[int, ...], rows: Rows, record: dict[str, Any]
) -> int:
    """Writes the file, where one is wanted, and says so."""
    if args.out is not None:
        made = add_profile(layers, name, plan, rows)
        write(made, args.out)
        record |= {"out": str(args.out), "profile": name}
        if args.test:
            with load(args.out, threads=args.threads) as model:
                record["test_accuracy"] = test_accuracy(args, model, name)
            last = replace(made.profiles[-1], accuracy=record["test_accuracy"])
            write(replace(made, profiles=(*made.profiles[:-1], last)), args.out)
        if not args.json:
            noted = f", {record['test_accuracy']:.2f} % of the test images right" if args.test else ""
            print(f"{args.out} has the profile {name!r}{noted}; run it with bits={name!r} (--bits {name})")
    if args.json:
        print_json(record)
    return 0


def test_accuracy(args: argparse.Namespace, model: PackedModel, name: str) -> float:
    data = load_data(args.dataset, "test", args.data)
    return round(measure(model, data, [name], batch=16, progress=not args.json)[0].accuracy, 2)


def bits_text(point: PlanPoint) -> str:
    """'2 bit', or the bits of every layer: '4 2 1 1 8'."""
    if len(set(point.plan)) == 1:
        return f"{point.plan[0]} bit"
    return " ".join(map(str, point.plan))


def front_table(result: SearchResult) -> str:
    """The front, then the uniform widths, then the random plans that come nearest to the front."""
    has_labels = result.points[0].accuracy is not None
    rows = [["", "bits", "ms", "kB", "loss", "agrees %", *(["right %"] if has_labels else [])]]

    def add(title: str, points: list[PlanPoint]) -> None:
        for point in points:
            right = [] if point.accuracy is None else [f"{point.accuracy:.2f}"]
            cells = [
                f"{point.latency_ms:.3f}",
                f"{point.bytes / 1e3:.1f}",
                f"{point.loss:.4f}",
                f"{point.agreement:.2f}",
            ]
            rows.append([title, bits_text(point), *cells, *right])
            title = ""

    add("front", result.front("plan", "uniform"))
    add("uniform", [p for p in result.points if p.kind == "uniform"])
    add("random", result.front("random"))
    names = ", ".join(layer.name for layer in result.layers.layers)
    head = (
        f"{result.layers.graph.name}: {result.evaluations} plans tried on {result.images} images; loss is "
        f"{'the KL divergence from' if result.loss == 'kl' else 'the squared error against'} "
        f"{result.layers.widths[-1]} bit"
    )
    return f"{head}\nlayers: {names}\n\n{table(rows, right=range(2, 7))}"
