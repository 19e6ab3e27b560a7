"""`convert` on hand-written networks: what changes, what is left alone and why, and that float stays."""

import copy
import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anyprec.errors import AnyprecError, DataError, NothingConverted, UncalibratedBits, UnknownLayer
from anyprec.nn.calibrate import calibrate
from anyprec.nn.convert import convert
from anyprec.nn.layers import AnyConv1d, AnyConv2d, AnyConvTranspose2d, AnyLayer, AnyLinear
from anyprec.nn.norms import BatchNorm2d, SwitchBatchNorm2d, SwitchGroupNorm, SwitchLayerNorm, SwitchNorm
from anyprec.nn.switching import any_layers, set_bits, switch_norms, widths_of
from anyprec.widths import Profile

WIDTHS = (1, 2, 4, 8, 32)


class Residual(nn.Module):
    """Functional activations, an identity shortcut and a block that is called twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.stem_norm = nn.BatchNorm2d(12)
        self.conv = nn.Conv2d(12, 12, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(12, eps=1e-3, momentum=0.2)
        self.down = nn.Conv2d(12, 16, 3, stride=2)
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = F.relu(self.stem_norm(self.stem(x)))
        for _ in range(2):
            x = x + F.relu(self.norm(self.conv(x)))
        return self.fc(F.relu(self.down(x)).mean((2, 3)))


class Tied(nn.Module):
    """Two linear layers with one weight, and an embedding tied to the output, as language models have it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.b.weight = self.a.weight
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(self.b(torch.tanh(self.a(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        y = F.elu(self.mid(F.relu(self.down(x))))
        return self.out(F.relu(self.up(y, output_size=x.shape[2:])))


class Wave(nn.Module):
    """A list of lists of 1-d convolutions with group norms."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(2, 8, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.ModuleList(
                [nn.ModuleDict({"conv": nn.Conv1d(8, 8, 3, padding=1), "norm": nn.GroupNorm(2, 8)}) for _ in range(2)]
            )
            for _ in range(2)
        )
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        for stage in self.stages:
            for block in stage:
                x = x + F.gelu(block["norm"](block["conv"](x)))
        return self.last(x.mean(2))


class Mixer(nn.Module):
    """Layer norms, arguments by keyword, a dict out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16, eps=1e-3)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, 4)

    def forward(self, *, tokens, mask=None):
        x = self.embed(tokens)
        x = x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))
        x = x if mask is None else x * mask[..., None]
        return {"logits": self.head(x.mean(1)), "hidden": (x,)}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.attention(x, x, x)[0]
        return self.head(x + F.relu(self.mlp(self.norm(x))))


def images(n=4):
    return torch.randn(n, 3, 8, 8)


def settled(net, *args, **kwargs):
    """With batch statistics that are not the initial zeros and ones, and norms with weights of their own."""
    for module in net.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    with torch.no_grad():
        for _ in range(3):
            net.train()(*args, **kwargs)
    return net.eval()


# name -> (network, example, names that are converted)
NETS = {
    "residual": (Residual, images, ["conv", "down"]),
    "tied": (Tied, lambda: torch.arange(11)[None], ["b"]),
    "decoder": (Decoder, lambda: torch.randn(2, 1, 9, 9), ["mid", "up"]),
    "wave": (
        Wave,
        lambda: torch.randn(4, 2, 16),
        ["stages.0.0.conv", "stages.0.1.conv", "stages.1.0.conv", "stages.1.1.conv"],
    ),
    "mixer": (Mixer, lambda: {"tokens": torch.randn(4, 7, 6), "mask": torch.ones(4, 7)}, ["up", "down"]),
    "attention": (
        Attention,
        lambda: torch.randn(4, 7, 6),
        ["attention.out_proj", "attention.query_proj", "attention.key_proj", "attention.value_proj", "mlp"],
    ),
}


def call(net, example):
    out = net(**example) if isinstance(example, dict) else net(example)
    return out["logits"] if isinstance(out, dict) else out


def build(name):
    make, example, names = NETS[name]
    net, x = make(), example()
    return settled(net, **x) if isinstance(x, dict) else settled(net, x), x, names


@pytest.mark.parametrize("name", NETS)
def test_float_is_the_original_bit_for_bit(name):
    net, x, names = build(name)
    model = convert(net, example=x)
    assert list(any_layers(model)) == names == list(model.conversion.converted)
    assert torch.equal(call(model, x), call(net, x))
    assert not any("at 32 bits" in note for note in model.conversion.notes)
    assert not any(isinstance(m, AnyLayer) for m in net.modules())


@pytest.mark.parametrize("name", NETS)
def test_error_falls_with_every_bit(name, relative_errors):
    net, x, names = build(name)
    errors = relative_errors(net, convert(net, example=x), x, WIDTHS, call)
    assert errors[1] > errors[2] > errors[4] > errors[8] > errors[32] == 0
    # What one layer adds at 8 bit: its input (signed, range 4 deviations) 8/255/sqrt(12) = 0.9 %, its weights
    # (largest 3 deviations) 3/256/sqrt(3) = 0.7 %, the curve of tanh (|w| up to 0.35) 1 %: all in all 2 %.
    # Layers add up as squares do; shortcuts only make the share of the output that has errors smaller.
    assert errors[8] < 0.02 * len(names) ** 0.5


@pytest.mark.parametrize("name", NETS)
def test_gradients_reach_every_weight_at_one_bit(name):
    net, x, _ = build(name)
    model = convert(net, example=x).train()
    set_bits(model, 1)
    call(model, x).square().sum().backward()
    for layer in any_layers(model).values():
        if layer.weight.is_leaf:  # projections of an attention have a part of its weight
            assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0
        assert layer.quantizer.scales["1"].grad is not None
        assert layer.act.ranges["1"].grad is not None


@pytest.mark.parametrize("name", NETS)
def test_copies_and_checkpoints(name):
    net, x, _ = build(name)
    model = convert(net, example=x)
    set_bits(model, 2)
    expected = call(model, x)
    assert torch.equal(call(copy.deepcopy(model), x), expected)

    other = convert(NETS[name][0](), keep=("first", "last") if name != "tied" else ("a", "head"))
    other.load_state_dict(model.state_dict())  # the signs of the inputs too: `other` has seen no example
    set_bits(other.eval(), 2)
    assert torch.equal(call(other, x), expected)


def test_kinds_and_parameters_carry_over():
    net, x, _ = build("residual")
    model = convert(net, example=x, inplace=True)
    assert model is net
    assert isinstance(model.conv, AnyConv2d) and isinstance(model.conv, nn.Conv2d)
    before = dict(build("residual")[0].named_parameters())  # the same names; other values
    assert set(before) - set(dict(model.named_parameters())) == {
        "stem_norm.weight", "stem_norm.bias", "norm.weight", "norm.bias"
    }  # fmt: skip
    net, x, _ = build("decoder")
    weight = net.up.weight
    convert(net, example=x, inplace=True)
    assert isinstance(net.up, AnyConvTranspose2d) and net.up.weight is weight
    net, x, _ = build("wave")
    model = convert(net, example=x)
    assert isinstance(model.stages[0][1]["conv"], AnyConv1d)
    assert isinstance(model.stages[0][1]["norm"], SwitchGroupNorm)


def test_norm_tables_start_as_copies():
    net, x, _ = build("residual")
    model = convert(net, example=x)
    assert isinstance(model.norm, SwitchBatchNorm2d) and list(model.norm.tables) == ["1", "2", "4", "8", "32"]
    for table in model.norm.tables.values():
        assert isinstance(table, BatchNorm2d)
        assert (table.eps, table.momentum, table.num_batches_tracked) == (
            1e-3,
            0.2,
            6,
        )  # 3 runs, called twice
        for name, value in net.norm.state_dict().items():
            assert torch.equal(table.state_dict()[name], value)
    weights = {id(table.weight) for table in model.norm.tables.values()}
    assert len(weights) == 5
    assert model.norm.eps == 1e-3  # networks read such things


def test_the_widest_norm_table_holds_the_original_parameters():
    net, x, _ = build("mixer")
    weight = net.norm.weight
    convert(net, example=x, inplace=True)
    assert isinstance(net.norm, SwitchLayerNorm)
    assert net.norm.tables["32"].weight is weight and net.norm.tables["1"].weight is not weight


def test_signs_and_ranges_come_from_the_example():
    net, x, _ = build("decoder")
    model = convert(net, example=x)
    assert not model.mid.act.signed  # behind a ReLU
    assert model.up.act.signed  # behind an ELU
    ranges = [model.mid.act.ranges[str(k)].item() for k in (1, 2, 4, 8)]
    largest = F.relu(net.down(x)).max().item()
    # More levels pay for a wider range. At 8 bit it is nearly that of the data: the candidates are 9 % apart.
    assert 0 < ranges[0] <= ranges[1] <= ranges[2] <= ranges[3] <= largest
    assert ranges[3] > 0.5 * largest
    assert "unsigned" in model.conversion.converted["mid"] and ", input signed" in model.conversion.converted["up"]


def test_a_layer_that_sees_both_signs_is_signed():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.c(self.b(-F.relu(self.b(F.relu(self.a(x))))))

    model = convert(Twice(), example=torch.randn(8, 4))
    assert model.b.act.signed


def test_the_example_leaves_no_trace():
    class Restless(Residual):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return super().forward(x + 0 * torch.rand(()) + 0 * random.random() + 0 * float(np.random.rand()))

    net = settled(Restless(), images())
    net.train()
    net.norm.eval()  # a mix of modes
    before = copy.deepcopy(net.state_dict())
    modes = {name: m.training for name, m in net.named_modules()}
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    x = images()
    torch.set_rng_state(state[0])
    model = convert(net, example=x)
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    assert np.random.get_state()[2] == state[2]
    assert {name: m.training for name, m in net.named_modules()} == modes
    assert model.training and not model.norm.training and model.conv.training
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])
    assert model.count == before["count"]


# --- What is left alone -------------------------------------------------------------------------------------


def test_first_and_last_follow_the_order_of_running():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.mid, self.first = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(F.relu(self.mid(F.relu(self.first(x)))))

    x = torch.randn(3, 4)
    report = convert(Backwards(), example=x).conversion
    assert list(report.converted) == ["mid"] and "first layer" in report.kept["first"]
    assert "last layer" in report.kept["last"]
    report = convert(Backwards()).conversion  # the order of definition is all there is to go by
    assert list(report.converted) == ["mid"] and "first layer" in report.kept["last"]
    assert list(convert(Backwards(), example=x, keep="first").conversion.converted) == ["last", "mid"]
    assert len(convert(Backwards(), example=x, keep=()).conversion.converted) == 3


def test_keep_patterns():
    net, x, _ = build("wave")
    report = convert(net, example=x, keep=("stages.0.*", "last")).conversion
    assert list(report.converted) == ["first", "stages.1.0.conv", "stages.1.1.conv"]
    assert report.kept["stages.0.0.conv"] == "as asked (keep='stages.0.*')"
    assert "stages.0.0.norm" in report.norms  # patterns are about layers: a norm per width never hurts
    assert list(convert(net, example=x, keep=["stages.1", "first"]).conversion.converted) == [
        "stages.0.0.conv", "stages.0.1.conv", "last"
    ]  # fmt: skip
    with pytest.raises(UnknownLayer, match=r"keep='stage.0.conv' matches no layer of Wave; .*stages.0.0.conv"):
        convert(net, example=x, keep=("first", "stage.0.conv"))


def test_shared_module_is_converted_once():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
            self.again = self.body[0]
            self.listed = [self.body[0], self.body[2]]  # torch does not see these
            self.c = nn.Linear(4, 4)

        def forward(self, x):
            return self.c(self.listed[1](self.listed[0](self.again(self.body(self.a(x))))))

    net = Shared()
    model = convert(net, example=torch.randn(3, 4))
    assert model.body[0] is model.again is model.listed[0] and isinstance(model.again, AnyLinear)
    assert model.listed[1] is model.body[2] and isinstance(model.body[2], SwitchLayerNorm)
    assert list(model.conversion.converted) == ["body.0"]
    x = torch.randn(3, 4)
    assert torch.equal(model(x), net(x))
    set_bits(model, 2)
    assert not torch.equal(model(x), net(x))


def test_tied_weights_stay_tied():
    net, x, _ = build("tied")
    model = convert(net, example=x, keep=())
    assert model.a.weight is model.b.weight and model.head.weight is model.embedding.weight
    assert any("shares its weight with a" in note for note in model.conversion.notes)
    assert model.conversion.kept == {"embedding": "Embedding is not a kind of layer that can be converted"}


def _middle(layer):
    return nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4), nn.Linear(4, 4))


def _old_weight_norm():
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(4, 4))


def _patched():
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x
    return layer


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: Scaled(4, 4), "Scaled has a forward of its own"),
        (_patched, "Linear has a forward of its own"),
        (lambda: nn.LazyLinear(4), "lazy"),
        (lambda: nn.Linear(4, 4, dtype=torch.complex64), "complex64"),
        (lambda: nn.Linear(4, 0), "empty"),
        (lambda: nn.Linear(4, 4, device="meta"), "meta"),
        (lambda: nn.Bilinear(4, 4, 4), "Bilinear is not a kind of layer"),
        (
            lambda: torch.ao.nn.qat.Linear(4, 4, qconfig=torch.ao.quantization.default_qconfig),
            "quantized module",
        ),
        (lambda: nn.LSTM(4, 4), "LSTM is not a kind of layer"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element:UserWarning", "ignore:.*Lazy modules:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
def test_left_alone_with_a_reason(layer, reason):
    net = _middle(layer())
    report = convert(net, inplace=True).conversion
    assert list(report.converted) == ["2"]
    assert reason in report.kept["1"]


def test_lazy_layers_are_left_alone_although_the_example_gives_them_a_shape():
    net = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4), nn.Linear(4, 4), nn.Linear(4, 4))
    state = torch.get_rng_state()
    x = torch.ones(2, 4)
    report = convert(net, example=x).conversion
    assert list(report.converted) == ["2"] and "lazy" in report.kept["1"]
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(net[1], nn.LazyLinear)  # the original is as lazy as before


def test_a_network_that_cannot_be_copied_says_what_to_do():
    net = _middle(_old_weight_norm())
    with pytest.raises(AnyprecError, match=r"cannot be copied .*inplace=True"):
        convert(net)


def test_layers_that_do_not_run_are_left_alone():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
            self.read, self.head = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            x = F.linear(self.b(self.a(x)), self.read.weight)  # not called as a module
            return self.d(self.c(input=x))

    report = convert(Reads(), example=torch.randn(2, 4)).conversion
    assert report.kept["read"] == report.kept["head"] == "never ran on the example"
    assert "by keyword" in report.kept["c"]
    assert list(report.converted) == ["b"]


def test_subclasses_that_only_add_methods_are_converted():
    class Named(nn.Linear):
        def label(self):
            return f"{self.in_features} features"

    net = _middle(Named(4, 4))
    model = convert(net, example=torch.randn(2, 4))
    assert isinstance(model[1], AnyLinear) and isinstance(model[1], Named)
    assert model[1].label() == "4 features" and type(model[1]).__name__ == "AnyNamed"
    x = torch.randn(2, 4)
    assert torch.equal(copy.deepcopy(model)(x), net(x))


def test_norms_with_a_forward_of_their_own_switch_between_copies():
    class NormAct(nn.BatchNorm1d):
        def __init__(self, features):
            super().__init__(features)
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return F.relu(self.drop(super().forward(x)))

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), NormAct(4), nn.Linear(4, 4)).eval()
    x = torch.randn(8, 4)
    model = convert(net, example=x)
    assert type(model[2]) is SwitchNorm and type(model[2].tables["2"]) is NormAct
    assert torch.equal(model(x), net(x))
    calibrate(model, [x], (3,))  # statistics of the copies are calibrated; the dropout within stays off
    assert model[2].tables["3"].num_batches_tracked == 1 and not model[2].tables["3"].drop.training


@pytest.mark.skipif(not hasattr(nn, "RMSNorm"), reason="torch before 2.4 has no RMSNorm")
def test_rms_norms_switch_too():
    net = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    model = convert(net, example=x)
    assert list(model.conversion.norms) == ["1"] and torch.equal(model(x), net(x))


def test_norms_without_anything_to_switch_are_left_alone():
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 4), nn.Linear(4, 4))
    report = convert(net, example=torch.randn(2, 4)).conversion
    assert report.kept["1"] == "has neither parameters nor statistics" and not report.norms


def test_batch_norms_keep_their_options():
    options = [{"affine": False}, {"track_running_stats": False, "eps": 0.1}, {"momentum": None}]
    pairs = [m for o in options for m in (nn.Linear(4, 4), nn.BatchNorm1d(4, **o))]
    net = nn.Sequential(nn.Linear(4, 4), *pairs, nn.Linear(4, 4))
    model = convert(net, example=torch.randn(8, 4))
    assert model[2].tables["1"].weight is None and model[2].tables["1"].running_mean is not None
    assert model[4].tables["1"].running_mean is None and model[4].tables["1"].eps == 0.1
    assert model[6].tables["1"].momentum is None
    x = torch.randn(8, 4)
    assert torch.equal(model.train()(x), copy.deepcopy(net).train()(x))


def test_hooks_stay_with_the_module_that_is_called():
    net, x, _ = build("residual")
    seen = []
    net.norm.register_forward_hook(lambda m, args, out: seen.append("norm"))
    net.conv.register_forward_hook(lambda m, args, out: seen.append("conv"))
    model = convert(net, example=x)
    seen.clear()
    set_bits(model, 2)
    model(x)
    assert seen == ["conv", "norm", "conv", "norm"]


# --- torch's fused encoder layer ----------------------------------------------------------------------------


def test_encoder_layers_leave_the_fused_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)).eval()
    x = torch.randn(2, 5, 4)
    model = convert(net, example=x)
    assert torch.equal(model(x), net(x))  # with gradients torch does not take the fused path either
    assert any("fused" in note for note in model.conversion.notes)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    with torch.no_grad():
        exact = model(x)
        assert torch.allclose(exact, net(x), atol=1e-5)
        set_bits(model, 1)
        assert not torch.allclose(model(x), exact, atol=1e-2)  # the fused path would have stayed float
        model[1](model[0](x), src_key_padding_mask=mask)


# --- Depth-wise convolutions --------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "times", "size", "group"), [(16, 1, 8, 8), (12, 2, 8, 6), (4, 1, 8, 4)])
def test_depthwise_becomes_grouped(channels, times, size, group):
    net = nn.Sequential(
        nn.Conv2d(3, channels, 1),
        nn.ReLU(),
        nn.Conv2d(channels, channels * times, 3, groups=channels, padding=1),
        nn.Conv2d(channels * times, 2, 1),
    )
    x = images()
    model = convert(net, example=x, group_depthwise=size)
    assert model[2].weight.shape == (channels * times, group, 3, 3) and model[2].groups == channels // group
    assert (model[2].weight != 0).sum() == net[2].weight.numel()
    assert torch.allclose(model(x), net(x), atol=1e-6)
    assert f"groups of {group} channels" in model.conversion.notes[0]
    set_bits(model, 1)
    model(x).sum().backward()
    assert (model[2].weight.grad != 0).all()  # the new weights learn too
    plain = convert(net, example=x)
    assert plain[2].groups == channels and torch.equal(plain(x), net(x))


def test_depthwise_that_cannot_be_grouped():
    conv = nn.Conv1d(7, 7, 3, groups=7)
    net = nn.Sequential(nn.Conv1d(2, 7, 1), conv, nn.Conv1d(7, 7, 3, groups=7), nn.Conv1d(7, 2, 1))
    report = convert(net, example=torch.randn(2, 2, 9), group_depthwise=4).conversion
    assert report.notes[0] == "1: stays depth-wise, as none of 2 to 4 divides 7 channels"


# --- Options, report, errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("quantizer", ["nested", "dorefa", "lsq"])
def test_quantizers(quantizer):
    net, x, _ = build("residual")
    model = convert(net, example=x, quantizer=quantizer)
    original = net(x)
    assert torch.equal(model(x), original) == (quantizer != "dorefa")
    assert any("dorefa" in note for note in model.conversion.notes) == (quantizer == "dorefa")
    assert any("at 32 bits the output" in note for note in model.conversion.notes) == (quantizer == "dorefa")
    set_bits(model, 8)
    if quantizer != "dorefa":
        assert (model(x) - original).norm() < 0.05 * original.norm()


def test_learned_scales_are_the_least_squares_fit():
    net, x, _ = build("residual")
    layer = convert(net, example=x).conv
    for k in (1, 2, 4, 8):
        values = layer.quantizer.values(layer.codes(k), k)
        best = (layer.weight * values).sum() / values.square().sum()
        assert layer.quantizer.scales[str(k)].item() == pytest.approx(best.item(), rel=1e-5)
    assert not len(convert(net, example=x, scale="mean").conv.quantizer.scales)


def test_clip_options():
    net, x, _ = build("residual")
    fixed = convert(net, example=x, clip="fixed")
    assert not len(fixed.conv.act.ranges) and not fixed.conv.act.signed
    calibrated = convert(net, example=x, clip="calibrated")
    assert not calibrated.conv.act.ranges["2"].requires_grad and calibrated.conv.act.ranges["2"] > 0
    undecided = convert(net, clip="fixed")
    set_bits(undecided, 2)
    with pytest.raises(UncalibratedBits, match="sign"):
        undecided(x)


def test_without_an_example_integer_bits_wait_for_calibration():
    net, x, _ = build("residual")
    model = convert(net)
    assert torch.equal(model(x), net(x))
    assert any("calibrate" in note for note in model.conversion.notes)
    set_bits(model, 2)
    with pytest.raises(UncalibratedBits, match=r"bits=2: .*`convert` an example, or run `calibrate`"):
        model(x)
    calibrate(model, [x], (1, 2, 4, 8))
    assert torch.isfinite(model(x)).all()


def test_widths_without_float():
    net, x, _ = build("residual")
    model = convert(net, (2, 4), example=x)
    assert widths_of(model) == (2, 4) and model.conv.bits == 4
    assert list(model.norm.tables) == ["2", "4"]


def test_half_precision_and_frozen_weights():
    net = _middle(nn.Linear(4, 4)).to(torch.bfloat16)
    net[1].weight.requires_grad_(False)
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    model = convert(net, example=x)
    assert torch.equal(model(x), net(x))
    set_bits(model, 2)
    assert model(x).dtype == torch.bfloat16 and not model[1].weight.requires_grad


def test_plain_dicts_of_bits_reach_the_norms():
    net, x, _ = build("wave")
    model = convert(net, example=x)
    assert model.stages[1][0]["norm"].follows == "stages.1.0.conv"
    set_bits(model, {"stages.1.0.conv": 2})
    assert model.stages[1][0]["norm"].key == "2" and model.stages[0][0]["norm"].key == "32"
    profile = Profile("mixed", {"stages.0.0.conv": 1})
    calibrate(model, [x], (), profiles=[profile])
    set_bits(model, profile)
    assert {norm.key for norm in switch_norms(model).values()} == {"mixed"}


def test_report():
    net, x, _ = build("attention")
    report = convert(net, example=x).conversion
    text = str(report)
    for name in ("mlp", "attention.out_proj", "embed", "head", "norm"):
        assert f"  {name} " in text
    assert text.startswith("Attention: 5 layers any-precision (") and "widths 1, 2, 4, 8, float" in text
    total = sum(p.numel() for p in net.parameters())
    assert report.share == pytest.approx(5 * 16 * 16 / total)
    record = json.loads(json.dumps(report.to_dict()))
    assert record["kept"] == report.kept and record["converted"] == report.converted
    assert "\n" not in "".join([*report.kept.values(), *report.notes])


def test_large_weights_are_noted():
    net = _middle(nn.Linear(4, 4))
    with torch.no_grad():
        net[1].weight.mul_(10)
    notes = convert(net, example=torch.randn(2, 4)).conversion.notes
    assert any("tanh flattens" in note and "1 layers" in note for note in notes)
    assert not convert(net, example=torch.randn(2, 4), quantizer="lsq").conversion.notes


def bad_cases():
    linear = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    return {
        "not a module": (lambda: convert(lambda x: x), AnyprecError, "give it an nn.Module"),
        "no layer at all": (lambda: convert(nn.ReLU()), NothingConverted, "it has no Conv1d, Conv2d"),
        "only first and last": (
            lambda: convert(linear[:2], example=x), NothingConverted, r"0: the first layer .*; with keep=\(\)"
        ),
        "nothing eligible": (
            lambda: convert(Scaled(4, 4), keep=()), NothingConverted, "it: Scaled has a forward of its own"
        ),
        "twice": (lambda: convert(convert(linear)), AnyprecError, "any-precision already"),
        "width 0": (lambda: convert(linear, (0, 8)), AnyprecError, "bits=0 is not a bit-width"),
        "quantizer": (lambda: convert(linear, quantizer="int8"), AnyprecError, "choose one of nested"),
        "scale": (lambda: convert(linear, scale="max"), AnyprecError, "choose 'mean' or 'learned'"),
        "clip": (lambda: convert(linear, clip="relu"), AnyprecError, "choose 'fixed'"),
        "group": (lambda: convert(linear, group_depthwise=1), AnyprecError, "group_depthwise=1"),
        "pattern": (lambda: convert(linear, keep=("heads.*",)), UnknownLayer, "matches no layer"),
        "shape": (lambda: convert(linear, example=torch.randn(2, 5)), DataError, "the example does not run"),
        "nan": (lambda: convert(linear, example=x * float("nan")), DataError, "the example has NaN"),
    }  # fmt: skip


@pytest.mark.parametrize("case", bad_cases())
def test_errors_are_one_line_and_change_nothing(case):
    action, error, message = bad_cases()[case]
    with pytest.raises(error, match=message) as caught:
        action()
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
@pytest.mark.parametrize("k", [4, 32])
def test_export(k):
    net, x, _ = build("residual")
    model = convert(net, example=x)
    set_bits(model, k)
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), model(x))


def test_a_network_of_one_layer():
    net = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    model = convert(net, example=x, keep=())
    assert isinstance(model, AnyLinear) and torch.equal(model(x), net(x))
    assert "(itself)" in str(model.conversion)
