"""`anyprec import`: what it prints and saves, for reference checkpoints and float weights, and its errors."""

import json

import pytest
import torch

from anyprec.cli import main
from anyprec.nn.switching import set_bits, widths_of
from anyprec.training.checkpoint import load_model
from anyprec.zoo import build, from_reference


def float_file(path, depth):
    """Float weights of a textbook ResNet under the published names: our own, with one table for each norm."""
    model = build("resnet-he", depth=depth, widths=(32,), num_classes=4)
    state = {"module." + n.replace(".tables.32", ""): v for n, v in model.state_dict().items()}
    torch.save({"state_dict": state, "best_prec1": 91.0}, path)
    return model.eval()


def reference_file(path, widths=(1, 4, 32)):
    """A ResNet-8 under the reference code's names."""
    model = build("resnet8", widths=widths, multiplier=0.5, quantizer="dorefa", scale="mean").eval()
    renames = (("blocks.", "layers."), ("skip_norm.", "skip_bn."), ("norm", "bn"), (".tables.", ".bn_dict."))
    state = {}
    for name, value in model.state_dict().items():
        for ours, theirs in renames:
            name = name.replace(ours, theirs)
        state[name] = value
    torch.save(state, path)
    return model


def test_reference_checkpoint(tmp_path, capsys):
    model = reference_file(tmp_path / "theirs.pth")
    out = tmp_path / "ours.pt"
    assert main(["import", str(tmp_path / "theirs.pth"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for words in ("resnet8", "1, 4, 32", "quantizer=dorefa", "multiplier=0.5", str(out)):
        assert words in printed
    loaded, direct = load_model(out).eval(), from_reference(tmp_path / "theirs.pth")
    x = torch.randn(2, 3, 16, 16)
    for bits in widths_of(loaded):
        for m in (model, loaded, direct):
            set_bits(m, bits)
        assert torch.equal(loaded(x), model(x)) and torch.equal(direct(x), model(x))


def test_json(tmp_path, capsys):
    reference_file(tmp_path / "theirs.pth", widths=(2, 8))
    out = tmp_path / "ours.pt"
    assert main(["import", str(tmp_path / "theirs.pth"), "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["network"] == "resnet8" and record["widths"] == [2, 8] and record["out"] == str(out)
    assert record["options"]["quantizer"] == "dorefa" and record["options"]["num_classes"] == 10
    assert record["parameters"] == sum(p.numel() for p in load_model(out).parameters())


@pytest.mark.parametrize(("depth", "name"), [(8, "resnet-he"), (20, "resnet20-he")])
def test_float_weights_tell_their_depth(tmp_path, capsys, depth, name):
    original = float_file(tmp_path / "float.th", depth)
    out = tmp_path / "ours.pt"
    assert main(["import", str(tmp_path / "float.th"), "--out", str(out), "--widths", "2,32"]) == 0
    printed = capsys.readouterr().out
    assert name in printed and "num_classes=4" in printed and "calibrate" in printed
    loaded = load_model(out).eval()
    assert loaded.zoo_name == name and widths_of(loaded) == (2, 32)
    x = torch.randn(2, 3, 16, 16)
    set_bits(loaded, 32)
    assert torch.equal(loaded(x), original(x))


def test_net_names_a_network_the_file_cannot_tell(tmp_path, capsys):
    model = build("resnet8", widths=(32,)).eval()
    torch.save({n.replace(".tables.32", ""): v for n, v in model.state_dict().items()}, tmp_path / "float.pt")
    out = tmp_path / "ours.pt"
    assert main(["import", str(tmp_path / "float.pt"), "--out", str(out)]) == 2
    assert "cannot tell the network" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "float.pt"), "--out", str(out), "--net", "resnet8"]) == 0
    loaded = load_model(out).eval()
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(x), model(x))


def test_errors_are_one_line_and_leave_no_file(tmp_path, capsys):
    reference_file(tmp_path / "theirs.pth")
    float_file(tmp_path / "float.th", 8)
    torch.save({"a": torch.zeros(2)}, tmp_path / "odd.pth")
    cut = tmp_path / "cut.pth"
    cut.write_bytes((tmp_path / "theirs.pth").read_bytes()[:5000])
    cases = [
        (["nowhere.pth"], "cannot read"),
        (["cut.pth"], "is truncated, damaged or not a torch file"),
        (["odd.pth"], "cannot tell the network of these 1 tensors (a, ...)"),
        (["odd.pth", "--net", "resnet8"], "no convolution or no linear layer"),
        (["theirs.pth", "--widths", "1,2"], "--net and --widths are for float weights"),
        (["theirs.pth", "--net", "resnet8"], "--net and --widths are for float weights"),
        (["float.th", "--net", "resnet20-he"], "lack 'layer1.1.conv1.weight'"),
        (["float.th", "--net", "resnet20he"], "did you mean 'resnet20-he'?"),
        (["float.th", "--widths", "1,9"], "bits=9 is not a bit-width"),
    ]
    out = tmp_path / "ours.pt"
    for (file, *options), message in cases:
        assert main(["import", str(tmp_path / file), "--out", str(out), *options]) == 2, file
        printed = capsys.readouterr()
        assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""
        assert not out.exists()
    assert main(["import", str(tmp_path / "theirs.pth"), "--out", str(tmp_path / "no" / "folder.pt")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.fixture
def onnx_file(tmp_path):
    """conv - relu - conv - relu - pool - linear, as ONNX."""
    onnx = pytest.importorskip("onnx", reason="ONNX networks need onnx; pip install 'anyprec[onnx]'")
    make, rng = onnx.helper, torch.Generator().manual_seed(0)
    shapes = {"stem.weight": (8, 3, 3, 3), "body.weight": (8, 8, 3, 3), "head.weight": (5, 8), "head.bias": (5,)}
    weights = [
        onnx.numpy_helper.from_array((0.2 * torch.randn(shape, generator=rng)).numpy(), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        make.make_node("Conv", ["x", "stem.weight"], ["a"], pads=[1] * 4), make.make_node("Relu", ["a"], ["b"]),
        make.make_node("Conv", ["b", "body.weight"], ["c"], pads=[1] * 4), make.make_node("Relu", ["c"], ["d"]),
        make.make_node("GlobalAveragePool", ["d"], ["e"]), make.make_node("Flatten", ["e"], ["f"]),
        make.make_node("Gemm", ["f", "head.weight", "head.bias"], ["y"], transB=1),
    ]  # fmt: skip
    values = [make.make_tensor_value_info("x", 1, ["N", 3, 8, 8]), make.make_tensor_value_info("y", 1, ["N", 5])]
    graph = make.make_graph(nodes, "three", values[:1], values[1:], weights)
    path = tmp_path / "three.onnx"
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_an_onnx_network_is_imported_loaded_and_packed(onnx_file, tmp_path, capsys):
    import anyprec

    out = tmp_path / "three.pt"
    assert main(["import", str(onnx_file), "--out", str(out), "--widths", "2,8,32"]) == 0
    printed = capsys.readouterr().out
    for words in ("three  (opset 17, 7 nodes)", "N x 3 x 8 x 8", "2, 8, 32", "1 of them any-precision", "checked"):
        assert words in printed
    model, x = load_model(out).eval(), torch.randn(3, 3, 8, 8)
    set_bits(model, 32)
    torch.testing.assert_close(model(x), anyprec.import_onnx(onnx_file)(x))
    assert main(["pack", str(out), "--out", str(tmp_path / "three.apm")]) == 0
    set_bits(model, 8)
    with anyprec.load(tmp_path / "three.apm") as packed:
        torch.testing.assert_close(torch.from_numpy(packed(x.numpy(), bits=8)), model(x).detach(), atol=1e-2, rtol=0)


def test_mistakes_with_onnx_networks(onnx_file, tmp_path, capsys):
    for arguments, said in (
        (["--net", "resnet8"], "--net is for float weights"),
        (["--size", "3,0"], "is no shape"),
    ):
        assert main(["import", str(onnx_file), "--out", str(tmp_path / "n.pt"), *arguments]) == 2
        assert said in capsys.readouterr().err
    float_file(tmp_path / "theirs.pth", 8)
    assert main(["import", str(tmp_path / "theirs.pth"), "--out", str(tmp_path / "n.pt"), "--size", "3,8,8"]) == 2
    assert "--size is for ONNX networks" in capsys.readouterr().err


def test_safetensors(tmp_path, capsys):
    library = pytest.importorskip("safetensors.torch", reason="writes the file; reading needs no package")
    model = float_file(tmp_path / "theirs.pth", 8)
    state = torch.load(tmp_path / "theirs.pth")["state_dict"]
    library.save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "theirs.safetensors")
    assert main(["import", str(tmp_path / "theirs.safetensors"), "--out", str(tmp_path / "ours.pt")]) == 0
    loaded, x = load_model(tmp_path / "ours.pt").eval(), torch.randn(2, 3, 16, 16)
    set_bits(loaded, 32)
    assert torch.equal(loaded(x), model(x))
