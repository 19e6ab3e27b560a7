"""bench/arm_cycles.py: which instructions count, and what is a spill. tests/run/test_arm.py runs it on real loops."""

import re
from pathlib import Path

import arm_cycles
from arm_cycles import LEVELS
from hot_loops import ARM, loop_of

KERNELS = Path(__file__).parents[2] / "native" / "kernels"


def loop(*body):
    return loop_of("Dots<Signed>", "6, 4", body, ARM)


def test_products_of_a_loop():
    body = ("ldr\tq0, [x1], #16", "sdot\tv2.4s, v0.16b, v1.4b[0]", "usmmla\tv3.4s, v0.16b, v1.16b", "b.ne\t10 <f>")
    assert loop(*body).products == 16 + 32
    assert loop("and\tv0.16b, v1.16b, v2.16b", "cnt\tv0.16b, v0.16b", "add\tv3.16b, v3.16b, v0.16b").products == 128
    assert loop("umull\tv0.8h, v1.8b, v2.8b", "uadalp\tv3.4s, v0.8h").products == 8


def test_spills_are_vectors_on_the_stack():
    assert loop("str\tq0, [sp, #32]", "ldr\tq7, [sp, #32]").spills == 2
    assert loop("ldr\tx0, [sp, #8]", "ldr\tq0, [x0]", "stp\tx1, x2, [sp]").spills == 0


def test_every_table_of_arm_is_looked_at():
    source = (KERNELS / "kernel_tables.cpp").read_text(encoding="utf-8")
    arm = source.partition("__aarch64__")[2].partition("#endif")[0]
    assert set(LEVELS) == set(re.findall(r"kernels_(\w+)\(\)", arm))
    assert {core for cores in LEVELS.values() for core in cores} == set(arm_cycles.CORES)


def test_every_kernel_is_named_after_an_instruction_that_counts():
    for isa in LEVELS:
        source = (KERNELS / f"kernels_{isa}.cpp").read_text(encoding="utf-8")
        names = re.findall(r'(?:TileKernel \w+\(|winograd_of<\w+>\(\s*\{)\s*"([^"]+)"', source)
        assert len(names) >= 5
        for name in names:
            assert name.removeprefix("winograd ").removeprefix("toom-cook ").partition(",")[0] in ARM.products, name
