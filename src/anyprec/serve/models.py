"""ModelRepository: model files in; loaded models with their schedulers out, reloaded when a file is replaced.

A new file is opened and verified beside the old one and takes over only if it is complete. Models are copied into
memory, so a file that is rewritten, truncated or deleted in place changes no answer. Accepted requests are always
answered. Called by cli/serve.py, and by http/app.py for every request; everything slow runs in other threads.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anyprec.errors import AnyprecError, ServeError, TruncatedFile
from anyprec.format import INPUT, ModelFile
from anyprec.models.catalog import find
from anyprec.progress import Progress
from anyprec.run.model import AUTO, PackedModel, load
from anyprec.serve.connections.cores import pin_thread
from anyprec.serve.http.protocol import ModelSignature, TensorMetadata
from anyprec.serve.monitoring.logs import log
from anyprec.serve.scheduling.answer import Deliver, call_each
from anyprec.serve.scheduling.engine import ServedLevels, measure_latency, served_levels
from anyprec.serve.scheduling.queue import QueueLimits
from anyprec.serve.scheduling.scheduler import Scheduler

VERSION = "1"  # the only version of a model, also of a replaced file; URLs with a version keep working
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

Stamp = tuple[int, int, int, int, int]  # device, inode, times of the last write and of the last change, size
NO_FILE: Stamp = (0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Settings:
    """Settings shared by all models of a server."""

    slo_s: float = 0.05
    policy: str = "adaptive"
    bits: int | str | None = None  # with the policy "fixed"
    levels: tuple[str, ...] | None = None  # widths, plans and "auto" to serve; None: all of the file
    layout: str = "NCHW"
    threads: int = 1  # per call
    engine_threads: int = 1
    cores: frozenset[int] | None = None  # cores that engine threads keep to; None: any
    limits: QueueLimits = field(default_factory=QueueLimits)
    max_pixels: int = 1 << 20
    memory_budget: int | None = None
    warm_up_s: float = 3.0


@dataclass(frozen=True)
class LoadedModel:
    """One loaded file. Immutable and replaced as a whole, so a request never sees half of a change."""

    model: PackedModel
    scheduler: Scheduler
    signature: ModelSignature
    accuracies: Mapping[str, float | None]  # of all levels served, in percent
    stamp: Stamp
    since: float  # Unix time
    layers: LayerBits

    def output_shapes(self, x: np.ndarray) -> list[tuple[int, ...]]:
        """Shapes of all outputs for this input, known before it runs."""
        declared = [tensor.shape[1:] for tensor in self.signature.outputs]
        if not any(-1 in shape for shape in declared):
            return [(len(x), *shape) for shape in declared]
        height, width = x.shape[2:] if self.signature.layout == "NCHW" else x.shape[1:3]
        return self.model.output_shapes(len(x), height, width)


@dataclass(frozen=True)
class LayerBits:
    """Weight bits of every layer that has some, at each level; of a cascade those of each stage."""

    names: tuple[str, ...]
    bits: Mapping[str, tuple[tuple[int, ...], ...]]  # level -> stage -> layer


def layer_bits(file: ModelFile, model: PackedModel) -> LayerBits:
    """In the order of the graph. Layers of fixed bits are not among them."""
    used = [op.get("weight") for op in file.graph_json["ops"]]
    names = tuple(dict.fromkeys(name for name in used if name in file.quantized and name not in file.fixed))
    bits: dict[str, tuple[tuple[int, ...], ...]] = {
        p.name: (tuple(p.weight_bits(name) for name in names),) for p in file.profiles
    }
    if model.has_cascade:
        bits[AUTO] = tuple(bits[stage.profile][0] for stage in model.cascade.stages)
    return LayerBits(names, bits)


MakeScheduler = Callable[[PackedModel, ServedLevels, Settings, Deliver], Scheduler]


def make_scheduler(model: PackedModel, levels: ServedLevels, settings: Settings, deliver: Deliver) -> Scheduler:
    """Measure the latency table, for at most about warm_up_s seconds, and start the scheduler."""
    with Progress(f"measure {model.name}", unit="cell") as progress:
        table = measure_latency(
            model,
            slo=settings.slo_s,
            max_batch=settings.limits.max_batch,
            threads=settings.threads,
            seconds=settings.warm_up_s,
            progress=progress,
            levels=levels,
        )
    scheduler = Scheduler(
        model,
        table,
        policy=settings.policy,
        bits=settings.bits,
        slo=settings.slo_s,
        limits=settings.limits,
        engine_threads=settings.engine_threads,
        threads_per_call=settings.threads,
        cores=settings.cores,
        levels=levels,
        deliver=deliver,
    )
    scheduler.start()
    return scheduler


class ServedModel:
    """A name, its file, and what is loaded from it now."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path
        self.now: LoadedModel | None = None
        self.reason = "not loaded yet"  # why `now` is None
        self.loads = 0
        self.refused: Stamp | None = None  # of a file that was refused: not tried again until it changes
        self.seen: Stamp | None = None  # a change must be seen twice, since a copy may still be running

    @property
    def state(self) -> str:
        return "UNAVAILABLE" if self.now is None else "READY"


class ModelRepository:
    def __init__(
        self,
        paths: Mapping[str, str],
        settings: Settings,
        deliver: Deliver = call_each,
        make: MakeScheduler = make_scheduler,
        on_load: Callable[[str, bool], None] = lambda name, good: None,
    ) -> None:
        self.settings = settings
        self.deliver = deliver
        self.make = make
        self.on_load = on_load
        self.served = {name: ServedModel(name, path) for name, path in paths.items()}
        self._changing = threading.RLock()  # one load at a time, since two would compete for memory and cores
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        self._leaving: list[threading.Thread] = []

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.served.values())

    def get(self, name: str) -> ServedModel | None:
        return self.served.get(name)

    @property
    def ready(self) -> bool:
        return all(served.now is not None for served in self)

    # --- loading ---

    def load_all(self) -> None:
        for served in self:
            self.load(served)

    def load(self, served: ServedModel) -> None:
        """Load or reload the file; on an error nothing changes, and it is raised."""
        pin_thread(self.settings.cores)  # measure on the cores it will run on
        with self._changing:
            before = served.now
            stamp = None
            try:
                stamp = stamp_of(served.path)
                opened = open_model(served.path, self.settings)
                stamp = opened.stamp
                self._take_over(served, before, opened)
            except AnyprecError:
                served.refused = stamp
                self.on_load(served.name, False)
                if before is None:
                    served.reason = "its file was refused; the server's log says why"
                raise
            served.loads += 1
            served.refused = served.seen = None
            self.on_load(served.name, True)

    def _take_over(self, served: ServedModel, before: LoadedModel | None, opened: OpenedModel) -> None:
        model, levels, signature = opened.model, opened.levels, opened.signature
        if before is not None and before.signature == signature:
            before.scheduler.replace_model(model, levels=levels)  # queued requests are answered by the new file
            scheduler = before.scheduler
        else:
            # Queued requests may have another shape, or name a width the new file lacks: the old file answers them.
            scheduler = self.make(model, levels, self.settings, self.deliver)
            if before is not None:
                carry_policy(before.scheduler, scheduler)
        served.now = LoadedModel(
            model, scheduler, signature, levels.accuracies, opened.stamp, time.time(), opened.layers
        )
        if before is not None and scheduler is not before.scheduler:
            self._drain_aside(before.scheduler)

    def unload(self, served: ServedModel) -> None:
        with self._changing:
            before, served.now, served.reason = served.now, None, "unloaded"
            if before is not None:
                self._drain_aside(before.scheduler)

    def _drain_aside(self, scheduler: Scheduler) -> None:
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]
        thread = threading.Thread(target=scheduler.drain, name="anyprec-drain", daemon=True)
        thread.start()
        self._leaving.append(thread)

    # --- replaced files ---

    def check(self, at_once: bool = False) -> None:
        """Load files that were replaced. at_once: also those whose change has been seen only once."""
        for served in self:
            with self._changing:
                if served.now is None and served.reason == "unloaded":
                    continue
                try:
                    stamp = stamp_of(served.path)
                except ServeError as error:
                    if served.refused != NO_FILE:
                        log.warning("model file gone, still serving it", model=served.name, error=str(error))
                        served.refused = NO_FILE
                    continue
                held = served.now.stamp if served.now else None
                if stamp in (held, served.refused):
                    served.seen = None
                    continue
                if served.seen != stamp and not at_once:
                    served.seen = stamp
                    continue
                try:
                    self.load(served)
                except AnyprecError as error:
                    served.refused = stamp
                    log.error("new model file refused, the old one stays", model=served.name, error=str(error))
                else:
                    log.info("model file replaced", model=served.name, path=served.path, loads=served.loads)

    def watch(self, every_s: float = 1.0) -> None:
        """Check for replaced files every `every_s` seconds, in a thread of its own, until `close`."""

        def look() -> None:
            while not self._stop.wait(every_s):
                try:
                    self.check()
                except Exception as error:  # one bad file must not end the watch
                    log.error("looking for replaced files failed", error=repr(error))

        self._watcher = threading.Thread(target=look, name="anyprec-watch", daemon=True)
        self._watcher.start()

    # --- the end ---

    def close(self, timeout_s: float | None = None) -> None:
        """Answer all accepted requests, then stop."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
        for served in self:
            if served.now is not None:
                served.now.scheduler.drain(timeout_s)
        for thread in self._leaving:
            thread.join(timeout_s)


def carry_policy(old: Scheduler, new: Scheduler) -> None:
    """Keep the policy set by a user, unless the new file lacks that width."""
    with contextlib.suppress(AnyprecError):
        new.set_policy(*old.policy)


@dataclass(frozen=True)
class OpenedModel:
    model: PackedModel
    levels: ServedLevels
    signature: ModelSignature
    stamp: Stamp
    layers: LayerBits


def open_model(path: str, settings: Settings) -> OpenedModel:
    """Read the file twice, by the format and by the engine; both must have seen the same version."""
    for _ in range(5):
        stamp = stamp_of(path)
        with ModelFile(path) as file:
            if file.size != file.total:
                raise TruncatedFile(f"{path} has {file.size:,} of its {file.total:,} bytes; fetch it again")
            shapes = {name: tuple(file.checked.values[name]) for name in file.graph_json["outputs"]}
            model = load(
                path,
                threads=settings.threads,
                layout=settings.layout,
                memory_budget=settings.memory_budget,
                verify=True,
            )
            layers = layer_bits(file, model)
        if stamp_of(path) == stamp:
            if len(model.inputs) > 1:
                raise ServeError(
                    f"{path} takes {len(model.inputs)} inputs ({', '.join(model.inputs)}); the server has models of one"
                )
            if model.takes_uint8 and model.preprocessing is None:
                log.warning(
                    "the model file does not say how its training prepared pictures: /classify may answer wrongly",
                    path=path, pack_again="anyprec pack, or image=anyprec.Preprocessing(...)",
                )  # fmt: skip
            levels = served_levels(model, settings.levels)
            return OpenedModel(model, levels, signature_of(model, levels, shapes, settings), stamp, layers)
    raise ServeError(f"{path} changes all the time; replace it by renaming a finished file")


def stamp_of(path: str) -> Stamp:
    try:
        found = os.stat(path)
    except OSError as error:
        raise ServeError(f"there is no model file {path}: {error.strerror}") from error
    # ctime too: a program that rewrites a file may set its mtime back (rsync --times does)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def signature_of(
    model: PackedModel, levels: ServedLevels, outputs: Mapping[str, Sequence[int | None]], settings: Settings
) -> ModelSignature:
    height, width, channels = model.input_shape
    if height == width == 1:
        shape: tuple[int, ...] = (-1, channels)
    else:
        shape = axes((height, width, channels), settings.layout)
    return ModelSignature(
        input=TensorMetadata(INPUT, "UINT8" if model.takes_uint8 else "FP32", shape),
        takes_uint8=model.takes_uint8,
        outputs=tuple(
            TensorMetadata(name, "FP32", output_axes(sizes, settings.layout)) for name, sizes in outputs.items()
        ),
        labels=model.labels,
        levels=levels.names,
        layout=settings.layout,
        max_batch=settings.limits.max_batch,
        max_pixels=settings.max_pixels,
        image_size=model.image_size,
        preprocessing=model.preprocessing,
    )


def axes(shape: Sequence[int | None], layout: str) -> tuple[int, ...]:
    h, w, c = map(size, shape)
    return (-1, c, h, w) if layout == "NCHW" else (-1, h, w, c)


def output_axes(sizes: Sequence[int | None], layout: str) -> tuple[int, ...]:
    """A map of one pixel is a vector; what is no map has the file's axes."""
    if len(sizes) != 3:
        return (-1, *map(size, sizes))
    h, w, c = sizes
    return (-1, size(c)) if h == w == 1 else axes((h, w, c), layout)


def size(value: int | None) -> int:
    return -1 if value is None else value


def named_paths(given: Sequence[str]) -> dict[str, str]:
    """['net.apm', 'small=dir/other.apm'] -> {'net': 'net.apm', 'small': 'dir/other.apm'}.

    For a name of `anyprec models`, the path of its file.
    """
    found: dict[str, str] = {}
    for one in given:
        name, equals, path = one.partition("=")
        if not equals or "/" in name:
            name, path = Path(one).stem, one
        if not NAME.fullmatch(name):
            raise ServeError(f"{name!r} cannot be a model's name: letters, digits, _ . - only; write NAME={path}")
        if name == "stats":
            raise ServeError(f"no model can be called 'stats', for /v2/models/stats is all of them; write NAME={path}")
        if name in found:
            raise ServeError(f"two models are called {name!r}; write NAME={path} with another name")
        found[name] = os.fsdecode(find(path))
    return found


def metadata(name: str, loaded: LoadedModel, settings: Settings) -> dict[str, Any]:
    """GET /v2/models/NAME. `parameters` is our extension: widths, accuracies, preprocessing, limits."""
    signature = loaded.signature
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "anyprec",
        "inputs": [signature.input.record()],
        "outputs": [tensor.record() for tensor in signature.outputs],
        "parameters": {
            "layout": signature.layout,
            "datatypes": list(signature.datatypes),
            "widths": [int(name) for name in signature.levels if name.isdigit()],
            "levels": list(signature.levels),
            "accuracy": dict(loaded.accuracies),
            "image_size": None if signature.image_size is None else list(signature.image_size),
            "preprocessing": None if signature.preprocessing is None else signature.preprocessing.to_dict(),
            "max_batch": signature.max_batch,
            "slo_ms": settings.slo_s * 1e3,
            "labels": len(signature.labels),
        },
    }


def triton_config(name: str, loaded: LoadedModel) -> dict[str, Any]:
    """GET /v2/models/NAME/config: the same in Triton's form, which some of its clients read."""

    def tensor(one: TensorMetadata) -> dict[str, Any]:
        return {"name": one.name, "data_type": f"TYPE_{one.datatype}", "dims": list(one.shape[1:])}

    return {
        "name": name,
        "platform": "anyprec",
        "backend": "anyprec",
        "max_batch_size": loaded.signature.max_batch,
        "input": [tensor(loaded.signature.input)],
        "output": [tensor(one) for one in loaded.signature.outputs],
    }
