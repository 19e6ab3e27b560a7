"""When requests arrive: seconds from the start, ascending, as a float64 array; the same seed gives the same times.

    poisson(200, 30)            gamma(200, 4, 30)           ramp(50, 400, 30)
    steps([(100, 10), (400, 5)])                            trace("day.csv", seconds=120)
    parse("gamma:200:4", 30)    what `--arrivals` takes

Used by the load generator (client.py), by the simulator of anyprec.serve and by bench/serve.py.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from anyprec.errors import ArrivalsError

MOST = 50_000_000  # arrivals in one array, 400 MB: more is a typing mistake
TIME_NAMES = ("time", "t", "timestamp", "arrived", "arrival", "seconds")  # a trace's column of times ...
COUNT_NAMES = ("count", "requests", "invocations", "n")  # ... or of counts per interval


def poisson(rate: float, seconds: float, seed: int = 0) -> np.ndarray:
    """`rate` requests a second on average, each independent of the others: gaps are exponential, CV^2 = 1."""
    return gamma(rate, 1.0, seconds, seed)


def gamma(rate: float, cv2: float, seconds: float, seed: int = 0) -> np.ndarray:
    """Gaps drawn from a gamma distribution of mean 1 / rate and squared coefficient of variation cv2.

    cv2 = 1 is Poisson, 4 comes in bursts, 0 is a clock. With 200 / s and cv2 = 4 the gaps have shape 1/4 and scale
    20 ms: half of them are under 0.9 ms, one in ten is over 15 ms.
    """
    return steps([(rate, seconds)], cv2, seed)


def steps(parts: Sequence[tuple[float, float]], cv2: float = 1.0, seed: int = 0) -> np.ndarray:
    """One (rate, seconds) after the other; a rate of 0 is a pause."""
    if not parts:
        raise ArrivalsError("steps need at least one (rate, seconds)")
    for rate, seconds in parts:
        check_rate(rate)
        check_seconds(seconds)
    rates = np.array([rate for rate, _ in parts], np.float64)
    ends = np.cumsum([seconds for _, seconds in parts])
    work = np.concatenate([[0.0], np.cumsum(rates * np.diff(ends, prepend=0.0))])  # requests expected until then
    unit = renewals(float(work[-1]), cv2, seed)
    # A unit-rate process stretched by the rates: an arrival at `work` w comes when w requests were expected. In a
    # pause `work` stands still, so the part of an arrival is the last one that begins at or before it, and has a rate.
    part = np.searchsorted(work, unit, side="right") - 1
    made: np.ndarray = np.concatenate([[0.0], ends])[part] + (unit - work[part]) / rates[part]
    return made


def ramp(rate0: float, rate1: float, seconds: float, cv2: float = 1.0, seed: int = 0) -> np.ndarray:
    """A rate that changes linearly from rate0 to rate1."""
    check_rate(rate0)
    check_rate(rate1)
    check_seconds(seconds)
    unit = renewals((rate0 + rate1) / 2 * seconds, cv2, seed)
    slope = (rate1 - rate0) / seconds
    if abs(slope) * seconds < 1e-9 * (rate0 + rate1):
        return unit / max(rate0, 1e-300)
    # rate0 t + slope t^2 / 2 = w, solved in the form that does not cancel near slope = 0
    return 2 * unit / (rate0 + np.sqrt(np.maximum(rate0 * rate0 + 2 * slope * unit, 0.0)))


def trace(
    path: str | Path,
    seconds: float | None = None,
    *,
    rate: float | None = None,
    interval: float = 1.0,
    cv2: float = 1.0,
    seed: int = 0,
) -> np.ndarray:
    """Replay a file: CSV (with or without a head) or JSON lines; either times, or requests per interval.

    Times: a column named time, t, timestamp, arrived or seconds; JSON lines of numbers or of {"time": ...}; one
    column of numbers that never fall. Counts: a column named count, requests, invocations or n, in order of time; each
    is `interval` seconds long and its requests fall at random within it.

    seconds squeezes (or stretches) the whole to that duration: a day becomes two minutes with all its bursts. rate
    thins or repeats requests until their mean is that: each is kept rate / mean times, rounded at random.
    """
    path = Path(path)
    if not interval > 0 or not math.isfinite(interval):
        raise ArrivalsError(f"interval={interval} is not a length in seconds; give more than 0")
    kind, values = read_trace(path)
    draw = np.random.default_rng(seed)
    if kind == "counts":
        if (values < 0).any() or values.sum() > MOST:
            raise ArrivalsError(f"{path}: counts must be 0 or more, and at most {MOST} together")
        times = within(values, interval, cv2, draw)
        length = interval * len(values)
    else:
        times = np.sort(values) - values.min()
        # One mean gap after the last: 10 requests at 0, 1, ... 9 are 10 s of one request a second.
        length = float(times[-1]) * len(times) / max(1, len(times) - 1) or 1.0
    if seconds is not None:
        check_seconds(seconds)
        times, length = times * (seconds / length), seconds
    if rate is not None:
        check_rate(rate)
        times = repeat(times, rate * length / max(1, len(times)), length, draw)
    return times[times < length]


def parse(text: str, seconds: float, seed: int = 0) -> np.ndarray:
    """The arrivals of `--arrivals TEXT`.

    poisson:200   gamma:200:4   uniform:200   steps:100@10,400@5[:CV2]   ramp:50:400[:CV2]   trace:FILE[:INTERVAL]
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "poisson":
            return poisson(float(rest), seconds, seed)
        if kind == "uniform":
            return gamma(float(rest), 0.0, seconds, seed)
        if kind == "gamma":
            rate, cv2 = rest.split(":")
            return gamma(float(rate), float(cv2), seconds, seed)
        if kind == "ramp":
            rate0, rate1, *cv2s = rest.split(":")
            return ramp(float(rate0), float(rate1), seconds, one(cv2s), seed)
        if kind == "steps":
            listed, *cv2s = rest.split(":")
            return steps([step(part) for part in listed.split(",")], one(cv2s), seed)
        if kind == "trace":
            path, colon, last = rest.rpartition(":")
            if colon and is_number(last):
                return trace(path, seconds, interval=float(last), seed=seed)
            return trace(rest, seconds, seed=seed)
    except ArrivalsError:
        raise
    except (ValueError, TypeError):
        pass
    raise ArrivalsError(
        f"arrivals {text!r} are not known; write poisson:200, gamma:200:4 (rate and CV^2), uniform:200, "
        "steps:100@10,400@5 (rate@seconds), ramp:50:400, or trace:FILE"
    )


def renewals(until: float, cv2: float, seed: int) -> np.ndarray:
    """Arrivals of a renewal process of rate 1 in [0, until)."""
    if not 0 <= cv2 <= 1000 or math.isnan(cv2):
        raise ArrivalsError(
            f"cv2={cv2} is not a squared coefficient of variation; give 0 (a clock) to 1000, 1 is Poisson"
        )
    if until > MOST:
        raise ArrivalsError(f"that is {until:.3g} requests; at most {MOST} are sent in one go")
    draw = np.random.default_rng(seed)
    if cv2 == 0:
        times = np.arange(math.ceil(until)) + draw.random()
        return times[times < until]
    # The first gap is drawn as if we began to look at a random moment: its length is biased (a gap is met in
    # proportion to its length: shape + 1) and we fall anywhere in it. Else a burst would open every run.
    first = draw.gamma(1 / cv2 + 1, cv2) * draw.random()
    parts, at = [np.array([first])], first
    while at < until:
        gaps = draw.gamma(1 / cv2, cv2, size=int(until - at + 4 * math.sqrt(cv2 * (until - at)) + 16))
        times = at + np.cumsum(gaps)
        parts.append(times)
        at = float(times[-1])
    times = np.concatenate(parts)
    return times[times < until]


def within(counts: np.ndarray, interval: float, cv2: float, draw: np.random.Generator) -> np.ndarray:
    """Arrivals of so many requests in each interval; cv2 = 0 spreads them evenly, 1 at random, more in clumps."""
    parts = []
    for i, count in enumerate(counts.astype(np.int64)):
        if count:
            gaps = np.ones(count + 1) if cv2 == 0 else draw.gamma(1 / cv2, cv2, size=count + 1)
            total = gaps.sum()
            where = np.cumsum(gaps)[:-1] / total if total > 0 else draw.random(count)
            parts.append(interval * (i + np.minimum(where, np.nextafter(1.0, 0.0))))
    return np.sort(np.concatenate(parts)) if parts else np.zeros(0)


def repeat(times: np.ndarray, factor: float, length: float, draw: np.random.Generator) -> np.ndarray:
    """Each time kept `factor` times on average; copies fall within one mean gap of the original, not on it."""
    if factor * len(times) > MOST:
        raise ArrivalsError(f"that is {factor * len(times):.3g} requests; at most {MOST} are sent in one go")
    copies = np.floor(factor + draw.random(len(times))).astype(np.int64)
    again = np.repeat(times, copies)
    first = np.ones(len(again), bool)
    first[1:] = np.diff(np.repeat(np.arange(len(times)), copies)) > 0
    gap = length / max(1, len(times))
    return np.sort(np.where(first, again, again + gap * draw.random(len(again))))


# --- Reading a trace ---------------------------------------------------------------------------------------------


def read_trace(path: Path) -> tuple[str, np.ndarray]:
    """("times" or "counts", the numbers)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ArrivalsError(f"{path}: cannot be read as a trace: {error}") from error
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise ArrivalsError(f"{path}: an empty trace; give a time or a count a line")
    try:
        kind, values = read_json(lines) if lines[0].lstrip()[0] in "{[" else read_csv(lines)
        array = np.array(values, np.float64)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ArrivalsError(
            f"{path}: {error}; a trace is CSV or JSON lines with a column time, or count (requests per interval)"
        ) from error
    if not len(array) or not np.isfinite(array).all():
        raise ArrivalsError(f"{path}: a trace needs finite numbers")
    return kind, array


def read_csv(lines: list[str]) -> tuple[str, list[float]]:
    rows = list(csv.reader(io.StringIO("\n".join(lines)), delimiter="\t" if "\t" in lines[0] else ","))
    head = [cell.strip().lower() for cell in rows[0]]
    if all(is_number(cell) for cell in head):
        if len(head) > 1:
            raise ValueError(f"{len(head)} columns without names")
        values = [float(row[0]) for row in rows]
        return ("times" if (np.diff(values) >= 0).all() else "counts"), values
    kind, column = find_column(head)
    return kind, [float(row[column]) for row in rows[1:]]


def read_json(lines: list[str]) -> tuple[str, list[float]]:
    records = json.loads("\n".join(lines)) if lines[0].lstrip().startswith("[") else [json.loads(x) for x in lines]
    if records and not isinstance(records[0], dict):
        return "times", [float(record) for record in records]
    names = list(records[0])
    kind, column = find_column([name.lower() for name in names])
    return kind, [float(record[names[column]]) for record in records]


def find_column(names: list[str]) -> tuple[str, int]:
    # Counts first: a file of counts often has the interval's time beside them.
    for kind, known in (("counts", COUNT_NAMES), ("times", TIME_NAMES)):
        for name in known:
            if name in names:
                return kind, names.index(name)
    raise ValueError(f"no column of {names} is a time or a count")


# --- Checks ------------------------------------------------------------------------------------------------------


def check_rate(rate: float) -> None:
    if not 0 <= rate < math.inf:
        raise ArrivalsError(f"rate={rate} is not a number of requests a second; give 0 or more")


def check_seconds(seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ArrivalsError(f"seconds={seconds} is not a duration; give more than 0")


def step(text: str) -> tuple[float, float]:
    rate, seconds = text.split("@")
    return float(rate), float(seconds)


def one(cv2s: list[str]) -> float:
    (cv2,) = cv2s or ["1"]
    return float(cv2)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
