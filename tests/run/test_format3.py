"""Operations of format 3: the engine against the oracle, bit for bit, on every instruction set."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from chain_builder import Chain, random_chain
from engine_check import assert_exact, usable_isas
from sampling import sampled

from anyprec.errors import InputError
from anyprec.format import Graph, write
from anyprec.format.schema import FUNCTIONS, SCHEMAS
from anyprec.run.model import load

F32 = np.float32
SPECIAL = (
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    1e-40,
    -1e-42,
    1e-38,
    3e38,
    -3e38,
    88.7,
    89.5,
    -87.4,
    -103.9,
    -104.5,
    0.625,
    20.0,
    1.0,
)
LENGTHS = (1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 100)


def check(chain: Chain, tmp_path, *outputs: str, threads=(1, 2), profiles=("8",)) -> None:
    graph, inputs = chain.finish(*outputs)
    with np.errstate(all="ignore"):
        assert_exact(graph, [inputs], tmp_path / "net.apm", usable_isas(), threads, profiles)


def spread(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of all sizes, special ones among them."""
    x = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 2, shape)).astype(F32)
    flat = x.reshape(-1)
    places = rng.integers(0, flat.size, len(SPECIAL))
    flat[places] = np.array(SPECIAL, F32)
    return x


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function, tmp_path):
    for batch, size in ((1, 20011), (3, 37)):
        chain = Chain(1, (size,), batch)
        chain.arrays["input"][...] = spread(chain.rng, (batch, size))
        check(chain, tmp_path, chain.op("pointwise", "input", function=function))


@pytest.mark.parametrize("function", ["add", "sub", "mul", "div", "max", "min"])
@pytest.mark.parametrize(
    "a, b",
    [
        ((5, 7), (5, 7)), ((5, 7), (1, 7)), ((5, 1), (5, 7)), ((1, 1), (5, 7)), ((4, 1, 3), (1, 6, 1)), ((19,), (1,)),
        ((2, 3, 1, 5, 1, 4), (2, 1, 3, 5, 2, 4)), ((1, 33), (40, 1)), ((1,), (1,)),
    ],
)  # fmt: skip
def test_binary(function, a, b, tmp_path):
    chain = Chain(2, a, 3, {"other": b})
    for name, shape in (("input", a), ("other", b)):
        chain.arrays[name][...] = spread(chain.rng, (3, *shape))
    constant = chain.constant(*b)
    outputs = [chain.op("binary", x, y, function=function)
               for x, y in (("input", "other"), ("other", "input"), (constant, "input"))]  # fmt: skip
    check(chain, tmp_path, *outputs)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(n,) for n in LENGTHS] + [(3, 17), (5, 1), (4, 3, 20), (2, 3, 4, 5), (70, 3, 70)])
def test_reductions(shape, tmp_path):
    for batch in (1, 3):
        chain = Chain(3, shape, batch)
        if batch == 3:
            chain.arrays["input"][...] = np.round(chain.arrays["input"])  # zeros of both signs, equal numbers
        rank = len(shape)
        all_axes = [tuple(i for i in range(rank) if mask >> i & 1) for mask in range(1, 2**rank)]
        outputs = []
        for axes in all_axes:
            outputs += [chain.op("reduce", "input", function=f, axes=axes) for f in ("sum", "mean", "max", "min")]
            outputs += [chain.op("norm", "input", axes=axes, eps=eps) for eps in (0.001, 0.3)]
        outputs.append(chain.op("softmax", "input", single=True))
        check(chain, tmp_path, *outputs)


def test_largest_with_special_numbers(tmp_path):
    rows = [
        [np.nan, 1, 2], [1, np.nan, 2], [-0.0, 0.0, -1], [0.0, -0.0, 0], [-np.inf, -np.inf, -np.inf],
        [3, np.inf, np.nan], [-1, -0.0, 0.0],
    ]  # fmt: skip
    for width in (3, 16, 40):
        x = np.array([row + [row[-1]] * (width - 3) for row in rows], F32)[None]
        chain = Chain(4, x.shape[1:], 1)
        chain.arrays["input"][...] = x
        outputs = [chain.op("reduce", "input", function=f, axes=axes) for f in ("max", "min") for axes in ((1,), (0,))]
        check(chain, tmp_path, *outputs, chain.op("softmax", "input", single=True))


@pytest.mark.parametrize("shape", [(9, 17), (8, 8), (1, 7), (3, 20, 11), (33, 1, 40), (5, 16, 2, 24)])
def test_transposes(shape, tmp_path):
    """Floats and codes, every order of the axes: whole blocks of 8 x 8 and their rests."""
    chain = Chain(7, shape, 2)
    codes, unit = chain.quantize("input"), np.tile([1.0, 0.0], (len(chain.widths), 1))
    outputs = []
    for order in itertools.permutations(range(len(shape))):
        outputs.append(chain.op("transpose", "input", order=order))
        outputs.append(chain.op("dequantize", chain.op("transpose", codes, order=order), table=unit))
    check(chain, tmp_path, *outputs)


def test_steps_tell_scalar_loops(tmp_path):
    chain = Chain(8, (6, 10, 12), 1)
    names = {
        "moved": chain.op("transpose", "input", order=(2, 0, 1)),
        "rows": chain.op("transpose", "input", order=(1, 0, 2)),
        "picked": chain.op("gather", "input", axis=2, index=(3, 1)),
        "lines": chain.op("gather", "input", axis=1, index=(3, 1)),
        "double": chain.op("softmax", "input"),
        "single": chain.op("softmax", "input", single=True),
    }
    graph, inputs = chain.finish(*names.values())
    write(graph, tmp_path / "net.apm")
    for isa in usable_isas():
        steps = {
            s.op: s.scalar for s in load(tmp_path / "net.apm", layout="NHWC", isa=isa).steps(inputs["input"], repeat=1)
        }
        found = {title for title, name in names.items() if steps[name]}
        assert found == (set(names) if isa == "scalar" else {"picked", "double"})


@pytest.mark.thorough
@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (1, 40, 70), (5, 3, 16), (6, 7, 15), (12, 9, 65), (13, 64, 64),
                                     (50, 33, 130), (100, 130, 17)])  # fmt: skip
@pytest.mark.parametrize("transposed", [False, True])
def test_matmul(m, k, n, transposed, tmp_path):
    for batch, left, right in ((1, (), ()), (3, (2, 1), (1, 3)), (2, (1, 2), (2, 2))):
        b = (*right, *((n, k) if transposed else (k, n)))
        chain = Chain(5, (*left, m, k), batch, {"other": b})
        outputs = [chain.op("matmul", "input", other, transposed=transposed) for other in ("other", chain.constant(*b))]
        check(chain, tmp_path, *outputs)


@pytest.mark.thorough
@pytest.mark.parametrize("m, k, n", sampled([(1, 1, 1), (1, 40, 70), (5, 3, 16), (6, 7, 15), (13, 64, 64), (12, 9, 65),
                                             (50, 33, 130), (100, 130, 17)]))  # fmt: skip
@pytest.mark.parametrize("signs", [(True, True), (False, True), (True, False), (False, False)])
def test_matmul_of_codes(m, k, n, signs, tmp_path):
    """At every width, odd sizes, repeated matrices; all signs of the two sides."""
    for batch, left, right in ((1, (), ()), (3, (2, 1), (1, 3)), (2, (1, 2), (2, 2))):
        for transposed in (False, True):
            b = (*right, *((n, k) if transposed else (k, n)))
            chain = Chain(5, (*left, m, k), batch, {"other": b})
            sides = []
            for name, signed in zip(("input", "other"), signs, strict=True):
                table = chain.fit([run.values[name] for run in chain.runs], True)
                sides.append(chain.op("quantize", name, signed=signed, rectify=not signed, affine=True, table=table))
            check(chain, tmp_path, chain.codes_product(*sides, transposed), profiles=[p.name for p in chain.profiles])


@pytest.mark.parametrize("signs", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("fixed", [0, 1])
def test_matmul_of_codes_of_other_widths(fixed, signs, tmp_path):
    """One side has 8 bits in every profile: kernels for 8-bit weights, whose accumulators need the sums of rows."""
    for m, k, n in ((5, 9, 17), (13, 64, 40), (30, 7, 3)):
        for transposed in (False, True):
            chain = Chain(6, (2, m, k), 2, {"other": (2, *((n, k) if transposed else (k, n)))})
            sides = []
            for i, name in enumerate(("input", "other")):
                top = [1 if bits == 32 else 255 if i == fixed else 2**bits - 1 for bits in chain.widths]
                size = chain.shape(name)[-1]
                table = np.stack([np.stack([np.full(size, 0.3 * n), np.full(size, 0.5 * n)]) for n in top])
                more = {"bits": 8} if i == fixed else {}
                sides.append(
                    chain.op("quantize", name, signed=signs[i], rectify=False, affine=True, table=table, **more)
                )
            check(chain, tmp_path, chain.codes_product(*sides, transposed), profiles=[p.name for p in chain.profiles])


@pytest.mark.parametrize("signed", [False, True])
def test_largest_sums_of_codes(signed, tmp_path):
    """16,383 products of the largest codes fit; one more is refused when it runs, as its length was free."""
    chain = Chain(8, (3, 16383), 1)
    chain.arrays["input"][...] = np.where(np.arange(3)[:, None] == 1, -1.0, 1.0)
    table = np.zeros((5, 2, 16383), F32)
    for row, bits in enumerate(chain.widths):
        top = 1 if bits == 32 else 2**bits - 1
        table[row] = [[top], [0]] if not signed else [[top / 2], [top / 2]]
    codes = chain.op("quantize", "input", signed=signed, rectify=False, affine=True, table=table)
    check(chain, tmp_path, chain.codes_product(codes, codes, True), profiles=[p.name for p in chain.profiles])


def test_sums_of_codes_that_do_not_fit_are_an_input_error(tmp_path):
    chain = Chain(9, (2, 16), 1)
    graph = codes_graph(chain)
    write(graph, tmp_path / "net.apm")
    model = load(tmp_path / "net.apm")
    assert model(np.ones((1, 16383, 16), F32), bits="8").shape == (1, 16, 16)
    with pytest.raises(InputError, match="32-bit integers"):
        model(np.ones((1, 16384, 16), F32), bits="8")
    assert model(np.ones((1, 16384, 16), F32), bits="4").shape == (1, 16, 16)


def codes_graph(chain: Chain) -> Graph:
    """(L, 16) in, its codes' products along L out: (16, 16)."""
    table = np.ones((5, 2, 16), F32)
    codes = chain.op("quantize", "input", signed=True, rectify=False, affine=True, table=table)
    turned = chain.op("transpose", codes, order=(1, 0))
    product = chain.codes_product(turned, codes, False)
    return replace(chain.graph, ops=tuple(chain.ops), outputs=(product,), input_shape=(None, 16))


@pytest.mark.thorough
@pytest.mark.parametrize("function, gates", [("lstm", 4), ("gru", 3)])
@pytest.mark.parametrize("hidden, length", [(1, 1), (3, 5), (16, 4), (37, 9)])
def test_recurrent(function, gates, hidden, length, tmp_path):
    for batch, leading in ((1, ()), (3, ()), (1, (3,)), (2, (2, 3))):
        chain = Chain(6, (*leading, length, gates * hidden), batch)
        outputs = []
        for reverse in (False, True):
            weight = chain.float_weight(gates * hidden, 1, 1, hidden + 1, scale=0.4)
            outputs.append(chain.op("recurrent", "input", function=function, weight=weight, reverse=reverse))
        check(chain, tmp_path, *outputs)


@pytest.mark.parametrize("seed", range(24))
def test_transposed_convolutions(seed, tmp_path):
    """Integer at every width, and float; groups, depthwise, odd sizes."""
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 8)), int(rng.integers(1, 8)), int(rng.choice([1, 2, 3, 6, 16, 33])))
    chain = Chain(seed, shape, int(rng.integers(1, 4)))
    codes = chain.transposed_conv(chain.quantize("input"))
    again = chain.transposed_conv(chain.quantize(codes)) if math.prod(chain.shape(codes)) < 3000 else codes
    check(chain, tmp_path, *{codes: 0, again: 0, chain.transposed_conv("input"): 0},
          profiles=[p.name for p in chain.profiles])  # fmt: skip


def test_codes_pass_through_moves(tmp_path):
    chain = Chain(7, (6, 5, 8), 3)
    codes = chain.quantize("input")
    moved = chain.op("transpose", codes, order=(2, 0, 1))
    flat = chain.op("reshape", moved, shape=(None, 15))
    part = chain.op("slice", flat, axis=1, start=-13, stop=None, step=2)
    chosen = chain.op("gather", part, axis=0, index=(3, 3, 0, 7, 15))
    image = chain.op("reshape", chosen, shape=(5, 7, 1))
    outputs = [chain.linear(flat), chain.linear(chosen), chain.transposed_conv(image), chain.linear(moved)]
    outputs.append(chain.op("dequantize", chosen, table=chain.rng.uniform(0.1, 1, (len(chain.widths), 2))))
    check(chain, tmp_path, *outputs, profiles=[p.name for p in chain.profiles])


def test_convolutions_of_reshaped_values(tmp_path):
    """Padding reads the pixel of zeros in front of a value, whose size a reshape changes both ways."""
    chain = Chain(8, (24, 6), 3)
    window = {"kernel": (3, 3), "stride": (1, 1), "pad": (1, 1, 1, 1), "dilation": (1, 1), "groups": 1}
    outputs = []
    for value in ("input", chain.quantize("input")):
        for c in (2, 9, 36, 144):
            image = chain.op("reshape", value, shape=(2, 144 // c // 2 or None, None if 144 // c // 2 else 72))
            outputs.append(chain.layer("conv", image, (4, 3, 3, chain.shape(image)[2]), **window))
    check(chain, tmp_path, *outputs, profiles=[p.name for p in chain.profiles])


def test_an_addition_after_a_reshape_keeps_what_others_read(tmp_path):
    """A convolution may write over its residual only where no view of it is read later."""
    chain = Chain(9, (4, 6), 1)
    wide = chain.op("pointwise", "input", function="tanh")
    narrow = chain.op("reshape", wide, shape=(8, 3))
    summed = chain.op("add", chain.linear(wide, 6), wide)
    late = chain.op("binary", narrow, chain.op("reshape", summed, shape=(8, 3)), function="sub")
    check(chain, tmp_path, late, chain.op("reshape", narrow, shape=(24,)))


def embedding(integer: bool = True) -> Graph:
    chain = Chain(10, (5,), 1)
    weight = chain.float_weight(11, 1, 1, 3)
    chain.arrays["input"][...] = np.arange(5)
    made = chain.op("embedding", "input", weight=weight)
    return replace(chain.finish(made)[0], integer_input=integer, input_shape=(None,))


def test_embedding(tmp_path):
    graph = embedding()
    ids = [np.random.default_rng(0).integers(0, 11, shape) for shape in ((1, 1), (3, 5), (2, 300))]
    models = assert_exact(graph, ids, tmp_path / "net.apm", usable_isas(), (1, 2), ["8"])
    for model in models.values():
        want = model(ids[1])
        for dtype in (np.int8, np.uint8, np.int32, np.float64):
            np.testing.assert_array_equal(model(ids[1].astype(dtype)), want)
        for wrong in (11, -1):
            with pytest.raises(InputError, match="none of its rows"):
                model(np.array([[0, wrong]]))
        with pytest.raises(InputError, match="not whole"):
            model(np.array([[0.5]]))
        with pytest.raises(InputError, match="beyond"):
            model(np.array([[2**24 + 1]]))
        assert model(np.zeros((0, 4), int)).shape == (0, 4, 3)


def test_embedding_of_floats_that_are_no_rows(tmp_path):
    write(embedding(integer=False).__class__(**{**embedding().__dict__, "integer_input": False, "input_shape": (2,)}),
          tmp_path / "net.apm")  # fmt: skip
    model = load(tmp_path / "net.apm")
    assert model(np.array([[0, 10]], F32)).shape == (1, 2, 3)
    for wrong in (0.5, 11, -1, 1e30, -0.5):
        with pytest.raises(InputError, match="none of its rows"):
            model(np.array([[0, wrong]], F32))


def test_several_inputs(tmp_path):
    chain = Chain(11, (4, 6), 2, {"scale": (4, 1), "image": (3, 5, 2)})
    outputs = (
        chain.op("binary", "input", "scale", function="mul"),
        chain.op("reduce", "image", function="max", axes=(2,)),
    )
    graph, inputs = chain.finish(*outputs)
    write(graph, tmp_path / "net.apm")
    model = load(tmp_path / "net.apm", layout="NHWC")
    assert list(model.inputs) == ["input", "scale", "image"] and model.inputs["image"][2] == 2
    x, scale, image = inputs.values()
    want = model(x, scale, image)
    for got in (model(x, image=image, scale=scale), model(**inputs), model(x, scale, image, 8),
                model(x, scale, image.transpose(0, 3, 1, 2), layout="NCHW")):  # fmt: skip
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1].reshape(-1), want[1].reshape(-1))
    for call, message in (
        (lambda: model(x), "'scale' is missing; the model takes 3 inputs"),
        (lambda: model(x, scale, image, x, 8), "4 inputs are given"),
        (lambda: model(x, scale, image, image=image), "given twice"),
        (lambda: model(x, scale, images=image), "no input 'images'"),
        (lambda: model(x, scale[:1], image), "N = 1"),
        (lambda: model(x[:, 0], scale, image), "takes \\(N, "),
        (lambda: model(x, scale.astype(int), image), "int64; give float32"),
        (lambda: model(x, scale, image[..., :1]), "channels"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_sizes_that_do_not_fit_are_errors_of_the_input(tmp_path):
    chain = Chain(12, (6, 4), 1)
    cut = chain.op("slice", "input", axis=0, start=5, stop=None, step=1)
    paired = chain.op("reshape", "input", shape=(None, 8))
    graph, _ = chain.finish(cut, paired)
    write(replace(graph, input_shape=(None, 4)), tmp_path / "net.apm")
    model = load(tmp_path / "net.apm")
    assert [y.shape for y in model(np.zeros((2, 8, 4), F32))] == [(2, 3, 4), (2, 4, 8)]
    with pytest.raises(InputError, match="nothing of an axis of size 4"):
        model(np.zeros((1, 4, 4), F32))
    with pytest.raises(InputError, match="come out even"):
        model(np.zeros((1, 7, 4), F32))


@pytest.mark.parametrize("seed", range(60))
def test_random_chains(seed, tmp_path):
    with np.errstate(all="ignore"):
        graph, inputs = random_chain(seed)
        profiles = ["8", "32", str((1, 2, 4)[seed % 3])]
        assert_exact(graph, [inputs], tmp_path / "net.apm", usable_isas(), (1, 2), profiles)


@pytest.mark.thorough
def test_chains_cover_every_operation():
    kinds: Counter[str] = Counter()
    with np.errstate(all="ignore"):
        for seed in range(60):
            graph, _ = random_chain(seed)
            kinds.update(op.kind for op in graph.ops)
            kinds.update("transposed" for op in graph.ops if "output_pad" in op.attributes)
    new = {kind for kind, schema in SCHEMAS.items() if schema.format == 3} - {"embedding"}
    assert new | {"transposed", "linear", "add", "concat"} <= set(kinds)
