"""The engine against the oracle, bit for bit: random graphs, every operation at every width, every kernel."""

from collections.abc import Sequence

import numpy as np
import pytest
from engine_check import assert_exact, kernels_built, kernels_used, usable_isas
from graph_builder import assert_same
from random_graphs import BLOCKS, random_graph

from anyprec.bits import FLOAT, INTEGER_WIDTHS
from anyprec.format import INPUT, Graph, GraphProfile, Op, Weight, nested_planes, write
from anyprec.run.model import load

F32 = np.float32
ISAS = usable_isas()


def draw(seed, **options):
    return random_graph(seed, special=seed % 3 == 1, float_layers=seed % 3 == 2, **options)


# --- Graphs drawn at random -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100, 140))
def test_random_graphs(seed, tmp_path):
    graph, x = draw(seed)
    assert_exact(graph, [x], tmp_path / "net.apm", ISAS, threads=(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_many_random_graphs(seed, tmp_path):
    graph, x = draw(seed, blocks=1 + seed % 6)
    assert_exact(graph, [x], tmp_path / "net.apm", ISAS, threads=(1, 2, 3))


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_operation_at_every_width(kind, tmp_path):
    seed = list(BLOCKS).index(kind)
    graph, x = draw(seed, kinds=[kind], blocks=1, widths=(*INTEGER_WIDTHS, FLOAT), max_channels=33)
    assert_exact(graph, [x], tmp_path / "net.apm", ISAS)


@pytest.mark.parametrize("isa", ISAS)
def test_a_batch_is_its_images_one_by_one(isa, tmp_path):
    for seed in range(200, 206):
        graph, x = random_graph(seed, max_channels=40)
        write(graph, tmp_path / "net.apm")
        model = load(tmp_path / "net.apm", isa=isa, layout="NHWC")
        x = np.concatenate([x, -x, x[:1] / 2])
        whole = model(x, threads=2)
        parts = [model(x[i : i + 1]) for i in range(len(x))]
        for i, y in enumerate(whole if isinstance(whole, tuple) else (whole,)):
            assert_same(y, np.concatenate([p[i] if isinstance(p, tuple) else p for p in parts]), f"seed {seed}")


# --- Every kernel ---------------------------------------------------------------------------------------------------

PAIRS = [(w, a) for w in INTEGER_WIDTHS for a in INTEGER_WIDTHS]
ONE = {"stride": [1, 1], "dilation": [1, 1]}


def pair_graph(
    c: int, out: int, kernel: int = 1, ending: str = "sums", signed: bool = False, groups: int = 1,
    pairs: Sequence[tuple[int, int]] = PAIRS, seed: int = 0,
) -> Graph:  # fmt: skip
    """quantize -> conv, with a profile for every pair of weight and input bits.

    ending: "sums" (as they are), "codes" (its table makes codes), or "all" (table, add, clip, float and codes).
    Output channel 0 has the least weight everywhere, channel 1 the largest: sums as large as they come.
    """
    rng = np.random.default_rng(seed)
    widest = max(w for w, _ in pairs)
    shape = (out, kernel, kernel, c // groups)
    codes = rng.integers(0, 2**widest, shape, np.uint8)
    codes[0], codes[1:2] = 0, 2**widest - 1
    weights = {"w": Weight(shape, None, {k: codes >> (widest - k) for k in sorted({w for w, _ in pairs})})}
    levels = np.array([2.0**a - 1 for _, a in pairs])
    deviation = np.sqrt(np.prod(shape[1:])) * np.array([2.0**w for w, _ in pairs]) * levels * (0.6 if signed else 0.3)
    level_column, ones = levels[:, None], np.ones((len(pairs), out))

    def table(scale, shift):  # (P, 1 or C) each -> (P, 2, C)
        return np.stack(np.broadcast_arrays(scale, shift), 1).astype(F32)

    tables = {"q": table(level_column / 3 * np.ones(c), level_column / 2)}
    window = {"kernel": [kernel, kernel], "pad": [kernel // 2] * 4, **ONE}
    attributes = {"weight": "w", "groups": groups, "signed": signed, **window}
    quantizer = {"signed": signed, "rectify": False, "affine": True}
    ops = [Op("q", "quantize", (INPUT,), quantizer)]
    outputs = ["conv"]
    spread = (levels / 4 / deviation)[:, None] * np.where(rng.random(out) < 0.3, -1, 1)
    if ending == "sums":
        ops.append(Op("conv", "conv", ("q",), {**attributes, "affine": False}))
    elif ending == "codes":
        tables["conv"] = table(spread, level_column / 2)
        ops.append(Op("conv", "conv", ("q",), {**attributes, "affine": True}))
        ops.append(Op("again", "quantize", ("conv",), {"signed": False, "rectify": True, "affine": False}))
    else:
        weights["float"] = Weight((out, 1, 1, c), rng.standard_normal((out, 1, 1, c)).astype(F32))
        same = {"kernel": [1, 1], "pad": [0] * 4, **ONE, "groups": 1}
        tables |= {
            "conv": table(ones / deviation[:, None], rng.standard_normal(out)),
            "clip": np.tile(np.array([-1, 1.5], F32), (len(pairs), 1)),
            "again": table(spread * deviation[:, None], level_column / 2),
        }
        ops += [
            Op("skip", "conv", (INPUT,), {"weight": "float", "signed": False, "affine": False, **same}),
            Op("conv", "conv", ("q",), {**attributes, "affine": True}),
            Op("add", "add", ("conv", "skip")),
            Op("clip", "clip", ("add",)),
            Op("again", "quantize", ("clip",), {"signed": False, "rectify": True, "affine": True}),
        ]
        outputs = ["clip"]
    if ending != "sums":
        tables["back"] = np.stack([1 / levels, np.zeros(len(pairs))], 1).astype(F32)
        ops.append(Op("back", "dequantize", ("again",)))
        outputs = [*outputs, "back"] if ending == "all" else ["back"]
    profiles = tuple(GraphProfile(f"w{w}a{a}", w, a) for w, a in pairs)
    planes = nested_planes({w for w, _ in pairs})
    return Graph("pairs", (None, None, c), profiles, planes, weights, tuple(ops), tuple(outputs), tables)


def images(*sizes, c, seed=0):
    """Normal numbers, but the last pixel of each image is as large as codes get, the one before as small."""
    rng = np.random.default_rng(seed)
    made = [rng.standard_normal((n, h, w, c)).astype(F32) for n, h, w in sizes]
    for x in made:
        x[:, -1, -1], x[:, -1, -2:-1] = 9, -9
    return made


@pytest.mark.parametrize("isa", ISAS)
def test_every_kernel_is_chosen(isa, tmp_path):
    """Wide enough for all: 384 channels fill the groups and vectors of every kernel there is."""
    graph = pair_graph(384, 128, ending="all")
    x = images((1, 2, 3), c=384)
    models = assert_exact(graph, x, tmp_path / "net.apm", [isa])
    used = kernels_used(models[isa], x[0], [p.name for p in graph.profiles])
    assert used == kernels_built(isa)


# Channels in and out, kernel, ending, signed, groups: around full vectors and groups of channels, and far from them.
SHAPES = [
    (12, 64, 1, "all", False, 1),
    (12, 128, 1, "codes", False, 1),
    (24, 129, 1, "sums", True, 1),
    (13, 63, 3, "all", True, 1),
    (6, 200, 3, "codes", False, 1),
    (65, 33, 1, "all", False, 1),
    (7, 17, 3, "sums", False, 1),
    (1, 1, 3, "codes", True, 1),
    (3, 5, 5, "all", False, 1),
    (36, 48, 3, "all", False, 3),
    (130, 66, 1, "codes", True, 2),
    (8, 8, 3, "codes", False, 8),
    (19, 19, 3, "all", True, 19),
]


@pytest.mark.parametrize("c, out, kernel, ending, signed, groups", SHAPES)
def test_every_pair_of_bits(c, out, kernel, ending, signed, groups, tmp_path):
    graph = pair_graph(c, out, kernel, ending, signed, groups, seed=c)
    assert_exact(graph, images((2, 3, 5), c=c), tmp_path / "net.apm", ISAS, threads=(1, 2))


# One profile per kernel is enough here: a tile of every height, in blocks of one, two and four vectors.
HEIGHTS = [(1, 1), (2, 2), (4, 4), (5, 5), (6, 6), (7, 7), (8, 7), (8, 8)]


@pytest.mark.parametrize("out", [8, 16, 30, 64, 96, 128])
def test_tiles_of_every_height(out, tmp_path):
    graph = pair_graph(48, out, ending="codes", pairs=HEIGHTS, seed=out)
    sizes = [(1, 1, pixels) for pixels in range(1, 10)]
    assert_exact(graph, images(*sizes, c=48), tmp_path / "net.apm", ISAS)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    "w, a, longest",
    [
        (1, 1, 65532),  # look-ups add up in 16 bits: 65532 products of at most 1 in groups of 4 or 6
        (2, 2, 7280),  # 7280 / 4 groups of at most 4 x 9 (AVX2), 7281 / 3 of at most 3 x 9 (AVX-512)
        (2, 2, 7281),
        (7, 7, 133144),  # 2^31 / 127^2: the longest a file may have
        (8, 7, 66311),  # 2^31 / (255 x 127)
        (8, 8, 33025),  # 2^31 / 255^2
    ],
)
def test_the_longest_sums(w, a, longest, signed, tmp_path):
    for c in (longest, longest + 1) if w < 7 else (longest,):
        graph = pair_graph(c, 32 if w < 7 else 3, signed=signed, pairs=[(w, a)], seed=w)
        x = np.full((1, 1, 2, c), 9, F32)  # codes as large as they come
        x[:, :, 1, ::7] = -9
        assert_exact(graph, [x], tmp_path / "net.apm", ISAS)
