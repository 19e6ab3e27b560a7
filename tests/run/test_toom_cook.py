"""Float convolutions by Toom-Cook (ARITHMETIC.md, conv): against the oracle bit for bit, and against the plain sum."""

import numpy as np
import pytest
from engine_check import assert_exact, usable_isas
from kernel_graphs import TOOM_COOK, TOOM_COOK_STRIDE_1, float_graph
from sampling import sampled
from test_first_layers import POOLS, first_layer, window

from anyprec.run import oracle_ops

F32, F64 = np.float32, np.float64
ISAS = usable_isas()
ENDINGS = [(3, 64, "sums"), (1, 5, "float"), (4, 83, "added"), (13, 16, "float")]
ALL = TOOM_COOK | TOOM_COOK_STRIDE_1
PLAIN = {  # as TOOM_COOK
    "stride 1, not asked for": TOOM_COOK_STRIDE_1["3x3"],
    "stride 1": ([7, 7], [2, 1], [3] * 4, [1, 1]),
    "stride 3": ([7, 7], [3, 2], [3] * 4, [1, 1]),
    "4 columns": ([7, 4], [2, 2], [1] * 4, [1, 1]),
    "4 lines": ([4, 7], [2, 2], [1] * 4, [1, 1]),
    "9 columns": ([8, 9], [2, 2], [4] * 4, [1, 1]),
    "9 lines": ([9, 8], [2, 2], [4] * 4, [1, 1]),
    "columns apart": ([5, 5], [2, 2], [4] * 4, [1, 2]),
    "lines apart": ([5, 5], [2, 2], [4] * 4, [2, 1]),
}


def steps_of(models, x):
    return {isa: [step.work for step in model.steps(x, repeat=1)] for isa, model in models.items()}


PLACES_AND_ENDINGS = sampled((place, *ending) for place in ALL for ending in ENDINGS)


@pytest.mark.thorough
@pytest.mark.parametrize("place, channels, out, ending", PLACES_AND_ENDINGS)
def test_every_place_and_ending(place, channels, out, ending, tmp_path):
    graph = float_graph(ALL[place], channels, out, ending, seed=out, toom_cook=place in TOOM_COOK_STRIDE_1)
    rng = np.random.default_rng(1)
    for size in ((11, 33), (8, 8), (17, 70), (6, 12), (7, 21), (5, 48)):  # 5, 1, 9, 2, 3 and 6 tiles across at 7x7
        x = rng.standard_normal((2, *size, channels)).astype(F32)
        models = assert_exact(graph, [x], tmp_path / "net.apm", ISAS, threads=(1, 2, 5))
        for isa, work in steps_of(models, x).items():
            assert all("toom-cook" in w for w in work), (isa, work)


@pytest.mark.parametrize("place", PLAIN)
def test_all_others_are_plain_sums(place, tmp_path):
    graph = float_graph(PLAIN[place], 3, 16)
    x = np.random.default_rng(1).standard_normal((1, 19, 27, 3)).astype(F32)
    models = assert_exact(graph, [x], tmp_path / "net.apm", ISAS)
    for isa, work in steps_of(models, x).items():
        assert not any("toom-cook" in w for w in work), (isa, work)


@pytest.mark.thorough
@pytest.mark.parametrize("pool", sampled(POOLS))
def test_a_pool_behind_them(pool, tmp_path):
    """Bands of lines begin and end inside tiles, and with threads some tiles are computed twice."""
    graph = first_layer(window(*TOOM_COOK["7x7"]), POOLS[pool], clip=pool in ("spread", "apart"))
    x = np.random.default_rng(1).standard_normal((2, 123, 130, 3)).astype(F32)  # 62 x 65 x 72: more than 1 MiB
    for isa, work in steps_of(assert_exact(graph, [x], tmp_path / "net.apm", ISAS, threads=(1, 2, 5)), x).items():
        assert len(work) == 1 and "toom-cook" in work[0] and work[0].endswith(", pool"), (isa, work)


def test_nan_and_infinity_stay_in_their_tiles(tmp_path):
    """Infinity and NaN may reach the other outputs of a tile that reads them, and no further."""
    graph = float_graph(TOOM_COOK["7x7"], 3, 16)
    x = np.random.default_rng(1).standard_normal((2, 20, 64, 3)).astype(F32)
    x[0, 4, 8, 1], x[1, 15, 50, 2] = np.nan, np.inf  # under lines 1 .. 3 and columns 3 .. 5; 6 .. 9 and 24 .. 26
    for model in assert_exact(graph, [x], tmp_path / "net.apm", ISAS).values():
        y = model(x)
        finite = np.isfinite(y).all(-1)
        assert not finite[0, 1:4, 3:6].any() and not finite[1, 6:10, 24:27].any()
        assert finite[0, 4:].all() and finite[0, :, 8:].all() and finite[1, :4].all()
        assert finite[1, :, :20].all() and finite[1, :, 28:].all()


@pytest.mark.parametrize("place", ALL)
@pytest.mark.parametrize("values", ["random", "standard_normal"])
def test_near_to_the_exact_sum(place, values):
    """Errors over all outputs, beside those of a sum in the order of K: 3 times on an image, 5 to 6 without a mean.
    With stride 1, whose sums are shorter, 4 to 5 times and 7 to 10."""
    rng = np.random.default_rng(2)
    kernel, stride, pad, dilation = ALL[place]
    w = (rng.standard_normal((32, *kernel, 3)) / 10).astype(F32)
    x = getattr(rng, values)((2, 20, 64, 3)).astype(F32)
    toom_cook = oracle_ops.conv_float(x, w, 1, stride, pad, dilation, toom_cook=place in TOOM_COOK_STRIDE_1)
    (oh, ow), taps = oracle_ops.window_taps(x.shape, kernel, stride, pad, dilation)
    exact, plain = np.zeros((2, oh, ow, 32), F64), np.zeros((2, oh, ow, 32), F32)
    for (i, oy, iy), (j, ox, ix) in taps:
        for k in range(3):
            product = np.multiply(x[:, iy, ix, k, None], w[:, i, j, k], dtype=F64)
            exact[:, oy, ox] += product
            plain[:, oy, ox] = (product + plain[:, oy, ox]).astype(F32)
    size, error, usual = (np.sqrt(np.mean(y**2)) for y in (exact, toom_cook - exact, plain - exact))
    assert 0 < error < 1.5e-6 * size, (error, size)
    most = {"random": 4, "standard_normal": 6.5} if place in TOOM_COOK else {"random": 5.5, "standard_normal": 10.5}
    assert error < most[values] * usual, (error, usual)
