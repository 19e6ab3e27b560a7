"""The graphs drawn for comparing engine and oracle: valid, repeatable, of every kind, with codes that spread."""

from collections import Counter

import numpy as np
import pytest
from graph_builder import assert_same
from random_graphs import BLOCKS, random_graph

from anyprec.format.check import check_graph
from anyprec.format.record import to_record
from anyprec.format.schema import SCHEMAS
from anyprec.run.oracle import run_graph


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(20))
def test_drawn_graphs_are_valid_and_run_in_every_profile(seed):
    graph, x = random_graph(seed)
    check_graph(to_record(graph, {}))
    for profile in graph.profiles:
        for name, value in run_graph(graph, x, profile.name).items():
            assert value.dtype == np.float32 and value.size and np.isfinite(value).all(), name


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("seed", range(3))
def test_every_kind_of_block(kind, seed):
    graph, _ = random_graph(seed, kinds=[kind], blocks=2, max_channels=33, special=seed == 1, float_layers=seed == 2)
    check_graph(to_record(graph, {}))


def test_a_seed_gives_one_graph():
    (a, x), (b, y) = random_graph(7), random_graph(7)
    assert_same(x, y)
    assert a.ops == b.ops and a.profiles == b.profiles and a.outputs == b.outputs
    for name in a.tables:
        assert_same(a.tables[name], b.tables[name], name)
    assert random_graph(8)[0].ops != a.ops


@pytest.mark.slow
def test_seeds_cover_every_op_and_codes_spread():
    kinds: Counter[str] = Counter()
    used, fixed = [], 0
    for seed in range(30):
        graph, x = random_graph(seed, max_channels=40)
        kinds.update(op.kind for op in graph.ops)
        fixed += sum(weight.bits == 8 for weight in graph.weights.values())
        profile = graph.profiles[-1]
        values = run_graph(graph, x, profile.name, all_values=True)
        for op in graph.ops:
            if op.kind == "quantize" and values[op.name].size >= 256:
                levels = 2 ** profile.act_bits(op.name, op.bits)
                used.append(len(np.unique(values[op.name])) / levels)
    old = {kind for kind, schema in SCHEMAS.items() if schema.format == 1}  # of format 3: test_format3.py
    assert set(kinds) == old and fixed > 2
    assert len(used) > 20 and np.median(used) > 0.8


def test_same_means_every_bit():
    zero = np.zeros(3, np.float32)
    assert_same(np.array([np.nan], np.float32), -np.array([np.nan], np.float32))
    with pytest.raises(AssertionError, match="1 of 3 differ, first at \\[2\\]"):
        assert_same(zero, np.array([0, 0, -0.0], np.float32))
    with pytest.raises(AssertionError, match="float64"):
        assert_same(zero, zero.astype(np.float64))
