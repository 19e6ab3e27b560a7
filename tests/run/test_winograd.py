"""Winograd's transforms against the oracle, bit for bit: edges, odd channels, every ending, the largest sums.

The planner decides by size and width whether it takes them; each test says where it must, and looks at the steps.
"""

import numpy as np
import pytest
from engine_check import assert_exact, kernels_used, usable_isas
from graph_builder import assert_same
from sampling import sampled

from anyprec import _native
from anyprec.format import INPUT, Graph, GraphProfile, Op, Weight, nested_planes, write
from anyprec.run.model import load

F32 = np.float32
# Weight and input bits that must go this way where the shape allows, by instruction set. AMX multiplies faster than it
# transforms.
TAKEN = {
    "avx2": [(8, 8), (8, 6), (7, 8), (4, 4), (3, 3)],
    "avxvnni": [(4, 4), (4, 5), (3, 3)],
    "avx512vnni": [(4, 4), (4, 5), (3, 3), (2, 2)],
    "avx512": [(4, 4), (4, 5), (3, 3)],  # 2 bit: by Winograd or lookups, whichever this CPU is faster at
    "neon": [(4, 4), (3, 3)],
    "dotprod": [(4, 4), (4, 5), (3, 3)],
    "i8mm": [(4, 4), (4, 5), (3, 3)],
}
ISAS = [isa for isa in usable_isas() if isa in TAKEN]
ALL = [(k, k) for k in range(1, 9)] + [(8, 6), (7, 8), (4, 5), (5, 4), (3, 5), (1, 4)]

pytestmark = pytest.mark.skipif(not ISAS, reason="only the scalar kernels run on this CPU")


def conv_graph(c, out, pad=(1, 1, 1, 1), ending="sums", signed=False, pairs=ALL, extreme=False, seed=0) -> Graph:
    """quantize -> 3x3 conv, with a profile for every pair of weight and input bits.

    ending: "sums"; "float" and "codes" (with a table); "all" (residual, clips, float and codes); "clip" (before the sum
    too). extreme: weights are all least or all largest, by output channel.
    """
    rng = np.random.default_rng(seed)
    shape = (out, 3, 3, c)
    codes = rng.integers(0, 256, shape, np.uint8)
    if extreme:
        codes[:] = np.where(np.arange(out) % 2, 255, 0)[:, None, None, None]
    weights = {"w": Weight(shape, None, {k: codes >> (8 - k) for k in sorted({w for w, _ in pairs})})}
    levels = np.array([2.0**a - 1 for _, a in pairs])
    spread = (levels / 4 / (np.sqrt(9 * c) * np.array([2.0**w for w, _ in pairs]) * levels * 0.3))[:, None]
    sign = np.where(rng.random(out) < 0.3, -1, 1)

    def table(scale, shift):  # (P, 1 or C) each -> (P, 2, C)
        return np.stack(np.broadcast_arrays(scale, shift), 1).astype(F32)

    half = levels[:, None] / 2
    tables = {"q": table(levels[:, None] / 3 * np.ones(c), half)}
    ops = [Op("q", "quantize", (INPUT,), {"signed": signed, "rectify": False, "affine": True})]
    window = {"kernel": [3, 3], "stride": [1, 1], "pad": [*pad], "dilation": [1, 1], "groups": 1}
    conv = {"weight": "w", "signed": signed, **window}
    end, outputs = "conv", []
    if ending == "sums":
        ops.append(Op("conv", "conv", ("q",), {**conv, "affine": False}))
    else:
        tables["conv"] = table(spread * sign, half)
        if ending in ("all", "clip"):
            weights["skip"] = Weight((out, 3, 3, c), (rng.standard_normal((out, 3, 3, c)) / 9).astype(F32))
            skip = {"weight": "skip", "signed": False, "affine": False, **window}
            ops.append(Op("skip", "conv", (INPUT,), skip))
        ops.append(Op("conv", "conv", ("q",), {**conv, "affine": True}))
        if ending == "clip":
            tables["first"] = np.stack([0 * levels, 0.8 * levels], 1).astype(F32)
            ops.append(Op("first", "clip", ("conv",)))
            end = "first"
        if ending in ("all", "clip"):
            ops.append(Op("add", "add", (end, "skip")))
            tables["second"] = np.stack([-0.1 * levels, 0.9 * levels], 1).astype(F32)
            ops.append(Op("second", "clip", ("add",)))
            end = "second"
    if ending not in ("sums", "float"):
        tables["back"] = np.stack([1 / levels, 0 * levels], 1).astype(F32)
        affine = ending == "all"
        if affine:
            tables["again"] = table(np.full((len(pairs), out), 1.1), np.full((1, out), 0.25))
        ops.append(Op("again", "quantize", (end,), {"signed": False, "rectify": True, "affine": affine}))
        ops.append(Op("back", "dequantize", ("again",)))
        outputs = ["back"]
    if ending != "codes":
        outputs.append(end)
    profiles = tuple(GraphProfile(f"w{w}a{a}", w, a) for w, a in pairs)
    planes = nested_planes({w for w, _ in pairs})
    return Graph("winograd", (None, None, c), profiles, planes, weights, tuple(ops), tuple(outputs), tables)


def image(n, h, w, c, seed=0):
    x = np.random.default_rng(seed).standard_normal((n, h, w, c)).astype(F32)
    x[:, -1, -1], x[:, -1, -2:-1] = 9, -9  # codes as large and as small as they come
    return x


def taken(model, x, bits) -> bool:
    return any(name.startswith("winograd ") for name in kernels_used(model, x, bits))


def names(pairs):
    return [f"w{w}a{a}" for w, a in pairs]


def assert_taken(models, x):
    for isa, model in models.items():
        for pair in TAKEN[isa]:
            assert taken(model, x, names([pair])), (isa, pair)


@pytest.mark.parametrize("isa", ISAS)
def test_taken_where_it_pays(isa, tmp_path):
    write(conv_graph(128, 128), tmp_path / "net.apm")
    model = load(tmp_path / "net.apm", isa=isa, layout="NHWC")
    for pair in TAKEN[isa]:
        assert taken(model, image(1, 16, 16, 128), names([pair])), pair
        assert not taken(model, image(1, 1, 1, 128), names([pair])), pair  # one output: 9 taps against 16


@pytest.mark.skipif("avx512" not in ISAS, reason="this CPU has no lookups of 512 bits")
@pytest.mark.parametrize("out", [16, 64, 128])
def test_two_bits_take_the_faster_products_of_this_cpu(out, tmp_path):
    """Lookups only where their measured rate pays, and always where even Winograd could not be faster."""
    graph = conv_graph(192, out, pairs=[(2, 2)])
    rates = {(name, vectors): rate for name, vectors, rate in _native.kernel_rates("avx512")}
    write(graph, tmp_path / "net.apm")
    model = load(tmp_path / "net.apm", isa="avx512", layout="NHWC")
    used = kernels_used(model, image(1, 16, 16, 192), names([(2, 2)]))
    lookups = rates["vpermb, 2 bit", min(2, -(-out // 64))] * min(1, out / 64)  # partly filled vectors
    dots = rates["vpdpbusd", min(4, -(-out // 16))]
    if lookups < 0.8 * dots:  # they also prepare their inputs
        assert not any("vpermb" in kernel for kernel in used)
    if lookups > 2.25 * 1.2 * dots:  # Winograd saves 2.25 times the products at most
        assert any("vpermb" in kernel for kernel in used)


@pytest.mark.parametrize("h, w", [(6, 6), (5, 7), (8, 5), (7, 12), (13, 13), (2, 12), (40, 9)])
def test_edges(h, w, tmp_path):
    """Odd sizes, images of one chunk and several, batches."""
    pairs = sorted({pair for isa in ISAS for pair in TAKEN[isa]})
    graph = conv_graph(192, 128, ending="codes", pairs=pairs, seed=h)
    x = image(2, h, w, 192, seed=w)
    models = assert_exact(graph, [x], tmp_path / "net.apm", ISAS, threads=(1, 2, 5))
    assert_taken(models, x)


PADS = [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 1, 0, 4), (5, 5, 5, 5)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "h, w, pad", sampled([(1, 1, p) for p in PADS[1:]] + [(2, 2, p) for p in PADS[1:]] + [(3, 5, p) for p in PADS])
)
def test_small_images_and_any_padding(h, w, pad, tmp_path):
    pairs = sorted({pair for isa in ISAS for pair in TAKEN[isa]})
    graph = conv_graph(128, 80, pad=pad, ending="all", pairs=pairs)
    x = image(3, h, w, 128)
    models = assert_exact(graph, [x], tmp_path / "net.apm", ISAS, threads=(1, 3))
    if pad == (5, 5, 5, 5):  # 9 x 9 outputs at least
        assert_taken(models, x)


@pytest.mark.thorough
@pytest.mark.parametrize("ending", ["sums", "float", "codes", "all", "clip"])
@pytest.mark.parametrize("signed", sampled([True, False]))
def test_every_ending_at_every_width(ending, signed, tmp_path):
    graph = conv_graph(128, 64, ending=ending, signed=signed)
    x = image(1, 9, 10, 128)
    models = assert_exact(graph, [x], tmp_path / "net.apm", ISAS, threads=(1, 2))
    assert_taken(models, x)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "c, out",
    sampled([(63, 65), (65, 63), (127, 33), (33, 127), (130, 130), (31, 200), (67, 96), (16, 16), (1, 3), (5, 1)]),
)
def test_odd_channels(c, out, tmp_path):
    pairs = sorted({pair for isa in ISAS for pair in TAKEN[isa]})
    graph = conv_graph(c, out, ending="all", pairs=pairs, seed=c)
    x = image(1, 9, 11, c)
    models = assert_exact(graph, [x], tmp_path / "net.apm", ISAS, threads=(1, 2))
    for isa, model in models.items():
        took = taken(model, x, names(TAKEN[isa][:1]))
        if c <= 16:  # the plain way
            assert not took
        elif isa not in ("avx512", "avxvnni"):  # there a narrow last block may not pay
            assert took


@pytest.mark.parametrize("signed", [False, True])
def test_largest_sums(signed, tmp_path):
    """All weights least or largest, all codes largest or mixed: four times the sum nears 2^31 at 8 bit."""
    x = np.full((1, 8, 9, 916), 9, F32)
    x[:, ::3, ::2, ::5] = -9
    for c, must in ((916, True), (918, False)):  # 4 x 9 x 255 x 255 x 917.4 = 2^31
        graph = conv_graph(c, 32, signed=signed, pairs=[(8, 8), (4, 4), (3, 3)], extreme=True)
        some = np.resize(x, (1, 8, 9, c))
        models = assert_exact(graph, [some], tmp_path / "net.apm", ISAS)
        if "avx2" in models:
            assert taken(models["avx2"], some, ["w8a8"]) == must
        for isa in {"avx512vnni", "avx512"} & models.keys():
            assert taken(models[isa], some, ["w4a4"]) and taken(models[isa], some, ["w3a3"])


@pytest.mark.parametrize("isa", ISAS)
def test_a_batch_is_its_images_one_by_one(isa, tmp_path):
    """Chunks of all images share memory: more chunks than places for them, several threads."""
    write(conv_graph(64, 64, pairs=TAKEN[isa]), tmp_path / "net.apm")
    model = load(tmp_path / "net.apm", isa=isa, layout="NHWC")
    x = np.concatenate([image(1, 30, 17, 64, seed=i) for i in range(7)])
    for name in names(TAKEN[isa]):
        alone = np.concatenate([model(x[i : i + 1], bits=name) for i in range(len(x))])
        for threads in (1, 2, 4, 20):
            assert_same(model(x, bits=name, threads=threads), alone, f"{name}, {threads} threads")
