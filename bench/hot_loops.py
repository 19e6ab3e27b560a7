"""The hot loop of every tile kernel, from a compiled object file: what it computes, and whether it spills registers.

In: an object file of native/kernels and its architecture. Out: a Loop for each tile function: the jump back that spans
the most products per instruction. Read by bench/arm_cycles.py and by the tests that look for spills.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Architecture:
    objdump: str
    branch: re.Pattern[str]  # a jump; group 1 is its target
    spill: re.Pattern[str]  # a vector that goes to the stack, or comes back
    products: Mapping[str, int]  # multiply-accumulates of one instruction, by the start of its name


# Multiply-accumulates of one instruction. A look-up serves 4 channels in half as many outputs as there are bytes: two
# bytes, one of each plane, are one output.
ARM = Architecture(
    "aarch64-linux-gnu-objdump",
    re.compile(r"^(?:b\.\w+|cbn?z|tbn?z|b)\s.*?([0-9a-f]+) <"),
    re.compile(r"\bq\d.*\[sp"),
    {"sdot": 16, "udot": 16, "usmmla": 32, "smmla": 32, "smlal": 8, "umull": 8, "tbl": 32, "cnt": 128, "fmla": 4},
)
# Of vectors of 256 bits; those of 512 have twice as many, which the choice of a loop does not need to know.
X86 = Architecture(
    "objdump",
    re.compile(r"^j\w+\s+([0-9a-f]+) <"),
    re.compile(r"^v.*\(%rsp\)"),  # vectors are aligned, and so is the stack pointer of their function
    {
        "vpmaddwd": 16,
        "vpmaddubsw": 32,
        "vpdpbusd": 32,
        "vpshufb": 64,
        "vpermb": 64,
        "vpopcntd": 256,
        "vfmadd": 8,
        "tdpb": 16384,
    },
)

# Dots<Signed>::tile<6, 4>, or PairLookUp<8, 2>::tile
TILE = re.compile(r"::(?:(\w+(?:<.*>)?)::tile<(\d+, \d+)>|(\w+)<(\d+, \d+)>::tile\()")


@dataclass(frozen=True)
class Loop:
    kernel: str  # Dots<Signed>
    tile: str  # "6, 4": rows and vectors
    body: tuple[str, ...]
    products: int
    spills: int  # vectors that go to the stack and back


def loops(file: Path, architecture: Architecture) -> Iterator[Loop]:
    words = [architecture.objdump, "-d", "-C", "--no-show-raw-insn", str(file)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for name, code in re.findall(r"^[0-9a-f]+ <(.*)>:\n((?:.+\n)+)", text, re.M):
        found = TILE.search(name.replace("(anonymous namespace)::", ""))
        if found is None:
            continue
        lines = [line.strip().split(":\t", 1) for line in code.splitlines() if ":\t" in line]
        place = {int(address, 16): i for i, (address, _) in enumerate(lines)}
        jumps = [(i, architecture.branch.match(text)) for i, (_, text) in enumerate(lines)]
        ends = [(i, place[int(b[1], 16)]) for i, b in jumps if b and int(b[1], 16) in place]
        bodies = [tuple(text for _, text in lines[to : i + 1]) for i, to in ends if to < i]
        kernel, tile = found[1] or found[3], found[2] or found[4]
        made = [loop_of(kernel.replace("anyprec::", ""), tile, body, architecture) for body in bodies]
        best = max(made, key=lambda loop: (loop.products / len(loop.body), loop.products), default=None)
        if best is not None and best.products:
            yield best


def loop_of(kernel: str, tile: str, body: tuple[str, ...], architecture: Architecture) -> Loop:
    def products(line: str) -> int:
        name = line.split()[0]
        return next((count for start, count in architecture.products.items() if name.startswith(start)), 0)

    spills = sum(architecture.spill.search(line) is not None for line in body)
    return Loop(kernel, tile, body, sum(map(products, body)), spills)
