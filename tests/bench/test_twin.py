"""The float twin that rivals get computes what the file's network computes: every op, and whole networks."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from anyprec.bench.random_networks import mobilenetv2_graph, resnet20_graph, resnet_graph
from anyprec.bench.rivals import given_network, open_rival
from anyprec.bench.twin import Twin, graph_to_onnx, twin_profile
from anyprec.export.onnx_writer import window_means
from anyprec.format.graph import INPUT, Graph, GraphProfile, Op, Weight
from anyprec.run.oracle import run_graph

onnx = pytest.importorskip("onnx", reason="the float twin is an ONNX model; pip install 'anyprec[bench]'")
reference = pytest.importorskip("onnx.reference")

RNG = np.random.default_rng(0)
WINDOW = {"kernel": [3, 3], "stride": [2, 2], "pad": [1, 1, 1, 1]}


def conv(weight, signed=False, affine=True, pad=(1, 1, 1, 1), stride=(1, 1), groups=1, kernel=(3, 3)):
    return {"weight": weight, "kernel": list(kernel), "stride": list(stride), "pad": list(pad), "dilation": [1, 1],
            "groups": groups, "signed": signed, "affine": affine}  # fmt: skip


def linear(weight):
    return {"weight": weight, "signed": False, "affine": True}


def resize(mode, align=False, size=None, scale=None, like=None):
    return {"mode": mode, "align": align, "size": size, "scale": scale, "like": like}


def small_graph(ops, channels=4, weights=None, tables=None, bits=8, outputs=None):
    """One profile; a table or weight that is not given is made up."""
    made = {}
    for name, shape in (weights or {}).items():
        values = RNG.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(np.prod(shape[1:])))
        made[name] = Weight(shape, values)
    profile = GraphProfile(str(bits), bits, bits)
    tables = {name: np.asarray(table, np.float32)[None] for name, table in (tables or {}).items()}
    return Graph("small", (9, 11, channels), (profile,), {8: tuple(range(8))}, made, tuple(ops),
                 tuple(outputs or [ops[-1].name]), tables)  # fmt: skip


def by_reference(model, x):
    return reference.ReferenceEvaluator(model).run(None, {INPUT: x})


def by_torch(model, x):
    """The PyTorch rival: torch functions for ONNX nodes."""
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, Path(folder) / "twin.onnx")
        return [open_rival("torch", "fp32", folder, x, 1).run()]


def compare(graph, size=(9, 11), batch=2, rtol=1e-4, run=by_reference):
    """Outputs of the twin against the oracle, as a fraction of the largest number."""
    x = np.random.default_rng(1).standard_normal((batch, *size, graph.input_shape[2])).astype(np.float32)
    profile = twin_profile(graph)
    expected = run_graph(graph, x, profile)
    model = graph_to_onnx(graph, size)
    onnx.checker.check_model(model, full_check=True)
    got = run(model, x.transpose(0, 3, 1, 2).copy())
    for name, value in zip(graph.outputs, got, strict=True):
        wanted = expected[name].transpose(0, 3, 1, 2).reshape(value.shape)
        assert np.abs(value - wanted).max() <= rtol * np.abs(wanted).max(), name
    return [node.op_type for node in model.graph.node]


C = 4
FLOAT_OPS = {
    "conv": [Op("y", "conv", (INPUT,), conv("w", pad=(1, 0, 2, 1), stride=(2, 1)))],
    "groups": [Op("y", "conv", (INPUT,), conv("g", groups=2))],
    "linear, spatial": [Op("y", "linear", (INPUT,), linear("l"))],
    "affine": [Op("y", "affine", (INPUT,))],
    "conv, affine": [Op("c", "conv", (INPUT,), conv("w", affine=False)), Op("y", "affine", ("c",))],
    "relu6": [Op("y", "clip", (INPUT,))],
    "add": [Op("a", "affine", (INPUT,)), Op("y", "add", ("a", INPUT))],
    "concat": [Op("a", "affine", (INPUT,)), Op("y", "concat", ("a", INPUT))],
    "max_pool": [Op("y", "max_pool", (INPUT,), {**WINDOW, "dilation": [1, 1], "ceil": False})],
    "avg_pool": [Op("y", "avg_pool", (INPUT,), {**WINDOW, "ceil": False, "count_pad": False})],
    "avg_pool, padding counts": [Op("y", "avg_pool", (INPUT,), {**WINDOW, "ceil": False, "count_pad": True})],
    "global pool": [Op("y", "adaptive_avg_pool", (INPUT,), {"size": [1, 1]})],
    "adaptive pool": [Op("y", "adaptive_avg_pool", (INPUT,), {"size": [4, 3]})],
    "nearest": [Op("y", "resize", (INPUT,), resize("nearest", scale=[2.0, 2.0]))],
    "bilinear": [Op("y", "resize", (INPUT,), resize("bilinear", size=[18, 33]))],
    "corners": [Op("y", "resize", (INPUT,), resize("bilinear", align=True, size=[17, 21]))],
    "like": [
        Op("p", "adaptive_avg_pool", (INPUT,), {"size": [1, 1]}),
        Op("y", "resize", ("p",), resize("bilinear", like=INPUT)),
    ],
    "softmax": [Op("y", "softmax", (INPUT,))],
    "head": [
        Op("p", "adaptive_avg_pool", (INPUT,), {"size": [1, 1]}),
        Op("c", "linear", ("p",), linear("l")),
        Op("y", "softmax", ("c",)),
    ],
    "flatten": [Op("f", "flatten", (INPUT,)), Op("y", "linear", ("f",), linear("f"))],
    "vector and map": [
        Op("p", "adaptive_avg_pool", (INPUT,), {"size": [1, 1]}),
        Op("c", "linear", ("p",), linear("l")),
        Op("y", "concat", ("c", "p")),
    ],
    "pad": [Op("y", "pad", (INPUT,), {"h": [1, 0], "w": [0, 2], "c": [1, 1]})],
}  # fmt: skip
WEIGHTS = {"w": (6, 3, 3, C), "g": (6, 3, 3, C // 2), "l": (5, 1, 1, C), "f": (5, 1, 1, 9 * 11 * C)}


def tables_for(ops):
    tables, made = {}, {INPUT: C}
    for op in ops:
        out = WEIGHTS[op.attributes["weight"]][0] if "weight" in op.attributes else made[op.inputs[0]]
        made[op.name] = out
        if op.kind == "clip":
            tables[op.name] = [-0.5, 0.75]
        elif op.kind == "affine" or op.attributes.get("affine"):
            tables[op.name] = [RNG.uniform(0.5, 2, out), RNG.standard_normal(out)]
    return tables


@pytest.mark.parametrize("name", FLOAT_OPS)
@pytest.mark.parametrize("run", [by_reference, by_torch])
def test_float_ops(name, run):
    if run is by_torch:
        pytest.importorskip("torch")
    ops = FLOAT_OPS[name]
    used = {op.attributes["weight"] for op in ops if "weight" in op.attributes}
    weights = {key: WEIGHTS[key] for key in used}
    nodes = compare(small_graph(ops, weights=weights, tables=tables_for(ops)), run=run)
    if name == "conv, affine":
        assert nodes == ["Conv", "Identity"]  # the norm is inside


def test_infinite_clip_is_a_relu():
    graph = small_graph([Op("y", "clip", (INPUT,))], tables={"y": [0, np.inf]})
    assert compare(graph) == ["Relu", "Identity"]


def quantized(signed, step, shift=0.0, between=None):
    """quantize -> (max_pool) -> conv and dequantize, 8 bits; codes stay inside their range for inputs up to 5."""
    codes = RNG.integers(0, 256, (6, 3, 3, C)).astype(np.uint8)
    ops = [Op("q", "quantize", (INPUT,), {"signed": signed, "rectify": not signed, "affine": True})]
    last = "q"
    if between:
        ops.append(Op("m", "max_pool", ("q",), {**WINDOW, "dilation": [1, 1], "ceil": False}))
        last = "m"
    ops += [Op("y", "conv", (last,), conv("w", signed=signed)), Op("d", "dequantize", (last,))]
    tables = {"q": [np.broadcast_to(step, C), np.broadcast_to(shift, C)],
              "y": [RNG.uniform(0.5, 1, 6) / 255**2, RNG.standard_normal(6)], "d": [1 / 51, -0.5]}  # fmt: skip
    graph = small_graph(ops, tables=tables, outputs=["y", "d"])
    graph.weights["w"] = Weight((6, 3, 3, C), codes={8: codes})
    return graph


@pytest.mark.parametrize("between", [False, True])
def test_unsigned_codes(between):
    # Rounding to codes is what the twin leaves out: half a step of 255.
    nodes = compare(quantized(False, 50.0, between=between), rtol=0.02)
    assert "BatchNormalization" not in nodes  # one step for all channels goes into the reader's weights


def test_signed_codes():
    assert "Relu" not in compare(quantized(True, 25.0, 127.5), rtol=0.02)


def test_a_norm_that_cannot_be_folded_stays():
    step = np.array([30.0, 40.0, 50.0, 20.0])
    assert "BatchNormalization" in compare(quantized(False, step, 3.0), rtol=0.02)


def test_codes_of_a_conv_need_no_norm():
    """conv -> quantize: step and shift go into the convolution before."""
    ops = [
        Op("c", "conv", (INPUT,), conv("w")),
        Op("q", "quantize", ("c",), {"signed": False, "rectify": True, "affine": True}),
        Op("y", "dequantize", ("q",)),
    ]
    tables = {"c": [RNG.uniform(0.5, 1, 6), np.zeros(6)], "q": [RNG.uniform(20, 40, 6), np.full(6, 9)], "y": [0.02, 0]}
    nodes = compare(small_graph(ops, weights={"w": WEIGHTS["w"]}, tables=tables), rtol=0.02)
    assert nodes == ["Conv", "Relu", "Mul", "Identity"]


def test_whole_networks():
    compare(resnet_graph(18, size=32, classes=10, multiplier=0.125, widths=(8, 32)), (32, 32), 1)
    compare(resnet20_graph(multiplier=0.5, widths=(2, 32)), (32, 32), 1)
    compare(mobilenetv2_graph(widths=(1, 32)), (32, 32), 1)


def test_profile_of_the_twin():
    graph = small_graph([Op("y", "affine", (INPUT,))])
    mixed = GraphProfile("fast", {}, {})
    profiles = (GraphProfile("2", 2, 2), GraphProfile("8", 8, 8), mixed)
    assert twin_profile(Graph("n", (9, 9, 4), profiles, {}, {}, graph.ops, ("y",), {})) == "8"
    assert twin_profile(Graph("n", (9, 9, 4), (mixed,), {}, {}, graph.ops, ("y",), {})) == "fast"


def test_window_means():
    np.testing.assert_allclose(window_means(5, 2), [[1 / 3, 1 / 3, 1 / 3, 0, 0], [0, 0, 1 / 3, 1 / 3, 1 / 3]])


def test_every_op_of_the_format_has_its_method():
    from anyprec.format.schema import SCHEMAS

    assert set(Twin.OPS) == {kind for kind, schema in SCHEMAS.items() if schema.format < 3}
    assert all(callable(getattr(Twin, method)) for method in Twin.OPS.values())


def test_a_network_of_ones_own(tmp_path):
    """--onnx: whatever its input is called and however its batch is fixed, it takes a twin's place."""
    make, floats = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [make.make_node("Relu", ["pixels"], ["a"]), make.make_node("Add", ["a", "pixels"], ["b"])]
    values = [make.make_tensor_value_info(name, floats, [1, 3, 32, 32]) for name in ("pixels", "b")]
    model = make.make_model(make.make_graph(nodes, "own", values[:1], values[1:]), ir_version=8)
    onnx.save(model, tmp_path / "own.onnx")
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    (got,) = by_reference(given_network(str(tmp_path / "own.onnx"), (8, 8)), x)
    np.testing.assert_array_equal(got, np.maximum(x, 0) + x)
