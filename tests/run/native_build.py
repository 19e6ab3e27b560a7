"""Builds of the engine that run as programs: for another CPU, or with instructions of other CPUs in software.

In: a build folder, CMake options, the words that start anyprec-run. Out: an AssertionError where a bit differs from the
oracle. Used by arm.py and emulate.py.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from chain_builder import Chain
from engine_check import kernels_built
from kernel_graphs import KERNEL_PAIRS, TOOM_COOK, float_graph, images, pair_graph
from sanitize import check, graphs

from anyprec.format import Graph, write

ROOT = Path(__file__).parents[2]


def build(folder: Path, *options: str) -> None:
    """Again only what changed."""
    beside = Path(sys.executable).parent  # `make setup` puts CMake and Ninja there
    cmake, ninja = (shutil.which(name, path=str(beside)) or shutil.which(name) for name in ("cmake", "ninja"))
    if cmake is None:
        raise SystemExit("cmake: not installed; run: pip install cmake ninja")
    words = [cmake, "-S", ROOT, "-B", folder, "-DANYPREC_PYTHON=OFF", "-DANYPREC_TESTS=ON"]
    words += ["-DCMAKE_BUILD_TYPE=Release", *options]
    if ninja:
        words += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    for command in (words, [cmake, "--build", folder]):
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-4000:])


def run(words: Sequence[str | Path], code: int = 0) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode != code:
        raise AssertionError(f"{' '.join(map(str, words))}: {done.returncode}\n{said[-4000:]}")
    return said


def check_kernels(program: Sequence[str], isa: str) -> None:
    """Every tile of a table against scalar, by bench_kernels."""
    said = run([*program, "check", isa])
    assert "all equal to scalar" in said and isa in said and "not on this CPU" not in said, said


def kernels_of(program: Sequence[str], path: Path, graph: Graph, x: np.ndarray, isa: str) -> dict[str, list[str]]:
    """Profile -> what each step ran on, without what a convolution absorbs."""
    array = path.with_suffix(".npy")
    write(graph, path)
    np.save(array, x)
    works = {}
    for profile in graph.profiles:
        words = [path, array, "--layout", "NHWC", "--bits", profile.name, "--isa", isa, "--steps"]
        lines = [line[33:].partition("  ")[0] for line in run([*program, *words]).splitlines()]  # behind the op's name
        works[profile.name] = [re.sub("(, add)?(, float)?(, codes)?(, pool)?$", "", work) for work in lines]
    return works


def check_every_kernel_is_chosen(program: Sequence[str], isa: str) -> None:
    """As test_engine.py has it: wide enough for all, 3x3 layers for Winograd, 5x5 ones in which only products count."""
    cases: list[tuple[Graph, np.ndarray]] = []
    for kernel, ending, size in ((1, "all", (1, 2, 3)), (3, "codes", (1, 8, 9)), (5, "codes", (1, 4, 5))):
        pairs = [*KERNEL_PAIRS, (3, 3)]
        cases += [(pair_graph(96, 128, kernel, ending, pairs=pairs), x) for x in images(size, c=96)]
    cases += [(float_graph(TOOM_COOK["7x7"], 3, 64), x) for x in images((1, 9, 9), c=3)]
    used = set()
    with tempfile.TemporaryDirectory() as temporary:
        for graph, x in cases:
            for works in kernels_of(program, Path(temporary) / "net.apm", graph, x, isa).values():
                used |= set(works)
    built = kernels_built(isa) - ({"vpermb, 1 bit"} if isa == "amx" else set())  # that one: LAYERS of emulate.py
    assert built <= used, (isa, sorted(built - used))


def products() -> Iterator[tuple[str, Graph, dict[str, np.ndarray]]]:
    """Products of two values of codes: their panels are made at run time, for steps of 1, 2, 4 or 8 terms."""
    for seed, terms in enumerate((1, 2, 3, 7, 8, 9, 16, 37, 64, 130)):
        chain = Chain(seed, (2, 5, terms), 2)
        yield f"product of {terms} terms", *chain.finish(chain.integer_matmul("input"))


def check_graphs(
    program: Sequence[str], isas: Sequence[str], seeds: int, first: int = 0, every: int = 1
) -> tuple[int, int]:
    """Those of sanitize.py, or one of `every` of them, against the oracle; gives how many graphs and runs."""
    count = runs = 0
    with tempfile.TemporaryDirectory() as temporary:
        for what, graph, x in itertools.islice(itertools.chain(products(), graphs(seeds)), first, None, every):
            runs += check(program, Path(temporary), what, graph, x, isas)
            count += 1
    return count, runs
