"""Whether the server holds its target with all levels of a file: a few loads, as the machine is; docs/results.md.

    python bench/serve_levels.py --data DIR --out levels.apm
    python bench/serve_targets.py levels.apm --data DIR --work build/serve_targets [--cores 0:1]
    python bench/serve_targets.py resnet50 --work build/serve_resnet50 --slice 60 --capacity 20 --cores 0:1
    python bench/serve_targets.py levels.apm --data DIR --batch 16 --slice 10 --capacity 25 --rounds 4 --cores 0:1

Target and C8 are found as in bench/serve.py, held at 8 bit. Then slices of seconds, policies in turn: "adaptive" has
all levels of the file, numbers are widths held. 8 bit is held in bursts only; 1 bit everywhere, since what that misses
the machine itself costs, and no policy could save it. least_points_lost is what a policy would lose that knows all
arrivals beforehand: with every answer in time, none loses less at the times measured. Held-out test images are sent:
every answer must be the file's own at the level that the server names. Interrupted, it goes on where it was. Writes
bench/results/serve_targets.csv.

"resnet50" has random weights, is sent noise, and stands for time alone. So that the policy has something to weigh, its
file has the accuracies of the paper's Table 1 (any-precision ResNet-50 on ImageNet), or with --accuracies those of a
model that comes with anyprec: 11.7 points from 8 to 1 bit, or 4 with cifar10-vgg.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import serve
from plans_cascades import held_out
from serve_results import grid_name, grid_row, seed_of, to_csv

import anyprec
from anyprec.bench import random_networks as graphs
from anyprec.format.file import write
from anyprec.loadtest import arrivals
from anyprec.loadtest.target import noise
from anyprec.progress import Progress
from anyprec.reproduce import paper

CELLS = "1@1,1.5@1,2@1,2.5@1,0.8@4"  # load / C8 @ CV^2
SENT = 2000  # images
NOISE = 64  # random ones
LONE = 60  # requests, one at a time, at each level
SLICE_S, ROUNDS = 5.0, 10
KEPT = (
    "load", "cv2", "policy", "slices", "requests", "misses", "attainment", "rejected", "late", "errors",
    "wrong_answers", "points_below_8_bit", "points_below_8_bit_error", "p50_ms", "p99_ms", "mean_batch",
    "generator_late_p99_ms",
)  # fmt: skip


class Targets(serve.Bench):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.options.append("--local-control")
        self.scale = replace(
            self.scale, slice_s=args.slice, rounds=args.rounds or ROUNDS, capacity_s=args.capacity, alone=100
        )
        serve.STOLEN_S = math.inf  # on a virtual machine some is always stolen: it is part of the machine as it is
        self.cells = [tuple(map(float, cell.split("@"))) for cell in args.cells.split(",")]
        self.policies = tuple(args.policies.split(","))
        self.minutes = args.minutes
        self.batch = args.batch
        self.begun = time.monotonic()

    def slice(self, name, policy, times, seed, plan=None, repeats=1):
        return super().slice(name, policy, times, seed, plan, min(repeats, 1))

    def in_cell(self, cv2: float) -> list[str]:
        """8 bit, held, is compared with in bursts only."""
        return [policy for policy in self.policies if policy != "8" or cv2 > 1]

    def images(self):
        if self.data is None:
            images = noise(self.target, NOISE)
            return images, self.packed(images, bits=8).argmax(1)
        data = held_out(self.data)
        return data.images[:SENT], np.asarray(data.labels)[:SENT]

    def levels(self) -> list[str]:
        return [str(name) for name in self.target.accuracy]

    def answers_of_the_file(self) -> dict[str, np.ndarray]:
        path = self.work / "file.npz"
        if not path.exists():
            found = {}
            self.packed.always_cascade = True
            for name in self.levels():
                parts = np.array_split(self.sent, max(1, len(self.sent) // 50))
                found[name] = np.concatenate([self.packed(part, bits=name) for part in parts]).argmax(1)
            np.savez(path, **found)
        with np.load(path) as kept:
            return {name: kept[name] for name in kept}

    def grid(self) -> None:
        with Progress(
            "cells", total=self.scale.rounds * sum(len(self.in_cell(cv2)) for _, cv2 in self.cells), unit="slice"
        ) as bar:
            for turn in range(self.scale.rounds):
                for number, (load, cv2) in enumerate(self.cells):
                    seed = seed_of(turn, number)
                    times = arrivals.gamma(load * self.facts["c8"], cv2, self.scale.slice_s, seed)
                    for policy in self.in_cell(cv2):
                        if time.monotonic() - self.begun > 60 * self.minutes:
                            raise SystemExit("its time is up; run it again for the rest")
                        self.slice(grid_name(load, cv2, policy, turn), policy, times, seed)
                        bar.update()
                self.keep_table()

    def times(self) -> None:
        """Seconds of one request alone at each level, HTTP and all."""
        if "alone_s" not in self.facts:
            outcomes = {name: self.alone(f"alone-{name}", [level_of(name)], LONE) for name in self.levels()}
            self.keep(alone_s={name: float(np.nanmedian(one.done - one.sent)) for name, one in outcomes.items()})

    def rows(self, own: dict[str, np.ndarray]) -> list[dict[str, object]]:
        found = []
        measured = self.measured(own)
        alone = self.facts.get("alone_s", {})
        best = self.target.accuracy["8"]
        costs = [(alone[name], best - self.target.accuracy[name]) for name in alone]
        for load, cv2 in self.cells:
            for policy in self.policies:
                parts = measured.slices(load, cv2, policy)
                if not parts:
                    continue
                row = grid_row(measured, load, cv2, policy, parts)
                whole = [name for part in parts for name in part.outcome.profile[part.outcome.profile != ""].tolist()]
                shares = {name: whole.count(name) / max(1, len(whole)) for name in own}
                expected = sum(share * self.target.accuracy[name] for name, share in shares.items())
                slo = self.facts["slo_s"]
                least = [least_lost(part.outcome.planned, costs, slo) for part in parts] if costs else [0.0]
                found.append(
                    {name: row[name] for name in KEPT}
                    | {"expected_accuracy": expected, "points_lost": best - expected}
                    | ({"least_points_lost": float(np.mean(least))} if alone else {})
                    | {f"share_{name}": share for name, share in shares.items() if share}
                )
        return found


def level_of(name: str) -> int | str:
    return int(name) if name.isdigit() else name


def least_lost(arrivals: np.ndarray, costs: list[tuple[float, float]], slo: float) -> float:
    """The least mean points lost by answers one after the other, in order, each within `slo` of its arrival.

    costs: seconds and points lost of each level. A request that cannot be in time takes the quickest level, and counts
    as that. Larger batches are left out: where they save no time per image, they gain nothing.
    """
    quickest = min(costs)
    front = [(0.0, 0.0)]  # when the engine is free, points lost so far: of those none is better in both
    for arrived in arrivals.tolist():
        found = []
        for free, lost in front:
            begin = max(free, arrived)
            found += [(begin + s, lost + points) for s, points in costs if begin + s <= arrived + slo]
        if not found:
            found = [(max(free, arrived) + quickest[0], lost + quickest[1]) for free, lost in front]
        front = []
        for free, lost in sorted(found):
            if not front or lost < front[-1][1] - 1e-9:
                front.append((free, lost))
    return min(lost for _, lost in front) / max(1, len(arrivals))


def made_resnet50(work: Path, accuracies_of: str | None) -> Path:
    path = work / f"resnet50-{accuracies_of or 'paper'}.apm"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        graph = graphs.resnet_graph(50)
        if accuracies_of:
            given = anyprec.load(accuracies_of)
            known = {profile.name: given.accuracy(profile.name) for profile in graph.profiles}
        else:
            _, accuracies = paper.TABLE1["ImageNet ResNet-50"]
            known = dict(zip(("1", "2", "4", "8"), accuracies, strict=False))
        profiles = tuple(replace(profile, accuracy=known[profile.name]) for profile in graph.profiles)
        write(replace(graph, profiles=profiles), path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model file, or resnet50")
    parser.add_argument("--accuracies", metavar="NAME", help="resnet50: the accuracies of this model (default: paper)")
    parser.add_argument("--data", help="of CIFAR-10; leave it out to send noise")
    parser.add_argument("--work", default="build/serve_targets", help="where slices are kept")
    parser.add_argument("--cells", default=CELLS, metavar="LOAD@CV2,...", help=f"loads, times C8 (default: {CELLS})")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="images in a request")
    parser.add_argument("--policies", default="adaptive,8,1", help="adaptive, or widths to hold")
    parser.add_argument("--slice", type=float, default=SLICE_S, metavar="S", help="seconds of each load")
    parser.add_argument("--rounds", type=int, help=f"slices of every cell (default: {ROUNDS})")
    parser.add_argument("--capacity", type=float, default=6.0, metavar="S", help="seconds of a load when C8 is sought")
    parser.add_argument("--minutes", type=float, default=60.0, help="then stop; run it again for the rest")
    parser.add_argument("--cores", metavar="SENDER:SERVER", help="cores of this process and of the server, such as 0:1")
    parser.add_argument("--only", default="capacity,times,grid", help="'': the table of what was measured")
    parser.add_argument("--serve", action="append", default=[], metavar="OPTION", help="of `anyprec serve`, as it is")
    parser.add_argument("--results", default=Path(__file__).parent / "results" / "serve_targets.csv", type=Path)
    args = parser.parse_args()
    args.quick, args.fresh, args.dataset = False, False, "held-out"
    if args.cores:
        sender, server = (int(core) for core in args.cores.split(":"))
        os.sched_setaffinity(0, {sender})
        serve.Server.cores = {server}
    if args.model == "resnet50":
        args.model = made_resnet50(Path(args.work), args.accuracies)
    bench = Targets(args)
    try:
        bench.find_target()
        bench.answers_of_the_file()
        for part in filter(None, args.only.split(",")):
            getattr(bench, part)()
    finally:
        bench.end()
        if hasattr(bench, "target"):
            rows = bench.rows(bench.answers_of_the_file())
            if rows:
                columns = list(dict.fromkeys(name for row in rows for name in row))
                to_csv(args.results, [{name: row.get(name, 0) for name in columns} for row in rows])
            for row in rows:
                print(
                    f"{row['load']:g} x C8, CV^2 {row['cv2']:g}, {row['policy']}: {row['misses']} of {row['requests']} "
                    f"missed ({row['rejected']} refused, {row['late']} late), {100 * row['attainment']:.3f} % in time, "
                    f"{row['points_lost']:.2f} points lost, {row['wrong_answers']} wrong; "
                    + " ".join(f"{k[6:]}:{100 * v:.0f}%" for k, v in row.items() if k.startswith("share_"))
                )


if __name__ == "__main__":
    main()
