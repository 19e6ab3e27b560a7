"""8 bit by vpmaddubsw (kernels.h, Coding::split8): exact whatever the weights, and only where few of them are split."""

from dataclasses import replace

import numpy as np
import pytest
from engine_check import assert_exact, kernels_used, usable_isas
from kernel_graphs import images, pair_graph

from anyprec.format import Weight

ISAS = usable_isas()
SPLIT = "vpmaddubsw, 8 bit"
LAYERS = [  # input and output channels, kernel, stride, pad, groups
    (64, 96, 1, 1, 0, 1),
    (21, 83, 3, 2, 1, 1),
    (36, 24, 3, 2, 1, 1),
    (36, 24, 3, 2, 1, 3),
    (40, 5, 5, 3, 4, 1),
    (130, 34, 1, 2, 0, 1),
]


def layer(codes, kernel, stride, pad, groups, signed=False):
    """quantize -> conv at 8 bit with these codes, (out, kh, kw, in): its sums as they are."""
    out, inside = codes.shape[0], codes.shape[-1]
    graph = pair_graph(inside * groups, out, kernel, "sums", signed, groups, pairs=[(8, 8)])
    ops = [replace(op, attributes={**op.attributes, "stride": [stride] * 2, "pad": [pad] * 4})
           if op.kind == "conv" else op for op in graph.ops]  # fmt: skip
    return replace(graph, weights={"w": Weight(codes.shape, None, {8: codes})}, ops=tuple(ops))


def normal_codes(shape, seed=0):
    """As of most float networks: the largest is five deviations from the mean."""
    values = np.random.default_rng(seed).normal(128, 25, shape)
    return np.clip(np.round(values), 0, 255).astype(np.uint8)


def extremes(c, size=(2, 7, 9)):
    """Images of the largest codes alone, and others."""
    return [np.full((*size, c), 99, np.float32), *images(size, c=c)]


@pytest.mark.parametrize("c, out, kernel, stride, pad, groups", LAYERS)
@pytest.mark.parametrize("signed", [False, True])
def test_exact_with_a_few_large_weights(c, out, kernel, stride, pad, groups, signed, tmp_path):
    """Some in the first and the last tap, which tiles at the border leave out."""
    codes = normal_codes((out, kernel, kernel, c // groups), seed=c)
    codes[1, 0, 0, :2], codes[-1, -1, -1, -2:], codes[0, kernel // 2, 0, :4] = 255, 0, [0, 1, 255, 255]
    graph = layer(codes, kernel, stride, pad, groups, signed)
    models = assert_exact(graph, extremes(c), tmp_path / "net.apm", ISAS, threads=(1, 2))
    if "avx2" in ISAS:
        assert kernels_used(models["avx2"], extremes(c)[0], ["w8a8"]) == {SPLIT if groups == 1 else "vpmaddwd"}


@pytest.mark.parametrize("a, b", [(127, 1), (64, 64), (127, 2), (65, 64), (-128, 0), (-128, -1), (-64, -65), (127, 127),
                                  (-128, -128), (-128, 127)])  # fmt: skip
def test_both_sides_of_the_limit(a, b, tmp_path):
    """Of two weights side by side in every eighth step, 255 times their sum leaves 16 bits or does not."""
    codes = np.full((32, 1, 1, 64), 128, np.uint8)
    codes[3, 0, 0, ::32], codes[3, 0, 0, 1::32] = 128 + a, 128 + b
    models = assert_exact(layer(codes, 1, 1, 0, 1), extremes(64), tmp_path / "net.apm", ISAS)
    if "avx2" in ISAS:
        assert SPLIT in kernels_used(models["avx2"], extremes(64)[0], ["w8a8"])


@pytest.mark.skipif("avx2" not in ISAS, reason="needs AVX2")
def test_weights_of_which_many_are_large_go_another_way(tmp_path):
    codes = np.random.default_rng(0).integers(0, 256, (32, 1, 1, 64), np.uint8)
    models = assert_exact(layer(codes, 1, 1, 0, 1), extremes(64), tmp_path / "net.apm", ISAS)
    assert kernels_used(models["avx2"], extremes(64)[0], ["w8a8"]) == {"vpmaddwd"}
