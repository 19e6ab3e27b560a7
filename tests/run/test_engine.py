"""The engine against the oracle, bit for bit: random graphs, every operation at every width, every kernel."""


import numpy as np
import pytest
from engine_check import assert_exact, kernels_built, kernels_used, usable_isas
from graph_builder import assert_same
from kernel_graphs import KERNEL_PAIRS, SHAPES, images, pair_graph
from random_graphs import BLOCKS, random_graph

from anyprec.bits import FLOAT, INTEGER_WIDTHS
from anyprec.format import write
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


@pytest.mark.parametrize("isa", ISAS)
def test_every_kernel_is_chosen(isa, tmp_path):
    """Wide enough for all: 384 channels fill the groups and vectors of every kernel there is."""
    graph = pair_graph(384, 128, ending="all")
    x = images((1, 2, 3), c=384)
    models = assert_exact(graph, x, tmp_path / "net.apm", [isa])
    used = kernels_used(models[isa], x[0], [p.name for p in graph.profiles])
    assert used == kernels_built(isa)


@pytest.mark.parametrize("c, out, kernel, ending, signed, groups", SHAPES)
def test_every_pair_of_bits(c, out, kernel, ending, signed, groups, tmp_path):
    graph = pair_graph(c, out, kernel, ending, signed, groups, seed=c)
    assert_exact(graph, images((2, 3, 5), c=c), tmp_path / "net.apm", ISAS, threads=(1, 2))


@pytest.mark.parametrize("out", [8, 16, 30, 64, 96, 128])
def test_tiles_of_every_height(out, tmp_path):
    """In blocks of one, two and four vectors."""
    graph = pair_graph(48, out, ending="codes", pairs=KERNEL_PAIRS, seed=out)
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
