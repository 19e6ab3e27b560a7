"""Cascade: which profiles run, in which order, and how sure an answer must be to stay. FORMAT.md, section 5.

    {"score": "margin", "stages": [{"profile": "1", "threshold": 0.8, "temperature": 1.2, "share": 1.0},
                                   {"profile": "8", "share": 0.21}], "agreement": 99.0, "accuracy": null}

Its text stands in the header of the model file, outside GRAPH: files without it, and readers that do not know it, stay
as they are. Nothing of it is believed before `from_text` has checked it. Used by run/model.py and calibrate.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from anyprec.errors import CascadeError
from anyprec.format.header import parse_json, show

SCORES = ("margin", "confidence")
MOST_STAGES = 8


@dataclass(frozen=True)
class Stage:
    """One profile. An answer with a score of at least `threshold` stays; the last stage has no threshold."""

    profile: str
    threshold: float | None  # 0..1
    temperature: float  # scores are divided by it before the softmax
    share: float  # of the inputs that got here when the cascade was calibrated, 0..1


@dataclass(frozen=True)
class Cascade:
    score: str  # "margin": first probability minus second; "confidence": the first
    stages: tuple[Stage, ...]
    agreement: float | None = None  # percent of the calibration images answered as by the last stage alone
    accuracy: float | None = None  # percent, where it was measured

    @property
    def last(self) -> str:
        return self.stages[-1].profile

    def text(self) -> str:
        stages = [
            {"profile": s.profile, "share": s.share}
            | ({} if s.threshold is None else {"threshold": s.threshold, "temperature": s.temperature})
            for s in self.stages
        ]
        record = {"score": self.score, "stages": stages, "agreement": self.agreement, "accuracy": self.accuracy}
        return json.dumps(record, allow_nan=False)

    @classmethod
    def from_text(cls, text: str, profiles: Collection[str]) -> Cascade:
        """Checked whole; `profiles` are those of the file."""
        record = parse_json(text, "the cascade of this file", CascadeError)
        need(
            isinstance(record, dict) and set(record) == {"score", "stages", "agreement", "accuracy"},
            f"is {show(record)}; it must have score, stages, agreement and accuracy",
        )
        need(record["score"] in SCORES, f"has the score {show(record['score'])}; known are {' and '.join(SCORES)}")
        stages = record["stages"]
        is_list = isinstance(stages, list)
        need(
            is_list and 2 <= len(stages) <= MOST_STAGES,
            f"has {len(stages) if is_list else 'no list of'} stages; it must have 2 to {MOST_STAGES}",
        )
        made = tuple(stage_from(stage, i + 1 == len(stages), profiles) for i, stage in enumerate(stages))
        need(len({s.profile for s in made}) == len(made), "has one profile in two stages")
        for key in ("agreement", "accuracy"):
            value = record[key]
            need(
                value is None or is_between(value, 0, 100), f"has the {key} {show(value)}; it must be 0 to 100 or null"
            )
        return cls(record["score"], made, record["agreement"], record["accuracy"])


def stage_from(record: Any, is_last: bool, profiles: Collection[str]) -> Stage:
    keys = {"profile", "share"} | (set() if is_last else {"threshold", "temperature"})
    need(
        isinstance(record, dict) and set(record) == keys,
        f"has the stage {show(record)}; {'the last' if is_last else 'one'} has {', '.join(sorted(keys))}",
    )
    name = record["profile"]
    need(
        isinstance(name, str) and name in profiles,
        f"names the profile {show(name)}, and there are {', '.join(profiles)} now; calibrate it again",
    )
    need(is_between(record["share"], 0, 1), f"has the share {show(record['share'])}; it must be 0 to 1")
    if is_last:
        return Stage(name, None, 1.0, float(record["share"]))
    check_threshold(record["threshold"])
    heat = record["temperature"]
    need(is_between(heat, 1e-3, 1e3), f"has the temperature {show(heat)}; it must be 0.001 to 1000")
    return Stage(name, float(record["threshold"]), float(heat), float(record["share"]))


def check_threshold(threshold: object) -> float:
    if not is_between(threshold, 0, 1):
        raise CascadeError(
            f"threshold={show(threshold)} is not a probability; give 0 (every first answer stays) to 1 (none does)"
        )
    return float(threshold)  # type: ignore[arg-type]


def is_between(value: object, low: float, high: float) -> bool:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return number and math.isfinite(value) and low <= value <= high  # type: ignore[arg-type,operator]


def need(holds: bool, problem: str) -> None:
    if not holds:
        raise CascadeError(f"the cascade of this file {problem}")


def scores(y: npt.NDArray[np.float32], temperature: float, score: str) -> npt.NDArray[np.float64]:
    """How sure each answer of (N, C) is, 0 to 1; NaN where the outputs are no numbers."""
    with np.errstate(invalid="ignore"):
        z = y.astype(np.float64)
        z -= z.max(axis=1, keepdims=True)
        z /= temperature
        e = np.exp(z)  # of the largest: 1
        best = 1.0 - np.partition(e, -2, axis=1)[:, -2] if score == "margin" else 1.0
        sure: npt.NDArray[np.float64] = best / e.sum(axis=1)
    return sure
