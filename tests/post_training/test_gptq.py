"""GPTQ on small networks: codes nest and pack, each part helps, all kinds of layers, checkpoints."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anyprec
from anyprec.errors import AnyprecError
from anyprec.nn.layers import AnyConv2d
from anyprec.nn.quantizers import ChosenCodes
from anyprec.nn.switching import any_layers
from anyprec.post_training import GptqSettings, ptq
from anyprec.post_training.gptq import (
    affine_fit,
    channel_ranges,
    input_columns,
    sampled_positions,
    second_moments,
    share_that_holds,
    weight_change,
)
from anyprec.post_training.tune import distance
from anyprec.training.checkpoint import load_model, save_model
from anyprec.zoo import build

WIDTHS = (1, 2, 3, 4, 8)


class Net(nn.Module):
    """A depth-wise convolution, one without a norm, strides, a signed input, a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.point = nn.Conv2d(16, 24, 1, stride=2)
        self.last = nn.Conv2d(24, 24, 3, padding=1, dilation=1)
        self.norm2 = nn.BatchNorm2d(24)
        self.hidden = nn.Linear(24, 32)
        self.fc = nn.Linear(32, 6)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.norm1(self.deep(x))  # signed
        x = F.relu(self.point(x))
        x = F.relu(self.norm2(self.last(x))).mean((2, 3))
        return self.fc(F.relu(self.hidden(x)))


def images(count=48, seed=1):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    net = Net()
    for _ in range(20):
        net(images(seed=7))
    net.fc.weight.data.mul_(20)  # sure of its answers, as a trained one is
    return net.eval()


@pytest.fixture(scope="module")
def loader():
    return [images(), images(seed=2)]


@torch.no_grad()
def gaps(model, net, widths=WIDTHS):
    x = images(seed=3)
    plain, found = net(x), {}
    for k in widths:
        with anyprec.bits(model, k):
            found[k] = float((model(x) - plain).norm() / (plain - plain.mean(0)).norm())
    return found


@pytest.fixture(scope="module")
def untuned(net, loader):
    return ptq(net, loader, "gptq", WIDTHS, gptq=GptqSettings(tune_steps=0))


@pytest.mark.thorough
def test_codes_nest_and_every_channel_has_its_scale(untuned):
    for layer in any_layers(untuned).values():
        assert isinstance(layer.quantizer, ChosenCodes)
        for k in range(1, 9):
            assert torch.equal(layer.codes(k), layer.codes(8) >> (8 - k))
        for k in WIDTHS:
            assert layer.quantizer.scale(layer.weight, k).shape[0] == layer.weight.shape[0]


@pytest.mark.thorough
def test_it_beats_shifted_bits_and_calibrated_norms(net, loader, untuned):
    found = gaps(untuned, net)
    for method in ("bs", "bc"):
        other = gaps(ptq(net, loader, method, WIDTHS), net)
        assert all(found[k] < other[k] for k in (2, 3, 4)), (method, found, other)
    assert found[8] < 0.1  # all widths share the codes: 8 bit gives a little for 1 and 2


@pytest.mark.thorough
def test_tuning_helps_low_widths_and_keeps_the_codes(net, loader):
    """On other images, in what is tuned: the divergence from the answers of a network that is sure of them."""
    sure, x = copy.deepcopy(net), images(480, seed=3)
    sure.fc.weight.data.mul_(10)
    models = [ptq(sure, loader, "gptq", WIDTHS, gptq=GptqSettings(tune_steps=steps)) for steps in (0, 40)]
    before, after = ({k: divergence(model, sure, x, k) for k in WIDTHS} for model in models)
    assert all(after[k] < before[k] for k in (1, 2, 3)) and after[8] < 0.01, (before, after)
    for a, b in zip(*(any_layers(model).values() for model in models), strict=True):
        assert torch.equal(a.codes(8), b.codes(8))
    assert all(p.grad is None for p in models[1].parameters())


@torch.no_grad()
def divergence(model, net, x, bits):
    with anyprec.bits(model, bits):
        return float(distance(model(x), net(x)))


def test_it_packs_and_truncates(untuned, tmp_path):
    path = tmp_path / "net.apm"
    x = images(4, seed=5)
    report = anyprec.pack(untuned, path, example=x)
    assert report.profiles == ("1", "2", "3", "4", "8") and report.check is not None
    packed = anyprec.load(path)
    for k in WIDTHS:
        with anyprec.bits(untuned, k), torch.no_grad():
            # A value at the border between two codes may fall to the other side.
            assert torch.allclose(
                torch.from_numpy(packed(x.numpy(), bits=k)), untuned(x), atol=0.15 * float(untuned(x).abs().max())
            ), k
        cut = anyprec.load(path, max_bits=k)
        assert (cut(x.numpy(), bits=k) == packed(x.numpy(), bits=k)).all()


@pytest.mark.thorough
def test_a_zoo_network_is_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    source = build("resnet8", widths=(32,), in_channels=1, multiplier=0.5).eval()
    x = torch.randn(16, 1, 8, 8)
    model = ptq(source, [x], "gptq", (2, 8), gptq=GptqSettings(tune_steps=2))
    save_model(model, tmp_path / "m.pt")
    loaded = load_model(tmp_path / "m.pt").eval()
    assert all(isinstance(layer.quantizer, ChosenCodes) for layer in any_layers(loaded).values())
    with torch.no_grad():
        for k in (2, 8, 32):
            with anyprec.bits(model, k), anyprec.bits(loaded, k):
                assert torch.equal(model(x), loaded(x))
    # A width calibrated later has scales of its own, and no shift.
    anyprec.calibrate(loaded, [x], widths=(4,))
    save_model(loaded, tmp_path / "n.pt")
    again = load_model(tmp_path / "n.pt").eval()
    with torch.no_grad(), anyprec.bits(loaded, 4), anyprec.bits(again, 4):
        assert torch.equal(loaded(x), again(x))


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2}, {"padding": 1}, {"padding": "same", "dilation": 2}, {"groups": 2}, {"groups": 4, "padding": 1}],
)
def test_columns_times_weights_are_the_convolution(options):
    """Up to the means, which are taken out of both."""
    torch.manual_seed(0)
    layer, x = AnyConv2d(4, 8, (3, 2), bias=False, **options), torch.randn(2, 4, 7, 6)
    with torch.no_grad():
        y = F.conv2d(
            x, layer.weight, stride=layer.stride, padding=layer.padding, dilation=layer.dilation, groups=layer.groups
        )
        at = sampled_positions(layer, x, 10**6)
        columns = input_columns(layer, x, at)  # (G, c, positions)
        made = layer.weight.reshape(layer.groups, -1, columns.shape[1]) @ columns
        wanted = y.permute(1, 0, 2, 3).flatten(1)
        torch.testing.assert_close(made.flatten(0, 1), wanted - wanted.mean(1, keepdim=True), atol=1e-5, rtol=1e-5)


def test_affine_fit():
    torch.manual_seed(0)
    y = torch.randn(20_000, 3, 4)  # many positions: the scale that a channel has counts for little
    x = 0.5 * y + 0.3 * torch.randn_like(y) + 2
    x[:, 2] = 7.0  # constant: keeps its scale
    for shrink in (0.0, 1.0):
        a, b = affine_fit(x, y, 1, shrink)
        made = x * a[:, None] + b[:, None]
        assert torch.allclose(made.mean((0, 2)), y.mean((0, 2)), atol=1e-5)
        assert a[2] == 1
    least = (made - y)[:, :2].square().sum()
    for factor in (0.97, 1.03):
        assert ((made * factor - y)[:, :2].square().sum() > least) if shrink else True
    a, b = affine_fit(x, y, 1, 0.0)
    made = x * a[:, None] + b[:, None]
    assert torch.allclose(made[:, :2].var((0, 2)), y[:, :2].var((0, 2)), rtol=1e-3)


@pytest.mark.parametrize("wrong", [{"importance": 0}, {"damping": -1}, {"sweeps": -1}, {"shrink": 2}, {"tune_rate": 0}])
def test_settings_that_cannot_be(wrong):
    with pytest.raises(AnyprecError, match=next(iter(wrong))):
        GptqSettings(**wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, {"equalize": False, "migrate": 0.5}, {"migrate": 1.0}])
def test_ranges_per_channel_are_exact_at_8_bit_and_pack(settings, net, loader, tmp_path):
    """Divisors of the inputs are taken up by scales or weights: nothing but rounding is left, in the file too."""
    model = ptq(net, loader, "gptq", (8,), gptq=GptqSettings(tune_steps=0, **settings))
    divided = [name for name, layer in any_layers(model).items() if layer.act.divisors is not None]
    assert ("deep" in divided) == ("equalize" not in settings) and ("point" in divided) == ("migrate" in settings)
    assert gaps(model, net, (8,))[8] < 0.1  # 0.06 by shifted bits
    report = anyprec.pack(model, tmp_path / "net.apm", example=images(8))
    assert report.check is not None


def test_small_channels_of_a_depth_wise_layer_get_finer_steps():
    """One of them counts for as much as the others, since the norm behind it makes it large again."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 4, 1, groups=4), nn.ReLU6(), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 6))
    sizes = torch.tensor([3.0, 3.0, 0.03, 3.0])
    with torch.no_grad():
        net[0].weight.copy_(sizes.view(4, 1, 1, 1))
        net[0].bias.zero_()
        net[2].weight.div_(sizes.view(4, 1, 1, 1))
    x = torch.randn(64, 4, 8, 8)
    found = {}
    for equalize in (False, True):
        settings = GptqSettings(tune_steps=0, equalize=equalize)
        model = ptq(net.eval(), [x[:48]], "gptq", (8,), gptq=settings)
        with torch.no_grad(), anyprec.bits(model, 8):
            found[equalize] = float((model(x[48:]) - net(x[48:])).norm() / net(x[48:]).norm())
    assert found[True] < found[False] / 3 and found[True] < 0.02, found


def test_channel_ranges_have_a_margin_and_never_exceed_the_layer():
    ranges = channel_ranges(torch.tensor([6.0, 4.0, 0.6, 0.001, 0.0]))
    assert torch.allclose(ranges, torch.tensor([1.0, 1.0, 0.2, 1 / 64, 1.0]))


@pytest.mark.parametrize(("learnable", "low", "high"), [(True, 0.9, 1.0), (False, 0.0, 0.3)])
def test_only_changes_that_hold_on_other_images_are_made(learnable, low, high):
    """A scale that is wrong can be learned from some images; what noise has made of them cannot."""
    torch.manual_seed(0)
    weight, plain = torch.randn(1, 8, 40), torch.randn(1, 40, 120)
    own = 0.7 * plain if learnable else plain + 0.05 * torch.randn(1, 40, 120)
    seen, others = (second_moments(own[..., half], plain[..., half]) for half in (slice(60), slice(60, None)))
    change = weight_change(seen, weight, weight.double(), 1e-3)
    assert low <= share_that_holds(change, others, weight, weight.double()) <= high


def test_few_positions_do_not_decide(net):
    """With two images there are fewer positions than weights, two for the linear layers: what is seen of float must not
    be learned by heart. Two positions lie on a line at any clip, so rounding errors once chose the ranges of linear
    layers, other ones on other CPUs, and some pairs were 1.2 off."""
    settings = GptqSettings(tune_steps=0)
    found = [gaps(ptq(net, [images(2, seed)], "gptq", (8,), gptq=settings), net, (8,))[8] for seed in range(1, 8)]
    assert sorted(found)[len(found) // 2] < 0.2 and max(found) < 0.5, found


def test_two_positions_say_little_about_a_scale():
    made, wanted = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [5.0]])
    a, b = affine_fit(made, wanted, 1, 1.0)
    assert 1 < a < 1.5 and torch.allclose(b, wanted.mean() - a * made.mean())
    many = affine_fit(made.repeat(1000, 1), wanted.repeat(1000, 1), 1, 1.0)[0]
    assert 4.9 < many <= 5


def test_no_share_beyond_one():
    with pytest.raises(AnyprecError, match="migrate"):
        GptqSettings(migrate=1.5)
