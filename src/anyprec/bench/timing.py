"""A fair race: contestants in, times out. Every round gives each a turn, one after the other; figures are medians.

What slows a machine down for a second then slows all alike, and ratios are taken round by round. A Contestant is a
process (contestant.py). Called by `anyprec bench` (cli/bench.py) and bench/engine.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol, TypeVar

import numpy as np

from anyprec.bench.rivals import TWIN, int8_makers
from anyprec.errors import AnyprecError

TURN_S = 0.02  # a turn lasts about this long: one run of a large network, fifty of a small one
MOST_RUNS = 50
TIMEOUT_S = 300.0  # without an answer; NNCF needs a minute for ResNet-50 on a slow machine
LONGEST_ANSWER = 1 << 16  # bytes; fifty times are 2 kB


class ContestantFailed(AnyprecError):
    """A contestant that could not be loaded or run; the message says why. `signal`: what it died of, as 'SIGILL'."""

    def __init__(self, message: str, signal: str | None = None) -> None:
        super().__init__(message)
        self.signal = signal


class Racer(Protocol):
    def turn(self) -> list[float]: ...  # seconds of each timed run


class ContestantProcess:
    """`python -m anyprec.bench.contestant`: a JSON line in, one out. Every way to fail is a ContestantFailed."""

    def __init__(
        self, order: Mapping[str, Any], environment: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.timeout_s = timeout_s
        self._unread = b""
        # Rivals warn here; what one says last before it dies is often the reason. A file cannot fill up as a pipe does.
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (close() closes it)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "anyprec.bench.contestant"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, **(environment or {})},
        )
        try:
            self.send(order)
        except BaseException:
            self.close()
            raise

    def send(self, order: Mapping[str, Any]) -> None:
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps(dict(order)).encode() + b"\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def answer(self) -> dict[str, Any]:
        line = self._line()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self.popen.kill()  # what it says next would be taken for an answer to something else
            shown = line[:40].decode(errors="backslashreplace").strip()
            raise ContestantFailed(f"gave {shown!r} instead of an answer")
        if "error" in answer:
            raise ContestantFailed(str(answer["error"]))
        return answer

    def close(self) -> None:
        """It ends when its input does; one that does not is killed."""
        for stream in (self.popen.stdin, self.popen.stdout):
            with contextlib.suppress(OSError):  # the rest of an order, if it is gone already
                assert stream is not None
                stream.close()
        try:
            self.popen.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self._said.close()

    def _line(self) -> bytes:
        assert self.popen.stdout is not None
        until = time.monotonic() + self.timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self.popen.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self.popen.kill()
                raise ContestantFailed(f"did not answer within {self.timeout_s:g} s and was ended")
            block = os.read(self.popen.stdout.fileno(), LONGEST_ANSWER)
            if not block:
                raise self._death()
            self._unread += block
            if len(self._unread) > LONGEST_ANSWER:
                self.popen.kill()
                raise ContestantFailed(f"gave more than {LONGEST_ANSWER} bytes instead of an answer")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self) -> ContestantFailed:
        """Its output has ended: what of?"""
        try:
            code = self.popen.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it closed its output and lives on
            self.popen.kill()
            return ContestantFailed("closed its output without an answer and was ended")
        last = self._last_words()
        if code >= 0:
            return ContestantFailed(f"ended with code {code} without an answer{last}")
        name = signal_name(-code)
        return ContestantFailed(f"died of {name}{last}", name)

    def _last_words(self) -> str:
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - 2000))
        lines = [line.strip() for line in self._said.read().decode(errors="backslashreplace").splitlines()]
        lines = [line for line in lines if line]
        return f" ({lines[-1][:120]})" if lines else ""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


@dataclass
class Contestant:
    """A started process that loads one model and runs it when asked. `resident` and `peak` are bytes, `cold_s`
    the seconds from opening the file to the first answer."""

    process: ContestantProcess
    runs: int = 1
    resident: int | None = None
    peak: int | None = None
    cold_s: float = 0.0
    kernels: str | None = None  # what does the products, where it tells

    @classmethod
    def start(
        cls, order: Mapping[str, Any], environment: Mapping[str, str], timeout_s: float = TIMEOUT_S
    ) -> Contestant:
        """Raises ContestantFailed with the reason if it cannot be loaded or run."""
        contestant = cls(ContestantProcess(order, environment, timeout_s))
        try:
            ready = contestant.process.answer()
            contestant.runs = int(min(MOST_RUNS, max(1, TURN_S // float(ready["warm_s"]))))
            contestant.resident, contestant.peak = ready["resident"], ready["peak"]
            contestant.kernels, contestant.cold_s = ready["kernels"], float(ready["cold_s"])
        except (KeyError, TypeError, ValueError) as error:
            contestant.close()
            if isinstance(error, ContestantFailed):
                raise
            raise ContestantFailed(f"gave an answer without its figures ({error!r})") from error
        except BaseException:
            contestant.close()
            raise
        return contestant

    def turn(self) -> list[float]:
        self.process.send({"runs": self.runs})
        times = self.process.answer().get("times_s")
        if not isinstance(times, list) or not times or not all(isinstance(t, float) and t > 0 for t in times):
            raise ContestantFailed("gave an answer without times")
        return times

    def close(self) -> None:
        self.process.close()


def prepare_rivals(
    model: str,
    folder: str,
    size: tuple[int, int],
    rivals: Sequence[str],
    onnx: str | None,
    timeout_s: float = TIMEOUT_S,
    vocabulary: int | None = None,
) -> dict[str, ContestantFailed]:
    """The rivals' files; returns the rivals whose int8 could not be made, and why.

    A process for each file: the tools print, warn, take hundreds of megabytes, and one that dies shall not take the
    others with it. Raises ContestantFailed where the float network itself cannot be made.
    """
    failed: dict[str, ContestantFailed] = {}
    makers = int8_makers(rivals)
    for what in (TWIN, *dict.fromkeys(makers.values())):
        order = {
            "prepare": what, "model": model, "folder": folder, "size": size, "onnx": onnx, "vocabulary": vocabulary
        }  # fmt: skip
        try:
            process = ContestantProcess(order, timeout_s=timeout_s)
            try:
                process.answer()
            finally:
                process.close()
        except ContestantFailed as error:
            if what == TWIN:
                raise
            failed |= {rival: error for rival, maker in makers.items() if maker == what}
    return failed


Name = TypeVar("Name")


def race(
    racers: Mapping[Name, Racer],
    rounds: int,
    after_round: Callable[[], None] = lambda: None,
    failed: Callable[[Name, ContestantFailed], None] | None = None,
) -> dict[Name, list[list[float]]]:
    """Contestant -> round -> seconds of each run. One that fails is told to `failed`, and left out from then on."""
    times: dict[Name, list[list[float]]] = {name: [] for name in racers}
    for _ in range(rounds):
        for name in list(times):
            try:
                times[name].append(racers[name].turn())
            except ContestantFailed as error:
                if failed is None:
                    raise
                failed(name, error)
                del times[name]
        after_round()
    return times


def percentiles(rounds: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """10th, 50th and 90th percentile over every run."""
    p10, p50, p90 = np.percentile(np.concatenate([np.asarray(times) for times in rounds]), (10, 50, 90))
    return float(p10), float(p50), float(p90)


def times_faster(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """How many times faster we are: the median over the rounds of (their median / our median)."""
    return float(np.median([np.median(b) / np.median(a) for a, b in zip(ours, theirs, strict=True)]))
