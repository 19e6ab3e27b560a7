"""What precision as the knob is worth in a server, measured on this machine: the tables of docs/results.md.

    python bench/serve.py NET.apm [--dataset cifar10 --data DIR] [--quick] [--work build/bench_serve] [--only grid,step]

Starts `anyprec serve` on loopback, sends it loads from this process, ends it. All numbers are ratios within one run:
target = 3 x the p50 of 8-bit requests alone, C8 = the highest Poisson load of which the server held at 8 bit answers
99 % within the target. Policies take turns in slices of seconds, so that what else the machine does hits all alike.
Slices are kept in --work: a run that was interrupted goes on where it was. serve_results.py makes tables and verdicts.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import serve_results
from serve_results import Measured, Slice, grid_name, seed_of, slice_path

import anyprec
from anyprec.bench import random_networks as graphs
from anyprec.data import ArrayData, load_data
from anyprec.format.file import write
from anyprec.loadtest import arrivals
from anyprec.loadtest.client import LoadPlan, send
from anyprec.loadtest.outcome import LoadOutcome
from anyprec.loadtest.target import OUTPUT_DTYPES, find, fit_images, messages, noise
from anyprec.progress import Progress

LOADS = (0.5, 0.8, 1.0, 1.5, 2.0)  # x C8
BURSTS = (1.0, 2.0, 4.0, 8.0)  # CV^2 of the gaps; 1 is Poisson
TARGET = 3.0  # x p50 of 8-bit batch 1
GOAL = 0.99  # share in time that defines C8
GROW = 1.25  # step of the search for C8, which then halves the last one so often:
HALVINGS = 4
# A slice is sent again, whatever came of it, if the machine stood still: the real-time generator itself was so late, or
STALLED_S = 0.005
STOLEN_S = 0.02  # the hypervisor gave so much of our cores' time to others. (Known in steps of 10 ms.)
REPEATS = 20  # at most, after longer and longer waits. What was sent first is kept: see serve_verdicts.csv
MOST_PAUSE_S = 20.0
PAUSE_S = 0.3  # between slices: the queue is empty and the policy changed
IMAGES = 10_000
PARTS = ("overhead", "switching", "capacity", "grid", "step")


@dataclass(frozen=True)
class Scale:
    loads: tuple[float, ...] = LOADS
    bursts: tuple[float, ...] = BURSTS
    slice_s: float = 4.0
    rounds: int = 8
    capacity_s: float = 6.0
    alone: int = 300  # requests, one at a time
    step_s: float = 8.0


QUICK = Scale(loads=(0.8, 2.0), bursts=(1.0, 4.0), slice_s=2.0, rounds=2, capacity_s=2.0, alone=100, step_s=2.0)


class Server:
    """`anyprec serve` as a child, on a port of its own."""

    cores: set[int] | None = None  # that it keeps to; None: any

    def __init__(self, model: Path, slo_s: float, log: Path, options: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "anyprec", "serve", f"net={model}", "--port", str(self.port)]
        self.log = open(log, "ab")  # noqa: SIM115
        self.child = subprocess.Popen(
            [*command, "--slo", f"{1e3 * slo_s:.4f}ms", *options], stdout=self.log, stderr=self.log
        )
        if self.cores is not None:
            os.sched_setaffinity(self.child.pid, self.cores)  # before it has started threads
        self.url = f"http://127.0.0.1:{self.port}"
        end = time.monotonic() + 120
        while not self.ready():
            if self.child.poll() is not None or time.monotonic() > end:
                self.stop()
                raise SystemExit(f"the server did not start; see {log}")
            time.sleep(0.1)

    def ready(self) -> bool:
        try:
            return self.ask("GET", "/v2/health/ready")[0] == 200
        except OSError:
            return False

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")
        finally:
            connection.close()

    def hold(self, policy: str) -> None:
        """ "adaptive", or a width to be held."""
        body = {"bits": int(policy)} if policy.isdigit() else {"policy": policy}
        status, said = self.ask("POST", "/v2/models/net/precision", body)
        if status != 200:
            raise SystemExit(f"the server did not take policy {policy}: {said}")

    def stats(self) -> dict[str, Any]:
        return self.ask("GET", "/v2/models/net/stats")[1]["model_stats"][0]["anyprec"]

    def stop(self) -> None:
        if self.child.poll() is None:
            self.child.terminate()
            try:
                self.child.wait(40)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        self.log.close()


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.model = Path(args.model).resolve()
        self.scale = QUICK if args.quick else Scale()
        if args.rounds:
            self.scale = replace(self.scale, rounds=args.rounds)
        self.work = Path(args.work)
        self.options = (["--pin"] if len(os.sched_getaffinity(0)) > 1 else []) + args.serve
        if args.fresh and self.work.exists():
            shutil.rmtree(self.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.facts: dict[str, Any] = {}
        if (self.work / "facts.json").exists():
            self.facts = json.loads((self.work / "facts.json").read_text())
        about = {"model": self.model.name, "bytes": self.model.stat().st_size, "quick": args.quick}
        if self.facts.setdefault("about", about) != about:
            raise SystemExit(f"{self.work} holds another run ({self.facts['about']}); add --fresh or another --work")
        self.packed = anyprec.load(self.model)
        widths = [str(k) for k in self.packed.widths if k <= 8]
        self.policies = ("adaptive", *(k for k in ("8", "4", "2", "1") if k in widths))
        if "8" not in widths:
            raise SystemExit(f"{self.model} has no 8 bit, which everything is compared with; it has {widths}")
        self.slo_s = 0.05
        self.server: Server | None = None
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # the server is ended, too
        self.dataset, self.data = args.dataset, args.data
        self.batch = 1  # images in a request

    def keep(self, **facts: Any) -> None:
        self.facts.update(facts)
        (self.work / "facts.json").write_text(json.dumps(self.facts, indent=2) + "\n")

    def measured(self, own: dict[str, np.ndarray]) -> Measured:
        s = self.scale
        labels = None if self.labels is None else self.in_requests(self.labels)
        return Measured(
            self.facts, self.work, self.policies, s.loads, s.bursts, s.rounds, s.slice_s, s.step_s, labels,
            {name: self.in_requests(classes) for name, classes in own.items()}, self.target.accuracy,
        )  # fmt: skip

    def in_requests(self, classes: np.ndarray) -> np.ndarray:
        """Of every image -> (requests, images of each)."""
        return classes[: len(classes) // self.batch * self.batch].reshape(-1, self.batch)

    # --- Server and requests ---

    def start(self, slo_s: float, small: Path | None = None) -> None:
        """A server with this target, and the requests for it. small: of this file instead, sent noise."""
        self.end()
        self.slo_s = slo_s
        self.server = Server(small or self.model, slo_s, self.work / "server.log", self.options)
        self.target = find(self.server.url, "net")
        images, self.labels = (noise(self.target, 256), None) if small else self.images()
        self.sent = fit_images(images, self.target)
        self.messages = messages(self.target, self.sent, batch=self.batch, deadline_ms=1e3 * slo_s)
        self.plan = LoadPlan(
            "127.0.0.1",
            self.server.port,
            self.messages,
            connections=16,
            keep_outputs=self.labels is not None,
            real_time=True,  # as punctual as a client elsewhere; where that is not allowed, serve_grid.csv shows it
        )

    def end(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None

    def images(self) -> tuple[np.ndarray, np.ndarray | None]:
        if self.dataset is None:
            return noise(self.target, 256), None
        data = load_data(self.dataset, "test", self.data)
        assert isinstance(data, ArrayData)
        order = np.random.default_rng(0).permutation(len(data.labels))[:IMAGES]
        return data.images[order], np.asarray(data.labels)[order]

    def answers_of_the_file(self) -> dict[str, np.ndarray]:
        """The class of every image at every width by the engine alone: what the server must say too."""
        if self.labels is None:
            return {}
        path = self.work / "file.npz"
        if not path.exists():
            found = {}
            with Progress("the file's own answers", total=len(self.policies) - 1, unit="width") as progress:
                for bits in self.policies[1:]:
                    parts = np.array_split(self.sent, max(1, len(self.sent) // 100))
                    scores = [np.asarray(self.packed(part, bits=int(bits))).reshape(len(part), -1) for part in parts]
                    found[bits] = np.concatenate(scores).argmax(1)
                    progress.update()
            np.savez(path, **found)
        with np.load(path) as kept:
            return {name: kept[name] for name in kept}

    # --- Slices ---

    def slice(
        self, name: str, policy: str, times: np.ndarray, seed: int, plan: LoadPlan | None = None, repeats: int = REPEATS
    ) -> Slice:
        """One load, kept in a file by its name; the file alone if it is there already."""
        path = slice_path(self.work, name)
        if not path.exists():
            plan = self.plan if plan is None else plan
            self.send(path, policy, times, replace(plan, first=plan.first + 997 * seed), repeats)
        return serve_results.read(path)

    def send(self, path: Path, policy: str, times: np.ndarray, plan: LoadPlan, repeats: int) -> None:
        assert self.server is not None
        self.server.hold(policy)
        for attempt in range(1 + repeats):
            time.sleep(min(PAUSE_S * 2**attempt, MOST_PAUSE_S))
            before = stolen_s()
            outcome = send(plan, times)
            stood = np.nanmax(outcome.send_delay, initial=0.0) >= STALLED_S or stolen_s() - before >= STOLEN_S
            again = stood and attempt < repeats
            kept = serve_results.again_path(path, attempt) if again else path
            serve_results.save(kept, outcome, OUTPUT_DTYPES[self.target.output_datatype], self.batch)
            if not again:
                break
            self.keep(slices_sent_again=self.facts.get("slices_sent_again", 0) + 1)

    def alone(self, name: str, bits: Sequence[int | str], count: int) -> LoadOutcome:
        """Requests one at a time, far apart; the i-th at bits[i % len(bits)]."""
        images = self.sent[: self.batch]
        sets = [messages(self.target, images, batch=self.batch, deadline_ms=5000, bits=k)[0] for k in bits]
        plan = replace(self.plan, messages=sets, connections=1, limit=1, keep_outputs=False)
        gap = max(0.004, 2 * self.facts.get("p50_s", 0.005))
        # A minute without a hitch is not to be had everywhere, and medians do not mind.
        return self.slice(name, "adaptive", np.arange(count) * gap, 0, plan, repeats=0).outcome

    # --- Parts ---

    def find_target(self) -> None:
        if "slo_s" in self.facts:
            self.start(self.facts["slo_s"])
            return
        self.start(0.05)
        outcome = self.alone("p50", [8], self.scale.alone)
        p50 = float(np.nanmedian(outcome.done - outcome.sent))
        self.keep(p50_s=p50, slo_s=TARGET * p50, machine=serve_results.machine(self.packed))
        self.start(self.facts["slo_s"])

    def overhead(self) -> None:
        outcome = self.alone("overhead", [1 if "1" in self.policies else 8], self.scale.alone)
        whole = outcome.done - outcome.sent
        self.keep(
            overhead_ms={
                "p50": 1e3 * float(np.nanmedian(whole - outcome.run_s)),
                "p90": 1e3 * float(np.nanquantile(whole - outcome.run_s, 0.9)),
                "p50 without the wait in the queue": 1e3 * float(np.nanmedian(whole - outcome.run_s - outcome.queue_s)),
            }
        )

    def switching(self) -> None:
        """Of a small network, so that microseconds show; and of this one, whose weights come back to the caches."""
        small = self.work / "small.apm"
        if not small.exists():
            write(graphs.resnet20_graph(size=8), small)
        self.start(0.05, small)
        self.keep(switching_us=self.cost_of_change("switching-small", 8, 1))
        self.start(self.facts["slo_s"])
        self.keep(switching_us_this_network=self.cost_of_change("switching", 8, int(self.policies[-1])))

    def cost_of_change(self, name: str, high: int, low: int) -> dict[str, float]:
        """8, 8, 1, 1, 8, 8, ...: every other request runs at the width of the one before it."""
        run = self.alone(name, [high, high, low, low], 16 * self.scale.alone).run_s * 1e6
        pairs = run[: len(run) // 4 * 4].reshape(-1, 4)
        changed_less_same = np.concatenate([pairs[1:, 0] - pairs[1:, 1], pairs[1:, 2] - pairs[1:, 3]])
        known = changed_less_same[~np.isnan(changed_less_same)]
        error = 1.25 * float(known.std()) / np.sqrt(len(known))  # of a median, were they normal; spikes make it larger
        return {"median": float(np.median(known)), "error": min(error, spread(known))}

    def capacity(self) -> None:
        """C8: grow the load until 8 bit fails, then halve the step. A load that fails is tried once more: C8 is high
        rather than low, which is the harder test for everybody else."""
        if "c8" in self.facts:
            return
        tried: dict[str, float] = self.facts.get("tried", {})

        def holds(rate: float) -> bool:
            for attempt in range(2):
                name = f"capacity-{rate:.2f}-{attempt}"
                seconds = self.scale.capacity_s
                outcome = self.slice(name, "8", arrivals.poisson(rate, seconds, 100 + attempt), attempt).outcome
                share = float(outcome.in_time(self.slo_s).mean())
                tried[f"{rate:.2f}"] = max(share, tried.get(f"{rate:.2f}", 0.0))
                self.keep(tried=tried)
                if share >= GOAL:
                    return True
            return False

        rate = 0.25 / self.facts["p50_s"]
        while not holds(rate) and rate > 1:
            rate /= 2
        low = rate
        while holds(low * GROW):
            low *= GROW
        high = low * GROW
        for _ in range(HALVINGS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if holds(middle) else (low, middle)
        self.keep(c8=low)

    def grid(self) -> None:
        cells = [(load, cv2) for cv2 in self.scale.bursts for load in self.scale.loads]
        with Progress("grid", total=self.scale.rounds * len(cells) * len(self.policies), unit="slice") as progress:
            for turn in range(self.scale.rounds):
                for number, (load, cv2) in enumerate(cells):
                    seed = seed_of(turn, number)
                    times = arrivals.gamma(load * self.facts["c8"], cv2, self.scale.slice_s, seed)
                    first = (turn + number) % len(self.policies)
                    for policy in self.policies[first:] + self.policies[:first]:
                        self.slice(grid_name(load, cv2, policy, turn), policy, times, seed)
                        progress.update(1)
                self.keep_table()

    def keep_table(self) -> None:
        """The server's own latency table, for the simulator."""
        if self.server is not None:
            self.keep(table=self.server.stats()["table"], margin_ms=self.server.stats()["margin_ms"])

    def step(self) -> None:
        """Half of C8, twice C8, half of C8: the picture."""
        c8, seconds = self.facts["c8"], self.scale.step_s
        times = arrivals.steps([(0.5 * c8, seconds), (2 * c8, seconds), (0.5 * c8, seconds)], 1.0, 7)
        for policy in ("adaptive", "8"):
            self.slice(f"step-{policy}", policy, times, 7)


def stolen_s() -> float:
    """Seconds that the hypervisor has kept this machine's cores from it, since the start."""
    ticks = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
    return ticks / os.sysconf("SC_CLK_TCK")


def spread(values: np.ndarray) -> float:
    """Standard error of the median, by drawing again 200 times."""
    draw = np.random.default_rng(0)
    return float(np.std([np.median(draw.choice(values, len(values))) for _ in range(200)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model file with 8 bit and narrower widths, 64 channels and more")
    parser.add_argument("--dataset", help="whose test images are sent and checked (default: noise, no accuracy)")
    parser.add_argument("--data", help="folder that holds it")
    parser.add_argument("--quick", action="store_true", help="a minute or two: does it run?")
    parser.add_argument("--rounds", type=int, help="turns of every cell of the grid")
    parser.add_argument("--work", default="build/bench_serve", help="where slices are kept")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"of {','.join(PARTS)}; '': tables of what was measured"
    )
    parser.add_argument("--results", help="folder for the tables (default: bench/results; of --quick: in --work)")
    parser.add_argument("--pictures", help="folder for the pictures (default: docs/img; of --quick: in --work)")
    parser.add_argument("--serve", action="append", default=[], metavar="OPTION", help="of `anyprec serve`, as it is")
    args = parser.parse_args()
    bench = Bench(args)
    try:
        bench.find_target()
        own = bench.answers_of_the_file()
        for part in filter(None, args.only.split(",")):
            getattr(bench, part)()
    finally:
        bench.end()
    here = Path(__file__).resolve().parent
    results = Path(args.results or (bench.work if args.quick else here / "results"))
    pictures = Path(args.pictures or (bench.work if args.quick else here.parent / "docs" / "img"))
    for said in serve_results.write(bench.measured(own), results, pictures):
        print(f"{said['holds'] or '-':<4}{said['claim']}: {said['measured']}")


if __name__ == "__main__":
    main()
