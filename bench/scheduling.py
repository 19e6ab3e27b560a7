"""What the scheduler costs: a change of width between two batches, a decision, and a request from submit to answer.

    python bench/scheduling.py [MODEL.apm]

The network is small (a CIFAR ResNet-20 on 8 x 8 images, or the file given), so that microseconds show. Requests that
change the width and requests that do not take turns; medians. Writes bench/results/scheduling.csv.
"""

from __future__ import annotations

import time

import numpy as np
from switching import alternate, save_row, small_model

import anyprec
from anyprec.serve.scheduling.core import SchedulerCore
from anyprec.serve.scheduling.engine import example, measure_latency
from anyprec.serve.scheduling.latency import LatencyTable
from anyprec.serve.scheduling.queue import QueueLimits
from anyprec.serve.scheduling.scheduler import Request, Scheduler

ROUNDS = 1000
QUEUES = (1, 8, 64, 1000)


def through_the_scheduler(model: anyprec.PackedModel) -> dict[str, float]:
    """Run time of a batch after one at another width, and after one at the same; what a request takes beside it."""
    x = example(model, None)
    widths = [k for k in model.widths if k in (1, 2, 4, 8)]
    whole = []
    with Scheduler(model, measure_latency(model, slo=1.0, max_batch=32), slo=1.0) as scheduler:

        def ask(bits: int) -> float:
            start = time.perf_counter()
            future = scheduler.submit(Request(x, time.monotonic() + 10, bits=bits))
            assert future is not None
            answer = future.result(10)
            whole.append(1e6 * (time.perf_counter() - start - answer.run_s))
            return 1e6 * answer.run_s

        changed, same = alternate(widths, ask, ROUNDS)
    return {
        "a batch after another width, us": float(np.median(changed)),
        "a batch after the same width, us": float(np.median(same)),
        "cost of the change, us": float(np.median(changed - same)),
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
    with small_model() as model:
        row = through_the_scheduler(model)
    row |= {f"a decision with {images} waiting, us": deciding(images) for images in QUEUES}
    save_row("scheduling", row, digits=1)


if __name__ == "__main__":
    main()
