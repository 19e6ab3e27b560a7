"""Layers of 8 bits in every integer profile, engine against oracle bit for bit: stems, classifiers, prefixes."""

import numpy as np
import pytest
from engine_check import assert_exact, usable_isas
from graph_builder import assert_same

from anyprec.format import INPUT, Graph, GraphProfile, Op, Weight, truncate, write
from anyprec.run.model import load
from anyprec.run.oracle import run_graph
from anyprec.widths import FLOAT

F32 = np.float32
ISAS = usable_isas()


def edge_graph(kernel=7, stride=2, pad=3, channels=3, out=40, signed=True, groups=1, keep_float=True):
    """A stem of 8 bits on the image, a quantized layer, a mean and a classifier of 8 bits."""
    rng = np.random.default_rng(kernel + 10 * channels + out)
    widths = (1, 2, 4, 8, FLOAT) if keep_float else (1, 2, 4, 8)
    mixed = GraphProfile("fast", {"body": 2}, {"act": 4})
    profiles = (*(GraphProfile(str(k), k, k) for k in widths), mixed)
    shapes = {"stem": (out, kernel, kernel, channels // groups), "body": (24, 1, 1, out), "fc": (11, 1, 1, 24)}
    weights = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(F32) if keep_float else None
        wide = rng.integers(0, 256, shape, np.uint8)
        wide[:2] = 255  # the largest sums
        codes = {k: wide >> (8 - k) for k in (1, 2, 4, 8)} if name == "body" else {8: wide}
        weights[name] = Weight(shape, values, codes, bits=None if name == "body" else 8)

    def table(scale, shift, c):
        rows = np.array([[scale, shift]] * len(profiles), F32)
        return np.repeat(rows[:, :, None], c, axis=2) * rng.uniform(0.8, 1.2, (len(profiles), 1, c)).astype(F32)

    window = {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "pad": (pad,) * 4, "dilation": (1, 1), "groups": groups}
    one = {"kernel": (1, 1), "stride": (1, 1), "pad": (0,) * 4, "dilation": (1, 1), "groups": 1}
    ops = (
        Op("stem.in", "quantize", (INPUT,), {"signed": signed, "rectify": False, "affine": True, "bits": 8}),
        Op("stem", "conv", ("stem.in",), {"weight": "stem", "signed": signed, "affine": True, **window}),
        Op("act", "quantize", ("stem",), {"signed": False, "rectify": True, "affine": False}),
        Op("body", "conv", ("act",), {"weight": "body", "signed": False, "affine": True, **one}),
        Op("mean", "adaptive_avg_pool", ("body",), {"size": (1, 1)}),
        Op("fc.in", "quantize", ("mean",), {"signed": True, "rectify": False, "affine": True, "bits": 8}),
        Op("fc", "linear", ("fc.in",), {"weight": "fc", "signed": True, "affine": True}),
    )
    tables = {
        "stem.in": table(127.5 / 3 if signed else 85, 127.5 if signed else 0, channels),
        "stem": table(3e-5, 2, out),
        "body": table(1e-3, 0.1, 24),
        "fc.in": table(30, 127.5, 24),
        "fc": table(1e-4, -0.5, 11),
    }
    scale, shift = (6 / 255,) * channels, (-3.0,) * channels
    shape = (None, None, channels)
    planes = {k: tuple(range(k)) for k in (1, 2, 4, 8)}
    return Graph("edges", shape, profiles, planes, weights, ops, ("fc",), tables, scale, shift)


def pictures(*sizes, channels=3):
    rng = np.random.default_rng(0)
    floats = [(rng.standard_normal((*size, channels)) * 1.5).astype(F32) for size in sizes]
    return [*floats, rng.integers(0, 256, (2, 9, 10, channels), np.uint8)]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("kernel, stride, pad, channels, out", [(7, 2, 3, 3, 40), (3, 1, 1, 1, 16), (4, 4, 0, 5, 130)])
def test_engine_and_oracle(kernel, stride, pad, channels, out, signed, tmp_path):
    graph = edge_graph(kernel, stride, pad, channels, out, signed)
    x = pictures((1, 12, 13), (3, 7, 8), channels=channels)
    assert_exact(graph, x, tmp_path / "net.apm", ISAS, threads=(1, 2))


def test_a_depth_wise_stem(tmp_path):
    graph = edge_graph(3, 1, 1, 6, 6, signed=True, groups=6)
    assert_exact(graph, pictures((2, 5, 6), channels=6), tmp_path / "net.apm", ISAS)


def test_padding_of_signed_codes_adds_nothing(tmp_path):
    """Around one pixel of value v all other taps are outside: the sum is that of the center alone."""
    graph = edge_graph(3, 1, 1)
    write(graph, tmp_path / "net.apm")
    x = np.full((1, 1, 1, 3), 0.7, F32)
    values = run_graph(graph, x, "8", all_values=True)
    codes, weight = values["stem.in"].astype(int), graph.weights["stem"].codes[8][:, 1, 1].astype(int)
    sums = ((2 * weight - 255) * (2 * codes.reshape(-1) - 255)).sum(1)
    scale, shift = graph.tables["stem"][3].astype(np.float64)
    np.testing.assert_allclose(values["stem"].reshape(-1), sums * scale + shift, rtol=1e-5)
    assert_same(load(tmp_path / "net.apm")(x, bits=8, layout="NHWC").reshape(-1), values["fc"].reshape(-1))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_prefix_runs(bits, tmp_path):
    graph, (x, *_) = edge_graph(keep_float=False), pictures((1, 12, 13))
    write(graph, tmp_path / "net.apm")
    truncate(tmp_path / "net.apm", tmp_path / "part.apm", bits)
    want = run_graph(graph, x, str(bits))["fc"]
    for model in (load(tmp_path / "part.apm"), load(tmp_path / "net.apm", max_bits=bits)):
        assert_same(model(x, bits=bits, layout="NHWC").reshape(want.shape), want)
        assert model.bytes_needed(str(bits)) == (tmp_path / "part.apm").stat().st_size


def test_the_widest_bits_are_those_profiles_set(tmp_path):
    write(edge_graph(), tmp_path / "net.apm")
    found = {p.name: (p.weight_bits, p.act_bits) for p in load(tmp_path / "net.apm")._engine.profiles()}
    assert found == {"1": (1, 1), "2": (2, 2), "4": (4, 4), "8": (8, 8), "32": (32, 32), "fast": (2, 4)}
