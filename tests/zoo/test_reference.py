"""`from_reference` against a plain restatement of the reference networks: weights and width in, logits out.

The restatement shares nothing with the package: functional torch, on the reference code's own names.
"""

import pytest
import torch
import torch.nn.functional as F

from anyprec.errors import CheckpointError
from anyprec.nn.switching import set_bits, widths_of
from anyprec.zoo import from_reference

WIDTHS = (1, 2, 4, 8, 32)

# --- The restatement ---


def weight_at(w, k):
    t = torch.tanh(w)
    t = t / t.abs().max()
    if k < 32:
        n = 2**k - 1
        t = 2 * (torch.round((t / 2 + 0.5) * n) / n) - 1
    return t * w.abs().mean()


def clipped(y, k):
    return F.relu(y) if k == 32 else y.clamp(0, 1)


def activated(y, k):
    n = 2**k - 1
    return F.relu(y) if k == 32 else torch.round(y.clamp(0, 1) * n) / n


class Settling(dict):
    """A state dict whose norms take the statistics of what they read, so that every layer is alive."""


def plain_norm(s, name, x):
    if isinstance(s, Settling):
        s[f"{name}.running_mean"] = 0.9 * x.mean((0, 2, 3))
        s[f"{name}.running_var"] = 1.2 * x.var((0, 2, 3)) + 0.01
    mean, var = s[f"{name}.running_mean"], s[f"{name}.running_var"]
    return F.batch_norm(x, mean, var, s[f"{name}.weight"], s[f"{name}.bias"])


def switched_norm(s, name, x, k):
    return plain_norm(s, f"{name}.bn_dict.{k}", x)


def cifar_resnet(s, x, k):
    x = F.conv2d(x, s["conv0.weight"], padding=1)
    i = 0
    while f"layers.{i}.conv0.weight" in s:
        p = f"layers.{i}"
        stride = 2 if f"{p}.skip_conv.weight" in s else 1
        a = activated(switched_norm(s, f"{p}.bn0", x, k), k)
        if stride == 2:
            x = plain_norm(s, f"{p}.skip_bn", F.conv2d(a, s[f"{p}.skip_conv.weight"], stride=2))
        y = F.conv2d(a, weight_at(s[f"{p}.conv0.weight"], k), stride=stride, padding=1)
        a = activated(switched_norm(s, f"{p}.bn1", y, k), k)
        x = x + F.conv2d(a, weight_at(s[f"{p}.conv1.weight"], k), padding=1)
        i += 1
    return F.linear(switched_norm(s, "bn", x, k).mean((2, 3)), s["fc.weight"], s["fc.bias"])


def cnn8(s, x, k):
    def conv(x, i, padding):
        return F.conv2d(x, weight_at(s[f"layers.{i}.weight"], k), padding=padding)

    x = F.max_pool2d(F.conv2d(x, s["layers.0.weight"], s["layers.0.bias"]), 2)
    x = switched_norm(s, "layers.4", conv(activated(x, k), 3, 1), k)
    x = F.max_pool2d(switched_norm(s, "layers.7", conv(activated(x, k), 6, 1), k), 2)
    x = switched_norm(s, "layers.11", conv(activated(x, k), 10, 0), k)
    x = switched_norm(s, "layers.14", conv(activated(x, k), 13, 1), k)
    x = switched_norm(s, "layers.17", conv(activated(x, k), 16, 0), k)
    x = clipped(conv(activated(x, k), 20, 0), k)
    return F.linear(x.flatten(1), s["fc.weight"], s["fc.bias"])


def bottleneck_resnet(s, x, k):
    x = F.max_pool2d(F.conv2d(x, s["conv1.weight"], stride=2, padding=3), 3, 2, 1)
    for stage in (1, 2, 3, 4):
        i = 0
        while f"layer{stage}.{i}.conv0.weight" in s:
            p = f"layer{stage}.{i}"
            stride = 2 if stage > 1 and i == 0 else 1
            y = activated(switched_norm(s, f"{p}.bn0", x, k), k)
            y = F.conv2d(y, weight_at(s[f"{p}.conv0.weight"], k))
            y = activated(switched_norm(s, f"{p}.bn1", y, k), k)
            y = F.conv2d(y, weight_at(s[f"{p}.conv1.weight"], k), stride=stride, padding=1)
            y = activated(switched_norm(s, f"{p}.bn2", y, k), k)
            y = F.conv2d(y, weight_at(s[f"{p}.conv2.weight"], k))
            if f"{p}.downsample.0.weight" in s:
                x = F.conv2d(x, s[f"{p}.downsample.0.weight"], stride=stride)
                x = switched_norm(s, f"{p}.downsample.1", x, k)
            x = x + y
            i += 1
    x = activated(switched_norm(s, "bn", x, k), k)
    return F.linear(x.mean((2, 3)), s["fc.weight"], s["fc.bias"])


# --- Random checkpoints in the reference code's layout ---


class Maker:
    """Random tensors under the reference names, gains and offsets of the norms among them."""

    def __init__(self, widths, seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.widths, self.state = widths, {}

    def conv(self, name, out, inner, kernel, gain=1.4):
        w = torch.randn(out, inner, kernel, kernel, generator=self.random)
        self.state[f"{name}.weight"] = w * gain / (inner * kernel**2) ** 0.5

    def norm(self, name, channels):
        for key, low, high in (
            ("weight", 0.4, 1.2),
            ("bias", -0.2, 0.5),
            ("running_mean", -0.1, 0.1),
            ("running_var", 0.1, 0.3),
        ):
            u = torch.rand(channels, generator=self.random)
            self.state[f"{name}.{key}"] = low + (high - low) * u
        self.state[f"{name}.num_batches_tracked"] = torch.tensor(12)

    def switched(self, name, channels):
        for k in self.widths:
            self.norm(f"{name}.bn_dict.{k}", channels)

    def linear(self, name, out, inner):
        self.state[f"{name}.weight"] = torch.randn(out, inner, generator=self.random) / inner**0.5
        self.state[f"{name}.bias"] = torch.randn(out, generator=self.random)


def cifar_state(blocks=(1, 1, 1), base=16, classes=10, widths=WIDTHS, channels_in=3):
    make = Maker(widths)
    before = base
    make.conv("conv0", before, channels_in, 3)
    i = 0
    for stage, count in enumerate(blocks):
        for first in [True] + [False] * (count - 1):
            c = base * 2**stage
            make.switched(f"layers.{i}.bn0", before)
            make.conv(f"layers.{i}.conv0", c, before, 3)
            make.switched(f"layers.{i}.bn1", c)
            make.conv(f"layers.{i}.conv1", c, c, 3)
            if first and stage:
                make.conv(f"layers.{i}.skip_conv", c, before, 1)
                make.norm(f"layers.{i}.skip_bn", c)
            before, i = c, i + 1
    make.switched("bn", before)
    make.linear("fc", classes, before)
    return make.state


def cnn8_state(expand=1, classes=10, widths=WIDTHS):
    make = Maker(widths)
    e = expand
    make.conv("layers.0", 6 * e, 3, 5)
    make.state["layers.0.bias"] = torch.rand(6 * e, generator=make.random) * 0.5
    shapes = ((3, 6, 8, 3), (6, 8, 8, 3), (10, 8, 16, 3), (13, 16, 16, 3), (16, 16, 16, 3), (20, 16, 64, 5))
    for place, inner, out, kernel in shapes:
        make.conv(f"layers.{place}", out * e, inner * e, kernel, gain=2 if place < 20 else 6)
        if place != 20:
            make.switched(f"layers.{place + 1}", out * e)
    make.linear("fc", classes, 64 * e)
    return make.state


def bottleneck_state(blocks=(1, 2, 1, 1), base=8, classes=10, widths=WIDTHS):
    make = Maker(widths)
    make.conv("conv1", base, 3, 7)
    before = base
    for stage, count in enumerate(blocks):
        c = base * 2**stage
        for i in range(count):
            p = f"layer{stage + 1}.{i}"
            make.switched(f"{p}.bn0", before)
            make.conv(f"{p}.conv0", c, before, 1)
            make.switched(f"{p}.bn1", c)
            make.conv(f"{p}.conv1", c, c, 3)
            make.switched(f"{p}.bn2", c)
            make.conv(f"{p}.conv2", 4 * c, c, 1)
            if i == 0:
                make.conv(f"{p}.downsample.0", 4 * c, before, 1)
                make.switched(f"{p}.downsample.1", 4 * c)
            before = 4 * c
    make.switched("bn", before)
    make.linear("fc", classes, before)
    return make.state


def compare(state, restated, x):
    """Equal outputs at every width, and outputs that say something: they vary with image and width."""
    widths = sorted({int(name.split(".bn_dict.")[1].split(".")[0]) for name in state if ".bn_dict." in name})
    state = Settling(state)
    for k in widths:
        restated(state, x, k)
    state = dict(state)
    model = from_reference(state)
    assert widths_of(model) == tuple(widths)
    assert not model.training
    seen = []
    with torch.no_grad():
        for k in widths:
            set_bits(model, k)
            expected = restated(state, x, k)
            assert expected.std(0).min() > 1e-2, f"the test network is dead at {k} bits"
            torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-4)
            assert all((expected - other).abs().max() > 1e-2 for other in seen)
            seen.append(expected)
    return model


# --- The tests ---


def images(count, side, channels=3):
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("blocks", "base", "name", "options"),
    [
        ((1, 1, 1), 16, "resnet8", {"multiplier": 1}),
        ((1, 1, 1), 8, "resnet8", {"multiplier": 0.5}),
        ((2, 2, 2), 16, "resnet-cifar", {"multiplier": 1, "blocks": [2, 2, 2]}),
        ((3, 3, 3), 32, "resnet20", {"multiplier": 2}),
        pytest.param((3, 3, 3), 80, "resnet20x5", {}, marks=pytest.mark.slow),
        ((2, 1, 3), 16, "resnet-cifar", {"multiplier": 1, "blocks": [2, 1, 3]}),
    ],
)
def test_cifar_resnet(blocks, base, name, options):
    model = compare(cifar_state(blocks, base), cifar_resnet, images(8, 16))
    assert model.zoo_name == name
    shared = {
        "widths": list(WIDTHS),
        "num_classes": 10,
        "quantizer": "dorefa",
        "scale": "mean",
        "in_channels": 3,
    }
    assert model.zoo_options == {**shared, **options}


@pytest.mark.parametrize("expand", [1, 2])
def test_cnn8(expand):
    model = compare(cnn8_state(expand), cnn8, images(8, 40))
    assert model.zoo_name == "cnn8" and model.zoo_options["expand"] == expand


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("blocks", "base", "options"),
    [((3, 4, 6, 3), 8, {"multiplier": 0.125}), ((1, 2, 1, 1), 64, {"blocks": [1, 2, 1, 1]})],
)
def test_bottleneck_resnet(blocks, base, options):
    model = compare(bottleneck_state(blocks, base), bottleneck_resnet, images(4, 64))
    assert model.zoo_name == "resnet50"
    assert {k: v for k, v in model.zoo_options.items() if k in ("blocks", "multiplier")} == options


def test_classes_and_channels_are_read_off():
    model = compare(cifar_state(classes=4, channels_in=1), cifar_resnet, images(8, 8, channels=1))
    assert model.zoo_options["num_classes"] == 4 and model.zoo_options["in_channels"] == 1


@pytest.mark.parametrize("widths", [(4, 1), (32, 8, 2), (2,)])
def test_widths_are_read_off_in_order_of_number(widths):
    model = compare(cifar_state(widths=widths), cifar_resnet, images(8, 16))
    assert widths_of(model) == tuple(sorted(widths))


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("wrapped", [False, True])
def test_files_and_dicts_with_and_without_wrapping(tmp_path, prefix, wrapped):
    state = {prefix + name: value for name, value in cifar_state().items()}
    # As the released code saves it.
    record = (
        {"epoch": 3, "model": "resnet20q", "state_dict": state, "best_prec1": torch.tensor(91.0)} if wrapped else state
    )
    torch.save(record, tmp_path / "model_best.pth.tar")
    x = images(2, 16)
    outputs = [from_reference(given)(x) for given in (record, tmp_path / "model_best.pth.tar", cifar_state())]
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[2])
    assert torch.equal(from_reference(str(tmp_path / "model_best.pth.tar"))(x), outputs[2])


def test_old_files_without_batch_counts():
    state = {k: v for k, v in cifar_state().items() if not k.endswith("num_batches_tracked")}
    compare(state, cifar_resnet, images(8, 16))


def test_it_leaves_the_given_dict_alone():
    state = cifar_state()
    before = {name: value.clone() for name, value in state.items()}
    model = from_reference(state)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert list(state) == list(before) and all(torch.equal(state[name], before[name]) for name in before)


def without(state, *names):
    return {name: value for name, value in state.items() if name not in names}


def of_half(state, name):
    return {**state, name: state[name][: len(state[name]) // 2]}


BROKEN = {
    "another network": (
        {"features.0.weight": torch.zeros(3, 3), "b": torch.zeros(1)},
        "found 2 tensors (features.0.weight, b",
    ),
    "float weights": (
        {"conv1.weight": torch.zeros(16, 3, 3, 3)},
        "expected one of [CIFAR ResNet: conv0.weight",
    ),
    "empty": ({}, "the state dict is empty"),
    "no tensors": ({"epoch": 3}, "'epoch' is a int, not a tensor"),
    "no linear layer": (without(cifar_state(), "fc.weight"), "no usable 'fc.weight'"),
    "a tensor less": (
        without(cifar_state(), "layers.1.conv1.weight"),
        "lack 'blocks.1.conv1.weight' (1 names in all)",
    ),
    "a norm less": (
        without(cifar_state(), "layers.1.bn0.bn_dict.8.bias"),
        "lack 'blocks.1.norm0.tables.8.bias'",
    ),
    "a tensor more": (
        {**cifar_state(), "extra": torch.zeros(1)},
        "have 'extra' (1 names in all), which resnet8 has no use",
    ),
    "a wrong shape": (
        of_half(cifar_state(), "layers.1.conv1.weight"),
        "'blocks.1.conv1.weight' has shape (16, 32, 3, 3), resnet8 expects (32, 32, 3, 3)",
    ),
    "a block less": (
        {k: v for k, v in cifar_state((2, 2, 2)).items() if not k.startswith("layers.3.")},
        "blocks [0, 1, 2, 4, 5] of",
    ),
    "no skips": (
        {k: v for k, v in cifar_state().items() if ".skip_" not in k},
        "has skip convolutions in blocks []; expected two",
    ),
    "16 bits": (cifar_state(widths=(1, 16)), "norms for widths [1, 16]: bits=16 is not a bit-width"),
    "odd CNN-8": (
        of_half(cnn8_state(), "layers.0.weight"),
        "has 3 channels in its first layer; expected a multiple of 6",
    ),
    "half a ResNet-50": (
        {k: v for k, v in bottleneck_state().items() if not k.startswith("layer2.0.")},
        "blocks [1] of",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints_get_one_line(case):
    state, message = BROKEN[case]
    with pytest.raises(CheckpointError) as caught:
        from_reference(state)
    assert message in str(caught.value) and "\n" not in str(caught.value)
