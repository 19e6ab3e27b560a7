"""Operations of format 3 in ONNX compute what the oracle computes: random graphs, every operation, every function."""

import numpy as np
import pytest
from chain_builder import Chain, random_chain

from anyprec.export.any_axes import AnyAxesWriter, input_shapes, needed_opset
from anyprec.export.onnx_writer import OnnxWriter
from anyprec.export.qdq import QdqWriter
from anyprec.format.graph import INPUT, Graph, GraphProfile, Op
from anyprec.format.schema import FUNCTIONS, SCHEMAS
from anyprec.run.oracle import run_graph

onnx = pytest.importorskip("onnx", reason="exports are ONNX models; pip install 'anyprec[onnx]'")
F32 = np.float32


def outside(x):
    """Images as an engine takes and gives them."""
    if x.ndim == 4:
        x = x.transpose(0, 3, 1, 2)
        return x[:, :, 0, 0] if x.shape[2:] == (1, 1) else x
    return x


def run_onnx(graph, arrays, profile):
    ort = pytest.importorskip("onnxruntime", reason="an engine to compare with")
    shapes = input_shapes(graph, arrays[INPUT].shape[1:])
    model = QdqWriter(graph, shapes, profile).model(needed_opset(graph, 13))
    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    fed = {name: np.ascontiguousarray(x.transpose(0, 3, 1, 2) if x.ndim == 4 else x) for name, x in arrays.items()}
    return session.run(None, fed)


def run_oracle(graph, arrays, profile):
    more = {name: x for name, x in arrays.items() if name != INPUT}
    with np.errstate(all="ignore"):
        found = run_graph(graph, arrays[INPUT], profile, more=more)
    return [outside(found[name]) for name in graph.outputs]


def difference(want, got):
    """The largest, over the deviation of the numbers that are wanted; those that are not finite must be the same."""
    assert want.shape == got.shape
    usual = np.isfinite(want) & np.isfinite(got)
    assert (usual | (want == got) | (np.isnan(want) & np.isnan(got))).all()
    if not usual.any():
        return 0.0
    return float(np.abs(want[usual] - got[usual]).max() / max(float(np.abs(want[usual]).max()), 1e-3))


def is_well_posed(graph, arrays, profile, allowed):
    """Tables are of ordinary size, all values finite, none is rounded from near the middle of two codes, and inputs
    moved in their last digits leave the outputs where they are."""
    row = graph.profile(profile)
    if any(np.abs(table[row][np.isfinite(table[row])]).max(initial=0) > 1e3 for table in graph.tables.values()):
        return False
    more = {name: x for name, x in arrays.items() if name != INPUT}
    with np.errstate(all="ignore"):
        values = run_graph(graph, arrays[INPUT], profile, more=more, all_values=True)
    if not all(np.isfinite(value).all() for value in values.values()):
        return False
    for op in graph.ops:
        if op.kind == "quantize" and profile != "32":
            scale, shift = graph.tables[op.name][row].astype(np.float64)
            steps = values[op.inputs[0]] * scale + shift
            if (np.abs(steps - np.floor(steps) - 0.5) < 1e-4).any():
                return False
    moved = {name: (x * (1 + F32(1e-6))).astype(F32) for name, x in arrays.items()}
    pairs = zip(run_oracle(graph, arrays, profile), run_oracle(graph, moved, profile), strict=True)
    return all(difference(a, b) < allowed / 4 for a, b in pairs)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_chains(first):
    compared = 0
    for seed in range(first, first + 10):
        graph, arrays = random_chain(seed)
        for profile in ("32", "2", "4"):
            if is_well_posed(graph, arrays, profile, 1e-3):
                compared += 1
                for want, got in zip(run_oracle(graph, arrays, profile), run_onnx(graph, arrays, profile), strict=True):
                    assert difference(want, got) < 1e-3, (seed, profile)
    assert compared >= 8


def check(chain, *outputs, profiles=("32",), allowed=1e-5):
    graph, arrays = chain.finish(*outputs)
    for profile in profiles:
        for want, got in zip(run_oracle(graph, arrays, profile), run_onnx(graph, arrays, profile), strict=True):
            assert difference(want, got) < allowed, profile
    return graph


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function):
    chain = Chain(1, (7, 11), 3)
    if function in ("sqrt", "log"):
        chain.arrays[INPUT][...] = np.abs(chain.arrays[INPUT]) + F32(0.1)
    check(chain, chain.op("pointwise", INPUT, function=function))


@pytest.mark.parametrize("function", ["lstm", "gru"])
@pytest.mark.parametrize("reverse", [False, True])
def test_recurrent(function, reverse):
    gates = {"lstm": 4, "gru": 3}[function]
    chain = Chain(2, (6, 5), 3)
    x = chain.linear(INPUT, gates * 7)
    weight = chain.float_weight(gates * 7, 1, 1, 8, scale=0.5)
    check(chain, chain.op("recurrent", x, function=function, weight=weight, reverse=reverse))


@pytest.mark.parametrize("seed", range(8))
def test_transposed_convolutions(seed):
    chain = Chain(seed, (5, 4, 6), 2)
    check(chain, chain.transposed_conv(INPUT), profiles=("32",))
    chain = Chain(seed, (5, 4, 6), 2)
    check(chain, chain.transposed_conv(chain.quantize(INPUT)), profiles=("2", "8"), allowed=1e-4)


def test_a_constant_is_repeated_for_each_image():
    """A class token in front of patches, and a constant that is an output."""
    chain = Chain(3, (4, 6), 3)
    token = chain.constant(1, 6)
    joined = chain.op("concat", token, INPUT, axis=0)
    added = chain.op("binary", joined, chain.constant(5, 6), function="add")
    check(chain, added, token, chain.op("pointwise", token, function="tanh"))


def test_whole_numbers_are_int64():
    chain = Chain(4, (5,), 2, {"kind": (5,)})
    weights = [chain.float_weight(9, 1, 1, 6), chain.float_weight(2, 1, 1, 6)]
    chain.arrays[INPUT][...] = np.arange(10).reshape(2, 5) % 9
    chain.arrays["kind"][...] = np.arange(10).reshape(2, 5) % 2
    words = chain.op("embedding", INPUT, weight=weights[0])
    moved = chain.op("slice", "kind", axis=0, start=0, stop=5, step=1)
    made = chain.op("binary", words, chain.op("embedding", moved, weight=weights[1]), function="add")
    graph, arrays = chain.finish(made)
    ops = tuple(
        op if op.kind != "input" else type(op)(op.name, op.kind, (), {**op.attributes, "integer": True})
        for op in graph.ops
    )  # fmt: skip
    graph = type(graph)(**{**graph.__dict__, "ops": ops, "integer_input": True})
    arrays = {name: x.astype(np.int64) for name, x in arrays.items()}
    for want, got in zip(run_oracle(graph, arrays, "32"), run_onnx(graph, arrays, "32"), strict=True):
        assert np.array_equal(want, got)


def test_layers_between_axes_are_int8():
    """norm -> codes -> linear -> gelu -> codes -> linear, as in a transformer."""
    chain = Chain(5, (8, 24), 2)
    x = chain.quantize(chain.op("norm", INPUT, axes=(1,), eps=1e-5))
    x = chain.op("pointwise", chain.linear(x, 48), function="gelu")
    x = chain.linear(chain.quantize(x), 24)
    graph, arrays = chain.finish(chain.op("add", x, INPUT))
    shapes = input_shapes(graph, arrays[INPUT].shape[1:])
    assert len(QdqWriter(graph, shapes, "2").int8_layers) == 2
    for profile in ("1", "2", "4", "8"):
        for want, got in zip(run_oracle(graph, arrays, profile), run_onnx(graph, arrays, profile), strict=True):
            assert (np.abs(want - got) > 1e-3).mean() < 0.05, profile


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_codes(transposed):
    """As in attention at few bits: both sides are codes, one of them signed."""
    rng = np.random.default_rng(6)
    sizes = ((5, 6), (7, 6) if transposed else (6, 7))
    ops, tables = [], {"y": np.array([[0.01, 0.2]], F32)}
    ops.append(Op("other", "input", (), {"shape": sizes[1], "integer": False}))
    for name, value, signed in (("a", INPUT, True), ("b", "other", False)):
        ops.append(Op(name, "quantize", (value,), {"signed": signed, "rectify": not signed, "affine": True}))
        tables[name] = np.array([[[3.0], [7.4]]], F32) * np.ones(
            (1, 2, (sizes[0] if name == "a" else sizes[1])[1]), F32
        )
    ops.append(Op("y", "matmul", ("a", "b"), {"transposed": transposed}))
    graph = Graph("products", sizes[0], (GraphProfile("4", 4, 4),), {}, {}, tuple(ops), ("y",), tables)
    arrays = {
        name: rng.standard_normal((3, *shape)).astype(F32) for name, shape in zip((INPUT, "other"), sizes, strict=True)
    }
    (want,), (got,) = run_oracle(graph, arrays, "4"), run_onnx(graph, arrays, "4")
    assert difference(want, got) < 1e-5


def test_every_operation_has_a_method():
    assert set(AnyAxesWriter.OPS) == set(SCHEMAS)
    assert all(hasattr(QdqWriter, name) for name in AnyAxesWriter.OPS.values())
    assert {kind for kind, schema in SCHEMAS.items() if schema.format < 3} == set(OnnxWriter.OPS)
