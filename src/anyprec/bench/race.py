"""What `anyprec bench` measures: a model file at each width, and the rivals, per batch and number of threads.

bench(...) -> BenchResult: rows of figures, the machine, notes. For every batch and thread count all contestants are
started, raced (timing.py) and ended. Called by cli/bench.py and bench/engine.py.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anyprec import __version__
from anyprec.bench import rivals as rival
from anyprec.bench.timing import (
    TIMEOUT_S,
    Contestant,
    ContestantFailed,
    percentiles,
    prepare_rivals,
    race,
    times_faster,
)
from anyprec.errors import AnyprecError, InputError, UnsupportedBits
from anyprec.format.graph import GraphProfile
from anyprec.format.model_file import ModelFile
from anyprec.widths import FLOAT

OURS = "anyprec"


@dataclass(frozen=True)
class BenchSettings:
    """What to measure. `rivals` are names of rivals.TITLES; `isa` holds ours and theirs to an instruction set."""

    model: str
    profiles: tuple[str, ...] = ()  # empty: every uniform one of the file
    batches: tuple[int, ...] = (1,)
    threads: tuple[int, ...] = (1,)
    rivals: tuple[str, ...] = tuple(rival.TITLES)
    size: int | None = None  # needed where the file leaves it free
    rounds: int = 30
    isa: str | None = None
    vocabulary: int | None = None  # of a network that takes tokens (N, length): `size` is the length
    onnx: str | None = None  # the float network the rivals get, instead of the twin made from the file
    folder: str | None = None  # where the rivals' files are kept; None: made anew
    timeout_s: float = TIMEOUT_S  # a contestant that does not answer for so long has failed


@dataclass(frozen=True)
class RaceRow:
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
    kernels: str | None = None  # what does its products; None: it does not tell
    cold_ms: float | None = None  # from opening the file to the first answer, once; None: not measured

    @property
    def title(self) -> str:
        return title_of(self.engine, self.variant)


@dataclass(frozen=True)
class RivalFailure:
    """A rival that takes no part in a race, though it was asked for and is installed."""

    engine: str
    variant: str
    batch: int
    threads: int
    reason: str  # continues the sentence: "died of SIGILL", "did not answer within 300 s"
    signal: str | None = None

    @property
    def title(self) -> str:
        return title_of(self.engine, self.variant)


@dataclass
class BenchResult:
    model: str
    size: tuple[int, int]
    machine: dict[str, Any]
    rows: list[RaceRow] = field(default_factory=list)
    failures: list[RivalFailure] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)  # rivals that were asked for and are not installed
    notes: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        best = [{"batch": b, "threads": t, "best_int8": self.best_int8(b, t)} for b, t in self.races]
        return {**asdict(self), "comparisons": best}

    @property
    def races(self) -> list[tuple[int, int]]:
        """(batch, threads) of each."""
        return list(dict.fromkeys((row.batch, row.threads) for row in self.rows))

    def best_int8(self, batch: int, threads: int) -> str | None:
        """What `x int8` compares with, and who else might have been better; None where no int8 was asked for."""
        here = [row for row in self.rows if (row.batch, row.threads) == (batch, threads)]
        int8 = [row for row in here if row.variant == "int8" and row.limited]
        lacking = [
            f"{failure.title} {failure.reason}"
            for failure in self.failures
            if (failure.batch, failure.threads, failure.variant) == (batch, threads, "int8")
        ]
        lacking += [f"{rival.TITLES[name]} is not installed" for name in self.absent if "int8" in rival.VARIANTS[name]]
        if not int8:
            return f"none; {'; '.join(lacking)}" if lacking else None
        best = min(int8, key=lambda row: row.p50_ms).title
        return f"{best}, best int8 of those that ran; {'; '.join(lacking)}" if lacking else best


def title_of(engine: str, variant: str) -> str:
    if engine != OURS:
        return f"{rival.TITLES[engine]} {variant}"
    if variant == str(FLOAT):
        return f"{OURS} float"
    return f"{OURS} {variant} bit" if variant.isdigit() else f"{OURS} {variant}"


def bench(settings: BenchSettings, step: Callable[[], None] = lambda: None) -> BenchResult:
    """`step` is called after every round; there are rounds x batches x threads of them."""
    with ExitStack() as stack:
        file = stack.enter_context(ModelFile(settings.model))
        profiles, size = chosen_profiles(file, settings.profiles), image_size(file, settings.size, settings.vocabulary)
        done = BenchResult(Path(settings.model).stem, size, {})
        if settings.onnx is not None and not Path(settings.onnx).is_file():
            raise AnyprecError(f"--onnx {settings.onnx}: no such file; give the float network as ONNX, or leave it out")
        present = [name for name in settings.rivals if is_installed(name, done)]
        folder = settings.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="anyprec-bench-"))
        unmade = unmade_files(settings, folder, size, present)
        done.machine = machine(settings, present)
        for batch in settings.batches:
            for threads in settings.threads:
                measure_setting(settings, file, profiles, present, unmade, folder, batch, threads, done, step)
    return done


def unmade_files(
    settings: BenchSettings, folder: str, size: tuple[int, int], present: Sequence[str]
) -> dict[tuple[str, str], ContestantFailed]:
    """(rival, variant) -> why there is no file for it."""
    if not present:
        return {}
    try:
        failed = prepare_rivals(
            settings.model, folder, size, present, settings.onnx, settings.timeout_s, settings.vocabulary
        )
        return {(name, "int8"): made_no_file(error) for name, error in failed.items()}
    except ContestantFailed as error:
        return {(name, variant): made_no_file(error) for name in present for variant in rival.VARIANTS[name]}


def made_no_file(error: ContestantFailed) -> ContestantFailed:
    return ContestantFailed(f"{error} while its file was made", error.signal)


def chosen_profiles(file: ModelFile, names: Sequence[str]) -> list[GraphProfile]:
    there = {profile.name: profile for profile in file.available_profiles}
    uniform = [profile for profile in there.values() if isinstance(profile.weights, int)]
    unknown = [name for name in names if name not in there]
    if unknown:
        raise UnsupportedBits(f"{file.path} has no profile {unknown[0]!r}; choose from {', '.join(there)}")
    return [there[name] for name in names] or uniform or list(there.values())


def image_size(file: ModelFile, asked: int | None, vocabulary: int | None = None) -> tuple[int, int]:
    """H, W of images; length, 1 of tokens."""
    shape = file.graph_json["input"]["shape"]
    if vocabulary is not None and len(shape) == 1 and file.graph_json["input"].get("integer"):
        if asked is None or shape[0] not in (None, asked):
            raise AnyprecError(f"{file.path} takes {shape[0] or 'any number of'} tokens; give that as the size")
        return asked, 1
    if any(op["op"] == "input" for op in file.graph_json["ops"]):
        raise InputError(f"{file.path} has several inputs, and bench gives one; time calls of the model in Python")
    if len(shape) != 3:
        raise InputError(f"{file.path} takes no images, and bench times images only; time calls of the model in Python")
    height, width, _ = shape
    if asked is None:
        height, width = file.graph_json["input"].get("size", (height, width))
        if None in (height, width):
            raise AnyprecError(f"{file.path} takes images of any size; say which with --size, such as --size 224")
        return height, width
    if asked < 1 or {height, width} - {None, asked}:
        takes = f"{height or 'any'} x {width or 'any'}"
        raise AnyprecError(f"--size {asked} does not fit {file.path}, which takes images of {takes}; leave it out")
    return asked, asked


def is_installed(name: str, done: BenchResult) -> bool:
    missing = rival.missing(name)
    if missing:
        advice = "pip install 'anyprec[bench]'"
        done.notes.append(f"no {rival.TITLES[name]}: {' and '.join(missing)} not installed; {advice}")
        done.absent.append(name)
    return not missing


def machine(settings: BenchSettings, present: Sequence[str]) -> dict[str, Any]:
    from anyprec.run import cpu

    return {
        "cpu": cpu.cpu_name(),
        "cores": os.cpu_count(),
        "isa": settings.isa or cpu.isa(),
        "rounds": settings.rounds,
        "versions": {OURS: __version__, **rival.versions(list(present))},
    }


def measure_setting(
    settings: BenchSettings,
    file: ModelFile,
    profiles: Sequence[GraphProfile],
    present: Sequence[str],
    unmade: Mapping[tuple[str, str], ContestantFailed],
    folder: str,
    batch: int,
    threads: int,
    done: BenchResult,
    step: Callable[[], None],
) -> None:
    """One race: every profile of ours and every rival at one batch and thread count. Adds its rows and failures."""
    shared = {
        "batch": batch,
        "threads": threads,
        "size": done.size,
        "channels": file.graph_json["input"]["shape"][-1],
        "vocabulary": settings.vocabulary,
    }
    started: dict[tuple[str, str], Contestant] = {}

    def failed(key: tuple[str, str], error: ContestantFailed) -> None:
        if key[0] == OURS:  # nothing is left to compare
            raise ContestantFailed(f"{title_of(*key)} {error}", error.signal) from error
        done.failures.append(RivalFailure(*key, batch, threads, str(error), error.signal))

    try:
        for key, order in contestant_orders(settings, file, profiles, present, folder).items():
            try:
                if key in unmade:
                    raise unmade[key]
                switches = environment(key[0], threads, settings.isa)
                started[key] = Contestant.start({**order, **shared}, switches, settings.timeout_s)
            except ContestantFailed as error:
                failed(key, error)
        times = race(started, settings.rounds, step, failed)
    finally:
        for contestant in started.values():
            contestant.close()

    int8 = [key for key in times if key[1] == "int8" and is_limited(key[0], settings.isa)]
    best = min(int8, key=lambda key: percentiles(times[key])[1], default=None)
    by_name = {profile.name: profile for profile in profiles}
    for engine, variant in times:
        p10, p50, p90 = (1e3 * seconds for seconds in percentiles(times[engine, variant]))
        ours = by_name[variant] if engine == OURS else None
        done.rows.append(
            RaceRow(
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
                resident_bytes=started[engine, variant].resident,
                peak_bytes=started[engine, variant].peak,
                cold_ms=1e3 * started[engine, variant].cold_s,
                accuracy=ours.accuracy if ours else None,
                limited=is_limited(engine, settings.isa),
                kernels=started[engine, variant].kernels,
            )
        )


def contestant_orders(
    settings: BenchSettings, file: ModelFile, profiles: Sequence[GraphProfile], present: Sequence[str], folder: str
) -> dict[tuple[str, str], dict[str, Any]]:
    """(engine, variant) -> what its process is to open."""
    ours = {(OURS, p.name): {"engine": OURS, "model": settings.model, **bits_of(file, p)} for p in profiles}
    theirs = {
        (name, variant): {"engine": name, "variant": variant, "folder": folder}
        for name in present
        for variant in rival.VARIANTS[name]
    }
    return {**ours, **theirs}


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
