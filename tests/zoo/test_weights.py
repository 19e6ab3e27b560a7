"""Files from elsewhere: reading them safely, and float weights in a textbook ResNet."""

import lzma

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from anyprec.errors import CheckpointError
from anyprec.nn.switching import any_layers, set_bits
from anyprec.zoo import build, from_reference, load_float
from anyprec.zoo.weights import read_state_dict


class Hostile:
    """Unpickling this would run code."""

    def __reduce__(self):
        return (print, ("executed",))


def test_reading_executes_no_code(tmp_path, capsys):
    path = tmp_path / "hostile.pth"
    torch.save({"state_dict": {"a": torch.zeros(1)}, "note": Hostile()}, path)
    with pytest.raises(CheckpointError, match="needs code to be read") as caught:
        from_reference(path)
    assert "\n" not in str(caught.value) and "print" in str(caught.value)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("zipped", [True, False])
def test_truncation_anywhere(tmp_path, zipped):
    path = tmp_path / "whole.pth"
    torch.save({"a.weight": torch.arange(1000.0)}, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    assert torch.equal(read_state_dict(path)["a.weight"], torch.arange(1000.0))
    cut = tmp_path / "cut.pth"
    for length in (0, 1, 10, 30, 100, 200, len(whole) // 2, len(whole) - 30):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"is truncated, damaged or not a torch file") as caught:
            from_reference(cut)
        assert "\n" not in str(caught.value) and "cut.pth" in str(caught.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*nowhere.pth: No such file"):
        from_reference(tmp_path / "nowhere.pth")
    with pytest.raises(CheckpointError, match=r"cannot read .*: Is a directory"):
        from_reference(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("hello world\n")
    with pytest.raises(CheckpointError, match="not a torch file"):
        from_reference(text)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(CheckpointError, match="holds a list; expected a state dict"):
        from_reference(tmp_path / "list.pth")


# --- Float weights ---


def textbook(s, x):
    """The float network restated: option A shortcuts, functional, on the published names."""

    def norm(name, x):
        mean, var = s[f"{name}.running_mean"], s[f"{name}.running_var"]
        return F.batch_norm(x, mean, var, s[f"{name}.weight"], s[f"{name}.bias"])

    x = F.relu(norm("bn1", F.conv2d(x, s["conv1.weight"], padding=1)))
    for stage in (1, 2, 3):
        i = 0
        while f"layer{stage}.{i}.conv1.weight" in s:
            p, stride = f"layer{stage}.{i}", 2 if stage > 1 and i == 0 else 1
            y = F.relu(norm(f"{p}.bn1", F.conv2d(x, s[f"{p}.conv1.weight"], stride=stride, padding=1)))
            y = norm(f"{p}.bn2", F.conv2d(y, s[f"{p}.conv2.weight"], padding=1))
            if stride == 2:
                zeros = torch.zeros(len(x), x.shape[1] // 2, *y.shape[2:])
                x = torch.cat([zeros, x[:, :, ::2, ::2], zeros], 1)
            x = F.relu(y + x)
            i += 1
    return F.linear(x.mean((2, 3)), s["linear.weight"], s["linear.bias"])


def float_state(blocks=1, classes=10):
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=random)

    state = {"conv1.weight": draw(16, 3, 3, 3) / 5}

    def norm(name, channels):
        state[f"{name}.weight"], state[f"{name}.bias"] = 0.5 + draw(channels).abs(), draw(channels) / 3
        state[f"{name}.running_mean"], state[f"{name}.running_var"] = (
            draw(channels) / 3,
            0.5 + draw(channels).abs(),
        )

    norm("bn1", 16)
    before = 16
    for stage, channels in ((1, 16), (2, 32), (3, 64)):
        for i in range(blocks):
            p = f"layer{stage}.{i}"
            state[f"{p}.conv1.weight"] = draw(channels, before, 3, 3) / (3 * before**0.5)
            norm(f"{p}.bn1", channels)
            state[f"{p}.conv2.weight"] = draw(channels, channels, 3, 3) / (3 * channels**0.5)
            norm(f"{p}.bn2", channels)
            before = channels
    state["linear.weight"], state["linear.bias"] = draw(classes, 64), draw(classes)
    return state


@pytest.mark.parametrize("prefix", ["", "module."])
def test_float_weights_give_exactly_the_float_outputs_at_32_bits(prefix):
    state = float_state(blocks=2)
    model = build("resnet-he", depth=14).eval()
    load_float(model, {prefix + name: value for name, value in state.items()})
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        expected = textbook(state, x)
        assert expected.std() > 0.1
        assert torch.equal(model(x), expected)


def test_norms_go_into_every_table():
    state = float_state()
    model = build("resnet-he", depth=8, widths=(2, 4, 32))
    load_float(model, state)
    for table in model.layer3[0].bn2.tables.values():
        assert torch.equal(table.running_var, state["layer3.0.bn2.running_var"])
        assert torch.equal(table.weight, state["layer3.0.bn2.weight"])
    assert list(model.layer3[0].bn2.tables) == ["2", "4", "32"]


@pytest.mark.parametrize("quantizer", ["nested", "lsq"])
def test_learned_scales_are_fitted_to_the_loaded_weights(quantizer):
    model = build("resnet-he", depth=8, quantizer=quantizer, scale="learned")
    load_float(model, float_state())
    for layer in any_layers(model).values():
        for bits in (1, 4):
            values = layer.quantizer.values(layer.codes(bits), bits)
            best = (layer.weight * values).sum() / (values * values).sum()
            torch.testing.assert_close(layer.quantizer.scale(layer.weight, bits), best)


def test_calibrated_ranges_survive_loading():
    model = build("resnet-he", depth=8)
    first = model.layer1[0].conv1
    first.act.fit(torch.linspace(0, 5, 50), (1, 4))
    before = first.act.range(4).clone()
    load_float(model, float_state())
    assert torch.equal(first.act.range(4), before)


def test_weights_of_another_network():
    model = build("resnet20-he")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"the float weights lack 'layer1.1.conv1.weight' .* resnet20-he needs"):
        load_float(model, float_state())
    deeper = float_state(blocks=4)
    with pytest.raises(CheckpointError, match=r"have 'layer1.3.conv1.weight'"):
        load_float(model, deeper)
    with pytest.raises(CheckpointError, match=r"'linear.weight' has shape \(7, 64\), resnet20-he expects \(10, 64\)"):
        load_float(model, float_state(blocks=3, classes=7))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.fixture(scope="module")
def cifar_200(data_root):
    path = data_root / "cifar-10-batches-bin" / "test_batch.bin.xz"
    if not path.is_file():
        pytest.skip(f"no CIFAR-10 test batch {path}")
    with lzma.open(path) as file:  # the first 200 records: 1 label byte, 3072 bytes of R, G and B planes
        records = np.frombuffer(file.read(200 * 3073), np.uint8).reshape(200, 3073)
    images = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).copy()).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (images - mean.view(3, 1, 1)) / std.view(3, 1, 1), torch.from_numpy(records[:, 0].astype(np.int64))


@pytest.mark.parametrize(
    ("name", "file", "right"),
    [
        ("resnet20-he", "resnet20-12fca82f.th", 182),
        pytest.param("resnet56-he", "resnet56-4bfd9763.th", 188, marks=pytest.mark.slow),
    ],
)
def test_published_weights(data_root, cifar_200, name, file, right):
    """91.73 % and 93.39 % of all 10,000 test images; here the first 200."""
    path = data_root / "weights" / file
    if not path.is_file():
        pytest.skip(f"no float weights {path}")
    images, labels = cifar_200
    model = build(name).eval()
    load_float(model, path)
    set_bits(model, 32)
    with torch.no_grad():
        logits = model(images)
        assert torch.equal(logits, textbook(read_state_dict(path), images))
    # One image may turn with a machine's rounding.
    assert abs((logits.argmax(1) == labels).sum().item() - right) <= 1
