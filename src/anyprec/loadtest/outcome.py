"""What became of every request of a load: arrays, one entry a request in the order of their planned times.

Made by client.py; report.py makes numbers of it. Times are seconds from the start of the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

OK = 200
REJECTED = (429, 503)  # the server said at once that it cannot: no engine time was spent
EXPIRED = 504  # taken in, then given up because the deadline had passed
UNANSWERED = 0  # nothing came before the time-out
BROKEN = -1  # no connection, or one that ended before the answer did


@dataclass
class LoadOutcome:
    planned: np.ndarray  # (n,) float64, when it should have been sent
    sent: np.ndarray  # (n,) float64, when it was; nan: never
    done: np.ndarray  # (n,) float64, when its answer was complete; nan: never
    status: np.ndarray  # (n,) int16, HTTP, or UNANSWERED, BROKEN
    profile: np.ndarray  # (n,) str, what it ran at ("4"); "" where not answered
    queue_s: np.ndarray  # (n,) float64, in the server's queue, as it says; nan: it did not
    run_s: np.ndarray  # (n,) float64, in its engine
    batch: np.ndarray  # (n,) int32, images that ran with it; 0: not known
    retry_after_s: np.ndarray  # (n,) float64, what a rejection advised; nan: nothing
    image: np.ndarray  # (n,) int64, which image was sent
    outputs: dict[int, bytes] = field(default_factory=dict)  # request -> the bytes of the answer, where kept
    cpu_s: float = 0.0  # of the generator itself
    connections: int = 0  # opened
    resent: int = 0  # on a new connection, the kept one having been closed by the server meanwhile
    waited: int = 0  # had to wait for a connection: the pool was at its limit
    notes: dict[str, int] = field(default_factory=dict)  # what errors said, and how often

    def __len__(self) -> int:
        return len(self.planned)

    @property
    def latency(self) -> np.ndarray:
        """From the planned time, not from the time of sending: a stalled sender hides nothing. (n,) s, nan: none."""
        return np.where(self.status == OK, self.done - self.planned, np.nan)

    @property
    def send_delay(self) -> np.ndarray:
        return self.sent - self.planned

    def in_time(self, slo_s: float) -> np.ndarray:
        return (self.status == OK) & (self.done - self.planned <= slo_s)

    def labels(self, datatype: np.dtype) -> np.ndarray:
        """The most likely class of every answer that was kept, -1 elsewhere. (n,) int64"""
        found = np.full(len(self), -1, np.int64)
        for request, data in self.outputs.items():
            if self.status[request] == OK and len(data) >= datatype.itemsize and len(data) % datatype.itemsize == 0:
                found[request] = np.frombuffer(data, datatype).argmax()
        return found


ARRAYS = ("planned", "sent", "done", "status", "profile", "queue_s", "run_s", "batch", "retry_after_s", "image")
SUMS = ("cpu_s", "connections", "resent", "waited")


def merge(parts: Sequence[tuple[np.ndarray, LoadOutcome]]) -> LoadOutcome:
    """Several (positions, outcome) of one load, such as its processes', in one."""
    order = np.argsort(np.concatenate([positions for positions, _ in parts]), kind="stable")
    whole: dict[str, Any] = {name: np.concatenate([getattr(part, name) for _, part in parts])[order] for name in ARRAYS}
    outputs = {int(where[i]): data for where, part in parts for i, data in part.outputs.items()}
    notes: dict[str, int] = {}
    for _, part in parts:
        for note, count in part.notes.items():
            notes[note] = notes.get(note, 0) + count
    sums: dict[str, Any] = {name: sum(getattr(part, name) for _, part in parts) for name in SUMS}
    return LoadOutcome(**whole, outputs=outputs, notes=notes, **sums)


def one_after_another(parts: Sequence[tuple[float, LoadOutcome]]) -> LoadOutcome:
    """Several loads of (seconds, outcome) as if each had followed the one before."""
    moved, shift, first = [], 0.0, 0
    for seconds, part in parts:
        times = {name: getattr(part, name) + shift for name in ("planned", "sent", "done")}
        rest = {name: getattr(part, name) for name in ARRAYS if name not in times}
        sums = {name: getattr(part, name) for name in SUMS}
        outcome = LoadOutcome(**times, **rest, **sums, outputs=part.outputs, notes=part.notes)
        moved.append((np.arange(first, first + len(part)), outcome))
        shift, first = shift + seconds, first + len(part)
    return merge(moved)
