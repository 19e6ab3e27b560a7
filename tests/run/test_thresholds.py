"""1-bit codes by comparing integer sums with thresholds (Epilogue::thresholds), where scales make it hard."""

from dataclasses import replace

import numpy as np
import pytest
from engine_check import assert_exact, usable_isas
from kernel_graphs import images, pair_graph

from anyprec.format.graph import GraphProfile

PAIRS = [(1, 1), (2, 1), (4, 1), (8, 1)]  # only outputs of 1 bit have thresholds
F32 = np.float32
# c, out, kernel, groups: whole vectors and partial ones of every kernel, and depthwise layers.
SHAPES = [(12, 64, 1, 1), (24, 144, 1, 1), (16, 16, 3, 1), (40, 130, 3, 1), (64, 64, 3, 64), (19, 19, 3, 19)]


def hard_tables(graph, rng):
    """Channels in turn: always 0, always 1, a tie at a sum that occurs, the same falling, tiny and huge scales."""
    tables = dict(graph.tables)
    table = tables["conv"].copy()  # (profiles, 2, out)
    for c in range(table.shape[2]):
        sum_of_tie = F32(rng.integers(-20, 20))
        scale, shift = [
            (0, 0.5),  # a tie everywhere: rounds to 0
            (0, 0.75),
            (0.25, 0.5 - 0.25 * sum_of_tie),
            (-0.25, 0.5 + 0.25 * sum_of_tie),
            (1e-30, 0.5),
            (-1e30, 1),
            (1, 0.5),
            (-1, -0.5),
        ][c % 8]
        table[:, 0, c], table[:, 1, c] = scale, shift
    tables["conv"] = table.astype(F32)
    return replace(graph, tables=tables)


@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("c, out, kernel, groups", SHAPES)
def test_hard_scales(isa, c, out, kernel, groups, tmp_path):
    graph = pair_graph(c, out, kernel, "codes", groups=groups, pairs=PAIRS, seed=c)
    x = images((2, 7, 6), (1, 5, 1), c=c, seed=out)
    assert_exact(hard_tables(graph, np.random.default_rng(out)), x, tmp_path / "net.apm", [isa], threads=(1, 2))


@pytest.mark.parametrize("isa", usable_isas())
def test_sums_too_large_for_thresholds(isa, tmp_path):
    """At 8 bit, 9 x 20 x 255 is more than thresholds of 16 bits hold; 9 x 14 x 255 is just what they hold."""
    for c in (14, 20):
        graph = pair_graph(c, 48, 3, "codes", pairs=[(8, 1)], seed=c)
        assert_exact(hard_tables(graph, np.random.default_rng(0)), images((1, 6, 7), c=c), tmp_path / "net.apm", [isa])


# (scale, shift) of the convolution and of the quantizer, in turn over the channels. The product of 3e38 and the larger
# sums is infinite; times 0 that is no number, whose code is 0, while small sums have the code of the shift.
TWO_TABLES = [
    ((0.25, -0.5), (1, 0.5)),
    ((0.25, -0.5), (-1, 0.5)),
    ((3e38, 0), (0, 1)),
    ((-3e38, 1e38), (0, 1)),
    ((3e38, 0), (1, 0)),
    ((1, 0.5), (0, 1)),
    ((1e-42, 0), (1e38, 0.5)),
]


def two_tables(c, out, kernel, groups, acts):
    """A convolution with a table of its own, whose 1-bit quantizer has another."""
    graph = pair_graph(c, out, kernel, "codes", groups=groups, pairs=[(1, acts)], seed=1)
    of_channels = [TWO_TABLES[i % len(TWO_TABLES)] for i in range(out)]
    tables = {**graph.tables, "back": np.array([[1, 0]], F32)}
    for name, which in (("conv", 0), ("again", 1)):
        tables[name] = np.array([pair[which] for pair in of_channels], F32).T[None]
    ops = [replace(op, attributes={**op.attributes, "affine": True}) if op.name == "again" else op for op in graph.ops]
    profile = GraphProfile("low", 1, {"q": acts, "again": 1})
    return replace(graph, tables=tables, ops=tuple(ops), profiles=(profile,))


@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("acts", [1, 2, 8])
@pytest.mark.parametrize("c, out, kernel, groups", SHAPES)
@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_quantizers_with_a_table(isa, acts, c, out, kernel, groups, tmp_path):
    graph = two_tables(c, out, kernel, groups, acts)
    assert_exact(graph, images((2, 7, 6), c=c, seed=out), tmp_path / "net.apm", [isa], threads=(1, 2))
