"""Options of the Ray application: `key=value` strings, or `args` of a configuration file, in; Options out.

Separate from ray/app.py, its only caller, because it needs no Ray. Options that `anyprec serve` has too have its names;
what Ray itself is told (address, port, TLS) is not here. docs/guides/deploy.md has the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from anyprec.arguments import delay, duration, names, positive
from anyprec.choices import LAYOUTS
from anyprec.errors import ServeError
from anyprec.serve.models import named_paths
from anyprec.serve.scheduling.queue import QueueLimits


@dataclass(frozen=True)
class Options:
    """What `key=value` behind `serve run`, or `args` in its configuration file, may say."""

    model: tuple[str, ...] = ()
    slo: float = 0.05
    transit: float = 0.01  # part of the target kept for the way through Ray's proxy, in and out
    policy: str = "adaptive"
    bits: int | str | None = None
    levels: tuple[str, ...] | None = None  # None: all of the file
    layout: str = "NCHW"
    threads: int = 1
    engines: int = 1
    max_batch: int = QueueLimits().max_batch
    max_queue: int = QueueLimits().max_queue
    warm_up: float = 3.0
    api_key_file: str | None = None
    min_replicas: int = 1
    max_replicas: int = 4
    num_cpus: float | None = None  # None: threads x engines
    settle: int | str | None = None
    busy: float = 0.7
    upscale_delay: float = 15.0
    downscale_delay: float = 300.0
    look_back: float = 20.0


def width(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def paths(given: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in given.split(",") if part.strip())


def share(text: str) -> float:
    found = float(text)
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share; write 0.7")
    return found


def count(text: str) -> int:
    return 0 if text == "0" else positive(text)


READ: dict[str, Callable[[str], Any]] = {
    "model": paths,
    "slo": duration,
    "transit": delay,
    "bits": width,
    "levels": names,
    "threads": positive,
    "engines": positive,
    "max_batch": positive,
    "max_queue": positive,
    "warm_up": duration,
    "min_replicas": count,
    "max_replicas": positive,
    "num_cpus": float,
    "settle": width,
    "busy": share,
    "upscale_delay": delay,
    "downscale_delay": delay,
    "look_back": duration,
}
CHOICES = {"policy": ("adaptive", "accuracy"), "layout": LAYOUTS}


def read_options(given: Mapping[str, Any]) -> Options:
    """Strings from the command line, or values from YAML. Times need a unit in both: `slo: 50ms`."""
    known = [field.name for field in fields(Options)]
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ServeError(f"{name}={value!r} is not an option of the Ray application; there are {', '.join(known)}")
        if value is None:
            continue
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        try:
            found[name] = READ.get(name, str)(text)
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ServeError(f"{name}={value!r} cannot be: {error}") from error
        if name in CHOICES and found[name] not in CHOICES[name]:
            raise ServeError(f"{name}={value!r} is not known; choose one of {', '.join(CHOICES[name])}")
    options = Options(**found)
    if not options.model:
        raise ServeError("no model is given; write model=/path/net.apm, a path that every node of the cluster has")
    named_paths(options.model)
    if options.min_replicas > options.max_replicas:
        raise ServeError(f"min_replicas={options.min_replicas} is more than max_replicas={options.max_replicas}")
    if options.transit >= options.slo:
        raise ServeError(f"transit={options.transit:g}s leaves nothing of slo={options.slo:g}s; give less")
    return options
