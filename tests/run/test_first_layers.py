"""What is particular about first layers: zeros around the input, and a max pool made band by band."""

from dataclasses import replace

import numpy as np
import pytest
from engine_check import assert_exact, usable_isas
from graph_builder import assert_same

from anyprec.format import INPUT, Graph, GraphProfile, Op, Weight, nested_planes
from anyprec.run.model import load

F32 = np.float32
ISAS = usable_isas()
POOLS = {  # kernel, stride, pad (top, left, bottom, right), dilation
    "overlapping": ([3, 3], [2, 2], [1, 1, 1, 1], [1, 1]),
    "side by side": ([2, 2], [2, 2], [0, 0, 0, 0], [1, 1]),
    "apart": ([1, 2], [3, 4], [0, 0, 0, 0], [1, 1]),
    "every line": ([3, 2], [1, 1], [1, 0, 1, 1], [1, 1]),
    "spread": ([3, 3], [2, 1], [2, 2, 2, 2], [2, 2]),
    "49 taps": ([7, 7], [5, 5], [3, 3, 3, 3], [1, 1]),
    "as high as the image": ([62, 1], [62, 1], [0, 0, 0, 0], [1, 1]),
}


def window(kernel, stride, pad, dilation):
    return {"kernel": kernel, "stride": stride, "pad": pad, "dilation": dilation}


def first_layer(place, pool, clip=False, integer=False, channels=72, seed=0):
    """conv -> max_pool, of 3 channels; perhaps a quantize before, a clip between."""
    rng = np.random.default_rng(seed)
    shape = (channels, *place["kernel"], 3)
    codes = rng.integers(0, 256, shape, np.uint8)
    weight = Weight(shape, rng.standard_normal(shape).astype(F32), {k: codes >> (8 - k) for k in (1, 8)})
    profiles = tuple(GraphProfile(str(k), k, k) for k in (1, 8, 32))
    attributes = {"weight": "w", "groups": 1, "signed": False, "affine": False, **place}
    ops, tables = [], {}
    if integer:
        ops.append(Op("q", "quantize", (INPUT,), {"signed": False, "rectify": True, "affine": True}))
        tables["q"] = np.array([[[0.7] * 3, [1] * 3], [[60] * 3, [99] * 3], [[0.3] * 3, [0.4] * 3]], F32)
    ops.append(Op("conv", "conv", ("q" if integer else INPUT,), attributes))
    if clip:
        ops.append(Op("clip", "clip", ("conv",)))
        tables["clip"] = np.tile(np.array([-1, 1.5], F32), (3, 1))
    ops.append(Op("pool", "max_pool", (ops[-1].name,), {**window(*pool), "ceil": False}))
    weights = {"w": weight if integer else Weight(shape, weight.values)}
    planes = nested_planes({1, 8}) if integer else {}
    profiles = profiles if integer else profiles[-1:]
    tables = {name: table if integer else table[-1:] for name, table in tables.items()}
    return Graph("first", (None, None, 3), profiles, planes, weights, tuple(ops), ("pool",), tables)


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("pool", POOLS)
def test_a_large_result_that_a_pool_reads(pool, integer, tmp_path):
    one = window([1, 1], [1, 1], [0] * 4, [1, 1])
    graph = first_layer(one, POOLS[pool], clip=pool in ("spread", "apart"), integer=integer)
    x = np.random.default_rng(1).standard_normal((2, 62, 68, 3)).astype(F32)
    x[0, 7, 9], x[1, 60, 66] = np.nan, -np.inf
    models = assert_exact(graph, [x], tmp_path / "net.apm", ISAS, threads=(1, 2, 5))
    for isa, model in models.items():
        for profile in graph.profiles:
            work = [step.work for step in model.steps(x, profile.name, repeat=1)]
            assert ("max_pool" in work) != any(w.endswith(", pool") for w in work), (isa, work)
            assert profile.name == "1" or "max_pool" not in work, (isa, work)


FRAMES = [([3, 3], [1, 1], [1] * 4, [1, 1]), ([7, 7], [2, 2], [3] * 4, [1, 1]), ([4, 5], [3, 2], [0, 2, 3, 1], [1, 1]),
          ([3, 2], [1, 1], [2, 0, 2, 1], [2, 1]), ([3, 3], [1, 1], [2] * 4, [1, 2]), ([1, 1], [2, 2], [0] * 4, [1, 1]),
          ([2, 2], [1, 1], [30] * 4, [1, 1])]  # fmt: skip


@pytest.mark.parametrize("kernel, stride, pad, dilation", FRAMES)
def test_the_first_layer_in_every_layout(kernel, stride, pad, dilation, tmp_path):
    """Zeros go around the input where that pays: not for dilated lines, not for more zeros than pixels."""
    place, path = window(kernel, stride, pad, dilation), tmp_path / "net.apm"
    for channels in (5, 16, 33):
        graph = first_layer(place, POOLS["overlapping"], channels=channels, seed=channels)
        graph = replace(graph, image_scale=(0.1, 0.2, 0.3), image_shift=(-5.0, 1.0, 0.5))
        rng = np.random.default_rng(channels)
        inputs = [rng.standard_normal((3, 17, 21, 3)).astype(F32), rng.integers(0, 256, (3, 17, 21, 3), np.uint8)]
        models = assert_exact(graph, inputs, path, ISAS, threads=(1, 2))
        for isa, model in models.items():
            first = load(path, isa=isa, layout="NCHW")
            for x in inputs:
                got = first(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
                assert_same(got, model(x).transpose(0, 3, 1, 2), f"{isa}, NCHW, {x.dtype}")
