"""Products per cycle of the ARM kernels' inner loops on paper, by llvm-mca: no ARM core is needed, none is measured.

    python bench/arm_cycles.py [BUILD] [--mca llvm-mca-19]

BUILD is the folder of a cross-compiled engine (default: build/arm, from `make arm-test`). Takes the hot loop of each
kernel's full tiles from the object files (aarch64-linux-gnu-objdump), counts the products its instructions do, asks
llvm-mca for the cycles an iteration takes with all data in L1, and prints a table: docs/internals/kernels.md has it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path

from hot_loops import ARM, Loop, loops

BUILD = Path(__file__).resolve().parents[1] / "build" / "arm"
OBJDUMP = ARM.objdump
# What we call a core, and LLVM's model for it. Models of LLVM 19: the Cortex-A76 is Neoverse N1's core, the Cortex-A72
# has the Cortex-A57's model, and all of Apple's cores have that of the A7 of 2013 (3 vector pipes; an M1 has 4).
CORES = {
    "Cortex-A72": "cortex-a72",
    "Cortex-A76": "neoverse-n1",
    "Neoverse V1": "neoverse-v1",
    "Apple-like": "apple-m1",
}
LEVELS = {
    "neon": ("Cortex-A72", "Cortex-A76", "Neoverse V1", "Apple-like"),
    "dotprod": ("Cortex-A76", "Neoverse V1", "Apple-like"),
    "i8mm": ("Neoverse V1", "Apple-like"),
}


def cycles(loop: Loop, core: str, mca: str, iterations: int = 200) -> float:
    """Of one iteration. Jumps have no target outside the function, and are left out."""
    code = "\n".join(re.sub(r"\s*//.*", "", line) for line in loop.body if not ARM.branch.match(line))
    words = [mca, "-mtriple=aarch64", f"-mcpu={CORES[core]}", "-mattr=+dotprod,+i8mm", f"-iterations={iterations}"]
    done = subprocess.run(words, input=code, capture_output=True, text=True)
    found = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if done.returncode or found is None:
        raise SystemExit(f"{mca} cannot read the loop of {loop.kernel}: {done.stderr.strip().splitlines()[:3]}")
    return int(found[1]) / iterations


def newest_mca() -> str:
    """Debian has several side by side, llvm-mca-14 to llvm-mca-19; Neoverse V1 needs 17."""
    numbered = [name for name in (f"llvm-mca-{n}" for n in range(30, 16, -1)) if shutil.which(name)]
    return (numbered or ["llvm-mca"])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("build", type=Path, nargs="?", default=BUILD)
    parser.add_argument("--mca", default=newest_mca())
    args = parser.parse_args()
    for tool, package in ((OBJDUMP, "binutils-aarch64-linux-gnu"), (args.mca, "llvm-19")):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is not installed; run: apt-get install {package}")
    for isa, cores in LEVELS.items():
        file = args.build / f"CMakeFiles/anyprec_engine.dir/native/kernels/kernels_{isa}.cpp.o"
        if not file.exists():
            raise SystemExit(f"{file} does not exist; run `make arm-test` first")
        print(f"\n{isa:8} {'loop':24} {'tile':6} {'spills':>6} " + " ".join(f"{core:>12}" for core in cores))
        for loop in sorted(loops(file, ARM), key=lambda loop: (loop.kernel, loop.tile)):
            if loop.tile in ("6, 4", "8, 2", "6, 2", "8, 1"):
                rates = " ".join(f"{loop.products / cycles(loop, core, args.mca):12.1f}" for core in cores)
                print(f"{isa:8} {loop.kernel:24} {loop.tile:6} {loop.spills:6} {rates}")


if __name__ == "__main__":
    main()
