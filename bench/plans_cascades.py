"""Plans per layer and cascades of a shipped model on CIFAR-10, against uniform widths: docs/results.md.

    python bench/plans_cascades.py search  --data DIR --out runs/plans   # plans from 500 held-out images
    python bench/plans_cascades.py outputs --data DIR --out runs/plans   # outputs on 5,000 of them
    python bench/plans_cascades.py time    --data DIR --out runs/plans   # under a minute; on a quiet machine
    python bench/plans_cascades.py cascade --data DIR --out runs/plans   # thresholds
    python bench/plans_cascades.py time-cascades --data DIR --out runs/plans   # on a quiet machine
    python bench/plans_cascades.py test    --data DIR --out runs/plans   # the other 5,000, once; the tables

The model was trained on all training images, so one half of the test set is held out: everything is chosen on it,
before `test` looks at the other half. Writes bench/results/plans_MODEL.csv and cascades_MODEL.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from anyprec.cascade.answering import answer
from anyprec.cascade.calibrate import Measured, best_cascade, curve, thinned
from anyprec.cascade.cascade import Cascade
from anyprec.data import load_data
from anyprec.data.catalog import balanced_subset, hold_out
from anyprec.errors import CascadeError
from anyprec.format.file import read, write
from anyprec.models.catalog import card, find
from anyprec.run.model import load
from anyprec.search import PlanLayers, SearchSettings, add_profile, search
from anyprec.search.cost import call_times

RESULTS = Path(__file__).parent / "results"
HELD_OUT, SEARCHED = 5000, 500
UNIFORM = ("1", "2", "3", "4", "8")
MOST = 10  # plans of a front that are kept
BATCHES = (1, 16)  # images a call, for the times of cascades
TURN = 48  # images in a row
BYTES = tuple(f"bytes-plan-{i}" for i in (0, 1, 2, 5, 6, 8))  # tested; the others are near one of the other front
DROP = 0.1  # points that a cascade may lose against 8 bit on the held-out images, to lose at most 0.2 on others


def halves(folder):
    """The test set in two: images for the figures of `test`, and images to choose by."""
    return hold_out(load_data("cifar10", "test", folder), HELD_OUT)


def held_out(folder):
    return halves(folder)[1]


def outputs(model, images, profile, batch=64):
    return np.concatenate([model(images[i : i + batch], bits=profile) for i in range(0, len(images), batch)])


def stored_outputs(args, out, split, data, names):
    """Outputs of these profiles, each kept in a file: after args.minutes it stops, and goes on when it is run again."""
    folder = out / split
    folder.mkdir(exist_ok=True)
    begun = time.process_time()
    with load(out / "plans.apm", layout="NHWC") as model:
        for name in names:
            if (folder / f"{name}.npy").exists():
                continue
            if time.process_time() - begun > 60 * args.minutes:
                raise SystemExit(f"{name} and what follows are left; run it again")
            np.save(folder / f"{name}.npy", outputs(model, data.images, name))
    np.save(folder / "labels.npy", data.labels)
    return {name: np.load(folder / f"{name}.npy") for name in names}


def search_plans(args, out):
    """Two fronts, by time and by bytes, cheaper than 4 bit; each plan a profile of plans.apm, added to those there."""
    data = balanced_subset(held_out(args.data), SEARCHED)
    made = (out / "plans.apm").exists()
    graph = read(out / "plans.apm" if made else find(args.model))
    records = json.loads((out / "plans.json").read_text()) if made else {}
    for cost in args.cost:
        with load(find(args.model)) as model:
            settings = SearchSettings(cost=cost, evaluations=args.evaluations, random=12, seconds=10.0)
            layers = PlanLayers(graph)
            result = search(model, layers, data.images, data.labels, settings)
        plans = [p for p in result.front("plan", "uniform") if p.kind == "plan"]
        four = next(p for p in result.points if p.plan == layers.uniform(4))
        plans = [p for p in plans if p.cost(cost) <= four.cost(cost)]
        plans = [plans[i] for i in np.unique(np.linspace(0, len(plans) - 1, min(MOST, len(plans))).astype(int))]
        drawn = [p for p in result.points if p.kind == "random"]
        for kind, points in (("plan", plans), ("random", drawn)):
            for number, point in enumerate(points):
                name = f"{cost}-{kind}-{number}"
                graph = add_profile(PlanLayers(graph), name, point.plan, result.rows[point.plan])
                records[name] = {"kind": kind, "cost": cost, "bits": point.plan, "bytes": point.bytes,
                                 "loss": point.loss, "searched": point.accuracy}  # fmt: skip
        for point in (p for p in result.points if p.kind == "uniform"):
            records[str(point.plan[0])] = {"kind": "uniform", "cost": "", "bits": point.plan, "bytes": point.bytes,
                                           "loss": point.loss, "searched": point.accuracy}  # fmt: skip
        (out / f"search_{cost}.json").write_text(json.dumps(result.record(), indent=1))
    write(graph, out / "plans.apm")
    (out / "plans.json").write_text(json.dumps(records, indent=1))
    print(f"{len(records)} profiles in {out / 'plans.apm'}")


def held_out_outputs(args, out):
    """Outputs of the widths and of plans that are candidates for a first stage, on all held-out images."""
    data = held_out(args.data)
    records = json.loads((out / "plans.json").read_text())
    names = [*UNIFORM, *(name for name in records if name.startswith("latency-plan"))]
    stored_outputs(args, out, "held_out", data, names)


def measure_times(args, out):
    """Every profile in turn, batch 1, one thread."""
    records = json.loads((out / "plans.json").read_text())
    names = [name for name, r in records.items() if r["kind"] != "random" or r["cost"] == "latency"]
    images = balanced_subset(held_out(args.data), 400).images
    with load(out / "plans.apm", layout="NHWC") as model:
        times = dict(zip(names, call_times(model, names, images[:1], seconds=args.seconds, threads=1), strict=True))
        steps = {}
        for bits in ("1", "8"):
            for step in model.steps(images[:1], bits, repeat=200):
                steps.setdefault(bits, {})[step.op] = 1e3 * step.seconds
        isa = model.isa
    (out / "times.json").write_text(json.dumps({"isa": isa, "ms": times, "steps": steps}, indent=1))


def choose_cascades(args, out):
    """By the times of `time`, on the held-out images; each in a file of its own."""
    times = json.loads((out / "times.json").read_text())["ms"]
    chosen = chosen_cascades(read_held_out(out, times))
    for name, (cascade, point) in chosen.items():
        print(name, [s.profile for s in cascade.stages], f"{point.share:.3f} {point.ms:.3f} ms {point.accuracy:.2f}")
        write(replace(read(out / "plans.apm"), cascade=cascade.text()), out / f"{name}.apm")
    (out / "cascades.json").write_text(json.dumps({n: c.text() for n, (c, _) in chosen.items()}, indent=1))


def time_cascades(args, out):
    """Each over single images, in turn with its stages and 8 bit."""
    cascades = json.loads((out / "cascades.json").read_text())
    images = balanced_subset(held_out(args.data), 1920).images
    each = args.seconds / len(cascades) / len(BATCHES)
    walls = {
        name: {str(batch): call_means(out / f"{name}.apm", images, batch, each) for batch in BATCHES}
        for name in cascades
    }
    (out / "walls.json").write_text(json.dumps(walls, indent=1))


def call_means(path, images, batch, seconds):
    """Milliseconds an image of whole calls: the cascade with its own threshold, each stage alone, and 8 bit.

    The mean over the images of a turn, and the median over turns: a cascade has slow and fast images, and the machine
    has slow turns.
    """
    with load(path, layout="NHWC") as model:
        model.always_cascade = True  # the check at the first call is not part of it
        names = list(dict.fromkeys(["auto", *(stage.profile for stage in model.cascade.stages), "8"]))
        for name in names:
            model(images[:batch], bits=name)  # prepares weights
        spent = {name: [] for name in names}
        end = time.perf_counter() + seconds
        for first in range(0, len(images), TURN):  # by turns: each finds its own weights in the caches, as in service
            if time.perf_counter() > end and first:
                break
            for name in names:
                model(images[first : first + batch], bits=name)  # its weights come back to the caches
                start = time.perf_counter()
                for at in range(first, first + TURN, batch):
                    model(images[at : at + batch], bits=name)
                spent[name].append(1e3 * (time.perf_counter() - start) / TURN)
    return {name: float(np.median(found)) for name, found in spent.items()}


def read_held_out(out, times):
    made = {path.stem: np.load(path) for path in sorted((out / "held_out").glob("*.npy"))}
    labels = made.pop("labels")
    return Measured(made, {name: times[name] for name in made}, "8", labels)


def chosen_cascades(found):
    """Pairs of uniform widths, and the best plan before 8 bit: at 8 bit's accuracy minus DROP, those that reach it."""
    wanted = 100 * float((found.outputs["8"].argmax(1) == found.labels).mean()) - DROP
    widths = Measured(
        {n: found.outputs[n] for n in UNIFORM}, {n: found.ms[n] for n in UNIFORM}, found.widest, found.labels
    )
    pairs = {"cascade-1-8": ("1", "8"), "cascade-1-4": ("1", "4"), "cascade-plan-8": None}
    chosen = {}
    for name, pair in pairs.items():
        try:
            chosen[name] = best_cascade(widths if pair else found, accuracy=wanted, stages=pair or ())[:2]
        except CascadeError as error:
            print(f"{name}: {error}")
    return chosen


class StoredPasses:
    """Outputs that are known already, instead of runs."""

    def __init__(self, made):
        self.made = made

    def begin(self, profile):
        return [self.made[profile].copy()]

    def go_on(self, rows, profile):
        return [self.made[profile][rows]]


def test(args, out):
    """The half of the test set that was not held out, once, for everything that was chosen; the two tables."""
    data = halves(args.data)[0]
    if args.limit:
        data = data.take(np.arange(args.limit))
    records = json.loads((out / "plans.json").read_text())
    times = json.loads((out / "times.json").read_text())["ms"]
    cascades = json.loads((out / "cascades.json").read_text())
    walls = json.loads((out / "walls.json").read_text())
    stages = {s["profile"] for text in cascades.values() for s in json.loads(text)["stages"]} | {"8"}
    plans = [name for name, r in records.items() if r["kind"] == "plan" and (r["cost"] == "latency" or name in BYTES)]
    made = stored_outputs(args, out, "test", data, list(dict.fromkeys([*UNIFORM, *plans, *sorted(stages)])))
    accuracy = {name: 100 * float((y.argmax(1) == data.labels).mean()) for name, y in made.items()}
    rows = [
        {"profile": name, "kind": records[name]["kind"], "front": records[name]["cost"],
         "bits": " ".join(map(str, records[name]["bits"])), "ms": f"{times[name]:.4f}", "bytes": records[name]["bytes"],
         "loss": f"{records[name]['loss']:.5f}", "searched": f"{records[name]['searched']:.2f}",
         "accuracy": f"{accuracy[name]:.2f}", "model": card(args.model).sha256[:12]}
        for name in sorted(accuracy, key=times.__getitem__)
    ]  # fmt: skip
    write_csv(RESULTS / f"plans_{args.model}.csv", rows)
    rows = []
    for name, text in cascades.items():
        cascade = Cascade.from_text(text, list(made))
        test_found = Measured(made, times, "8", data.labels)

        y, stopped = answer(cascade, len(data), StoredPasses(made))
        first, last = cascade.stages
        share = float(stopped.mean())
        agreement, right = test_found.reached(y[0].argmax(1))
        rows.append(
            {"cascade": name, "first": first.profile, "last": last.profile, "threshold": f"{first.threshold:.4f}",
             "temperature": f"{first.temperature:.3f}", "held_out_share": f"{last.share:.4f}", "share": f"{share:.4f}",
             "agreement": f"{agreement:.2f}", "accuracy": f"{right:.2f}", "accuracy_8": f"{accuracy['8']:.2f}",
             "expected_ms": f"{times[first.profile] + share * times[last.profile]:.4f}", "ms_8": f"{times['8']:.4f}",
             **{f"ms_{what}_batch_{b}": f"{walls[name][str(b)][what]:.4f}" for b in BATCHES for what in ("auto", "8")}}
        )  # fmt: skip
    write_csv(RESULTS / f"cascades_{args.model}.csv", rows)
    rows = [
        {"threshold": f"{p.threshold:.4f}", "share": f"{p.share:.4f}", "agreement": f"{p.agreement:.2f}",
         "accuracy": f"{p.accuracy:.2f}", "ms": f"{p.ms:.4f}"}
        for p in thinned(curve(read_held_out(out, times), "1", "8", "margin")[1])
    ]  # fmt: skip
    write_csv(RESULTS / f"cascade_curve_{args.model}.csv", rows)


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(path.read_text())


STEPS = {
    "search": search_plans, "outputs": held_out_outputs, "time": measure_times, "cascade": choose_cascades,
    "time-cascades": time_cascades, "test": test,
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--model", default="cifar10-vgg")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--evaluations", type=int, default=120)
    parser.add_argument("--cost", type=lambda text: text.split(","), default=["latency", "bytes"])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--minutes", type=float, default=60.0, help="of CPU time; run it again for the rest")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    STEPS[args.step](args, args.out)


if __name__ == "__main__":
    main()
