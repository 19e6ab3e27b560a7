"""`ptq` on small networks: what each method changes and leaves, packing, foreign networks, mistakes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anyprec
from anyprec.choices import NESTING_QUANTIZERS
from anyprec.data import load_data
from anyprec.errors import AnyprecError, DataError, UncalibratedBits, UnsupportedBits, UnsupportedOperation
from anyprec.nn.quantizers import QUANTIZERS
from anyprec.nn.switching import any_layers, switch_norms, widths_of
from anyprec.post_training import METHODS, AciqSettings, mean_bits, ptq
from anyprec.post_training.aciq import ChannelInputs, ChannelWeights
from anyprec.training.checkpoint import load_model, save_model
from anyprec.training.evaluate import evaluate
from anyprec.zoo import build

WIDTHS = (1, 2, 3, 4, 8)


class Net(nn.Module):
    """Residual, with functional ReLUs, a signed input, a linear layer in the middle."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.conv1 = nn.Conv2d(12, 12, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 16, 1)
        self.hidden = nn.Linear(16, 24)
        self.fc = nn.Linear(24, 6)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.norm1(self.conv1(x))  # signed
        x = F.relu(self.conv2(x)).mean((2, 3))
        return self.fc(F.relu(self.hidden(x)))


def images(count=32, seed=1):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def net():
    torch.manual_seed(0)
    net = Net()
    for _ in range(20):  # statistics of the data it will see
        net(images(seed=7))
    return net.eval()


@pytest.fixture
def loader():
    return [images(), images(seed=2)]


def outputs(model, x, widths=WIDTHS):
    with torch.no_grad():
        found = {}
        for k in widths:
            with anyprec.bits(model, k):
                found[k] = model(x)
        return found


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_float_is_what_it_was_and_eight_bit_is_close(net, loader, method):
    before = {key: value.clone() for key, value in net.state_dict().items()}
    dice = torch.get_rng_state()
    model = ptq(net, loader, method, WIDTHS)
    assert widths_of(model) == (*WIDTHS, 32)
    assert not model.training and all(layer.bits == 8 for layer in any_layers(model).values())
    assert set(any_layers(model)) == {"conv1", "conv2", "hidden"}
    x = images(seed=3)
    found, plain = outputs(model, x, (*WIDTHS, 32)), net(x).detach()
    assert torch.equal(found[32], plain)
    gaps = {k: float((y - plain).norm() / plain.norm()) for k, y in found.items()}
    # Norms calibrated on 64 images are not those of the float network, so 8 bit cannot be as close.
    assert gaps[8] < (0.15 if method == "bc" else 0.05)
    assert gaps[8] < gaps[2] and gaps[4] < gaps[2] < gaps[1]
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), dice)


@pytest.mark.parametrize("quantizer", ["lsq", "nested"])
def test_bit_shifting(net, loader, quantizer):
    model = ptq(net, loader, "bs", WIDTHS, quantizer=quantizer)
    for layer in any_layers(model).values():
        for k in range(1, 9):
            assert torch.equal(layer.codes(k), layer.codes(8) >> (8 - k))
    for norm in switch_norms(model).values():
        for table in norm.tables.values():
            for key, value in norm.tables["32"].state_dict().items():
                assert torch.equal(table.state_dict()[key], value)
    layer = any_layers(model)["conv1"]
    layer.bits = 8
    if quantizer == "lsq":  # linear over the whole range: no weight is off by more than half a step
        w = layer.weight.detach()
        assert float((layer.quantized_weight().detach() - w).abs().max()) <= 0.51 * 2 * float(w.abs().max()) / 256


def test_scales_are_the_least_squares_fit(net, loader):
    model = ptq(net, loader, "bs", WIDTHS)
    for layer in any_layers(model).values():
        for k in WIDTHS:
            layer.bits = k
            w, q = layer.weight.detach(), layer.quantized_weight().detach()
            errors = [float((w - factor * q).norm()) for factor in (0.99, 1.0, 1.01)]
            assert min(errors) == errors[1]


def test_calibration_changes_statistics_alone(net, loader):
    shifted, calibrated = (ptq(net, loader, method, WIDTHS) for method in ("bs", "bc"))
    changed = [
        key for key, value in shifted.state_dict().items() if not torch.equal(value, calibrated.state_dict()[key])
    ]
    assert changed and all(("tables" in key and "running" in key) or "tracked" in key for key in changed)
    assert not any("tables.32" in key for key in changed)
    # Behind calibrated statistics a 1-bit layer has the mean and deviation its norm expects.
    with anyprec.bits(calibrated, 1), torch.no_grad():
        seen = []
        calibrated.conv1.register_forward_hook(lambda _, __, y: seen.append(y))
        for batch in loader:
            calibrated(batch)
        y = torch.cat(seen)
        table = switch_norms(calibrated)["norm1"].tables["1"]
        # The norm before it was calibrated too, batch by batch: close, not equal.
        torch.testing.assert_close(table.running_mean, y.mean((0, 2, 3)), rtol=0.1, atol=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["bs", "bc"])
def test_packed_gives_the_same_answers(net, loader, method, tmp_path):
    pytest.importorskip("anyprec._native")
    model = ptq(net, loader, method, WIDTHS)
    anyprec.pack(model, tmp_path / "net.apm", example=images(1))
    packed = anyprec.load(tmp_path / "net.apm")
    x = images(64, seed=5)
    for k, y in outputs(model, x).items():
        assert packed(x.numpy(), bits=k).argmax(1).tolist() == y.argmax(1).tolist()


def test_aciq_cannot_be_packed(net, loader, tmp_path):
    model = ptq(net, loader, "aciq", WIDTHS)
    with pytest.raises(UnsupportedOperation, match=r"ACIQ, which gives every channel its own bits .* 'bs' or 'bc'"):
        anyprec.pack(model, tmp_path / "net.apm", example=images(1))
    assert not (tmp_path / "net.apm").exists()
    layer = any_layers(model)["conv1"]
    for question in (lambda: layer.codes(4), lambda: layer.act.codes(images(1), 4), lambda: layer.act.range(4)):
        with pytest.raises(UnsupportedOperation):
            question()


def test_aciq_layers(net, loader):
    model = ptq(net, loader, "aciq", WIDTHS)
    for layer in any_layers(model).values():
        assert isinstance(layer.quantizer, ChannelWeights) and isinstance(layer.act, ChannelInputs)
        rows = layer.weight.detach().flatten(1)
        for k in WIDTHS:
            layer.bits = k
            made = layer.quantized_weight().detach().flatten(1)
            bits = layer.quantizer.channel_bits(layer.weight, k)
            for row, width in zip(made, bits, strict=True):
                assert len(((row - row.mean()) * 1e5).round().unique()) <= 2 ** int(width)
            torch.testing.assert_close(made.mean(1), rows.mean(1), rtol=1e-4, atol=1e-5)
        assert (layer.quantizer.channel_bits(layer.weight, 8) == 8).all()  # no channel gains by another's loss
    acts = {name: layer.act for name, layer in any_layers(model).items()}
    assert acts["conv2"].signed and not acts["conv1"].signed and not acts["hidden"].signed
    assert acts["conv1"].low.shape == (8, 12) and acts["hidden"].low.shape == (8, 1)
    y = acts["conv1"](torch.zeros(1, 12, 4, 4), 4)
    live = acts["conv1"].width[3] > 0
    assert (y[:, live] == 0).all()  # padding and ReLU's zeros stay zero


def test_parts_of_aciq_can_be_left_out(net, loader):
    plain = AciqSettings(weight_prior=None, allocation=False, bias_correction=False)
    model = ptq(net, loader, "aciq", WIDTHS, aciq=plain)
    assert mean_bits(model) == {k: (k, k) for k in WIDTHS}
    layer = any_layers(model)["conv1"]
    layer.bits = 2
    w, q = layer.weight.detach().flatten(1), layer.quantized_weight().detach().flatten(1)
    step = (w.amax(1) - w.amin(1)) / 4
    assert ((w - q).abs() <= step[:, None] / 2 + 1e-6).all()
    shared = mean_bits(ptq(net, loader, "aciq", WIDTHS, aciq=AciqSettings(quota="bits")))
    assert all(max(spent) <= k for k, spent in shared.items())


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(groups):
    """Their output channels lie on the second axis, group by group."""
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(4, 6, 2, groups=groups)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), layer, nn.ReLU(), nn.Conv2d(6, 2, 1)).eval()
    model = ptq(net, [images()], "aciq", (4, 8))
    quantizer = model[2].quantizer
    rows = quantizer._rows(model[2].weight)
    assert torch.equal(quantizer._whole(rows, model[2].weight), model[2].weight)
    each = 4 // groups
    for out in range(6):
        group, within = divmod(out, 6 // groups)
        own = layer.weight[group * each : (group + 1) * each, within]
        assert torch.equal(rows[out], own.reshape(-1))
    torch.testing.assert_close(model(images()), net(images()), rtol=0.1, atol=0.1)


def test_sequences_and_keywords():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.conv = nn.Linear(5, 8), nn.Conv1d(8, 8, 3, padding=1)
            self.mix, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, words, scale):
            y = self.conv(self.embed(words).transpose(1, 2)).transpose(1, 2)
            return self.out(torch.tanh(self.mix(y)) * scale)

    torch.manual_seed(0)
    net, batch = Words().eval(), {"words": torch.randn(4, 7, 5), "scale": torch.tensor(0.5)}
    for method in METHODS:
        model = ptq(net, (batch for _ in range(3)), method, (8,), batches=2)
        torch.testing.assert_close(model(**batch), net(**batch), rtol=0.1, atol=0.05)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["resnet8", "resnet-he"])
def test_zoo_models_are_saved_and_loaded(name, tmp_path):
    """Also those whose activations clip at 1 in training: a float one's do not, so it needs ranges."""
    options = {"depth": 8} if name == "resnet-he" else {"multiplier": 0.25}
    torch.manual_seed(0)
    source = build(name, widths=(32,), **options).eval()
    model = ptq(source, [torch.randn(8, 3, 16, 16)], "bc", (2, 8))
    x = torch.randn(4, 3, 16, 16)
    save_model(model, tmp_path / "model.pt")
    again = load_model(tmp_path / "model.pt").eval()
    assert widths_of(again) == (2, 8, 32)
    for k, y in outputs(model, x, (2, 8, 32)).items():
        assert torch.equal(outputs(again, x, (k,))[k], y)
    with torch.no_grad():
        assert torch.equal(outputs(model, x, (32,))[32], source(x))
    third = ptq(again, [torch.randn(8, 3, 16, 16)], "bs", (4,))  # its float half is as good as any
    assert torch.equal(outputs(third, x, (32,))[32], outputs(model, x, (32,))[32])


def test_evaluate_takes_it(loader):
    model = ptq(build("resnet8", widths=(32,), multiplier=0.25, in_channels=1), [torch.randn(4, 1, 8, 8)], "aciq", (4,))
    assert set(evaluate(model, load_data("digits", "test", limit=50))) == {4, 32}


def test_half_precision(loader, net):
    model = ptq(net.bfloat16(), [batch.bfloat16() for batch in loader], "aciq", (4,))
    assert model(loader[0].bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("method", METHODS)
def test_degenerate_weights_and_inputs(method):
    """A layer of zeros, a constant channel, an input that is always zero: no NaN."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)
    ).eval()
    with torch.no_grad():
        net[0].bias.copy_(torch.tensor([-99.0, 0, 0, 0]))
        net[2].weight.zero_()
        net[4].weight[1] = 0.5
    model = ptq(net, [images()], method, WIDTHS)
    assert all(torch.isfinite(y).all() for y in outputs(model, 3 * images(seed=9)).values())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "magic"}, AnyprecError, "method='magic' is not known; choose one of bs, bc, aciq, gptq"),
        ({"widths": (3, 9)}, UnsupportedBits, "bits=9 is not a bit-width"),
        ({"widths": (32,)}, UnsupportedBits, "widths has only float"),
        ({"widths": ()}, UnsupportedBits, "widths is empty"),
        (
            {"quantizer": "dorefa"},
            AnyprecError,
            "quantizer='dorefa' has no codes that can be shifted; choose one of nes",
        ),
        ({"loader": []}, DataError, "the loader gave no batch"),
        ({"loader": images()}, DataError, "the loader is a Tensor; give a list"),
        ({"loader": [images() / 0]}, DataError, "batch 0 has NaN or infinity"),
        ({"loader": [torch.zeros(2, 5)]}, DataError, "the example does not run through Net"),
        ({"net": "resnet20"}, AnyprecError, "ptq was given a str; give it an nn.Module"),
        ({"net": build("resnet8", widths=(1, 8), multiplier=0.25)}, UncalibratedBits, "has no float width"),
        ({"keep": ("nowhere",)}, AnyprecError, "keep='nowhere' matches no layer"),
    ],
)
def test_mistakes(net, arguments, error, message):
    with pytest.raises(error, match=message.replace("(", r"\(")):
        ptq(**{"net": net, "loader": [images()], **arguments})


@pytest.mark.parametrize("setting", [{"prior": "cauchy"}, {"weight_prior": "uniform"}, {"quota": "bytes"}])
def test_unknown_settings(setting):
    with pytest.raises(AnyprecError, match="is not known; choose one of"):
        AciqSettings(**setting)


def test_a_layer_that_never_ran_says_so(net):
    model = ptq(net, [images()], "aciq", (4,))
    fresh = ChannelInputs(any_layers(model)["conv1"], AciqSettings())
    fresh.fit_channels()
    with pytest.raises(UncalibratedBits, match="never ran on the data"):
        fresh(torch.zeros(1, 12, 4, 4), 4)


def test_the_quantizers_to_choose_from_are_those_that_nest():
    assert set(NESTING_QUANTIZERS) == {name for name, kind in QUANTIZERS.items() if kind.nests}
