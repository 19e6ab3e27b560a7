"""A fair race: contestants in, times out. Every round gives each a turn, one after the other; figures are medians.

What slows a machine down for a second then slows all alike, and ratios are taken round by round. A Contestant is a
process (contestant.py). Called by `anyprec bench` (cli_bench.py) and bench/engine.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from anyprec.errors import AnyprecError

TURN_S = 0.02  # a turn lasts about this long: one run of a large network, fifty of a small one
MOST_RUNS = 50


class Racer(Protocol):
    def turn(self) -> list[float]: ...  # seconds of each timed run


@dataclass
class Contestant:
    """A started process that loads one model and runs it when asked. `resident` and `peak` are bytes."""

    order: Mapping[str, Any]
    process: subprocess.Popen[str]
    runs: int = 1
    resident: int | None = None
    peak: int | None = None

    @classmethod
    def start(cls, order: Mapping[str, Any], environment: Mapping[str, str]) -> Contestant:
        """Raises ContestantFailed with the reason if it cannot be loaded or run."""
        contestant = cls(order, spawn(order, environment))
        try:
            ready = contestant.answer()
        except BaseException:
            contestant.close()
            raise
        contestant.runs = int(min(MOST_RUNS, max(1, TURN_S // ready["warm_s"])))
        contestant.resident, contestant.peak = ready["resident"], ready["peak"]
        return contestant

    def turn(self) -> list[float]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"runs": self.runs}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise ContestantFailed("it ended during the race") from error
        times: list[float] = self.answer()["times_s"]
        return times

    def answer(self) -> dict[str, Any]:
        return read_answer(self.process)

    def close(self) -> None:
        end(self.process)


class ContestantFailed(AnyprecError):
    """A contestant that could not be loaded or run; the message says why."""


def spawn(order: Mapping[str, Any], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "anyprec.run.contestant"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # rivals' warnings; errors come as answers
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(dict(order)) + "\n")
    process.stdin.flush()
    return process


def read_answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ContestantFailed(f"it ended with code {process.wait()} and said nothing")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise ContestantFailed(answer["error"])
    return answer


def end(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # the rest of an order, if it is gone already
            assert stream is not None
            stream.close()
    try:
        process.wait(timeout=10)  # it ends when its input does
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def prepare_rivals(model: str, folder: str, size: tuple[int, int], rivals: Sequence[str], onnx: str | None) -> None:
    """The rivals' files, made in a process of its own: their tools print, warn, and take hundreds of megabytes."""
    process = spawn({"prepare": model, "folder": folder, "size": size, "rivals": list(rivals), "onnx": onnx}, {})
    try:
        read_answer(process)
    finally:
        end(process)


Name = TypeVar("Name")


def race(
    racers: Mapping[Name, Racer], rounds: int, after_round: Callable[[], None] = lambda: None
) -> dict[Name, list[list[float]]]:
    """Contestant -> round -> seconds of each run."""
    times: dict[Name, list[list[float]]] = {name: [] for name in racers}
    for _ in range(rounds):
        for name, racer in racers.items():
            times[name].append(racer.turn())
        after_round()
    return times


def percentiles(rounds: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """10th, 50th and 90th percentile over every run."""
    p10, p50, p90 = np.percentile(np.concatenate([np.asarray(times) for times in rounds]), (10, 50, 90))
    return float(p10), float(p50), float(p90)


def times_faster(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """How many times faster we are: the median over the rounds of (their median / our median)."""
    return float(np.median([np.median(b) / np.median(a) for a, b in zip(ours, theirs, strict=True)]))
