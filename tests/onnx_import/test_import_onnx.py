"""Float ONNX networks as modules: every operator, whole networks, names, checkpoints, and what is refused."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx", reason="there are no ONNX networks without it; pip install 'anyprec[onnx]'")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import anyprec  # noqa: E402
from anyprec.errors import CheckpointError, UnsupportedOperation, VerificationFailed  # noqa: E402
from anyprec.onnx_import import importing  # noqa: E402
from anyprec.onnx_import.operators import OPERATORS  # noqa: E402

make, FLOAT, INT64 = onnx.helper, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
RNG = np.random.default_rng(0)


def weight(*shape, positive=False):
    made = RNG.standard_normal(shape).astype(np.float32) * 0.3
    return np.abs(made) + 0.5 if positive else made


def ints(*numbers):
    return np.array(numbers, np.int64)


def save(path, nodes, shape=(4, 8, 8), constants=None, opset=18, batch="N", outputs=("y",), kind=FLOAT):
    tensors = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    inputs = [make.make_tensor_value_info("x", kind, [batch, *shape])]
    found = [make.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    body = make.make_graph(nodes, "made", inputs, found, tensors)
    onnx.save(make.make_model(body, opset_imports=[make.make_opsetid("", opset)], ir_version=8), path)
    return path


def node(kind, inputs="x", output="y", **attributes):
    return make.make_node(
        kind, inputs.split(), output.split(), name=f"n_{kind}" + ("" if output == "y" else f"_{output}"), **attributes
    )


# operator -> (nodes, constants, settings of `save`)
CASES = {
    "Conv, uneven padding": ([node("Conv", "x w b", pads=[0, 1, 2, 1], strides=[2, 1], group=2)],
                             {"w": weight(6, 2, 3, 3), "b": weight(6)}, {}),
    "Conv, SAME_UPPER": ([node("Conv", "x w", auto_pad="SAME_UPPER", strides=[2, 2])], {"w": weight(6, 4, 3, 3)}, {}),
    "Conv, 1-d": ([node("Conv", "x w", dilations=[2])], {"w": weight(6, 4, 3)}, {"shape": (4, 9)}),
    "ConvTranspose": ([node("ConvTranspose", "x w b", strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1])],
                      {"w": weight(4, 6, 3, 3), "b": weight(6)}, {}),
    "BatchNormalization": ([node("BatchNormalization", "x s b m v", epsilon=1e-3)],
                           {"s": weight(4), "b": weight(4), "m": weight(4), "v": weight(4, positive=True)}, {}),
    "Gemm": ([node("Gemm", "x w b", transB=1, alpha=0.5, beta=2.0)], {"w": weight(5, 7), "b": weight(5)},
             {"shape": (7,)}),
    "MatMul, Add": ([node("MatMul", "x w", "p"), node("Add", "p b")], {"w": weight(8, 5), "b": weight(5)}, {}),
    "MatMul of values": ([node("Transpose", "x", "t", perm=[0, 1, 3, 2]), node("MatMul", "x t")], {}, {}),
    "arithmetic": ([node("Sub", "x c", "a"), node("Mul", "a d", "m"), node("Div", "m c", "q"), node("Pow", "q two")],
                   {"c": weight(4, 1, 1, positive=True), "d": np.float32(3), "two": np.float32(2)}, {}),
    "Clip": ([node("Clip", "x l h")], {"l": np.float32(-0.5), "h": np.float32(0.7)}, {}),
    "PRelu": ([node("PRelu", "x s")], {"s": weight(4, 1, 1)}, {}),
    "activations": ([node("LeakyRelu", "x", "a", alpha=0.2), node("Sigmoid", "a", "b"), node("HardSigmoid", "b", "c"),
                     node("HardSwish", "c", "d"), node("Tanh", "d", "e"), node("Erf", "e", "f"), node("Exp", "f", "g"),
                     node("Sqrt", "g", "h"), node("Relu", "h")], {}, {}),
    "Gelu": ([node("Gelu", approximate="tanh")], {}, {"opset": 20}),
    "Softmax": ([node("Softmax", axis=1)], {}, {}),
    "MaxPool": ([node("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 0, 1, 1])], {}, {}),
    "AveragePool": ([node("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)], {}, {}),
    "GlobalAveragePool": ([node("GlobalAveragePool", "x", "p"), node("Flatten", "p")], {}, {}),
    "Concat, Split": ([node("Split", "x", "a b", axis=1, num_outputs=2), node("Concat", "b x a", axis=1)], {}, {}),
    "Slice, Gather": ([node("Slice", "x s e a t", "p"), node("Gather", "p i", axis=1)],
                      {"s": ints(1, 0), "e": ints(4, 2**62), "a": ints(1, 3), "t": ints(1, 2), "i": ints(2, 0)}, {}),
    "Gather, one": ([node("Gather", "x i", axis=2)], {"i": np.array(3, np.int64)}, {}),
    "Reshape by shape": ([node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Concat", "n rest", "t", axis=0),
                          node("Reshape", "x t")], {"zero": ints(0), "rest": ints(-1, 16)}, {}),
    "batch into rows": ([node("Reshape", "x t", "r"), node("Relu", "r")], {"t": ints(-1, 8)}, {}),
    "Squeeze, Unsqueeze": ([node("Unsqueeze", "x a", "u"), node("Squeeze", "u a")], {"a": ints(2)}, {}),
    "Expand a token": ([node("Shape", "x", "s", end=1), node("Concat", "s rest", "t", axis=0),
                        node("Expand", "token t", "e"), node("Concat", "e x", axis=1)],
                       {"rest": ints(1, 8, 8), "token": weight(1, 1, 8, 8)}, {}),
    "constants fold": ([node("Shape", "x", "s"), node("ConstantOfShape", "s", "z",
                        value=onnx.numpy_helper.from_array(np.array([2.0], np.float32))), node("Mul", "x z")], {}, {}),
    "Where of constants": ([node("Equal", "a b", "c"), node("Where", "c d e", "f"), node("Add", "x f")],
                           {"a": ints(1, 2), "b": ints(1, 3), "d": np.float32(1), "e": np.float32(5)},
                           {"shape": (4, 2)}),
    "Cast": ([node("Cast", "x", "i", to=INT64), node("Cast", "i", to=FLOAT)], {}, {}),
    "ReduceMean": ([node("ReduceMean", "x a", keepdims=0)], {"a": ints(2, 3)}, {}),
    "ReduceMean, old": ([node("ReduceMean", "x", axes=[-1])], {}, {"opset": 13}),
    "ReduceSum": ([node("ReduceSum", "x a")], {"a": ints(1)}, {}),
    "Resize": ([node("Resize", "x r sc", mode="linear")],
               {"r": np.zeros(0, np.float32), "sc": np.array([1, 1, 2, 2], np.float32)}, {}),
    "Resize, nearest": ([node("Resize", "x r sc", mode="nearest", coordinate_transformation_mode="asymmetric",
                              nearest_mode="floor")],
                        {"r": np.zeros(0, np.float32), "sc": np.array([1, 1, 2, 2], np.float32)}, {}),
    "Upsample": ([node("Upsample", "x sc", mode="nearest")], {"sc": np.array([1, 1, 2, 2], np.float32)}, {"opset": 9}),
    "Pad": ([node("Pad", "x p v")], {"p": ints(0, 0, 1, 2, 0, 1, 0, 1), "v": np.float32(1.5)}, {}),
    "Pad, reflect": ([node("Pad", "x p", mode="reflect")], {"p": ints(0, 0, 1, 2, 0, 0, 3, 1)}, {}),
    "LayerNormalization": ([node("LayerNormalization", "x s b")], {"s": weight(8), "b": weight(8)}, {}),
    "InstanceNormalization": ([node("InstanceNormalization", "x s b")], {"s": weight(4), "b": weight(4)}, {}),
    "GroupNormalization": ([node("GroupNormalization", "x s b", num_groups=2)], {"s": weight(4), "b": weight(4)},
                           {"opset": 21}),
    "DepthToSpace": ([node("DepthToSpace", blocksize=2)], {}, {}),
    "DepthToSpace, CRD": ([node("DepthToSpace", blocksize=2, mode="CRD")], {}, {}),
    "Identity, Dropout": ([node("Identity", "x", "i"), node("Dropout", "i")], {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operators(name, tmp_path):
    nodes, constants, settings = CASES[name]
    net = anyprec.import_onnx(save(tmp_path / "net.onnx", nodes, constants=constants, **settings))
    assert net.imported.difference < 1e-5
    assert net(torch.randn(5, *net.input_shapes[0])).isfinite().all()  # another batch than it was built with


def test_weights_are_parameters_of_layers(tmp_path):
    nodes, constants, _ = CASES["MatMul, Add"]
    net = anyprec.import_onnx(save(tmp_path / "net.onnx", nodes, constants=constants))
    (linear,) = [m for m in net.modules() if isinstance(m, nn.Linear)]
    np.testing.assert_array_equal(linear.weight.detach(), constants["w"].T)
    np.testing.assert_array_equal(linear.bias.detach(), constants["b"])


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(x + self.block(x), 2)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """A torch network and its ONNX file, written node by node as torch's exporter names them."""
    torch.manual_seed(0)
    net = SmallNet()
    net(torch.randn(8, 3, 12, 12))
    path = tmp_path_factory.mktemp("onnx") / "small.onnx"
    norm = "{0}.weight {0}.bias {0}.running_mean {0}.running_var"
    nodes = [
        node("Conv", "x conv1.weight", "a", pads=[1] * 4), node("BatchNormalization", "a " + norm.format("bn1"), "b"),
        node("Relu", "b", "c"), node("Conv", "c block.0.weight block.0.bias", "d", pads=[1] * 4),
        node("BatchNormalization", "d " + norm.format("block.1"), "e"), node("Relu", "e", "f"),
        node("Add", "c f", "g"), node("MaxPool", "g", "h", kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", "h", "i"), node("Flatten", "i", "j"),
        node("Gemm", "j fc.weight fc.bias", transB=1),
    ]  # fmt: skip
    constants = {k: v.numpy() for k, v in net.state_dict().items() if "num_batches" not in k}
    return net.eval(), save(path, nodes, (3, 12, 12), constants)


def test_names_and_answers_are_those_of_the_network(network):
    net, path = network
    made = anyprec.import_onnx(path)
    assert set(dict(made.named_parameters())) == set(dict(net.named_parameters()))
    x = torch.randn(3, 3, 12, 12)
    torch.testing.assert_close(made(x), net(x))
    torch.testing.assert_close(torch.export.export(made, (x,)).module()(x), net(x))


def test_it_converts_trains_and_packs(network, tmp_path):
    _, path = network
    x = torch.randn(4, 3, 12, 12)
    model = anyprec.convert(anyprec.import_onnx(path), widths=(2, 8, 32), example=x)
    assert "block.0" in anyprec.any_layers(model)
    losses = anyprec.joint_step(model.train(), x, torch.randint(0, 5, (4,)), (2, 8, 32))
    assert losses and all(p.grad is not None for p in model.get_submodule("block.0").parameters())
    anyprec.pack(model.eval(), tmp_path / "net.apm", example=x)
    with anyprec.load(tmp_path / "net.apm") as packed, torch.no_grad(), anyprec.bits(model, 8):
        np.testing.assert_allclose(packed(x.numpy(), bits=8), model(x).numpy(), atol=0.05)


def test_a_batch_of_one_in_the_file_is_free_in_the_module(tmp_path):
    nodes = [node("GlobalAveragePool", "x", "p"), node("Reshape", "p t", "r"), node("Gemm", "r w")]
    path = save(tmp_path / "net.onnx", nodes, constants={"t": ints(1, 4), "w": weight(4, 3)}, batch=1)
    assert anyprec.import_onnx(path)(torch.randn(6, 4, 8, 8)).shape == (6, 3)


def test_an_unknown_operator_is_named(tmp_path):
    path = save(tmp_path / "net.onnx", [node("Relu", "x", "a"), node("Hardmax", "a")])
    with pytest.raises(UnsupportedOperation, match=r"Hardmax \(node 'n_Hardmax'\); supported are Abs, Add, ") as error:
        anyprec.import_onnx(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "constants", "shape", "said"),
    [
        ([node("Conv", "x x")], {}, (4, 8, 8), "Conv 'n_Conv': its weight is computed"),
        ([node("Relu")], {}, ("C", 8, 8), "has free sizes"),
        ([node("Slice", "x s e a t")], {"s": ints(7), "e": ints(0), "a": ints(2), "t": ints(-1)}, (4, 8, 8), "steps"),
    ],
)
def test_what_is_refused(nodes, constants, shape, said, tmp_path):
    with pytest.raises(UnsupportedOperation, match=said):
        anyprec.import_onnx(save(tmp_path / "net.onnx", nodes, shape, constants))


def test_free_sizes_can_be_given(tmp_path):
    path = save(tmp_path / "net.onnx", [node("Relu")], ("C", "H", "W"))
    assert anyprec.import_onnx(path, input_shape=(4, 6, 6)).input_shapes == ((4, 6, 6),)


def test_a_module_that_answers_otherwise_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(OPERATORS, "Tanh", lambda b, one: b.function(one, torch.sin))
    with pytest.raises(VerificationFailed, match="differs from the model"):
        anyprec.import_onnx(save(tmp_path / "net.onnx", [node("Tanh")]))


def test_without_onnxruntime_the_reference_compares(tmp_path, monkeypatch):
    monkeypatch.setattr(importing.importlib.util, "find_spec", lambda name: None)
    net = anyprec.import_onnx(save(tmp_path / "net.onnx", [node("Relu")]))
    assert net.imported.compared_with == "the reference of ONNX" and net.imported.difference == 0


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x07"])
def test_damaged_files(content, tmp_path):
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a valid ONNX model"):
        anyprec.import_onnx(tmp_path / "net.onnx")
    with pytest.raises(CheckpointError, match="cannot read"):
        anyprec.import_onnx(tmp_path / "none.onnx")


def test_checkpoints_hold_graph_and_weights_and_no_code(network, tmp_path):
    _, path = network
    made = anyprec.import_onnx(path)
    assert len(made.onnx_graph) < path.stat().st_size - 4 * 500  # weights are in the state dict only
    again = importing.rebuild(importing.describe(made))
    again.load_state_dict(made.state_dict())
    x = torch.randn(2, 3, 12, 12)
    assert torch.equal(again(x), made(x))
