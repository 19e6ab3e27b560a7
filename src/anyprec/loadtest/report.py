"""Results of a load test: a LoadOutcome in; a Summary, a timeline and files (report.json, timeline.csv, ...) out.

Called by cli/loadtest.py and bench/serve.py. SLO attainment counts every planned request: rejected, lost and unsent
requests missed their target like late ones.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from anyprec.files import make_folder, write_text
from anyprec.loadtest.outcome import BROKEN, EXPIRED, OK, REJECTED, UNANSWERED, LoadOutcome

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
LATE_S = 0.001  # a generator later than this at p99 has changed the load it was asked for ...
LATE_SHARE = 0.05  # ... unless the target is so long that it does not matter
WINDOWS = 60  # rows of a timeline, more or less
LEAST_WINDOW_S = 0.1


@dataclass(frozen=True)
class Summary:
    """Shares are of all planned requests, 0 to 1. Latencies are of answered requests, from their planned time."""

    requests: int
    images: int  # in a request
    seconds: float
    rate: float  # requests a second, as planned
    slo_ms: float
    attainment: float  # answered within the target
    accuracy: float | None  # percent, mean over the answers
    accuracy_is: str  # "measured", "expected" (from the model file's accuracy of each width) or "unknown"
    effective_accuracy: float | None  # percent of all planned requests answered correctly and in time
    goodput: float  # answers in time a second
    answered: int
    late: int
    rejected: int
    expired: int
    errors: int
    latency_ms: dict[str, float | None]
    queue_ms: dict[str, float | None]  # in the server's queue, as it reports
    run_ms: dict[str, float | None]
    bits: dict[str, int]  # answers by width
    mean_bits: float | None
    mean_batch: float | None  # images that ran together
    send_delay_ms: dict[str, float]  # delay of the generator itself
    cpu_us: float  # the generator's CPU time a request
    connections: int
    resent: int
    waited: int
    notes: dict[str, int]
    warnings: list[str]

    def record(self) -> dict[str, object]:
        return asdict(self)


def summarize(
    outcome: LoadOutcome,
    slo_s: float,
    seconds: float,
    *,
    images: int = 1,  # in a request
    right: np.ndarray | None = None,  # (n,) share of a request's images answered right, from `correct_answers`
    expected: Mapping[str, float] | None = None,  # profile -> percent, where labels are not known
) -> Summary:
    count = len(outcome)
    status = outcome.status
    in_time = outcome.in_time(slo_s)
    answered = status == OK
    rejected = np.isin(status, REJECTED)
    score, kind = scores(outcome, right, expected)
    profiles, counts = np.unique(outcome.profile[answered], return_counts=True)
    bits = dict(sorted(zip(profiles.tolist(), counts.tolist(), strict=True), key=lambda pair: by_width(pair[0])))
    delays = outcome.send_delay[~np.isnan(outcome.send_delay)]
    delay = {name: value or 0.0 for name, value in quantiles(delays, ("p50", "p99")).items()}
    delay["max"] = to_ms(delays.max(initial=0.0))
    return Summary(
        requests=count,
        images=images,
        seconds=seconds,
        rate=count / seconds,
        slo_ms=to_ms(slo_s),
        attainment=float(in_time.mean()) if count else 1.0,
        accuracy=mean(score[answered]),
        accuracy_is=kind,
        effective_accuracy=mean(np.where(in_time, score, 0.0)) if kind != "unknown" else None,
        goodput=float(in_time.sum()) / seconds,
        answered=int(answered.sum()),
        late=int((answered & ~in_time).sum()),
        rejected=int(rejected.sum()),
        expired=int((status == EXPIRED).sum()),
        errors=int((~answered & ~rejected & (status != EXPIRED)).sum()),
        latency_ms=quantiles(outcome.latency, tuple(QUANTILES)),
        queue_ms=quantiles(outcome.queue_s, ("p50", "p99")),
        run_ms=quantiles(outcome.run_s, ("p50", "p99")),
        bits=bits,
        mean_bits=mean_width(outcome.profile[answered]),
        mean_batch=mean(outcome.batch[outcome.batch > 0]),
        send_delay_ms=delay,
        cpu_us=round(1e6 * outcome.cpu_s / max(1, count), 1),
        connections=outcome.connections,
        resent=outcome.resent,
        waited=outcome.waited,
        notes=outcome.notes,
        warnings=warnings(outcome, slo_s, delay),
    )


def correct_answers(outcome: LoadOutcome, labels: np.ndarray, datatype: np.dtype) -> np.ndarray:
    """Share of each request's images that were answered right. (n,) float64, 0 or 1 where requests have one image

    labels: of the images that were sent, in their order; with more than one in a request (requests, images).
    """
    labels = labels.reshape(len(labels), -1)
    made: np.ndarray = (outcome.labels(datatype, labels.shape[1]) == labels[outcome.image]).mean(1)
    return made


def scores(
    outcome: LoadOutcome, right: np.ndarray | None, expected: Mapping[str, float] | None
) -> tuple[np.ndarray, str]:
    """Accuracy of each answer in percent, and where it comes from. (n,) float64, nan: unknown"""
    if right is not None:
        return 100.0 * right, "measured"
    known = dict(expected or {})
    answered = outcome.status == OK
    if not known or not set(outcome.profile[answered].tolist()) <= set(known):
        return np.full(len(outcome), np.nan), "unknown"
    return np.array([known.get(profile, np.nan) for profile in outcome.profile.tolist()], np.float64), "expected"


def warnings(outcome: LoadOutcome, slo_s: float, delay: Mapping[str, float]) -> list[str]:
    found = []
    bound = max(to_ms(LATE_S), LATE_SHARE * to_ms(slo_s))
    if delay["p99"] > bound:
        found.append(
            f"the generator itself was late: 1 % of requests left {delay['p99']:.2f} ms or more after their time "
            f"(over {bound:.2f} ms); latencies hold it too. "
            "Send less, from more --processes, with --real-time, or from another machine"
        )
    if outcome.waited:
        found.append(f"{outcome.waited} requests waited for a connection; raise --limit (and `ulimit -n`)")
    lost = int((outcome.status == BROKEN).sum()), int((outcome.status == UNANSWERED).sum())
    if any(lost):
        found.append(f"{lost[0]} connections broke, {lost[1]} requests were never answered")
    return found


# --- Over time ---------------------------------------------------------------------------------------------------


def timeline(
    outcome: LoadOutcome,
    slo_s: float,
    seconds: float,
    *,
    right: np.ndarray | None = None,
    expected: Mapping[str, float] | None = None,
    window_s: float | None = None,
) -> list[dict[str, float | None]]:
    """A row per window, of the requests planned in it: load, share in time, latency, bits."""
    window_s = max(LEAST_WINDOW_S, seconds / WINDOWS) if window_s is None else window_s
    number = np.minimum(outcome.planned / window_s, max(0, np.ceil(seconds / window_s) - 1)).astype(np.int64)
    answered, in_time = outcome.status == OK, outcome.in_time(slo_s)
    rejected, latency = np.isin(outcome.status, REJECTED), outcome.latency
    score, _ = scores(outcome, right, expected)
    profiles = sorted(set(outcome.profile[answered].tolist()), key=by_width)
    rows = []
    for i in range(int(np.ceil(seconds / window_s - 1e-9))):
        here = number == i
        good = here & answered
        length = min(window_s, seconds - i * window_s)
        row: dict[str, float | None] = {
            "second": round(i * window_s, 4),
            "load": here.sum() / length,
            "in_time": (here & in_time).sum() / length,
            "rejected": (here & rejected).sum() / length,
            "attainment": mean(in_time[here]),
            "p50_ms": quantiles(latency[here], ("p50",))["p50"],
            "p99_ms": quantiles(latency[here], ("p99",))["p99"],
            "accuracy": mean(score[good]),
            "mean_bits": mean_width(outcome.profile[good]),
        }
        for profile in profiles:
            row[f"share_{profile}"] = mean(outcome.profile[good] == profile)
        rows.append(row)
    return rows


# --- Files -------------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    summary: Summary,
    rows: Sequence[Mapping[str, float | None]],
    outcome: LoadOutcome,
    right: np.ndarray | None,
    about: Mapping[str, object],
) -> None:
    make_folder(folder)
    report = {**about, **summary.record(), "timeline": list(rows)}
    write_text(folder / "report.json", json.dumps(report, indent=2) + "\n")
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(rows[0]) if rows else ["second"])
    table.writeheader()
    for row in rows:
        table.writerow({name: short(value) for name, value in row.items()})
    write_text(folder / "timeline.csv", text.getvalue())
    text = io.StringIO(newline="")
    lines = csv.writer(text)
    lines.writerow(
        ["planned_s", "send_delay_ms", "latency_ms", "status", "bits", "queue_ms", "run_ms", "batch", "right"]
    )
    for i in range(len(outcome)):
        lines.writerow(
            [
                f"{outcome.planned[i]:.6f}",
                short(to_ms(outcome.sent[i] - outcome.planned[i])),
                short(to_ms(outcome.done[i] - outcome.planned[i])),
                int(outcome.status[i]),
                outcome.profile[i],
                short(to_ms(outcome.queue_s[i])),
                short(to_ms(outcome.run_s[i])),
                int(outcome.batch[i]) or "",
                "" if right is None or outcome.status[i] != OK else short(float(right[i])),
            ]
        )
    write_text(folder / "requests.csv", text.getvalue())


def table(summary: Summary) -> str:
    """For people."""
    s = summary
    each = f" of {s.images} images" if s.images > 1 else ""
    lines = [
        f"{s.requests} requests{each} in {s.seconds:g} s ({s.rate:.1f} / s), target {s.slo_ms:g} ms",
        f"in time    {100 * s.attainment:.3f} %   ({s.goodput:.1f} / s; {s.late} late, {s.rejected} rejected, "
        f"{s.expired} expired, {s.errors} errors)",
    ]
    if s.answered:
        inside = {f"queue {name}": value for name, value in s.queue_ms.items()}
        inside |= {f"run {name}": value for name, value in s.run_ms.items()}
        batch = "" if s.mean_batch is None else f"   mean batch {s.mean_batch:.2f}"
        shares = (f"{name or 'not told'}: {100 * count / s.answered:.1f} %" for name, count in s.bits.items())
        mean_bits = "" if s.mean_bits is None else f"   (mean {s.mean_bits:.2f})"
        lines += [
            f"latency    {listed(s.latency_ms)} ms",
            *([f"in server  {listed(inside)} ms{batch}"] if listed(inside) else []),
            f"bits       {'   '.join(shares)}{mean_bits}",
        ]
    if s.accuracy is not None and s.effective_accuracy is not None:
        how = "of labels" if s.accuracy_is == "measured" else "expected from the widths used"
        lines.append(f"accuracy   {s.accuracy:.2f} % {how}; right and in time {s.effective_accuracy:.2f} %")
    lines.append(
        f"generator  late by p50 {s.send_delay_ms['p50']:.3f}, p99 {s.send_delay_ms['p99']:.3f}, "
        f"max {s.send_delay_ms['max']:.2f} ms; {s.cpu_us:.0f} us of CPU a request; {s.connections} connections"
    )
    lines += [f"{count} x {note}" for note, count in sorted(s.notes.items(), key=lambda pair: -pair[1])[:5] if note]
    lines += [f"warning: {text}" for text in s.warnings]
    return "\n".join(lines)


def listed(values: Mapping[str, float | None]) -> str:
    return "   ".join(f"{name} {value:.2f}" for name, value in values.items() if value is not None)


# --- Small parts -------------------------------------------------------------------------------------------------


def quantiles(seconds: np.ndarray, names: Sequence[str]) -> dict[str, float | None]:
    """Milliseconds; None where nothing is known."""
    known = seconds[~np.isnan(seconds)]
    if not len(known):
        return {name: None for name in names}
    # Nearest-rank quantile: always a latency that occurred, never the mean of two.
    found = np.quantile(known, [QUANTILES[name] for name in names], method="inverted_cdf")
    return {name: to_ms(value) for name, value in zip(names, found, strict=True)}


def by_width(profile: str) -> tuple[int, str]:
    return (int(profile), "") if profile.isdigit() else (99, profile)


def mean_width(profiles: np.ndarray) -> float | None:
    widths = [int(profile) for profile in profiles.tolist() if profile.isdigit()]
    return sum(widths) / len(widths) if widths else None


def mean(values: np.ndarray) -> float | None:
    values = np.asarray(values, np.float64)
    found = float(values.mean()) if len(values) else np.nan
    return None if np.isnan(found) else found


def to_ms(seconds: float) -> float:
    return round(float(seconds) * 1e3, 4)


def short(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.4g}" if abs(value) < 1e4 else f"{value:.1f}"
