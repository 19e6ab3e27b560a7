"""For tests of packed models: one small ResNet-20 with every width, float and a mixed profile, as Graph and as file."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from anyprec.bench.random_networks import resnet20_graph
from anyprec.format import GraphProfile, write
from anyprec.run.oracle import run_graph
from anyprec.widths import INTEGER_WIDTHS

LABELS = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def small_graph():
    """Of any image size. Profile "fast" has 2 bit weights, 4 bit in the last block; its tables are those of 2 bit."""
    graph = resnet20_graph(multiplier=0.25, size=None, widths=(*INTEGER_WIDTHS, 32))
    quantized = [name for name, weight in graph.weights.items() if not weight.is_float]
    bits = {name: 4 if name.startswith("blocks.8.") else 2 for name in quantized}
    profiles = [
        replace(p, accuracy=50.0 + 5 * p.weights if p.weights in (1, 2, 4, 8) else None) for p in graph.profiles
    ]
    return replace(
        graph,
        profiles=(*profiles, GraphProfile("fast", bits, 2)),
        tables={name: np.concatenate([table, table[1:2]]) for name, table in graph.tables.items()},
        labels=LABELS,
    )


@pytest.fixture(scope="session")
def net(tmp_path_factory):
    """graph, path, x (3, 9, 11, 3) float32 and wanted: profile -> the oracle's output (3, 10)."""
    graph = small_graph()
    path = tmp_path_factory.mktemp("net") / "net.apm"
    sizes = write(graph, path)
    x = np.random.default_rng(0).standard_normal((3, 9, 11, 3)).astype(np.float32)
    wanted = {p.name: run_graph(graph, x, p.name)["fc"][:, 0, 0] for p in graph.profiles}
    return SimpleNamespace(graph=graph, path=path, x=x, wanted=wanted, sizes=sizes)
