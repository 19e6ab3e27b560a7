"""What `anyprec bench` measures: a model file at each width, and the rivals, per batch and number of threads.

bench(...) -> Bench: rows of figures, the machine, notes. For every batch and thread count all contestants are started,
raced (timing.py) and ended. Called by cli_bench.py and bench/engine.py.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anyprec import __version__
from anyprec.bits import FLOAT
from anyprec.errors import AnyprecError, UnsupportedBits
from anyprec.format.graph import GraphProfile
from anyprec.format.model_file import ModelFile
from anyprec.run import rivals as rival
from anyprec.run.timing import Contestant, ContestantFailed, percentiles, prepare_rivals, race, times_faster

OURS = "anyprec"


@dataclass(frozen=True)
class Wish:
    """What to measure. `rivals` are names of rivals.TITLES; `isa` holds ours and theirs to an instruction set."""

    model: str
    profiles: tuple[str, ...] = ()  # empty: every uniform one of the file
    batches: tuple[int, ...] = (1,)
    threads: tuple[int, ...] = (1,)
    rivals: tuple[str, ...] = tuple(rival.TITLES)
    size: int | None = None  # needed where the file leaves it free
    rounds: int = 30
    isa: str | None = None
    onnx: str | None = None  # the float network the rivals get, instead of the twin made from the file
    folder: str | None = None  # where the rivals' files are kept; None: made anew


@dataclass(frozen=True)
class Row:
    """One contestant's figures. `speedup` is against the best int8 rival of the same race; None where there is none."""

    engine: str
    variant: str  # a profile of ours: "2", "fast"; "fp32" or "int8" of a rival
    batch: int
    threads: int
    p10_ms: float
    p50_ms: float
    p90_ms: float
    images_per_s: float
    speedup: float | None
    disk_bytes: int
    resident_bytes: int | None
    peak_bytes: int | None
    accuracy: float | None = None
    limited: bool = True  # False: it used more of the CPU than the instruction set asked for

    @property
    def title(self) -> str:
        if self.engine != OURS:
            return f"{rival.TITLES[self.engine]} {self.variant}"
        if self.variant == str(FLOAT):
            return f"{OURS} float"
        return f"{OURS} {self.variant} bit" if self.variant.isdigit() else f"{OURS} {self.variant}"


@dataclass
class Bench:
    model: str
    size: tuple[int, int]
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}


def bench(wish: Wish, step: Callable[[], None] = lambda: None) -> Bench:
    """`step` is called after every round; there are rounds x batches x threads of them."""
    with ExitStack() as stack:
        file = stack.enter_context(ModelFile(wish.model))
        profiles, size = chosen_profiles(file, wish.profiles), image_size(file, wish.size)
        done = Bench(Path(wish.model).stem, size, {})
        if wish.onnx is not None and not Path(wish.onnx).is_file():
            raise AnyprecError(f"--onnx {wish.onnx}: no such file; give the float network as ONNX, or leave it out")
        present = [name for name in wish.rivals if is_there(name, done.notes)]
        folder = wish.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="anyprec-bench-"))
        if present:
            try:
                prepare_rivals(wish.model, folder, size, present, wish.onnx)
            except ContestantFailed as error:
                done.notes.append(f"no rivals: their files could not be made: {error}")
                present = []
        done.machine = machine(wish, present)
        for batch in wish.batches:
            for threads in wish.threads:
                done.rows += heat(wish, file, profiles, present, folder, size, batch, threads, done.notes, step)
    return done


def chosen_profiles(file: ModelFile, names: Sequence[str]) -> list[GraphProfile]:
    there = {profile.name: profile for profile in file.available_profiles}
    uniform = [profile for profile in there.values() if isinstance(profile.weights, int)]
    unknown = [name for name in names if name not in there]
    if unknown:
        raise UnsupportedBits(f"{file.path} has no profile {unknown[0]!r}; choose from {', '.join(there)}")
    return [there[name] for name in names] or uniform or list(there.values())


def image_size(file: ModelFile, asked: int | None) -> tuple[int, int]:
    height, width, _ = file.graph_json["input"]["shape"]
    if asked is None:
        height, width = file.graph_json["input"].get("size", (height, width))
        if None in (height, width):
            raise AnyprecError(f"{file.path} takes images of any size; say which with --size, such as --size 224")
        return height, width
    if asked < 1 or {height, width} - {None, asked}:
        takes = f"{height or 'any'} x {width or 'any'}"
        raise AnyprecError(f"--size {asked} does not fit {file.path}, which takes images of {takes}; leave it out")
    return asked, asked


def is_there(name: str, notes: list[str]) -> bool:
    missing = rival.missing(name)
    if missing:
        notes.append(f"no {rival.TITLES[name]}: {' and '.join(missing)} not installed; pip install 'anyprec[bench]'")
    return not missing


def machine(wish: Wish, present: Sequence[str]) -> dict[str, Any]:
    from anyprec.run import cpu

    return {
        "cpu": cpu.cpu_name(),
        "cores": os.cpu_count(),
        "isa": wish.isa or cpu.isa(),
        "rounds": wish.rounds,
        "versions": {OURS: __version__, **rival.versions(list(present))},
    }


def heat(
    wish: Wish,
    file: ModelFile,
    profiles: Sequence[GraphProfile],
    present: Sequence[str],
    folder: str,
    size: tuple[int, int],
    batch: int,
    threads: int,
    notes: list[str],
    step: Callable[[], None],
) -> list[Row]:
    """One race: every profile of ours and every rival at one batch and thread count."""
    shared = {"batch": batch, "threads": threads, "size": size, "channels": file.graph_json["input"]["shape"][2]}
    started: dict[tuple[str, str], Contestant] = {}
    try:
        for profile in profiles:
            order = {"engine": OURS, "model": wish.model, **bits_of(file, profile), **shared}
            started[OURS, profile.name] = Contestant.start(order, environment(OURS, threads, wish.isa))
        for name in present:
            for variant in rival.VARIANTS[name]:
                order = {"engine": name, "variant": variant, "folder": folder, **shared}
                try:
                    started[name, variant] = Contestant.start(order, environment(name, threads, wish.isa))
                except ContestantFailed as error:
                    notes.append(f"no {rival.TITLES[name]} {variant} at batch {batch}, {threads} threads: {error}")
        times = race(started, wish.rounds, step)
    finally:
        for contestant in started.values():
            contestant.close()

    int8 = [key for key in times if key[1] == "int8" and is_limited(key[0], wish.isa)]
    best = min(int8, key=lambda key: percentiles(times[key])[1], default=None)
    by_name = {profile.name: profile for profile in profiles}
    rows = []
    for (engine, variant), contestant in started.items():
        p10, p50, p90 = (1e3 * seconds for seconds in percentiles(times[engine, variant]))
        ours = by_name[variant] if engine == OURS else None
        rows.append(
            Row(
                engine=engine,
                variant=variant,
                batch=batch,
                threads=threads,
                p10_ms=p10,
                p50_ms=p50,
                p90_ms=p90,
                images_per_s=1e3 * batch / p50,
                speedup=times_faster(times[engine, variant], times[best]) if best else None,
                disk_bytes=file.bytes_for_profile(ours) if ours else rival.disk_bytes(folder, engine, variant),
                resident_bytes=contestant.resident,
                peak_bytes=contestant.peak,
                accuracy=ours.accuracy if ours else None,
                limited=is_limited(engine, wish.isa),
            )
        )
    return rows


def bits_of(file: ModelFile, profile: GraphProfile) -> dict[str, Any]:
    """How to ask the engine for this profile, and how many planes it needs to read for it."""
    widest = max(file.weight_widths(profile), default=FLOAT)
    uniform = isinstance(profile.weights, int) and profile.name.isdigit()
    return {"bits": int(profile.name) if uniform else profile.name, "max_bits": None if widest == FLOAT else widest}


def environment(engine: str, threads: int, isa: str | None) -> dict[str, str]:
    wanted = {"OMP_NUM_THREADS": str(threads)}
    if isa is not None:
        wanted |= {"ANYPREC_ISA": isa} if engine == OURS else rival.ISA_SWITCHES.get(isa, {}).get(engine, {})
    return wanted


def is_limited(engine: str, isa: str | None) -> bool:
    return isa is None or engine == OURS or engine in rival.ISA_SWITCHES.get(isa, {})
