"""LoadOutcome: the outcome of every request of a load test, as arrays in the order of planned times.

Made by client.py, read by report.py. Times are seconds from the start of the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

OK = 200
REJECTED = (429, 503)  # refused by the server before spending engine time
EXPIRED = 504  # accepted, then dropped after its deadline
UNANSWERED = 0  # no answer before the timeout
BROKEN = -1  # no connection, or it closed before the answer was complete


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
    image: np.ndarray  # (n,) int64, which image was sent, or which batch of images
    outputs: dict[int, bytes] = field(default_factory=dict)  # request -> the bytes of the answer, where kept
    cpu_s: float = 0.0  # CPU time of the generator
    connections: int = 0  # opened
    resent: int = 0  # on a new connection, since the server had closed the kept one
    waited: int = 0  # waited for a connection, since the pool was at its limit
    notes: dict[str, int] = field(default_factory=dict)  # error messages, and how often each occurred

    def __len__(self) -> int:
        return len(self.planned)

    @property
    def latency(self) -> np.ndarray:
        """From the planned time, not the send time, so a stalled sender hides nothing. (n,) s, nan: no answer."""
        return np.where(self.status == OK, self.done - self.planned, np.nan)

    @property
    def send_delay(self) -> np.ndarray:
        made: np.ndarray = self.sent - self.planned
        return made

    def in_time(self, slo_s: float) -> np.ndarray:
        made: np.ndarray = (self.status == OK) & (self.done - self.planned <= slo_s)
        return made

    def labels(self, datatype: np.dtype, batch: int = 1) -> np.ndarray:
        """The most likely class of each of `batch` images in every answer that was kept, -1 elsewhere. (n, batch)"""
        found = np.full((len(self), batch), -1, np.int64)
        for request, data in self.outputs.items():
            if self.status[request] == OK and data and len(data) % (batch * datatype.itemsize) == 0:
                found[request] = np.frombuffer(data, datatype).reshape(batch, -1).argmax(1)
        return found


ARRAYS = ("planned", "sent", "done", "status", "profile", "queue_s", "run_s", "batch", "retry_after_s", "image")
SUMS = ("cpu_s", "connections", "resent", "waited")


def merge(parts: Sequence[tuple[np.ndarray, LoadOutcome]]) -> LoadOutcome:
    """Combine the (positions, outcome) of several processes."""
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
    """Concatenate several loads of (seconds, outcome) in time."""
    moved, shift, first = [], 0.0, 0
    for seconds, part in parts:
        times = {name: getattr(part, name) + shift for name in ("planned", "sent", "done")}
        rest = {name: getattr(part, name) for name in ARRAYS if name not in times}
        sums = {name: getattr(part, name) for name in SUMS}
        outcome = LoadOutcome(**times, **rest, **sums, outputs=part.outputs, notes=part.notes)
        moved.append((np.arange(first, first + len(part)), outcome))
        shift, first = shift + seconds, first + len(part)
    return merge(moved)
