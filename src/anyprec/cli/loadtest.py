"""`anyprec loadtest URL --arrivals poisson:200 --seconds 30 --slo 20ms`: put a server under load, say how it fared.

A table, --json, and with --out a folder of report.json, timeline.csv, requests.csv and load.png. Called by anyprec.cli.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import sys
from pathlib import Path

import numpy as np

from anyprec.arguments import duration, seed, span, whole
from anyprec.cli.output import print_json
from anyprec.errors import AnyprecError, LoadTestError
from anyprec.files import raise_file_limit
from anyprec.loadtest import arrivals, report
from anyprec.loadtest.client import LoadPlan
from anyprec.loadtest.outcome import LoadOutcome
from anyprec.loadtest.processes import send_from_processes
from anyprec.loadtest.target import OUTPUT_DTYPES, Target, find, fit_images, messages, noise
from anyprec.progress import Progress

EXAMPLE = "anyprec loadtest http://127.0.0.1:8000 --arrivals poisson:200 --seconds 30 --slo 20ms"

CONNECTIONS = whole(1, 1_000_000)
NOISE = 64  # random images where none are given
MOST_IMAGES = 10_000
MOST_BYTES = 256 << 20  # of requests made beforehand


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="address of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="model to load (default: the only one)")
    parser.add_argument(
        "--arrivals",
        default="poisson:100",
        metavar="FORM",
        help="poisson:200, gamma:200:4 (rate, CV^2), uniform:200, steps:100@10,400@5, ramp:50:400, "
        "trace:FILE[:INTERVAL] (default: poisson:100)",
    )
    parser.add_argument("--seconds", type=span, metavar="TIME", help="duration (default: 30s; steps define their own)")
    parser.add_argument("--slo", type=duration, default=0.05, metavar="TIME", help="the latency target (default: 50ms)")
    parser.add_argument(
        "--deadline", type=duration, metavar="TIME", help="deadline sent to the server (default: the target)"
    )
    parser.add_argument("--images", metavar="FILE.npy", help="images to send (default: noise)")
    parser.add_argument("--dataset", metavar="NAME", help="send this data set's test images and check the answers")
    parser.add_argument("--data", metavar="DIR", help="folder that holds the data set")
    parser.add_argument(
        "--batch", type=whole(1, 65_536), default=1, metavar="N", help="images in a request (default: 1)"
    )
    parser.add_argument("--bits", metavar="BITS", help="ask for this width or profile in every request")
    parser.add_argument("--min-bits", type=whole(1, 32), metavar="BITS", help="allow no narrower width")
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="header to add to every request, such as a key",
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of the arrivals (default: 0)")
    parser.add_argument(
        "--processes", type=whole(1, 1024), default=1, metavar="N", help="sending processes (default: 1)"
    )
    parser.add_argument("--real-time", action="store_true", help="send with real-time priority (Linux, root)")
    parser.add_argument(
        "--connections", type=CONNECTIONS, default=4, metavar="N", help="connections opened at the start (default: 4)"
    )
    parser.add_argument(
        "--limit", type=CONNECTIONS, default=4096, metavar="N", help="maximum number of connections (default: 4096)"
    )
    parser.add_argument(
        "--timeout", type=duration, default=10.0, metavar="TIME", help="longest wait for an answer (default: 10s)"
    )
    parser.add_argument("--out", metavar="DIR", help="write report.json, timeline.csv, requests.csv, load.png there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    slo_s, seconds = args.slo, load_seconds(args)
    times = arrivals.parse(args.arrivals, seconds, args.seed)
    if not len(times):
        raise AnyprecError(f"--arrivals {args.arrivals} for {seconds:g} s is no request at all; give more of either")
    headers = dict(header(text) for text in args.header)
    target = find(args.url, args.model, headers)
    images, labels = pictures_of(args, target, len(times))
    plan = LoadPlan(
        target.host,
        target.port,
        messages(
            target,
            images,
            batch=args.batch,
            deadline_ms=1e3 * (args.deadline or slo_s),
            bits=args.bits if args.bits is None or not args.bits.isdigit() else int(args.bits),
            min_bits=args.min_bits,
            headers=headers,
        ),
        timeout_s=args.timeout,
        connections=args.connections,
        limit=args.limit,
        keep_outputs=labels is not None,
        real_time=args.real_time,
    )
    raise_file_limit(plan.limit)
    outcome = shown(plan, times, args.processes, seconds)
    right = None if labels is None else report.correct_answers(outcome, labels, OUTPUT_DTYPES[target.output_datatype])
    summary = report.summarize(outcome, slo_s, seconds, images=args.batch, right=right, expected=target.accuracy)
    about = {
        "url": args.url,
        "model": target.model,
        "arrivals": args.arrivals,
        "seed": args.seed,
        "bits_asked": args.bits,
    }
    if args.out:
        rows = report.timeline(outcome, slo_s, seconds, right=right, expected=target.accuracy)
        report.write(Path(args.out), summary, rows, outcome, right, about)
        draw(rows, summary, f"{target.model}, {args.arrivals}", Path(args.out) / "load.png")
    if args.json:
        print_json({**about, **summary.record()})
    else:
        print(report.table(summary))
    return 0 if summary.answered else 1


def pictures_of(args: argparse.Namespace, target: Target, needed: int) -> tuple[np.ndarray, np.ndarray | None]:
    """What is sent, in the model's form, and the right answers, (requests, images), where they are known."""
    if args.images and args.dataset:
        raise AnyprecError(f"got both --images {args.images} and --dataset {args.dataset}; give one of them")
    if args.dataset:
        from anyprec.data import ArrayData, load_data

        data = load_data(args.dataset, "test", args.data)
        if not isinstance(data, ArrayData):
            raise AnyprecError(f"--dataset {args.dataset} is not held in memory as images of one size; give --images")
        if target.output_datatype not in OUTPUT_DTYPES:
            raise LoadTestError(f"model {target.model} answers {target.output_datatype}, which holds no classes")
        images, labels = data.images, data.labels
    else:
        labels = None
        images = read_images(Path(args.images)) if args.images else noise(target, args.batch * min(NOISE, needed))
    count = requests_of(images, args.batch, needed) * args.batch
    if labels is not None:
        labels = np.asarray(labels[:count]).reshape(-1, args.batch)
    return fit_images(images[:count], target), labels


def requests_of(images: np.ndarray, batch: int, needed: int) -> int:
    """How many different requests are made of these images: at most as many as `needed`, and as memory allows."""
    if len(images) < batch:
        raise AnyprecError(f"--batch {batch} with {len(images)} images; give at least {batch} images, or a smaller one")
    most = max(1, MOST_BYTES // (batch * max(1, int(images[0].nbytes))))
    return min(len(images) // batch, needed, max(1, MOST_IMAGES // batch), most)


def read_images(path: Path) -> np.ndarray:
    try:
        images: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise LoadTestError(
            f"{path} cannot be read as an array ({error}); save images (N, ...) with numpy.save"
        ) from error
    if images.ndim < 2 or not len(images):
        raise LoadTestError(f"{path} has shape {images.shape}; give at least one image, (N, ...)")
    return images


def shown(plan: LoadPlan, times: np.ndarray, processes: int, seconds: float) -> LoadOutcome:
    """The load, with a bar that counts its seconds."""
    whole = math.ceil(seconds)
    with Progress("load", total=whole, unit="s") as progress:
        outcome = send_from_processes(
            plan, times, processes, lambda now: progress.update(max(0, min(int(now), whole) - progress.done))
        )
        progress.update(whole - progress.done)
    return outcome


def draw(rows: list[dict[str, float | None]], summary: report.Summary, title: str, path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print(f"anyprec: note: {path} needs Matplotlib: pip install 'anyprec[report]'", file=sys.stderr)
        return
    from anyprec.loadtest.plots import draw as draw_load

    draw_load(rows, summary.slo_ms, f"{title}: {100 * summary.attainment:.2f} % in time", path)


# --- What the user typed -----------------------------------------------------------------------------------------


def load_seconds(args: argparse.Namespace) -> float:
    kind, _, rest = args.arrivals.partition(":")
    if kind != "steps":
        return args.seconds or 30.0
    if args.seconds:
        raise AnyprecError("--seconds is not for steps, which say how long each lasts: steps:100@10,400@5")
    try:
        return sum(arrivals.step(part)[1] for part in rest.split(":")[0].split(","))
    except ValueError:
        return 1.0  # arrivals.parse says what is wrong with it


def header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or "\n" in value or "\r" in value:
        raise AnyprecError(f"--header {text!r} is not a header; write 'Name: value'")
    return name, value.strip()
