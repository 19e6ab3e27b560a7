"""How tests compare the engine with the oracle: a Graph and images in, an AssertionError out where any bit differs.

Used by test_engine.py, test_engine_zoo.py and sanitize.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from graph_builder import assert_same

from anyprec.format import Graph, write
from anyprec.run.cpu import usable_isas
from anyprec.run.model import PackedModel, load
from anyprec.run.oracle import run_graph

__all__ = ["TIMED", "assert_exact", "kernels_built", "kernels_used", "usable_isas"]
NATIVE = Path(__file__).parents[2] / "native"


def assert_exact(
    graph: Graph,
    inputs: Sequence[np.ndarray | Mapping[str, np.ndarray]],  # (N, H, W, C) float32 or uint8; all inputs by name
    path: Path,
    isas: Iterable[str],
    threads: Sequence[int] = (1,),
    profiles: Iterable[str] | None = None,
) -> dict[str, PackedModel]:
    """Writes the graph to `path` and runs it in every profile on every instruction set; gives the models."""
    write(graph, path)
    models = {isa: load(path, isa=isa, layout="NHWC", check_finite=False) for isa in isas}
    for name in [p.name for p in graph.profiles] if profiles is None else profiles:
        for i, x in enumerate(inputs):
            more = dict(x) if isinstance(x, Mapping) else {"input": x}
            first = more.pop("input")
            want = run_graph(graph, first, name, more=more)
            for isa, model in models.items():
                for count in threads:
                    got = model(first, bits=name, threads=count, **more)
                    got = got if isinstance(got, tuple) else (got,)
                    assert len(got) == len(want)
                    for (output, expected), y in zip(want.items(), got, strict=True):
                        what = f"{isa}, profile {name}, input {i}, {count} threads, output {output}"
                        assert_same(y.reshape(expected.shape), expected, what)
    return models


def kernels_used(model: PackedModel, x: np.ndarray, profiles: Iterable[str]) -> set[str]:
    """Names of the kernels that convolutions run on; work is "vpmaddubsw, 4 bit, add, float, codes" for example."""
    steps = [step for name in profiles for step in model.steps(x, name, repeat=1) if step.products]
    return {re.sub("(, add)?(, float)?(, codes)?(, pool)?$", "", step.work) for step in steps}


# Files that are not named after the instruction set of their table.
FILES = {"avx512vnni": "avx512", "avx512": "vbmi"}
# Kernels of another table that are the fastest of some layers (kernel_tables.cpp).
INHERITED = {
    "avxvnni": {"vpshufb, 1 bit", "vpshufb, 2 bit", "fma", "toom-cook fma"},
    "avx512": {
        "vpdpbusd",
        "vpdpbusd, 8 bit",
        "winograd vpdpbusd, 3 bit",
        "winograd vpdpbusd, 4 bit",
        "fma",
        "toom-cook fma",
    },
    "amx": {"vpermb, 1 bit", "vpopcntd, 1 bit", "fma", "toom-cook fma"},
}
# Tables whose tiles are timed (native/plan/kernel_rates.h): of these kernels only those run that this CPU is faster at.
TIMED = {isa: {"vpermb, 1 bit", "vpopcntd, 1 bit", "vpermb, 2 bit"} for isa in ("avx512", "amx")}


def kernels_built(isa: str) -> set[str]:
    """Names of all kernels for convolutions that the file of a table defines, those for Winograd too, and of those the
    table inherits."""
    source = (NATIVE / "kernels" / f"kernels_{FILES.get(isa, isa)}.cpp").read_text(encoding="utf-8")
    own = set(re.findall(r'(?:TileKernel \w+\(|winograd_of<\w+>\(\s*\{)\s*"([^"]+)"', source))
    return own | INHERITED.get(isa, set())
