"""What the scheduler costs: a change of width between two batches, a decision, and a request from submit to answer.

    python bench/scheduling.py [MODEL.apm]

The network is small (a CIFAR ResNet-20 on 8 x 8 images, or the file given), so that microseconds show. Requests that
change the width and requests that do not take turns; medians. Writes bench/results/scheduling.csv.
"""

from __future__ import annotations

import csv
import sys
import tempfile
import time
from pathlib import Path

import graphs
import numpy as np

import anyprec
from anyprec.format.file import write
from anyprec.serve.scheduling.core import SchedulerCore
from anyprec.serve.scheduling.engine import example, measure_latency
from anyprec.serve.scheduling.latency import LatencyTable
from anyprec.serve.scheduling.queue import QueueLimits
from anyprec.serve.scheduling.scheduler import Request, Scheduler

ROUNDS = 1000
QUEUES = (1, 8, 64, 1000)


def switching(model: anyprec.run.model.PackedModel) -> dict[str, float]:
    """Through the scheduler: run time of a batch after one at another width, and after one at the same."""
    x = example(model, None)
    widths = [k for k in model.widths if k in (1, 2, 4, 8)]
    changed, same, whole = [], [], []
    with Scheduler(model, measure_latency(model, slo=1.0, max_batch=32), slo=1.0) as scheduler:

        def ask(bits: int) -> float:
            start = time.perf_counter()
            future = scheduler.submit(Request(x, time.monotonic() + 10, bits=bits))
            assert future is not None
            answer = future.result(10)
            whole.append(1e6 * (time.perf_counter() - start - answer.run_s))
            return 1e6 * answer.run_s

        for i in range(ROUNDS):
            k, other = widths[i % len(widths)], widths[(i + 1) % len(widths)]
            ask(other)
            changed.append(ask(k))
            same.append(ask(k))
    return {
        "a batch after another width, us": float(np.median(changed)),
        "a batch after the same width, us": float(np.median(same)),
        "cost of the change, us": float(np.median(np.array(changed) - np.array(same))),
        "submit to answer beside the run, us": float(np.median(whole)),
    }


def deciding(images: int) -> float:
    """Microseconds from a queue of so many images to a batch, and of taking its time down afterwards."""
    times = {
        str(k): {n: 1e-3 * ms * (0.2 + 0.8 * n) for n in (1, 2, 4, 8, 16, 32)}
        for k, ms in ((8, 2), (4, 1.6), (2, 1.3), (1, 1))
    }
    core = SchedulerCore(
        {"8": 93.9, "4": 93.8, "2": 93.5, "1": 92.0},
        LatencyTable(times),
        slo=3e-3 * images,
        limits=QueueLimits(max_queue=2000),
    )
    taken = []
    for i in range(300):
        now = 0.01 * i
        core.queue.__init__()  # type: ignore[misc]
        for n in range(images):
            core.queue.add(Request(None, now + 2e-3 * n + 4e-3, arrived=now))
        start = time.perf_counter()
        work = core.next(now)
        assert work is not None
        core.finish(work, work.ends - work.began, now)
        taken.append(1e6 * (time.perf_counter() - start))
    return float(np.median(taken))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = sys.argv[1] if len(sys.argv) > 1 else f"{folder}/net.apm"
        if len(sys.argv) < 2:
            write(graphs.resnet20_graph(size=8), path)
        row = switching(anyprec.load(path))
    row |= {f"a decision with {images} waiting, us": deciding(images) for images in QUEUES}
    for name, value in row.items():
        print(f"{name:38} {value:8.1f}")
    with open(Path(__file__).parent / "results" / "scheduling.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([row.keys(), [f"{v:.1f}" for v in row.values()]])


if __name__ == "__main__":
    main()
