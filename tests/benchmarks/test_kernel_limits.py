"""bench/kernel_limits.py: the limits it divides by, and rows that add up."""

import csv
import platform
import sys

import kernel_limits
import numpy as np
import pytest
from engine_check import kernels_built, usable_isas
from kernel_limits import CORES, INNERS, Row, core_of, kernel_of, layer_of, port_limit, save, stage_of

from anyprec.bench import random_networks as graphs
from anyprec.format.file import write
from anyprec.run.model import load


@pytest.mark.parametrize("isa", INNERS)
def test_every_kernel_has_a_limit(isa):
    assert set(INNERS[isa]) == kernels_built(isa)


@pytest.mark.parametrize(
    "isa, kernel, ice_lake, zen_4, zen_5",
    [  # as docs/cli/bench.md has them
        ("avx2", "fma", 16, 16, 16),
        ("avx2", "vpmaddwd", 24, 32, 32),
        ("avx2", "vpmaddubsw, 4 bit", 48, 64, 64),
        ("avx2", "vpmaddubsw, 7 bit", 32, 32, 32),
        ("avx2", "vpshufb, 2 bit", 96, 128, 128),
        ("avx2", "vpshufb, 1 bit", 256, 768 / 2.25, 768 / 2.25),
        ("avx2", "winograd vpmaddwd", 54, 72, 72),
        ("avx512vnni", "vpdpbusd", 128, 64, 128),
        ("avx512vnni", "vpshufb, 1 bit", 1536 / 4.5, 1536 / 4.5, 1536 / 2.25),
        ("avx512", "fma", 32, 16, 32),
        ("avx512", "vpdpbusd", 128, 64, 128),
        ("avx512", "vpermb, 2 bit", 192, 192, 384),
        ("avx512", "vpermb, 1 bit", 384, 384, 768),
        ("avx512", "vpopcntd, 1 bit", 512 / 1.5, 512 / 1.5, 512 / 0.75),
        ("avxvnni", "vpdpbusd", 64, None, 64),
        ("amx", "tdpbusd", 1024, None, None),
    ],
)
def test_port_limits(isa, kernel, ice_lake, zen_4, zen_5):
    assert [port_limit(isa, kernel, core) for core in ("Ice Lake", "Zen 4", "Zen 5")] == [ice_lake, zen_4, zen_5]
    assert port_limit(isa, kernel, "unknown") is None


def test_old_intel_cores_look_up_on_one_port():
    assert port_limit("avx2", "vpshufb, 2 bit", "Haswell") == 64
    assert port_limit("avx2", "vpmaddwd", "Haswell") == 24


@pytest.mark.parametrize(
    "vendor, family, flags, core",
    [
        ("AuthenticAMD", 26, "avx2 avx512f avx512vbmi gfni", "Zen 5"),
        ("AuthenticAMD", 25, "avx2 avx512f avx512vbmi gfni", "Zen 4"),
        ("AuthenticAMD", 25, "avx2", "Zen 3"),
        ("AuthenticAMD", 23, "avx2", "unknown"),
        ("GenuineIntel", 6, "avx2 avx512f avx512vbmi gfni", "Ice Lake"),
        ("GenuineIntel", 6, "avx2 avx512f avx512_vnni", "Haswell"),
        ("GenuineIntel", 6, "sse4_2", "unknown"),
    ],
)
def test_cores(vendor, family, flags, core):
    cpuinfo = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 1\nflags\t\t: fpu {flags}\n\n"
    assert core_of(2 * cpuinfo) == core
    assert core_of("Processor: ARM") == "unknown"


def test_names():
    assert kernel_of("vpshufb, 1 bit, add, float, codes") == "vpshufb, 1 bit"
    assert kernel_of("vpmaddwd, codes") == "vpmaddwd" and kernel_of("fma, float") == "fma"
    stages = [stage_of(f"blocks.{i}.conv1") for i in range(16)]
    assert stages == ["1"] * 3 + ["2"] * 4 + ["3"] * 6 + ["4"] * 3
    assert stage_of("conv0") == "stem" and stage_of("fc") == "head"


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform == "win32", reason="needs x86-64 instructions")
def test_the_clock_runs():
    clock = kernel_limits.Clock()
    assert all(0 < clock.ghz() < 10 for _ in range(3))


class StillClock:
    def ghz(self):
        return 2.0


@pytest.mark.parametrize("isa", [isa for isa in usable_isas() if isa in INNERS])
def test_rows_hold_all_products(isa, tmp_path):
    graph = graphs.resnet_graph(50, size=32, widths=(2, 8), classes=10, multiplier=0.125)
    write(graph, tmp_path / "net.apm")
    model = load(tmp_path / "net.apm", isa=isa)
    x = np.zeros((1, 3, 32, 32), np.float32)
    for bits in (2, 8):
        rows = kernel_limits.measure(model, graph, x, bits, StillClock(), rounds=2)
        steps = model.steps(x, bits, threads=1, repeat=1)
        assert sum(row.million_products for row in rows) == pytest.approx(sum(s.products for s in steps) / 1e6)
        assert sum(row.layers for row in rows) == sum(s.products > 0 for s in steps) == 54
        assert {row.stage for row in rows} == {"stem", "1", "2", "3", "4", "head"}
        for row in rows:
            assert row.products_per_ns == pytest.approx(1000 * row.million_products / row.us)
            if row.percent is not None:
                assert row.percent == pytest.approx(50 * row.products_per_ns / row.limit_per_cycle)
    layers = {layer_of(op) for op in graph.ops if op.kind in ("conv", "linear")}
    assert layers == {"7x7", "1x1", "3x3", "linear"} == {row.layer for row in rows}


def test_saving_keeps_rows_of_other_widths(tmp_path):
    def row(isa, bits, us):
        return Row(isa, bits, "1", "3x3", "vpmaddwd", 3, 346.8, us, 0.0, 346.8e3 / us, 3.0, 24.0, 50.0)

    path = tmp_path / "limits.csv"
    save(path, [row("avx2", 8, 100.0), row("avx2", 4, 200.0), row("avx512", 8, 300.0)])
    save(path, [row("avx2", 8, 400.0)])
    with open(path, newline="") as file:
        found = [(r["isa"], r["bits"], r["us"]) for r in csv.DictReader(file)]
    assert found == [("avx2", "4", "200.0"), ("avx2", "8", "400.0"), ("avx512", "8", "300.0")]


def test_sums_at_the_limit(tmp_path):
    """346.8 million products at 3 GHz, 24 a cycle (Intel) or 32 (AMD); where one limit is unknown, so is the sum."""
    path = tmp_path / "limits.csv"
    save(path, [Row("avx2", 8, "1", "3x3", "vpmaddwd", 3, 346.8, 6000.0, 500.0, 57.8, 3.0, 24.0, 80.0)])
    _, line = kernel_limits.sums(path)
    limits = [f"{346.8 / (96 if core.startswith('Zen') else 72):.1f}" for core in CORES]
    assert line.split() == ["avx2", "8", "bit", "6.5", *limits]
    save(path, [Row("avx2", 4, "1", "3x3", "another", 3, 346.8, 6000.0, 0.0, 57.8, 3.0, None, None)])
    assert kernel_limits.sums(path)[1].split() == ["avx2", "4", "bit", "6.0", *["unknown"] * len(CORES)]
