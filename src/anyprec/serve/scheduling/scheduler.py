"""Scheduler: one model, its waiting requests, and the engine threads that run them. Thread-safe; knows no HTTP.

    scheduler = Scheduler(anyprec.load("net.apm"), slo=0.05)
    scheduler.warm_up()                     # the latency table
    scheduler.start()
    future = scheduler.submit(Request(x, deadline=time.monotonic() + 0.05))
    answer = future.result()                # Answer, or raises Expired, Overloaded, ...
    scheduler.drain(timeout=10)

What to run next is decided by desk.py. Called by the HTTP server (app.py) and the Ray application.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from anyprec.errors import AnyprecError, Cancelled, Draining, Expired, InputError, ServeError
from anyprec.progress import Progress
from anyprec.run.model import CancelToken
from anyprec.serve.connections.cores import keep_to
from anyprec.serve.monitoring.condition import Precision
from anyprec.serve.scheduling.core import Desk, Refusal, Work, default_margin
from anyprec.serve.scheduling.engine import Model, accuracies, bits_of, check_fits, example, time_model
from anyprec.serve.scheduling.latency import LatencyTable
from anyprec.serve.scheduling.queue import Limits, Request
from anyprec.serve.scheduling.stats import Tally

__all__ = ["Answer", "Limits", "Request", "Scheduler"]

IDLE_S = 0.25  # an idle engine thread looks up this often: for late requests that expired, and stale times
PROBE_SHARE = 0.25  # of the SLO: the longest run that is only there to keep the table up to date

log = logging.getLogger("anyprec.serve")


@dataclass(frozen=True)
class Answer:
    outputs: list[np.ndarray]  # one array (n, ...) for each output of the model
    bits: int | str  # the width, or the name of a mixed profile
    queue_s: float  # from `arrived` to the start of the batch
    run_s: float
    batch: int  # images that ran together
    late: bool  # after its deadline


Outcome = Answer | Exception
Done = Callable[[Outcome], None]


def call_each(pairs: list[tuple[Done, Outcome]]) -> None:
    for done, outcome in pairs:
        try:
            done(outcome)
        except Exception:  # one caller's mistake must not cost the others their answers
            log.exception("a callback failed")


class Scheduler:
    """deliver: called once a batch with [(done, outcome), ...], from an engine thread (or from whoever displaced a
    request); a server passes one that hands them all to its event loop in one go.

    margin: seconds kept back from every deadline for the answer's way out; set it at any time. None: a tenth of the
    SLO, at most 5 ms. cores: that engine threads keep to; None: any. image_size: (H, W) the table is measured with
    where the model takes any.
    """

    def __init__(
        self,
        model: Model,
        *,
        policy: str = "adaptive",
        bits: int | str | None = None,
        slo: float = 0.05,
        limits: Limits | None = None,
        engine_threads: int = 1,
        threads_per_call: int = 1,
        cores: frozenset[int] | None = None,
        margin: float | None = None,
        image_size: tuple[int, int] | None = None,
        deliver: Callable[[list[tuple[Done, Outcome]]], None] = call_each,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < slo < 3600:
            raise ServeError(f"slo={slo!r} is not a latency target in seconds; give more than 0, such as 0.05")
        if engine_threads < 1 or threads_per_call < 1:
            raise ServeError("engine_threads and threads_per_call must be 1 or more")
        self.slo = slo
        self.limits = limits or Limits()
        self.deliver = deliver
        self.clock = clock
        self.threads_per_call = threads_per_call
        self.image_size = image_size
        self._engines = engine_threads
        self._cores = cores
        self._margin = default_margin(slo) if margin is None else margin
        self._policy = (policy, bits)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # something to do, or to end for
        self._quiet = threading.Condition(self._lock)  # nothing waits or runs
        self._model = model
        self._desk: Desk | None = None
        self._threads: list[threading.Thread] = []
        self._tokens: dict[Work, CancelToken] = {}  # of the batches that run
        self._busy = 0  # engine threads that have work, or answers not yet delivered
        self._draining = False
        self._ended = False
        self.tally = Tally()

    # --- Life -----------------------------------------------------------------------------------------------------

    def warm_up(self, progress: Progress | None = None, seconds: float = 3.0) -> LatencyTable:
        """Measure the latency table, in about so many seconds at most; prepares the engine's weights as well."""
        table = self._time(self._model, seconds, progress)
        self.use_table(table)
        return table

    def _time(self, model: Model, seconds: float, progress: Progress | None = None) -> LatencyTable:
        return time_model(
            model,
            slo=self.slo,
            max_batch=self.limits.max_batch,
            threads=self.threads_per_call,
            size=self.image_size,
            seconds=seconds,
            progress=progress,
        )

    def use_table(self, table: LatencyTable) -> None:
        """A table from elsewhere instead of `warm_up`."""
        policy, bits = self._policy
        desk = Desk(
            accuracies(self._model),
            table,
            policy=policy,
            bits=bits,
            slo=self.slo,
            limits=self.limits,
            margin=self._margin,
            engines=self._engines,
            shape=example(self._model, self.image_size).shape[1:],
        )
        with self._lock:
            if self._desk is not None:
                raise ServeError("the scheduler has its latency table already; replace_model brings a new one")
            self._desk = desk

    def start(self) -> None:
        """Start the engine threads (submit does so too); measures the table first if nobody has."""
        if self._desk is None:
            self.warm_up()
        with self._lock:
            if self._threads or self._ended:
                return
            for i in range(self._engines):
                thread = threading.Thread(target=self._serve, name=f"anyprec-engine-{i}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def drain(self, timeout: float | None = None) -> bool:
        """No new requests; True when all that were accepted have been answered, False after `timeout` seconds.

        Then the threads end. What is left over after the timeout is told Draining; batches that run stop at their next
        step.
        """
        with self._lock:
            self._draining = True
            desk = self._desk
            quiet = desk is None or self._quiet.wait_for(self._is_quiet, timeout)
            left = [] if desk is None else [*desk.queue.waiting, *desk.queue.late]
            for request in left:
                assert desk is not None
                desk.queue.remove(request)
            self._ended = True
            for token in self._tokens.values():
                token.cancel()
            self._work.notify_all()
            refused: list[Refusal] = [
                (request, Draining("the server stopped before its turn came")) for request in left
            ]
        self._tell(refused)
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
        """Let a request wait; never blocks. Raises at once what is known at once: Overloaded, Draining, Expired,
        InputError, UnsupportedBits.

        With `done` it is called once with the Answer or the error (by way of `deliver`) and nothing is returned; else
        a Future is, and cancelling that future takes the request out of the queue.
        """
        future: Future[Answer] | None = None
        if done is None:
            future = Future()
            future.add_done_callback(lambda f: self.cancel(request) if f.cancelled() else None)
            done = settle(future)
        self._check(request)
        if not self._threads:
            self.start()
        now = self.clock()
        request.done = done
        request.arrived = request.arrived or now
        refused: list[Refusal] = []
        with self._lock:
            desk = self._desk
            assert desk is not None
            self.tally.arrived += 1
            try:
                if self._draining:
                    raise Draining("the server is stopping; send it to another, or try again later")
                desk.arrive(request, now)
            except AnyprecError as error:
                self.tally.refuse(error, now)
                raise
            if desk.refused:
                refused = desk.take_refused()
            self._work.notify()
        self._tell(refused)
        return future

    def cancel(self, request: Request) -> bool:
        """The client is gone: True if the request still waited. It is told nothing, and costs no engine time.

        A batch that runs for it stops at its next step, if all the batch's other clients are gone as well.
        """
        with self._lock:
            if self._desk is None:
                return False
            if not self._desk.queue.remove(request):
                for work, token in self._tokens.items():
                    if request in work.requests:
                        work.gone.add(request)
                        if len(work.gone) == len(work.requests):
                            token.cancel()
                return False
            self.tally.cancelled += 1
            if self._is_quiet():
                self._quiet.notify_all()
        return True

    def _is_quiet(self) -> bool:
        desk = self._desk
        return desk is None or not (self._busy or desk.queue.waiting or desk.queue.late or desk.refused)

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
        keep_to(self._cores)
        while True:
            work: Work | None = None
            probe: tuple[str, int] | None = None
            with self._lock:
                desk = self._desk
                assert desk is not None
                while not self._ended:
                    work = desk.next(self.clock())
                    if work is not None or desk.refused or probe is not None:
                        break
                    if self._is_quiet():
                        self._quiet.notify_all()
                    if not self._work.wait(IDLE_S) and not self._draining:
                        probe = desk.stale(self.clock(), PROBE_SHARE * self.slo)
                if self._ended and work is None and not desk.refused:
                    return
                if work is not None:
                    self._tokens[work] = CancelToken(work.expires - self.clock())
                model, refused = self._model, desk.take_refused()
                self._busy += 1
            try:
                self._tell(refused)
                if work is not None:
                    self._run(desk, model, work)
                elif probe is not None:
                    self._probe(desk, model, *probe)
            except Exception:  # a mistake of ours; with the thread everyone's answers would be gone
                log.exception("the engine thread had an accident")
            finally:
                with self._lock:
                    if work is not None:
                        self._tokens.pop(work, None)
                    self._busy -= 1
                    if self._is_quiet():
                        self._quiet.notify_all()

    def _run(self, desk: Desk, model: Model, work: Work) -> None:
        requests = work.requests
        outcomes: list[Outcome]
        began = self.clock()
        failed = False
        try:
            token = self._tokens[work]
            arrays = [request.x for request in requests if request.x is not None]
            x = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            outputs = model(x, work.level.bits, threads=self.threads_per_call, cancel=token)
            ended = self.clock()
            outcomes = list(self._answers(work, outputs, began, ended))
        except Cancelled:
            ended = self.clock()
            # How long it would have taken is not known. That it was too long must be, or the same is tried again.
            failed = ended <= work.ends
            outcomes = [self._why_cancelled()] * len(requests)
        except Exception as error:  # the model's trouble is its callers' to know; the thread lives on
            log.exception("a batch of %d images failed at %s bit", work.images, work.level.profile)
            ended, failed = self.clock(), True
            outcomes = [error] * len(requests)
        try:
            with self._lock:
                # From the decision to now: what a batch costs beside its run counts too.
                desk.finish(work, None if failed else ended - work.began, ended)
                self.tally.cancelled_runs += isinstance(outcomes[0], (Expired, Draining))
                self.tally.ran(work.level.profile, ended - began, chosen=requests[0].bits is None)
                for request, outcome in zip(requests, outcomes, strict=True):
                    if request in work.gone:
                        self.tally.cancelled += 1
                    elif isinstance(outcome, Exception):
                        self.tally.refuse(outcome, ended)
                    else:
                        self.tally.add(request, work.level, ended)
        finally:
            self._deliver([(request.done, outcome) for request, outcome in zip(requests, outcomes, strict=True)])

    def _why_cancelled(self) -> Exception:
        if self._ended:
            return Draining("the server stopped before its run ended")
        return Expired("its deadline passed while it ran")

    def _probe(self, desk: Desk, model: Model, profile: str, batch: int) -> None:
        """Time a cell of the table that no request has used for long, while nobody waits."""
        began = self.clock()
        try:
            x = np.repeat(example(model, self.image_size), batch, axis=0)
            model(x, bits_of(profile), threads=self.threads_per_call)
            seconds = self.clock() - began
        except Exception:
            log.exception("a probe of %d images failed at %s bit", batch, profile)
            return
        with self._lock:
            if profile in desk.table.rows and model is self._model:
                desk.table.observe(profile, batch, seconds, self.clock())

    def _answers(self, work: Work, outputs: Any, began: float, ended: float) -> Iterable[Answer]:
        arrays = outputs if isinstance(outputs, tuple) else (outputs,)
        at = 0
        for request in work.requests:
            part = [array[at : at + request.images] for array in arrays]
            at += request.images
            late = ended > request.deadline
            yield Answer(part, work.level.bits, began - request.arrived, ended - began, work.images, late)

    def _tell(self, refused: list[Refusal]) -> None:
        if not refused:
            return
        with self._lock:
            now = self.clock()
            for _, error in refused:
                self.tally.refuse(error, now)
        self._deliver([(request.done, error) for request, error in refused])

    def _deliver(self, pairs: list[tuple[Done | None, Outcome]]) -> None:
        try:
            self.deliver([(done, outcome) for done, outcome in pairs if done is not None])
        except Exception:  # the event loop may be gone; the engine is not
            log.exception("%d answers could not be delivered", len(pairs))

    # --- Settings -------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        return self._model

    @property
    def policy(self) -> tuple[str, int | str | None]:
        """Its name, and the bits where it is "fixed"."""
        return self._policy

    @property
    def waiting(self) -> dict[str, int]:
        with self._lock:
            return {} if self._desk is None else waiting(self._desk)

    @property
    def precision(self) -> Precision:
        with self._lock:
            return Precision(self.tally.last, self.tally.changes, dict(self.tally.batches))

    def set_policy(self, policy: str, bits: int | str | None = None) -> None:
        """From the next batch on: "adaptive", "accuracy", or "fixed" with bits."""
        with self._lock:
            if self._desk is not None:
                self._desk.set_policy(policy, bits)
            self._policy = (policy, bits)

    @property
    def margin(self) -> float:
        return self._margin

    @margin.setter
    def margin(self, margin: float) -> None:
        with self._lock:
            self._margin = margin
            if self._desk is not None:
                self._desk.margin = margin

    def replace_model(self, model: Model, table: LatencyTable | None = None) -> None:
        """Serve another model from the next batch on. Batches that have begun end on the old one.

        Measures the new one first, while the old one serves. Requests that wait and do not fit it are told so.
        """
        table = table or self._time(model, 3.0)
        refused: list[Refusal] = []
        with self._lock:
            desk = self._desk
            self._model = model
            if desk is None:
                return
            desk.set_table(accuracies(model), table, example(model, self.image_size).shape[1:])
            bits = self._policy[1]
            if bits is not None and str(bits) not in desk.all_levels:
                self._policy = ("adaptive", None)
                desk.set_policy(*self._policy)
            for request in [*desk.queue.waiting, *desk.queue.late]:
                try:
                    assert request.x is not None
                    check_fits(model, request.x)
                    desk.allowed(request)
                except AnyprecError as error:
                    desk.queue.remove(request)
                    refused.append((request, error))
        self._tell(refused)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what the last seconds were like; all of it JSON."""
        with self._lock:
            now = self.clock()
            desk = self._desk
            record = self.tally.record(now)
            record["policy"], record["bits"] = self._policy
            record["slo_ms"] = 1e3 * self.slo
            record["margin_ms"] = 1e3 * self._margin
            record["draining"] = self._draining
            if desk is not None:
                record["queue"] = waiting(desk)
                record["running"] = sum(work.images for work in desk.running)
                record["rate"] = desk.rate.at(now)
                record["levels"] = [{"profile": level.profile, "accuracy": level.accuracy} for level in desk.levels]
                record["table"] = desk.table.record()
        return record


def waiting(desk: Desk) -> dict[str, int]:
    return {"requests": len(desk.queue), "images": desk.queue.images, "late": len(desk.queue.late)}


def settle(future: Future[Answer]) -> Done:
    def done(outcome: Outcome) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    return done
