"""Scheduler: one model, its queued requests, and the engine threads that run them. Thread-safe; knows no HTTP.

    model = anyprec.load("net.apm")
    scheduler = Scheduler(model, measure_latency(model, slo=0.05), slo=0.05)
    scheduler.start()
    future = scheduler.submit(Request(x, deadline=time.monotonic() + 0.05))
    answer = future.result()                # Answer, or raises Expired, Overloaded, ...
    scheduler.drain(timeout=10)

SchedulerCore decides what runs next. Called by models.py for the HTTP server and the Ray application.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from anyprec.errors import AnyprecError, Cancelled, Draining, Expired, InputError, ServeError
from anyprec.run.model import CancelToken
from anyprec.serve.connections.cores import pin_thread, run_behind_http
from anyprec.serve.monitoring.condition import Precision
from anyprec.serve.scheduling.answer import Answer, Deliver, Done, Outcome, call_each, set_future
from anyprec.serve.scheduling.core import Batch, Rejection, SchedulerCore, default_margin
from anyprec.serve.scheduling.engine import (
    ServableModel,
    ServedLevels,
    check_fits,
    example,
    measure_latency,
    run_whole,
    served_levels,
)
from anyprec.serve.scheduling.latency import LatencyTable
from anyprec.serve.scheduling.queue import QueueLimits, Request
from anyprec.serve.scheduling.stats import SchedulerStats

__all__ = ["Answer", "QueueLimits", "Request", "Scheduler"]

IDLE_S = 0.25  # an idle engine thread wakes this often, to drop expired requests and re-time stale table cells
SENDING = 0.99  # quantile of the time from a run's end until its answer is sent that is kept back from deadlines ...
SENDING_RUNS = 256  # ... of so many answers
MOST_MARGIN = 0.4  # of the SLO
PROBE_SHARE = 0.25  # longest run that only keeps the latency table up to date, as a fraction of the SLO

log = logging.getLogger("anyprec.serve")


class Scheduler:
    """Runs requests for `model` on engine threads; `table` holds its latency by level and batch size.

    levels: those it is served at, and their accuracies; None: all.

    deliver: called once per batch with [(done, outcome), ...], from an engine thread or from the thread whose request
    displaced another. A server passes one that hands all of them to its event loop at once.
    margin: seconds kept back from every deadline for sending the answer, at least. None: a tenth of the SLO, at most
        5 ms. What `sent` is told may raise it.
    cores: CPU cores the engine threads keep to; None: any.
    image_size: (H, W) the table was measured with, for models that take any size.
    """

    def __init__(
        self,
        model: ServableModel,
        table: LatencyTable,
        *,
        policy: str = "adaptive",
        bits: int | str | None = None,
        slo: float = 0.05,
        limits: QueueLimits | None = None,
        engine_threads: int = 1,
        threads_per_call: int = 1,
        cores: frozenset[int] | None = None,
        margin: float | None = None,
        image_size: tuple[int, int] | None = None,
        levels: ServedLevels | None = None,
        deliver: Deliver = call_each,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < slo < 3600:
            raise ServeError(f"slo={slo!r} is not a latency target in seconds; give more than 0, such as 0.05")
        if engine_threads < 1 or threads_per_call < 1:
            raise ServeError("engine_threads and threads_per_call must be 1 or more")
        self.slo = slo
        self.limits = limits or QueueLimits()
        self.deliver = deliver
        self.clock = clock
        self.threads_per_call = threads_per_call
        self.image_size = image_size
        self._cores = cores
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # signaled when there is a request to run, or at the end
        self._quiet = threading.Condition(self._lock)  # signaled when nothing is queued or running
        self._model = model
        levels = levels or served_levels(model)
        self._core = SchedulerCore(
            levels.accuracies,
            table,
            policy=policy,
            bits=bits,
            slo=slo,
            limits=self.limits,
            margin=default_margin(slo) if margin is None else margin,
            engines=engine_threads,
            shape=example(model, image_size).shape[1:],
            levels=levels.names,
        )
        self._threads: list[threading.Thread] = []
        self._tokens: dict[Batch, CancelToken] = {}  # of the running batches
        self._busy = 0  # engine threads that run a batch, or have answers not yet delivered
        self._draining = False
        self._ended = False
        self._stats = SchedulerStats()
        self._margin = self._core.margin  # at least
        self._sending: deque[float] = deque(maxlen=SENDING_RUNS)
        self._sent = 0

    # --- Start and end --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine threads; `submit` does so too."""
        with self._lock:
            if self._threads or self._ended:
                return
            for i in range(self._core.engines):
                thread = threading.Thread(target=self._serve, name=f"anyprec-engine-{i}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests; True once all accepted ones are answered, False after `timeout` seconds.

        Then the threads end. Requests left after the timeout get Draining; running batches stop at their next step.
        """
        with self._lock:
            self._draining = True
            quiet = self._quiet.wait_for(self._is_quiet, timeout)
            left = [*self._core.queue.waiting, *self._core.queue.late]
            for request in left:
                self._core.queue.remove(request)
            self._ended = True
            for token in self._tokens.values():
                token.cancel()
            self._work.notify_all()
            rejected: list[Rejection] = [
                (request, Draining("the server stopped before its turn came")) for request in left
            ]
        self._tell(rejected)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1.0 if quiet else 0.1)
        return quiet

    def __enter__(self) -> Scheduler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drain(10.0)

    # --- Requests -------------------------------------------------------------------------------------------------

    def submit(self, request: Request, done: Done | None = None) -> Future[Answer] | None:
        """Queue a request; never blocks. Raises Overloaded, Draining, Expired, InputError or UnsupportedBits.

        With `done`: it is called once with the Answer or the error, by `deliver`, and nothing is returned. Without:
        a Future is returned, and cancelling it takes the request out of the queue.
        """
        future: Future[Answer] | None = None
        if done is None:
            future = Future()
            future.add_done_callback(lambda f: self.cancel(request) if f.cancelled() else None)
            done = set_future(future)
        self._check(request)
        if not self._threads:
            self.start()
        now = self.clock()
        request.done = done
        request.arrived = request.arrived or now
        with self._lock:
            self._stats.arrived += 1
            try:
                if self._draining:
                    raise Draining("the server is stopping; send it to another, or try again later")
                self._core.arrive(request, now)
            except AnyprecError as error:
                self._stats.reject(error, now)
                raise
            rejected = self._core.take_rejected()
            self._work.notify()
        self._tell(rejected)
        return future

    def cancel(self, request: Request) -> bool:
        """The client is gone: True if the request was still queued. Its callback is not called.

        A running batch stops at its next step once the clients of all its requests are gone.
        """
        with self._lock:
            if not self._core.queue.remove(request):
                for batch, token in self._tokens.items():
                    if request in batch.requests:
                        batch.gone.add(request)
                        if len(batch.gone) == len(batch.requests):
                            token.cancel()
                return False
            self._stats.cancelled += 1
            if self._is_quiet():
                self._quiet.notify_all()
        return True

    def _is_quiet(self) -> bool:
        core = self._core
        return not (self._busy or core.queue.waiting or core.queue.late or core.rejected)

    def _check(self, request: Request) -> None:
        x = request.x
        if x is None or x.ndim != 4 or x.dtype not in (np.uint8, np.float32):
            given = "nothing" if x is None else f"{x.dtype} of shape {x.shape}"
            raise InputError(f"input is {given}; give uint8 or float32 images ({self._model.layout})")
        if not 1 <= request.images <= self.limits.max_batch:
            raise InputError(f"{request.images} images in one request; give 1 to {self.limits.max_batch}")
        check_fits(self._model, x)

    # --- Engine threads -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        pin_thread(self._cores)
        run_behind_http()
        while True:
            batch: Batch | None = None
            probe: tuple[str, int] | None = None
            with self._lock:
                while not self._ended:
                    batch = self._core.next(self.clock())
                    if batch is not None or self._core.rejected or probe is not None:
                        break
                    if self._is_quiet():
                        self._quiet.notify_all()
                    if not self._work.wait(IDLE_S) and not self._draining:
                        probe = self._core.stale(self.clock(), PROBE_SHARE * self.slo)
                if self._ended and batch is None and not self._core.rejected:
                    return
                if batch is not None:
                    self._tokens[batch] = CancelToken(batch.expires - self.clock())
                model, rejected = self._model, self._core.take_rejected()
                self._busy += 1
            try:
                self._tell(rejected)
                if batch is not None:
                    self._run(model, batch)
                elif probe is not None:
                    self._probe(model, *probe)
            except Exception:  # our mistake; without this thread nobody would be answered
                log.exception("internal error in an engine thread")
            finally:
                with self._lock:
                    if batch is not None:
                        self._tokens.pop(batch, None)
                    self._busy -= 1
                    if self._is_quiet():
                        self._quiet.notify_all()

    def _run(self, model: ServableModel, batch: Batch) -> None:
        requests = batch.requests
        outcomes: list[Outcome]
        began = self.clock()
        failed = False
        stages: tuple[int | str, ...] | None = None
        try:
            token = self._tokens[batch]
            arrays = [request.x for request in requests if request.x is not None]
            x = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            outputs = model(x, batch.level.bits, threads=self.threads_per_call, cancel=token)
            ended = self.clock()
            if batch.level.name in batch.table.cascades:
                stages = model.last_stages
            outcomes = self._answers(batch, outputs, began, ended, stages)
        except Cancelled:
            ended = self.clock()
            # Its full time is unknown. If it exceeded the expected time, the table must learn, or we try it again.
            failed = ended <= batch.ends
            outcomes = [self._why_cancelled()] * len(requests)
        except Exception as error:  # the callers get the model's error; the thread goes on
            log.exception("a batch of %d images failed at level %s", batch.images, batch.level.name)
            ended, failed = self.clock(), True
            outcomes = [error] * len(requests)
        try:
            with self._lock:
                # From the decision to now, so that the overhead of a batch counts too.
                went_on = self._went_on(batch, stages)
                self._core.finish(batch, None if failed else ended - batch.began, ended, went_on)
                self._stats.cancelled_runs += isinstance(outcomes[0], (Expired, Draining))
                self._stats.ran(batch.level.name, ended - began, chosen=requests[0].bits is None)
                for request, outcome in zip(requests, outcomes, strict=True):
                    if request in batch.gone:
                        self._stats.cancelled += 1
                    elif isinstance(outcome, Exception):
                        self._stats.reject(outcome, ended)
                    else:
                        self._stats.answer(request, batch.level, ended)
        finally:
            self._deliver([(request.done, outcome) for request, outcome in zip(requests, outcomes, strict=True)])

    def _why_cancelled(self) -> Exception:
        if self._ended:
            return Draining("the server stopped before its run ended")
        return Expired("its deadline passed while it ran")

    def _probe(self, model: ServableModel, name: str, batch: int) -> None:
        """Time a cell of the table that no request has used for a while, when the queue is empty."""
        began = self.clock()
        try:
            x = np.repeat(example(model, self.image_size), batch, axis=0)
            run_whole(model, x, name, name in self._core.table.cascades, self.threads_per_call)
            seconds = self.clock() - began
        except Exception:
            log.exception("a probe of %d images failed at level %s", batch, name)
            return
        with self._lock:
            if name in self._core.table.rows and model is self._model:
                self._core.table.observe(name, batch, seconds, self.clock(), went_on=batch, typical_input=False)

    def _answers(
        self, batch: Batch, outputs: Any, began: float, ended: float, stages: tuple[int | str, ...] | None
    ) -> list[Outcome]:
        arrays = outputs if isinstance(outputs, tuple) else (outputs,)
        answers: list[Outcome] = []
        at = 0
        for request in batch.requests:
            end = at + request.images
            part = [array[at:end] for array in arrays]
            own = None if stages is None else stages[at:end]
            late = ended > request.deadline
            answers.append(
                Answer(
                    part,
                    batch.level.bits,
                    began - request.arrived,
                    ended - began,
                    batch.images,
                    late,
                    own,
                    self._went_on(batch, own),
                )
            )
            at = end
        return answers

    @staticmethod
    def _went_on(batch: Batch, stages: tuple[int | str, ...] | None) -> int | None:
        """How many images went beyond the first stage of a cascade; None: not known, or no cascade."""
        way = batch.table.cascades.get(batch.level.name)
        return None if stages is None or way is None else sum(str(stage) != way.first for stage in stages)

    def _tell(self, rejected: list[Rejection]) -> None:
        if not rejected:
            return
        with self._lock:
            now = self.clock()
            for _, error in rejected:
                self._stats.reject(error, now)
        self._deliver([(request.done, error) for request, error in rejected])

    def _deliver(self, pairs: list[tuple[Done | None, Outcome]]) -> None:
        try:
            self.deliver([(done, outcome) for done, outcome in pairs if done is not None])
        except Exception:  # the event loop may have ended before the engine
            log.exception("%d answers could not be delivered", len(pairs))

    # --- Settings -------------------------------------------------------------------------------------------------

    @property
    def model(self) -> ServableModel:
        return self._model

    @property
    def policy(self) -> tuple[str, int | str | None]:
        """Its name, and the bits where it is "fixed"."""
        with self._lock:
            return self._core.policy_name, self._core.bits

    @property
    def waiting(self) -> dict[str, int]:
        with self._lock:
            return self._waiting()

    def _waiting(self) -> dict[str, int]:
        queue = self._core.queue
        return {"requests": len(queue), "images": queue.images, "late": len(queue.late)}

    @property
    def precision(self) -> Precision:
        with self._lock:
            return Precision(self._stats.last, self._stats.changes, dict(self._stats.batches))

    @property
    def levels(self) -> list[dict[str, Any]]:
        """For JSON: all levels served, and whether policies choose among them, being on the Pareto front."""
        with self._lock:
            core = self._core
            return [
                core.level_record(core.all_levels[name]) | {"front": core.all_levels[name] in core.levels}
                for name in core.names
            ]

    def set_policy(self, policy: str, bits: int | str | None = None) -> None:
        """From the next batch on: "adaptive", "accuracy", or "fixed" with bits."""
        with self._lock:
            self._core.set_policy(policy, bits)

    @property
    def margin(self) -> float:
        """Seconds kept back from every deadline for sending the answer, at least; `sent` may raise it."""
        return self._margin

    @margin.setter
    def margin(self, margin: float) -> None:
        with self._lock:
            self._margin = self._core.margin = margin

    def sent(self, seconds: float) -> None:
        """An answer was sent so long after its run had ended. The margin follows an upper quantile of that."""
        with self._lock:
            self._sending.append(seconds)
            self._sent += 1
            if self._sent % 16 == 0 and len(self._sending) >= 32:
                ordered = sorted(self._sending)
                found = ordered[int(SENDING * (len(ordered) - 1))]
                self._core.margin = max(self._margin, min(found, MOST_MARGIN * self.slo))
                self._core.sending = ordered[len(ordered) // 2]

    def replace_model(
        self, model: ServableModel, table: LatencyTable | None = None, levels: ServedLevels | None = None
    ) -> None:
        """Serve another model from the next batch on. Batches that have begun end on the old one.

        Without a table we measure the new model first, while the old one serves. Queued requests that do not fit the
        new model get an error.
        """
        levels = levels or served_levels(model)
        table = table or measure_latency(
            model,
            slo=self.slo,
            max_batch=self.limits.max_batch,
            threads=self.threads_per_call,
            size=self.image_size,
            levels=levels,
        )
        rejected: list[Rejection] = []
        with self._lock:
            core = self._core
            self._model = model
            core.set_table(levels.accuracies, table, example(model, self.image_size).shape[1:], levels.names)
            if core.bits is not None and str(core.bits) not in core.all_levels:
                core.set_policy("adaptive")
            for request in [*core.queue.waiting, *core.queue.late]:
                try:
                    assert request.x is not None
                    check_fits(model, request.x)
                    core.allowed(request)
                except AnyprecError as error:
                    core.queue.remove(request)
                    rejected.append((request, error))
        self._tell(rejected)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and over the last seconds; all of it JSON."""
        with self._lock:
            now, core = self.clock(), self._core
            return {
                **self._stats.record(now),
                "policy": core.policy_name,
                "bits": core.bits,
                "slo_ms": 1e3 * self.slo,
                "margin_ms": 1e3 * core.margin,
                "draining": self._draining,
                "queue": self._waiting(),
                "running": sum(batch.images for batch in core.running),
                "rate": core.rate.at(now),
                "levels": core.front(),
                "table": core.table.record(),
            }
