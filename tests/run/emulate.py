"""AVX-512, AVX-VNNI and AMX kernels in software, on any CPU with AVX2: python tests/run/emulate.py [BUILD] [--every 4]

Builds the engine with ANYPREC_EMULATE: the intrinsics of these instruction sets become small functions (native/emulate
and SIMDe), slow and exact, which end the program where a CPU would refuse an instruction. Then: every kernel against
scalar at odd sizes; which kernel a layer gets on AMX; and graphs at every width against the oracle, bit for bit. A
difference ends it. Called by `make emulate-test`; test_emulate.py runs its parts. It installs nothing: where something
is missing it names the package.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from kernel_graphs import images, pair_graph
from native_build import ROOT, build, check_every_kernel_is_chosen, check_graphs, check_kernels, kernels_of, run

from anyprec.run.cpu import cpu_features

BUILD = ROOT / "build" / "emulate"
OPTION = "-DANYPREC_EMULATE=ON"
ISAS = ("avx512vnni", "avx512", "avxvnni", "amx")

# Kernel size, channels in and out, image, whether a residual is added; then the kernel at 8, 4, 2 and 1 bit.
TILES8, TILES, DOT8, DOT = "tdpbusd, 8 bit", "tdpbusd", "vpdpbusd, 8 bit", "vpdpbusd"
LOOKUP, COUNT = "vpermb, 1 bit", "vpopcntd, 1 bit"
LAYERS = [
    (3, 64, 64, 14, "codes", (TILES8, TILES, TILES, TILES)),
    (3, 256, 256, 7, "codes", (TILES8, TILES, TILES, TILES)),
    (3, 320, 64, 7, "codes", (TILES8, TILES, TILES, LOOKUP)),  # 1 bit: more than 256 channels
    (1, 256, 64, 14, "codes", (TILES8, TILES, TILES, COUNT)),
    (1, 64, 256, 14, "codes", (TILES8, TILES, TILES, COUNT)),
    (1, 64, 256, 14, "all", (DOT8, DOT, DOT, COUNT)),  # a residual
    (1, 128, 512, 7, "all", (TILES8, TILES, TILES, COUNT)),
    (1, 512, 10, 1, "codes", (DOT8, DOT, DOT, COUNT)),  # a classifier: one row, few outputs
    (1, 68, 64, 14, "codes", (DOT8, DOT, DOT, LOOKUP)),  # 17 steps: matrices of one step
]


def missing() -> str:
    """What is missing, as a line for the user; empty: nothing."""
    if platform.machine().lower() not in ("x86_64", "amd64") or platform.system() != "Linux":
        return "emulates x86 instructions under Linux on x86 only"
    if not {"avx2", "fma"} <= set(cpu_features()):
        return "needs a CPU with AVX2 and FMA"
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return "c++: not installed; run: apt-get install g++"
    source = "#if !__has_include(<simde/x86/avx512.h>)\n#error missing\n#endif\n"  # reading it would take a second
    done = subprocess.run([compiler, "-x", "c++", "-E", "-"], input=source, capture_output=True, text=True)
    return "SIMDe: not installed; run: apt-get install libsimde-dev" if done.returncode else ""


def check_amx(folder: Path) -> None:
    """The probe for AMX, and whether emulated instructions refuse what a CPU refuses."""
    assert run([folder / "test_amx"]) == "0 failed\n"


def check_layers(folder: Path) -> None:
    """What the cost model gives each layer on AMX with its own rates: an emulation's would say nothing."""
    pairs = [(8, 8), (4, 4), (2, 2), (1, 1)]
    with tempfile.TemporaryDirectory() as temporary:
        for kernel, c, out, size, ending, wanted in LAYERS:
            graph = pair_graph(c, out, kernel, ending, pairs=pairs)
            (x,) = images((1, size, size), c=c)
            works = kernels_of([str(folder / "anyprec-run")], Path(temporary) / "net.apm", graph, x, "amx")
            for (bits, _), name in zip(pairs, wanted, strict=True):
                what = f"{kernel}x{kernel}, {c} to {out} channels, {ending}, {bits} bit"
                assert name in works[f"w{bits}a{bits}"], (what, name, works[f"w{bits}a{bits}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("build", type=Path, nargs="?", default=BUILD)
    parser.add_argument("--seeds", type=int, default=3, help="random graphs of each kind (default: 3)")
    parser.add_argument("--every", type=int, default=1, help="run one of so many graphs (default: all)")
    args = parser.parse_args()
    if lacking := missing():
        raise SystemExit(lacking)
    folder, started = args.build.resolve(), time.monotonic()
    program = [str(folder / "anyprec-run")]

    def tell(what: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {what}", flush=True)

    build(folder, OPTION)
    tell(f"built in {args.build}")
    check_amx(folder)
    tell("AMX: the probe survives a crash; misuse of tiles is refused")
    for isa in ISAS:
        check_kernels([str(folder / "bench_kernels")], isa)
        check_every_kernel_is_chosen(program, isa)
        tell(f"{isa}: every kernel as scalar has it, and chosen where it is the fastest")
    check_layers(folder)
    tell("amx: each layer on the kernel that the cost model means")
    count, runs = check_graphs(program, ISAS, args.seeds, every=args.every)
    tell(f"{count} graphs, {runs} runs on {', '.join(ISAS)}: all as the oracle has it")


if __name__ == "__main__":
    main()
