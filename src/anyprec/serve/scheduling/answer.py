"""Answer: what a request gets back, and how it reaches the caller. Made by scheduler.py.

A request ends with an Outcome, an Answer or an error. `deliver` gets all outcomes of a batch at once, each with the
callback of its request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

log = logging.getLogger("anyprec.serve")


@dataclass(frozen=True)
class Answer:
    outputs: list[np.ndarray]  # one array (n, ...) for each output of the model
    bits: int | str  # the level: a width, the name of a mixed profile, or "auto" for the cascade
    queue_s: float  # from `arrived` to the start of the batch
    run_s: float
    batch: int  # images that ran together
    late: bool  # after its deadline
    stages: tuple[int | str, ...] | None = None  # of a cascade: what answered each image ...
    went_on: int | None = None  # ... and how many of them went beyond the first stage


Outcome = Answer | Exception
Done = Callable[[Outcome], None]
Deliver = Callable[[list[tuple[Done, Outcome]]], None]


def call_each(pairs: list[tuple[Done, Outcome]]) -> None:
    for done, outcome in pairs:
        try:
            done(outcome)
        except Exception:  # one caller's mistake must not cost the others their answers
            log.exception("a callback failed")


def set_future(future: Future[Answer]) -> Done:
    def done(outcome: Outcome) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    return done
