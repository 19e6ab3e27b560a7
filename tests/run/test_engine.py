"""The engine against the oracle, bit for bit: random graphs, every operation at every width, every kernel."""

from dataclasses import replace

import numpy as np
import pytest
from engine_check import TIMED, assert_exact, kernels_built, kernels_used, usable_isas
from graph_builder import assert_same
from kernel_graphs import KERNEL_PAIRS, SHAPES, TOOM_COOK, float_graph, images, pair_graph
from random_graphs import BLOCKS, random_graph
from sampling import sampled

from anyprec.errors import BadGraph, InputError
from anyprec.format import INPUT, Graph, GraphProfile, Op, Weight, write
from anyprec.run.model import load
from anyprec.widths import FLOAT, INTEGER_WIDTHS

F32 = np.float32
ISAS = usable_isas()


def draw(seed, **options):
    return random_graph(seed, special=seed % 3 == 1, float_layers=seed % 3 == 2, **options)


# --- Graphs drawn at random -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", sampled(range(100, 140), 3))
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


def test_padding_that_makes_an_output_too_large_is_refused(tmp_path):
    """Its table of taps would take 2.3 GB: refused before anything is allocated, whatever the size of the input."""
    weight = Weight((1, 1, 1, 1), np.ones((1, 1, 1, 1), F32))
    window = dict(kernel=[1, 1], stride=[1, 1], pad=[12000] * 4, dilation=[1, 1])
    attributes = dict(weight="conv", **window, groups=1, signed=False, affine=False)
    ops = (Op("conv", "conv", (INPUT,), attributes), Op("pool", "adaptive_avg_pool", ("conv",), {"size": [1, 1]}))
    graph = Graph("padded", (None, None, 1), (GraphProfile("32", 32, 32),), {}, {"conv": weight}, ops, ("pool",), {})
    write(graph, tmp_path / "net.apm")
    model = load(tmp_path / "net.apm")
    with pytest.raises(InputError, match=r"'conv' reads 1 taps for each of 576048001 output pixels; .* below 2\^29"):
        model(np.ones((1, 1, 1, 1), F32))
    with pytest.raises(BadGraph, match=r"'conv' \(conv\) reads 1 taps for each of 576,048,001 output pixels"):
        write(replace(graph, input_shape=(1, 1, 1)), tmp_path / "fixed.apm")


def test_a_batch_larger_than_runs_at_once(tmp_path):
    """At 8 bit an image takes 0.6 MB of working memory, and 4 MB are used: groups of 6 and 5."""
    graph = pair_graph(32, 48, 3, "all", pairs=[(2, 2), (8, 8)])
    x = np.random.default_rng(5).standard_normal((11, 45, 31, 32)).astype(F32)
    write(graph, tmp_path / "net.apm")
    model = load(tmp_path / "net.apm", layout="NHWC")
    for bits in ("w2a2", "w8a8"):
        for threads in (1, 2):
            whole = model(x, bits, threads=threads)
            for i in range(11):
                for y, alone in zip(whole, model(x[i : i + 1], bits), strict=True):
                    assert_same(y[i : i + 1], alone, f"image {i}")
    assert model.memory["arenas"] < 2 * (4 << 20)


# --- Every kernel ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("isa", ISAS)
def test_every_kernel_is_chosen(isa, tmp_path):
    """Wide enough for all: 96 and 128 channels fill the groups and vectors of every kernel there is."""
    used = set()
    # 3x3 may go Winograd's way, and where a pixel has few products lookups do not pay for their offsets.
    for kernel, ending, size in ((1, "all", (1, 2, 3)), (3, "codes", (1, 8, 9)), (5, "codes", (1, 4, 5))):
        graph = pair_graph(96, 128, kernel, ending)
        x = images(size, c=96)
        models = assert_exact(graph, x, tmp_path / "net.apm", [isa])
        used |= kernels_used(models[isa], x[0], [p.name for p in graph.profiles])
    toom_cook, x = float_graph(TOOM_COOK["7x7"], 3, 64), images((1, 9, 9), c=3)
    used |= kernels_used(assert_exact(toom_cook, x, tmp_path / "net.apm", [isa])[isa], x[0], ["32"])
    assert used <= kernels_built(isa)
    assert kernels_built(isa) - used <= TIMED.get(isa, set())


@pytest.mark.parametrize("c, out, kernel, ending, signed, groups", sampled(SHAPES))
def test_every_pair_of_bits(c, out, kernel, ending, signed, groups, tmp_path):
    graph = pair_graph(c, out, kernel, ending, signed, groups, seed=c)
    assert_exact(graph, images((2, 3, 5), c=c), tmp_path / "net.apm", ISAS, threads=(1, 2))


@pytest.mark.parametrize("channels", [16, 31, 32, 48, 64, 100, 130])
def test_depth_wise_rows_of_every_length(channels, tmp_path):
    """In blocks of four and two vectors and what is left; rows of up to 32 pixels, sums of up to 8 at a time."""
    graph = pair_graph(channels, channels, 3, "codes", channels == 48, channels, KERNEL_PAIRS, seed=channels)
    sizes = [(1, 1, 7), (1, 1, 8), (2, 1, 9), (1, 1, 31), (1, 1, 33), (1, 6, 11), (1, 9, 29)]
    assert_exact(graph, images(*sizes, c=channels), tmp_path / "net.apm", ISAS, threads=(1, 3))


@pytest.mark.parametrize("channels", [16, 20])
def test_lines_of_eight_outputs_share_their_pixels(channels, tmp_path):
    """One vector of outputs, 3x3: tiles in one line, across the end of a line, at the first line of the image."""
    graph = pair_graph(channels, 16, 3, "codes", pairs=KERNEL_PAIRS, seed=channels)
    assert_exact(graph, images((1, 1, 8), (2, 3, 16), (1, 5, 9), (1, 4, 24), c=channels), tmp_path / "net.apm", ISAS)


def test_a_convolution_that_reads_nothing_but_padding(tmp_path):
    graph = pair_graph(12, 64, ending="codes", pairs=KERNEL_PAIRS)
    ops = [replace(op, attributes={**op.attributes, "stride": [2, 2], "pad": [1] * 4}) if op.kind == "conv" else op
           for op in graph.ops]  # fmt: skip
    assert_exact(replace(graph, ops=tuple(ops)), images((2, 1, 1), c=12), tmp_path / "net.apm", ISAS, threads=(1, 2))


@pytest.mark.parametrize("out", [8, 16, 30, 64, 96, 128])
def test_tiles_of_every_height(out, tmp_path):
    """In blocks of one, two and four vectors."""
    graph = pair_graph(48, out, ending="codes", pairs=KERNEL_PAIRS, seed=out)
    sizes = [(1, 1, pixels) for pixels in range(1, 10)]
    assert_exact(graph, images(*sizes, c=48), tmp_path / "net.apm", ISAS)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    "w, a, lengths",
    [
        # Look-ups add up in 16 bits: 65,535 products of at most 1, or 7,281 of at most 9. To there and beyond.
        (1, 1, (65532, 65533, 65535, 65536, 65540)),
        (2, 2, (7280, 7281, 7282, 7300)),
        # Others in 32: as long as a file may have it, 2^31 / 127^2, 2^31 / (255 x 127), 2^31 / 255^2
        (7, 7, (133144,)),
        (8, 7, (66311,)),
        (8, 8, (33025,)),
    ],
)
def test_the_longest_sums(w, a, lengths, signed, tmp_path):
    for c in lengths:
        graph = pair_graph(c, 64 if w < 7 else 3, signed=signed, pairs=[(w, a)], seed=w)
        x = np.full((1, 1, 2, c), 9, F32)  # codes as large as they come
        x[:, :, 1, ::7] = -9
        assert_exact(graph, [x], tmp_path / "net.apm", ISAS)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("ones", [0.02, 0.3, 0.5, 0.7, 0.98])
def test_sums_that_fill_a_byte(bits, ones, tmp_path):
    """Look-ups add up in bytes for as many steps as the weights allow: the fewer ones, the more. Codes are all largest,
    so that one step more would be too much."""
    for c, out, kernel in ((520, 96, 1), (68, 40, 3)):
        graph = pair_graph(c, out, kernel, pairs=[(bits, bits)])
        rng = np.random.default_rng(out)
        planes = rng.random((bits, *graph.weights["w"].shape)) < ones
        codes = sum(plane.astype(np.uint8) << i for i, plane in enumerate(planes))
        graph = replace(graph, weights={"w": Weight(codes.shape, None, {bits: codes})})
        assert_exact(graph, [np.full((1, 4, 5, c), 9, F32)], tmp_path / "net.apm", ISAS)


# --- What a convolution absorbs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 9])
def test_a_convolution_that_is_added_to_what_it_reads(groups, tmp_path):
    """The sum may be written over its other part, but not where neighbors still read that."""
    rng = np.random.default_rng(groups)
    window = {"kernel": [3, 3], "stride": [1, 1], "pad": [1] * 4, "dilation": [1, 1], "groups": groups}
    ops = (
        Op("x", "affine", (INPUT,)),
        Op("conv", "conv", ("x",), {"weight": "w", "signed": False, "affine": False, **window}),
        Op("add", "add", ("conv", "x")),
        Op("q", "quantize", ("add",), {"signed": False, "rectify": True, "affine": False}),
        Op("fc", "conv", ("q",), {"weight": "c", "signed": False, "affine": False, **window}),
        Op("sum", "add", ("add", "fc")),
    )
    codes = rng.integers(0, 256, (9, 3, 3, 9 // groups), np.uint8)
    floats = rng.standard_normal(codes.shape).astype(F32)
    weights = {"w": Weight(codes.shape, floats), "c": Weight(codes.shape, floats, {8: codes})}
    tables = {"x": rng.standard_normal((2, 2, 9)).astype(F32)}
    profiles = (GraphProfile("8", 8, 8), GraphProfile("32", 32, 32))
    graph = Graph("sums", (None, None, 9), profiles, {8: tuple(range(8))}, weights, ops, ("sum",), tables)
    x = rng.standard_normal((2, 7, 6, 9)).astype(F32)
    assert_exact(graph, [x], tmp_path / "net.apm", ISAS, threads=(1, 2))
