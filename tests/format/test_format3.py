"""Format 3: every operation is written, read and refused as FORMAT.md says, by both readers."""

from dataclasses import replace

import numpy as np
import pytest

from anyprec import format as apm
from anyprec.errors import BadGraph
from anyprec.format import Graph, GraphProfile, Op, Weight, nested_planes
from anyprec.format.check import check_graph
from anyprec.format.record import to_record
from anyprec.format.schema import SCHEMAS
from anyprec.run.oracle import run_graph

RNG = np.random.default_rng(3)
PROFILES = (GraphProfile("2", 2, 2), GraphProfile("8", 8, 8))


def floats(*shape: int) -> Weight:
    return Weight(shape, RNG.standard_normal(shape).astype(np.float32))


def codes(*shape: int) -> Weight:
    widest = RNG.integers(0, 256, shape, np.uint8)
    return Weight(shape, None, {k: widest >> (8 - k) for k in (2, 8)})


def op(name: str, kind: str, *inputs: str, **attributes) -> Op:
    return Op(name, kind, inputs, attributes)


def tokens() -> Graph:
    """Indices (L) and a mask (L, 8) in; every operation of format 3 but the transposed convolution once."""
    ops = (
        op("mask", "input", shape=(None, 8), integer=False),
        op("embed", "embedding", "input", weight="rows"),
        op("bias", "constant", weight="bias", shape=(1, 8)),
        op("sum", "binary", "embed", "bias", function="add"),
        op("masked", "binary", "sum", "mask", function="mul"),
        op("norm", "norm", "masked", axes=(1,), eps=1e-5),
        op("act", "quantize", "norm", signed=True, rectify=False, affine=True),
        op("part", "slice", "act", axis=1, start=0, stop=-2, step=1),
        op("chosen", "gather", "part", axis=1, index=(5, 0, 3)),
        op("linear", "linear", "chosen", weight="w", signed=True, affine=True),
        op("gelu", "pointwise", "linear", function="gelu"),
        op("heads", "reshape", "gelu", shape=(None, 2, 6)),
        op("turned", "transpose", "heads", order=(1, 0, 2)),
        op("scores", "matmul", "turned", "turned", transposed=True),
        op("weights", "softmax", "scores", single=True),
        op("mixed", "matmul", "weights", "turned", transposed=False),
        op("back", "transpose", "mixed", order=(1, 0, 2)),
        op("joined", "reshape", "back", shape=(None, 12)),
        op("states", "recurrent", "joined", function="gru", weight="gates", reverse=False),
        op("both", "concat", "states", "states", axis=1),
        op("mean", "reduce", "both", function="mean", axes=(0,)),
    )
    tables = {name: RNG.standard_normal((2, 2, n)).astype(np.float32) for name, n in (("act", 8), ("linear", 12))}
    weights = {
        "rows": floats(10, 1, 1, 8),
        "bias": floats(1, 1, 1, 8),
        "w": codes(12, 1, 1, 3),
        "gates": floats(12, 1, 1, 5),
    }
    return Graph(
        "tokens", (None,), PROFILES, nested_planes([2, 8]), weights, ops, ("mean",), tables, integer_input=True,
        made_by="anyprec 0.4.0",
    )  # fmt: skip


def image() -> Graph:
    ops = (
        op("act", "quantize", "input", signed=False, rectify=True, affine=False),
        op("up", "conv", "act", weight="w", kernel=(3, 2), stride=(2, 2), pad=(1, 0, 1, 0), dilation=(1, 1), groups=1,
           signed=False, affine=False, transposed=True, output_pad=(1, 0)),
    )  # fmt: skip
    return Graph("image", (4, 5, 3), PROFILES, nested_planes([2, 8]), {"w": codes(2, 3, 2, 3)}, ops, ("up",), {})


def attention() -> Graph:
    """Queries and keys of a sequence as codes, both products in integers."""
    ops = (
        op("q", "quantize", "input", signed=True, rectify=False, affine=True),
        op("k", "quantize", "input", signed=True, rectify=False, affine=False),
        op("scores", "matmul", "q", "k", transposed=True),
        op("weights", "softmax", "scores", single=True),
        op("p", "quantize", "weights", signed=False, rectify=False, affine=False),
        op("v", "quantize", "input", signed=False, rectify=True, affine=False),
        op("mixed", "matmul", "p", "v", transposed=False),
        op("plain", "matmul", "mixed", "input", transposed=True),
    )
    tables = {"q": (2, 2, 8), "scores": (2, 2), "mixed": (2, 2)}
    numbers = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in tables.items()}
    return Graph("attention", (None, 8), PROFILES, {}, {}, ops, ("mixed", "plain"), numbers)


def changed(graph: Graph, name: str, **attributes) -> Graph:
    """One op with other attributes; `inputs` and `kind` are its own."""

    def one(old: Op) -> Op:
        if old.name != name:
            return old
        inputs, kind = attributes.pop("inputs", old.inputs), attributes.pop("kind", old.kind)
        return Op(name, kind, inputs, {**old.attributes, **attributes})

    return replace(graph, ops=tuple(map(one, graph.ops)))


def test_all_operations_are_here():
    used = {one.kind for graph in (tokens(), image()) for one in graph.ops}
    assert {kind for kind, schema in SCHEMAS.items() if schema.format == 3} <= used


@pytest.mark.parametrize("make", [tokens, image, attention])
def test_written_and_read(make, tmp_path):
    graph = make()
    apm.write(graph, tmp_path / "net.apm")
    again = apm.read(tmp_path / "net.apm")
    assert again.ops == graph.ops and again.input_shape == graph.input_shape
    assert again.integer_input == graph.integer_input
    assert to_record(graph, {})["format"] == 3


def test_old_graphs_keep_their_format():
    graph = image()
    plain = {key: value for key, value in graph.ops[1].attributes.items() if key not in ("transposed", "output_pad")}
    old = replace(graph, ops=(graph.ops[0], Op("up", "conv", ("act",), plain)))
    assert to_record(old, {})["format"] == 1


def test_runs_at_any_length():
    graph = tokens()
    for length in (1, 6):
        ids = RNG.integers(0, 10, (3, length))
        mask = np.ones((3, length, 8), np.float32)
        made = run_graph(graph, ids, "8", more={"mask": mask})["mean"]
        assert made.shape == (3, 1, 8) and np.isfinite(made).all()


def test_shapes():
    shapes = check_graph(to_record(tokens(), {})).values
    assert shapes["heads"] == (None, 2, 6) and shapes["scores"] == (2, None, None) and shapes["mean"] == (1, 8)
    assert check_graph(to_record(image(), {})).values["up"] == (8, 10, 2)


WRONG = [
    (tokens, "heads", {"shape": (None, None, 6)}, "one of them perhaps null"),
    (tokens, "heads", {"shape": ()}, "1 to 6 sizes"),
    (tokens, "turned", {"order": (1, 0)}, "is for 2 axes, the value has 3"),
    (tokens, "turned", {"order": (1, 1, 0)}, "permutation"),
    (tokens, "part", {"axis": 2}, "beyond the last"),
    (tokens, "part", {"start": 8}, "there is nothing"),
    (tokens, "part", {"step": 0}, "from 1"),
    (tokens, "chosen", {"index": (6,)}, "beyond an axis of size 6"),
    (tokens, "chosen", {"index": ()}, "positions"),
    (tokens, "gelu", {"function": "gelo"}, "one of abs"),
    (tokens, "sum", {"inputs": ("embed", "input")}, "equally many"),
    (tokens, "sum", {"function": "pow"}, "one of add"),
    (tokens, "norm", {"axes": (2,)}, "beyond the last"),
    (tokens, "norm", {"axes": (1, 0)}, "rising"),
    (tokens, "norm", {"eps": 1.0}, "below 1"),
    (tokens, "mean", {"axes": ()}, "rising"),
    (tokens, "mixed", {"inputs": ("weights", "gelu")}, "equally many"),
    (tokens, "embed", {"weight": "w"}, "float in every profile"),
    (tokens, "bias", {"shape": (2, 8)}, "not that of weight"),
    (tokens, "bias", {"weight": "rows", "shape": (10, 8)}, "has its own"),
    (tokens, "states", {"function": "lstm"}, "4 H"),
    (tokens, "both", {"axis": 2}, "beyond the last"),
    (tokens, "mask", {"shape": (None, None)}, "only where integer"),
    (tokens, "joined", {"kind": "flatten", "shape": None}, "unknown"),
    (tokens, "gelu", {"inputs": ("act",)}, "takes floats"),
    (attention, "scores", {"inputs": ("q", "input")}, "it takes codes"),
    (attention, "scores", {"inputs": ("input", "k")}, "it takes floats"),
    (attention, "scores", {"signed": True}, "signed"),
    (image, "up", {"output_pad": (2, 0)}, "below stride"),
    (image, "up", {"transposed": False}, "true, or left out"),
    (image, "up", {"toom_cook": True}, "toom_cook, which needs groups, strides and dilations of 1"),
    (image, "up", {"toom_cook": False}, "true, or left out"),
]


@pytest.mark.parametrize("make, name, attributes, message", WRONG, ids=[f"{name}-{at}" for _, name, at, _ in WRONG])
def test_refused(make, name, attributes, message, tmp_path):
    with pytest.raises(BadGraph, match=message):
        apm.write(changed(make(), name, **attributes), tmp_path / "net.apm")


def test_images_only_where_images_are_needed(tmp_path):
    graph = tokens()
    pool = op("pool", "adaptive_avg_pool", "gelu", size=(1, 1))
    with pytest.raises(BadGraph, match="it takes images: 3 axes"):
        apm.write(replace(graph, ops=(*graph.ops, pool)), tmp_path / "net.apm")


def test_inputs_come_first(tmp_path):
    graph = tokens()
    late = op("late", "input", shape=(3,), integer=False)
    with pytest.raises(BadGraph, match="inputs come first"):
        apm.write(replace(graph, ops=(*graph.ops, late)), tmp_path / "net.apm")


def test_an_input_that_is_no_image_has_no_image_facts(tmp_path):
    with pytest.raises(BadGraph, match="goes without image"):
        apm.write(replace(tokens(), image_size=(3, 3)), tmp_path / "net.apm")


def test_a_product_of_codes_has_a_table(tmp_path):
    graph = attention()
    tensors = check_graph(to_record(graph, {})).tensors
    assert tensors["table.scores"] == ("F32", (2, 2)) and "table.plain" not in tensors
    apm.write(graph, tmp_path / "net.apm")
    assert np.array_equal(apm.read(tmp_path / "net.apm").tables["scores"], graph.tables["scores"])


def test_products_of_integers_and_floats_in_one_profile(tmp_path):
    graph = attention()
    mixed = GraphProfile("mixed", 8, {"q": 8, "k": 32, "p": 8, "v": 8})
    with pytest.raises(BadGraph, match="its inputs have 8 and 32 bits"):
        apm.write(replace(graph, profiles=(mixed, PROFILES[1])), tmp_path / "net.apm")


@pytest.mark.parametrize("length, fits", [(16383, True), (16384, False)])
def test_products_whose_sums_do_not_fit(length, fits, tmp_path):
    graph = replace(attention(), input_shape=(length, 8))
    if fits:
        apm.write(graph, tmp_path / "net.apm")
        return
    with pytest.raises(BadGraph, match="sums of 16384 products at 8 and 8 bits do not fit"):
        apm.write(graph, tmp_path / "net.apm")
