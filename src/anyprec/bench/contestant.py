"""One contestant of a benchmark in a process of its own: `python -m anyprec.bench.contestant`, driven by timing.py.

A JSON object a line comes in, one goes out. The first says what to open, or to prepare the rivals' files; each later
one asks for a turn. A fresh process each keeps thread pools, allocators and environment switches apart, makes resident
memory a plain figure, and lets a rival crash alone.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

from anyprec.bench.rivals import OpenedRival, Runner, open_rival, prepare, random_input

WARM_UP = 2  # runs before the first turn, after the one that allocates and lays out weights


def main() -> int:
    # Libraries print what they like to standard output; answers go to a copy that only this module knows.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        serve(sys.stdin, answers)
    except Exception as error:  # whatever a rival throws: the race goes on without it
        first = (str(error).strip().splitlines() or [""])[0]
        print(json.dumps({"error": f"{type(error).__name__}: {first}"}), file=answers)
        return 1
    return 0


def serve(commands: TextIO, answers: TextIO) -> None:
    order = json.loads(commands.readline())
    if "prepare" in order:
        prepare(
            order["prepare"],
            order["model"],
            order["folder"],
            tuple(order["size"]),
            order["onnx"],
            order.get("vocabulary"),
        )
        print(json.dumps({"ready": True}), file=answers)
        return
    # Importing is not part of a cold start: a service pays for it once, for all its models.
    importlib.import_module("anyprec.run.model" if order["engine"] == "anyprec" else order["engine"])
    started = time.perf_counter()
    opened = open_contestant(order)
    run = opened.run
    run()
    cold_s = time.perf_counter() - started
    for _ in range(WARM_UP):
        run()
    started = time.perf_counter()
    run()
    warm_s = time.perf_counter() - started
    gc.collect()
    facts: dict[str, Any] = {"ready": True, "warm_s": warm_s, "cold_s": cold_s, **memory_bytes()}
    facts["kernels"] = opened.kernels()
    gc.collect()
    gc.freeze()
    gc.disable()  # no collection inside a timed run
    print(json.dumps(facts), file=answers)
    for line in commands:
        print(json.dumps({"times_s": turn(run, json.loads(line)["runs"])}), file=answers)


def turn(run: Runner, runs: int) -> list[float]:
    """Times of `runs` runs, after one that brings its data back into the caches another contestant has used."""
    run()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times


def open_contestant(order: dict[str, Any]) -> OpenedRival:
    x = random_input(order["batch"], order["channels"], tuple(order["size"]), order.get("vocabulary"))
    if order["engine"] != "anyprec":
        return open_rival(order["engine"], order["variant"], order["folder"], x, order["threads"])
    from anyprec.run.cpu import isa
    from anyprec.run.model import load

    bits = order["bits"]
    # Only the planes this width needs: resident memory is then that of a process that runs this width alone.
    model = load(order["model"], max_bits=order["max_bits"], threads=order["threads"])
    return OpenedRival(lambda: model(x, bits=bits), isa)


def memory_bytes() -> dict[str, int | None]:
    """Resident now, and at most so far; None where the system does not tell (only Linux does)."""
    try:
        with open("/proc/self/status") as status:
            found = dict(line.split(":", 1) for line in status)
        return {name: int(found[key].split()[0]) * 1024 for name, key in (("resident", "VmRSS"), ("peak", "VmHWM"))}
    except (OSError, KeyError):
        return {"resident": None, "peak": None}


if __name__ == "__main__":
    sys.exit(main())
