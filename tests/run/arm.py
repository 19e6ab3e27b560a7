"""Cross-compiles the engine for 64-bit ARM and runs it in an emulator: python tests/run/arm.py [BUILD] [--every 4]

Builds with Debian's compiler, then, under qemu-user: the tests of the reader; every kernel against scalar at odd sizes,
on the least CPU that has its instructions, so that one instruction too many is an illegal one; which kernels such a CPU
is given; and graphs at every width against the oracle, bit for bit. A difference ends it. Called by `make arm-test`;
test_arm.py runs its parts. It installs nothing: where a tool is missing it names the package.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from kernel_graphs import pair_graph
from native_build import ROOT, build, check_every_kernel_is_chosen, check_graphs, check_kernels, run

from anyprec.format import write

BUILD = ROOT / "build" / "arm"
TOOLCHAIN = f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'native' / 'aarch64-linux.cmake'}"
LIBRARIES = "/usr/aarch64-linux-gnu"  # of the cross compiler; the emulated program is linked with them
# The least CPU of qemu for each level: Cortex-A57 has no dot products, Neoverse N1 (the Cortex-A76's core) no i8mm.
CPUS = {"neon": "cortex-a57", "dotprod": "neoverse-n1", "i8mm": "max"}
TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}


def missing() -> str:
    """What to install, as a line for the user; empty: nothing."""
    packages = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    lacking = ", ".join(tool for tool in TOOLS if shutil.which(tool) is None)
    return f"{lacking}: not installed; run: apt-get install {' '.join(packages)}" if packages else ""


def emulated(program: Path, cpu: str = "max") -> list[str]:
    return ["qemu-aarch64", "-L", LIBRARIES, "-cpu", cpu, str(program)]


def check_reader(folder: Path) -> None:
    run(emulated(folder / "test_reader"))


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

    build(folder, TOOLCHAIN)
    tell(f"built in {args.build}")
    check_reader(folder)
    tell("reader: its tests pass")
    check_dispatch(folder)
    tell("dispatch: " + ", ".join(f"{cpu} runs {isa}" for isa, cpu in CPUS.items()))
    for isa, cpu in CPUS.items():
        check_kernels(emulated(folder / "bench_kernels", cpu), isa)
        check_every_kernel_is_chosen(emulated(folder / "anyprec-run"), isa)
        tell(f"{isa}: every kernel as scalar has it, on {cpu}, and chosen where it is the fastest")
    count, runs = check_graphs(emulated(folder / "anyprec-run"), list(CPUS), args.seeds, every=args.every)
    tell(f"{count} graphs, {runs} runs on {', '.join(CPUS)}: all as the oracle has it")


if __name__ == "__main__":
    main()
