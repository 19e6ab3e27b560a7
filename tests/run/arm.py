"""Cross-compiles the engine for 64-bit ARM and runs it in an emulator: python tests/run/arm.py [BUILD] [--every 4]

Builds with Debian's compiler, then, under qemu-user: the tests of the reader; every kernel against scalar at odd sizes,
on the least CPU that has its instructions, so that one instruction too many is an illegal one; which kernels such a CPU
is given; and graphs at every width against the oracle, bit for bit. A difference ends it. Called by `make arm-test`;
test_arm.py runs its parts. It installs nothing: where a tool is missing it names the package.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from chain_builder import Chain
from engine_check import kernels_built
from kernel_graphs import KERNEL_PAIRS, TOOM_COOK, float_graph, images, pair_graph
from sanitize import check, graphs

from anyprec.format import Graph, write

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "arm"
LIBRARIES = "/usr/aarch64-linux-gnu"  # of the cross compiler; the emulated program is linked with them
# The least CPU of qemu for each level: Cortex-A57 has no dot products, Neoverse N1 (the Cortex-A76's core) no i8mm.
CPUS = {"neon": "cortex-a57", "dotprod": "neoverse-n1", "i8mm": "max"}
TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}


def missing() -> str:
    """What to install, as a line for the user; empty: nothing."""
    packages = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    lacking = ", ".join(tool for tool in TOOLS if shutil.which(tool) is None)
    return f"{lacking}: not installed; run: apt-get install {' '.join(packages)}" if packages else ""


def build(folder: Path) -> None:
    """Again only what changed."""
    beside = Path(sys.executable).parent  # `make setup` puts CMake and Ninja there
    cmake, ninja = (shutil.which(name, path=str(beside)) or shutil.which(name) for name in ("cmake", "ninja"))
    if cmake is None:
        raise SystemExit("cmake: not installed; run: pip install cmake ninja")
    words = [cmake, "-S", ROOT, "-B", folder, f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'native' / 'aarch64-linux.cmake'}"]
    words += ["-DANYPREC_PYTHON=OFF", "-DANYPREC_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"]
    if ninja:
        words += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    for command in (words, [cmake, "--build", folder]):
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-4000:])


def emulated(program: Path, cpu: str = "max") -> list[str]:
    return ["qemu-aarch64", "-L", LIBRARIES, "-cpu", cpu, str(program)]


def run(words: Sequence[str | Path], code: int = 0) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode != code:
        raise AssertionError(f"{' '.join(map(str, words))}: {done.returncode}\n{said[-4000:]}")
    return said


def check_reader(folder: Path) -> None:
    run(emulated(folder / "test_reader"))


def check_kernels(folder: Path, isa: str) -> None:
    """Every tile of a table against scalar."""
    said = run([*emulated(folder / "bench_kernels", CPUS[isa]), "check", isa])
    assert "all equal to scalar" in said and isa in said and "not on this CPU" not in said, said


def check_dispatch(folder: Path) -> None:
    """Each CPU gets the best table it can run, and is refused more."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "net.apm"
        write(pair_graph(4, 4, pairs=[(1, 1)]), path)
        levels = list(CPUS)
        for i, (isa, cpu) in enumerate(CPUS.items()):
            program = emulated(folder / "anyprec-run", cpu)
            assert f"instruction set {isa}," in run([*program, path]), cpu
            for less in ["scalar", *levels[:i]]:
                assert f"instruction set {less}," in run([*program, path, "--isa", less]), (cpu, less)
            for more in levels[i + 1 :]:
                said = run([*program, path, "--isa", more], code=2)
                assert f"{more} cannot run on this CPU, which lacks" in said, said


def check_every_kernel_is_chosen(folder: Path, isa: str) -> None:
    """As test_engine.py has it: wide enough for all, and 3x3 layers for Winograd."""
    cases: list[tuple[Graph, np.ndarray]] = []
    for kernel, ending, size in ((1, "all", (1, 2, 3)), (3, "codes", (1, 8, 9))):
        pairs = [*KERNEL_PAIRS, (3, 3)]
        cases += [(pair_graph(96, 128, kernel, ending, pairs=pairs), x) for x in images(size, c=96)]
    cases += [(float_graph(TOOM_COOK["7x7"], 3, 64), x) for x in images((1, 9, 9), c=3)]
    used = set()
    with tempfile.TemporaryDirectory() as temporary:
        path, array = Path(temporary) / "net.apm", Path(temporary) / "x.npy"
        for graph, x in cases:
            write(graph, path)
            np.save(array, x)
            for profile in graph.profiles:
                words = [path, array, "--layout", "NHWC", "--bits", profile.name, "--isa", isa, "--steps"]
                lines = run([*emulated(folder / "anyprec-run"), *words]).splitlines()
                works = [line[33:].partition("  ")[0] for line in lines]  # behind the op's name
                used |= {re.sub("(, add)?(, float)?(, codes)?(, pool)?$", "", work) for work in works}
    built = kernels_built(isa)
    assert built <= used, (isa, sorted(built - used))


def products() -> Iterator[tuple[str, Graph, dict[str, np.ndarray]]]:
    """Products of two values of codes: their panels are made at run time, for steps of 1, 2, 4 or 8 terms."""
    for seed, terms in enumerate((1, 2, 3, 7, 8, 9, 16, 37, 64, 130)):
        chain = Chain(seed, (2, 5, terms), 2)
        yield f"product of {terms} terms", *chain.finish(chain.integer_matmul("input"))


def check_graphs(folder: Path, seeds: int, first: int = 0, every: int = 1) -> tuple[int, int]:
    """Those of sanitize.py, or one of `every` of them, against the oracle; gives how many graphs and runs."""
    count = runs = 0
    with tempfile.TemporaryDirectory() as temporary:
        for what, graph, x in itertools.islice(itertools.chain(products(), graphs(seeds)), first, None, every):
            runs += check(emulated(folder / "anyprec-run"), Path(temporary), what, graph, x, list(CPUS))
            count += 1
    return count, runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("build", type=Path, nargs="?", default=BUILD)
    parser.add_argument("--seeds", type=int, default=3, help="random graphs of each kind (default: 3)")
    parser.add_argument("--every", type=int, default=1, help="run one of so many graphs (default: all)")
    args = parser.parse_args()
    if lacking := missing():
        raise SystemExit(lacking)
    folder, started = args.build.resolve(), time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {what}", flush=True)

    build(folder)
    tell(f"built in {args.build}")
    check_reader(folder)
    tell("reader: its tests pass")
    check_dispatch(folder)
    tell("dispatch: " + ", ".join(f"{cpu} runs {isa}" for isa, cpu in CPUS.items()))
    for isa, cpu in CPUS.items():
        check_kernels(folder, isa)
        check_every_kernel_is_chosen(folder, isa)
        tell(f"{isa}: every kernel as scalar has it, on {cpu}, and chosen where it is the fastest")
    count, runs = check_graphs(folder, args.seeds, every=args.every)
    tell(f"{count} graphs, {runs} runs on {', '.join(CPUS)}: all as the oracle has it")


if __name__ == "__main__":
    main()
