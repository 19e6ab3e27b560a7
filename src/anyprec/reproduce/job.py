"""One job, a training or an experiment, done in this process; and a worker process that does jobs told by its parent.

A job is a plain dict, so that it travels as a line of JSON. `perform(job, tell)` does it. `python -m
anyprec.reproduce.job` reads jobs from stdin and writes how far it is to stdout; when stdin closes, because the parent
ended in whatever way, it ends too.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tell = Callable[[float, str], None]  # (share done, what is done now)

# {"kind": "train", "recipe": {...}, "after": {...} | None, "observe": 8, ...} and {"kind": "experiment", "name": ...};
# both have "scale", "seeds", "out", "data", "device"
Job = dict[str, Any]


def perform(job: Job, tell: Tell) -> dict[str, Any]:
    """What is told of a job that is done: its seconds."""
    from anyprec.reproduce.store import TrainingStore

    started = time.monotonic()
    out = Path(job["out"])
    data = Path(job["data"]) if job["data"] else None
    store = TrainingStore(out / "trainings", data, job["device"], made_up_folder(job["scale"], out))
    if job["kind"] == "train":
        store.train(training_of(job["training"]), lambda step, steps: tell(step / max(steps, 1), ""))
    else:
        from anyprec.reproduce.catalog import conclude

        conclude(job["name"], job["scale"], out, store, tell, job["seeds"])
    return {"seconds": time.monotonic() - started}


def made_up_folder(scale: str, out: Path) -> Path | None:
    """At tiny scale data sets that are not embedded are made up."""
    return out / "made-up" if scale == "tiny" else None


def training_record(training: Any) -> dict[str, Any]:
    after = training_record(training.after) if training.after is not None else None
    return {"recipe": training.recipe.to_dict(), "after": after, "observe": training.observe}


def training_of(record: dict[str, Any]) -> Any:
    from anyprec.reproduce.store import Training
    from anyprec.training.recipe import Recipe

    after = training_of(record["after"]) if record["after"] is not None else None
    return Training(Recipe.from_dict(record["recipe"]), after, record["observe"])


def work() -> None:
    """The worker: jobs from stdin, one at a time; lines to stdout: {"share", "what"}, then {"done"} or {"error"}."""
    # What libraries print must not mix with what is told: it goes where errors go, into the log.
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(json.loads(line))
        os._exit(0)  # the parent is gone; what is being trained resumes from its last checkpoint

    def say(**fields: Any) -> None:
        told.write(json.dumps(fields) + "\n")
        told.flush()

    import torch

    from anyprec.errors import AnyprecError

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    threading.Thread(target=listen, daemon=True).start()
    while True:
        job = jobs.get()
        try:
            say(done=perform(job, lambda share, what: say(share=share, what=what)))
        except AnyprecError as error:
            say(error=str(error))
        except Exception as error:
            traceback.print_exc()
            say(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    work()
