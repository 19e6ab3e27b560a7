"""Slices of bench/serve.py in; tables (bench/results/serve_*.csv), verdicts and pictures out.

serve_facts.csv: target, C8, overhead, switching. serve_grid.csv: a row per load, burstiness and policy.
serve_simulator.csv: the same arrivals through the simulator. serve_verdicts.csv: what was claimed, what was measured.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anyprec.colors import TEXT, width_color
from anyprec.loadtest import arrivals
from anyprec.loadtest.outcome import ARRAYS, OK, LoadOutcome, one_after_another
from anyprec.loadtest.report import mean, mean_width, quantiles, timeline
from anyprec.serve.simulation.simulate import SimulationSetup, TimingNoise, simulate

NOISE = 2.0  # standard errors by which one must be better to be called so
HICCUP_S = 0.001  # a run so much longer than the median of its kind was held up
WAITED_S = 0.002  # a batch whose first request waited so long began as soon as the engine was free
LATE_MS = 1.0  # a generator later than this at p99 was not the load that was asked for


@dataclass
class Slice:
    """One load of one policy; `label` has the classes that were answered, -1: none. (n, images of a request) int64"""

    outcome: LoadOutcome
    label: np.ndarray


@dataclass
class Measured:
    """All that a run of bench/serve.py knows."""

    facts: dict[str, Any]
    work: Path
    policies: Sequence[str]
    loads: Sequence[float]
    bursts: Sequence[float]
    rounds: int
    slice_s: float
    step_s: float
    labels: np.ndarray | None  # of the images of every request, (requests, images)
    own: Mapping[str, np.ndarray]  # width -> the classes of the same images by the engine alone
    expected: Mapping[str, float]  # width -> percent, as the model file notes it

    @property
    def slo_s(self) -> float:
        return float(self.facts["slo_s"])

    def slices(self, load: float, cv2: float, policy: str) -> list[Slice]:
        paths = [slice_path(self.work, grid_name(load, cv2, policy, turn)) for turn in range(self.rounds)]
        return [read(path) for path in paths if path.exists()]

    def all_slices(self, load: float, cv2: float, policy: str) -> list[Slice]:
        """Also those that were sent again."""
        paths = [slice_path(self.work, grid_name(load, cv2, policy, turn)) for turn in range(self.rounds)]
        again = [other for path in paths for other in sorted(path.parent.glob(again_path(path, "*").name))]
        return self.slices(load, cv2, policy) + [read(path) for path in again]

    def score(self, part: Slice) -> np.ndarray:
        """Percent every answer is worth: of its images with labels, else what its width is expected to have. (n,)"""
        if self.labels is not None:
            return 100.0 * (by_request(part.label) == by_request(self.labels)[part.outcome.image]).mean(1)
        return np.array([self.expected.get(name, np.nan) for name in part.outcome.profile.tolist()], np.float64)

    def score_at_8(self, part: Slice) -> np.ndarray:
        """And at 8 bit, on the same images."""
        if self.labels is not None:
            return 100.0 * by_request(self.own["8"] == self.labels).mean(1)[part.outcome.image]
        return np.full(len(part.outcome), self.expected.get("8", np.nan))


def by_request(classes: np.ndarray) -> np.ndarray:
    """(requests, images of each); one where there is no second axis."""
    return classes.reshape(len(classes), -1)


def grid_name(load: float, cv2: float, policy: str, turn: int) -> str:
    return f"grid-{load:g}-{cv2:g}-{policy}-{turn}"


def slice_path(work: Path, name: str) -> Path:
    return work / "slices" / f"{name}.npz"


def again_path(path: Path, attempt: int | str) -> Path:
    """Of a slice that was sent again."""
    return path.with_name(f"{path.stem}.again-{attempt}.npz")


def save(path: Path, outcome: LoadOutcome, datatype: np.dtype, batch: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: getattr(outcome, name) for name in ARRAYS}
    about = {"cpu_s": outcome.cpu_s, "connections": outcome.connections, "notes": outcome.notes}
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        np.savez_compressed(file, label=outcome.labels(datatype, batch), about=json.dumps(about), **arrays)
    part.replace(path)  # whole or not there


def read(path: Path) -> Slice:
    with np.load(path) as kept:
        about = json.loads(str(kept["about"]))
        return Slice(LoadOutcome(**{name: kept[name] for name in ARRAYS}, **about), kept["label"])


# --- The grid ----------------------------------------------------------------------------------------------------


def grid_rows(m: Measured) -> list[dict[str, Any]]:
    rows = []
    for cv2 in m.bursts:
        for load in m.loads:
            for policy in m.policies:
                parts = m.slices(load, cv2, policy)
                if parts:
                    rows.append(grid_row(m, load, cv2, policy, parts))
    return rows


def grid_row(m: Measured, load: float, cv2: float, policy: str, parts: Sequence[Slice]) -> dict[str, Any]:
    whole = one_after_another([(m.slice_s, part.outcome) for part in parts])
    score = np.concatenate([m.score(part) for part in parts])
    at_8 = np.concatenate([m.score_at_8(part) for part in parts])
    label = np.concatenate([by_request(part.label) for part in parts])
    answered, in_time = whole.status == OK, whole.in_time(m.slo_s)
    latency = quantiles(whole.latency, ("p50", "p90", "p99", "p99.9"))
    wrong = sum(
        int((label[here] != by_request(own)[whole.image[here]]).any(1).sum())
        for name, own in m.own.items()
        for here in [answered & (whole.profile == name)]
    )
    row = {
        "load": load,
        "cv2": cv2,
        "policy": policy,
        "slices": len(parts),
        "requests": len(whole),
        "misses": int((~in_time).sum()),
        "attainment": float(in_time.mean()),
        "accuracy": mean(score[answered]),
        "points_below_8_bit": mean((at_8 - score)[answered]),
        "points_below_8_bit_error": standard_error((at_8 - score)[answered]),
        "effective_accuracy": mean(np.where(in_time, score, 0.0)),
        "goodput_per_s": in_time.sum() / (m.slice_s * len(parts)),
        "rejected": int(np.isin(whole.status, (429, 503)).sum()),
        "late": int((answered & ~in_time).sum()),
        "errors": int((~answered & ~np.isin(whole.status, (429, 503, 504))).sum()),
        "wrong_answers": wrong,
        **{f"{name}_ms": value for name, value in latency.items()},
        "mean_bits": mean_width(whole.profile[answered]),
        "mean_batch": mean(whole.batch[whole.batch > 0]),
        "generator_late_p99_ms": quantiles(whole.send_delay, ("p99",))["p99"],
        "generator_cpu_us": 1e6 * whole.cpu_s / max(1, len(whole)),
    }
    for name in ("1", "2", "4", "8"):
        row[f"share_{name}"] = mean(whole.profile[answered] == name)
    return row


def standard_error(values: np.ndarray) -> float:
    return float(values.std() / max(1, len(values)) ** 0.5) if len(values) else 0.0


def better_in_both(m: Measured, load: float, cv2: float, policy: str) -> tuple[bool, bool]:
    """Has this width more in time and more accuracy than adaptive: in the sums; and by more than noise, twice over?"""
    pairs = list(zip(m.slices(load, cv2, policy), m.slices(load, cv2, "adaptive"), strict=False))
    gains = []
    for of in (lambda s: 100.0 * s.outcome.in_time(m.slo_s), lambda s: m.score(s)[s.outcome.status == OK]):
        gain = [(mean(of(a)) or 0.0) - (mean(of(b)) or 0.0) for a, b in pairs]
        error = float(np.std(gain, ddof=1)) / len(gain) ** 0.5 if len(gain) > 1 else np.inf
        gains.append((float(np.mean(gain)), error))
    return all(g > 0 for g, _ in gains), all(g > NOISE * error for g, error in gains)


# --- The simulator -----------------------------------------------------------------------------------------------


def simulator_rows(m: Measured, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The very arrivals of the slices, through the simulator, with the times and the noise of the server's own runs."""
    found = []
    cells = [(load, cv2) for cv2 in m.bursts for load in m.loads]
    times, noise = fitted(m)
    for row in rows:
        policy = row["policy"]
        setup = SimulationSetup(
            times=times,
            accuracies=dict(m.expected),
            slo=m.slo_s,
            policy="fixed" if policy.isdigit() else policy,
            bits=int(policy) if policy.isdigit() else None,
            margin=m.facts["margin_ms"] / 1e3,
            noise=noise,
        )
        number = cells.index((row["load"], row["cv2"]))
        rate = row["load"] * m.facts["c8"]
        results = [
            simulate(arrivals.gamma(rate, row["cv2"], m.slice_s, seed_of(turn, number)), setup)
            for turn in range(row["slices"])
        ]
        served = {name: row[f"share_{name}"] or 0.0 for name in m.expected if f"share_{name}" in row}
        found.append(
            {
                "load": row["load"],
                "cv2": row["cv2"],
                "policy": policy,
                "attainment": row["attainment"],
                "simulated_attainment": float(np.mean([result.attainment for result in results])),
                "expected_accuracy": sum(share * m.expected[name] for name, share in served.items()),
                "simulated_accuracy": mean(np.array([result.accuracy for result in results], np.float64)),
            }
        )
    return found


def fitted(m: Measured) -> tuple[dict[str, dict[int, float]], TimingNoise]:
    """Times of batches, and what made them longer, from the runs of the grid.

    A cell is the median of its runs and of the pause before the next batch; one with few runs is from the server's own
    table, corrected as batch 1 is. Hiccups: runs that were a millisecond longer than the median, and by how much.
    """
    runs, ways, pauses = [], [], []
    for part in (
        part for cv2 in m.bursts for load in m.loads for name in m.policies for part in m.slices(load, cv2, name)
    ):
        found, way, pause = runs_of(part.outcome)
        runs.append(found)
        ways.append(way)
        pauses.append(pause)
    profile, batch, seconds = (np.concatenate(values) for values in zip(*runs, strict=True))
    between = np.concatenate(pauses)
    each = float(np.median(between)) if len(between) else 0.0
    table = {p: {int(n): ms / 1e3 for n, ms in cells.items()} for p, cells in m.facts["table"]["ms"].items()}
    times: dict[str, dict[int, float]] = {}
    over = []
    for name, cells in table.items():
        alone = seconds[(profile == name) & (batch == 1)]
        ratio = float(np.median(alone)) / cells[1] if len(alone) else 1.0
        times[name] = {n: cell * ratio + each for n, cell in cells.items()}
        for n in np.unique(batch[profile == name]).tolist():
            own = seconds[(profile == name) & (batch == n)]
            if len(own) >= 30:
                times[name][n] = float(np.median(own)) + each
                over.append(own / np.median(own) - 1)
    low, high = np.quantile(np.concatenate(over), (0.25, 0.5))
    middle = {(name, n): times[name][n] - each for name in times for n in times[name]}
    longer = seconds - np.array([middle.get(key, np.nan) for key in zip(profile.tolist(), batch.tolist(), strict=True)])
    hiccups = longer[longer > HICCUP_S]
    whole_way = np.concatenate(ways)
    return times, TimingNoise(
        way=(float(np.quantile(whole_way, 0.05)) / 2, float(np.quantile(whole_way, 0.95)) / 2),
        spread=float(high - low) / 0.674,  # of a bell curve, from its lower half alone: the upper one has the hiccups
        hiccup=float(hiccups.mean()) if len(hiccups) else 0.0,
        hiccups=len(hiccups) / float(seconds.sum()),
    )


def runs_of(outcome: LoadOutcome) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray, np.ndarray]:
    """(profile, images, seconds) of every batch; seconds on the way of every answer; pauses between batches."""
    ok = outcome.status == OK
    way = (outcome.done - outcome.sent - outcome.queue_s - outcome.run_s)[ok]
    start = outcome.sent[ok] + way / 2 + outcome.queue_s[ok]
    order = np.argsort(start, kind="stable")
    start, waited, run, images, profile = (
        values[order]
        for values in (start, outcome.queue_s[ok], outcome.run_s[ok], outcome.batch[ok], outcome.profile[ok])
    )
    first = []  # of every batch
    at = 0
    while at < len(start):
        first.append(at)
        at += max(1, int(images[at]))
    chosen = np.array(first, np.int64)
    pauses = start[chosen][1:] - (start + run)[chosen][:-1]
    return (profile[chosen], images[chosen], run[chosen]), way, pauses[waited[chosen][1:] > WAITED_S]


def seed_of(turn: int, cell: int) -> int:
    return 1000 * turn + cell


# --- Verdicts ----------------------------------------------------------------------------------------------------


def verdicts(m: Measured, rows: Sequence[Mapping[str, Any]], simulated: Sequence[Mapping[str, Any]]) -> list[dict]:
    at = {(row["load"], row["cv2"], row["policy"]): row for row in rows}
    found: list[dict[str, Any]] = []

    def say(claim: str, measured: str, holds: bool | None) -> None:
        found.append({"claim": claim, "measured": measured, "holds": {True: "yes", False: "no", None: ""}[holds]})

    poisson = [at[load, 1.0, "adaptive"] for load in m.loads if (load, 1.0, "adaptive") in at]
    if poisson:
        worst = min(poisson, key=lambda row: row["attainment"])
        text = f"{100 * worst['attainment']:.3f} % at {worst['load']:g} x C8, the worst of {len(poisson)} loads"
        whole = [
            np.concatenate([part.outcome.in_time(m.slo_s) for part in m.all_slices(row["load"], 1.0, "adaptive")])
            for row in poisson
        ]
        if (least := min(float(part.mean()) for part in whole)) < worst["attainment"]:
            text += f"; {100 * least:.3f} % with the slices in which the machine stood still"
        say("adaptive, Poisson, up to 2 x C8: at least 99.9 % in time", text, worst["attainment"] >= 0.999)
    if (0.8, 4.0, "adaptive") in at and (0.8, 4.0, "8") in at:
        ours, theirs = at[0.8, 4.0, "adaptive"], at[0.8, 4.0, "8"]
        ratio = theirs["misses"] / max(1, ours["misses"])
        text = f"{ours['misses']} of {ours['requests']} missed, 8 bit {theirs['misses']}: {ratio:.1f} x fewer"
        say("bursts (CV^2 4) at 0.8 x C8: at least 10 x fewer misses than 8 bit", text, ratio >= 10)
        # The accuracy of each width on the whole test set, by how often it was chosen: a thousand images are too few.
        lost = sum((ours.get(f"share_{name}") or 0.0) * (m.expected["8"] - m.expected[name]) for name in m.expected)
        text = f"{lost:.2f} points on the test set, by the widths chosen"
        if (here := ours["points_below_8_bit"]) is not None:
            text += f"; {here:.2f} +- {ours['points_below_8_bit_error']:.2f} on the images sent"
        say("... losing at most 1 point of mean accuracy", text, lost <= 1)
    fixed = [row for row in rows if row["policy"] != "adaptive" and row["accuracy"] is not None]
    if fixed:
        both = [better_in_both(m, row["load"], row["cv2"], row["policy"]) for row in fixed]
        strict, clear = sum(s for s, _ in both), sum(c for _, c in both)
        cells = len({(row["load"], row["cv2"]) for row in fixed})
        text = f"{len(fixed)} comparisons in {cells} cells: {strict} ahead in both, {clear} by more than noise"
        # Two slices or one have no noise to speak of; then only the sums can tell, and only one way.
        holds = clear == 0 if m.rounds > 2 else True if strict == 0 else None
        say("no fixed width is better in both attainment and accuracy in any cell", text, holds)
    if "switching_us" in m.facts:
        cost, error = m.facts["switching_us"]["median"], m.facts["switching_us"]["error"]
        say("a change of bits costs at most 10 us", f"{cost:.1f} us, +- {error:.1f}", below(10, cost, error))
    if "overhead_ms" in m.facts:
        p50 = m.facts["overhead_ms"]["p50"]
        say("HTTP in and out, and the way to the engine: p50 below 1.5 ms", f"{p50:.2f} ms", p50 < 1.5)
    if m.own:
        wrong = sum(row["wrong_answers"] for row in rows)
        total = sum(row["requests"] - row["rejected"] for row in rows)
        say("every answer is what the file itself gives at that width", f"{wrong} of {total} differ", wrong == 0)
    if simulated:
        gaps = np.array([abs(row["attainment"] - row["simulated_attainment"]) for row in simulated])
        text = f"apart by {100 * np.median(gaps):.2f} points (median), {100 * gaps.max():.1f} at most"
        say("the simulator gives the server's attainment", text, None)
    if rows:
        late = sum(row["generator_late_p99_ms"] > LATE_MS for row in rows)
        say(
            "the generator was in time itself",
            f"late by over {LATE_MS:g} ms at p99 in {late} of {len(rows)} rows",
            None,
        )
    return found


def below(bound: float, value: float, error: float) -> bool | None:
    """None: within the noise of the bound."""
    return None if abs(value - bound) < NOISE * error else value <= bound


# --- Files and pictures ------------------------------------------------------------------------------------------


def write(m: Measured, folder: Path, pictures: Path | None) -> list[dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    facts = flat("", {key: value for key, value in m.facts.items() if key not in ("table", "tried")})
    to_csv(folder / "serve_facts.csv", [{"fact": name, "value": value} for name, value in facts.items()])
    rows = grid_rows(m)
    to_csv(folder / "serve_grid.csv", rows)
    simulated = simulator_rows(m, rows) if rows and "table" in m.facts else []
    said = verdicts(m, rows, simulated)
    to_csv(folder / "serve_simulator.csv", simulated)
    to_csv(folder / "serve_verdicts.csv", said)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        draw_grid(m, rows, pictures / "serve_grid.png")
        draw_steps(m, pictures)
    return said


def draw_grid(m: Measured, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Misses and accuracy against load, a column per burstiness."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not rows:
        return
    figure, axes = plt.subplots(2, len(m.bursts), figsize=(2.6 * len(m.bursts) + 1, 5.2), dpi=150, squeeze=False)
    for column, cv2 in enumerate(m.bursts):
        for policy in m.policies:
            line = [row for row in rows if row["cv2"] == cv2 and row["policy"] == policy]
            loads = [row["load"] for row in line]
            style = {
                "color": TEXT if policy == "adaptive" else width_color(policy),
                "linewidth": 2.6 if policy == "adaptive" else 1.4,
                "marker": "o",
                "markersize": 3,
                "label": policy if policy == "adaptive" else f"{policy} bit",
                "zorder": 3 if policy == "adaptive" else 2,
            }
            axes[0, column].plot(loads, [max(100 * row["misses"] / row["requests"], 0.01) for row in line], **style)
            axes[1, column].plot(loads, [row["accuracy"] for row in line], **style)
        axes[0, column].set_yscale("log")
        axes[0, column].set_ylim(0.008, 120)
        axes[0, column].set_title("Poisson" if cv2 == 1 else f"bursts, CV$^2$ = {cv2:g}", fontsize=10)
        axes[1, column].set_xlabel("load / C8")
        for row in axes[:, column]:
            row.grid(axis="y", color="#d0d7de", linewidth=0.8)
            for side in ("top", "right"):
                row.spines[side].set_visible(False)
    axes[0, 0].set_ylabel("% not in time (0.01: none)")
    axes[1, 0].set_ylabel("accuracy of answers, %")
    axes[1, 0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def draw_steps(m: Measured, folder: Path) -> None:
    from anyprec.loadtest.plots import draw

    for policy in ("adaptive", "8"):
        path = slice_path(m.work, f"step-{policy}")
        if path.exists():
            outcome = read(path).outcome
            rows = timeline(outcome, m.slo_s, 3 * m.step_s, expected=m.expected)
            share = 100 * float(outcome.in_time(m.slo_s).mean())
            name = "adaptive" if policy == "adaptive" else f"{policy} bit"
            title = f"0.5, 2, 0.5 x C8, {name}: {share:.1f} % in time"
            draw(rows, round(1e3 * m.slo_s, 2), title, folder / f"serve_step_{policy}.png")


def machine(packed: Any) -> dict[str, Any]:
    from anyprec.run.cpu import cpu_name

    return {"cpu": cpu_name(), "cores": os.cpu_count(), "isa": packed.isa}


def flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found.update(flat(f"{name} {key}".strip(), inner))
    return found


def to_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
