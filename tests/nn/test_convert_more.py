"""`convert` beyond plain layers: forwards of their own, computed weights, attention, 3-d convolutions."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from anyprec.errors import UnsupportedOperation
from anyprec.nn.attention import AnyMultiheadAttention
from anyprec.nn.convert import convert
from anyprec.nn.layers import (
    AnyConv2d,
    AnyConv3d,
    AnyConvTranspose1d,
    AnyConvTranspose3d,
    AnyLayer,
    AnyLinear,
    normalize_weights_once,
)
from anyprec.nn.own_forward import ComputedWeightLayer
from anyprec.nn.plain import to_float_network
from anyprec.nn.switching import any_layers, bits, switch_norms
from anyprec.packing.packing import pack
from anyprec.training.joint import joint_step

WIDTHS = (1, 2, 4, 8, 32)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class SameConv(nn.Conv2d):
    """TensorFlow's padding: more at the end."""

    def forward(self, x):
        x = F.pad(x, (0, 1, 0, 1))
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class OtherCall(nn.Conv2d):
    """Its attributes say padding=0, its call pads."""

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, padding=1)


class StandardConv(nn.Conv2d):
    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return self._conv_forward(x, w, self.bias)


class Conv1D(nn.Module):
    """As transformers has it: weight (in, out)."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.2)
        self.bias = nn.Parameter(torch.randn(outputs))

    def __repr__(self):
        return f"Conv1D(nf={self.nf}, nx={self.nx})"

    def forward(self, x):
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class OwnLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.2)

    def forward(self, x):
        return x @ self.weight


def weight_hook(name):
    def make():
        conv = nn.Conv2d(8, 8, 3, padding=1)
        with pytest.warns(FutureWarning):
            return getattr(nn.utils, name)(conv)

    return make


def pruned():
    conv = nn.Conv2d(8, 8, 3, padding=1)
    prune.l1_unstructured(conv, "weight", 0.5)
    return conv


def imagery(layer, norm=8):
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), layer, nn.Flatten(), nn.LazyLinear(4))


LAYERS = {
    "same": (lambda: SameConv(8, 8, 2), (4, 8, 6, 6)),
    "other call": (lambda: OtherCall(8, 8, 3), (4, 8, 6, 6)),
    "standardized": (lambda: StandardConv(8, 8, 3, padding=1), (4, 8, 6, 6)),
    "Conv1D": (lambda: Conv1D(12, 8), (4, 5, 8)),
    "own linear": (lambda: OwnLinear(8, 12), (4, 8)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Conv2d(8, 8, 3)), (4, 8, 6, 6)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), (4, 8)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(8, 8)), (4, 8)),
    "old weight_norm": (weight_hook("weight_norm"), (4, 8, 6, 6)),
    "old spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), (4, 8)),
    "pruned": (pruned, (4, 8, 6, 6)),
    "Conv3d": (lambda: nn.Conv3d(8, 8, 3, padding=1), (4, 8, 4, 4, 4)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(8, 8, 3, stride=2), (4, 8, 6)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(8, 8, 2, stride=2), (4, 8, 3, 3, 3)),
}


def used_weight(net, x):
    """The float weight that the layer multiplies by."""
    found = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            name = getattr(func, "__name__", "")
            if name.startswith("conv") or name in ("linear", "addmm", "matmul", "__matmul__"):
                found.append(args[2] if name == "addmm" else args[1])
            return func(*args, **(kwargs or {}))

    with Spy(), torch.no_grad():
        net(x)
    return found[-1].detach()


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    """Float is what it was, each width has the quantized weight and input, and gradients reach the parameters."""
    make, shape = LAYERS[name]
    net = nn.Sequential(make()).eval()
    x = torch.rand(shape)
    before = {n: b.clone() for n, b in net.named_buffers()}
    full = used_weight(net, x)
    model = convert(net, example=x, keep=(), inplace=True)
    layer = model[0]
    assert isinstance(layer, AnyLayer), model.conversion.kept
    assert all(torch.equal(b, dict(model.named_buffers())[n]) for n, b in before.items())
    torch.testing.assert_close(layer.full_weight().detach(), full, rtol=0, atol=0)
    for k in (1, 2, 8):
        assert torch.equal(layer.codes(k), layer.quantizer.codes(full, k))
        with bits(model, k), torch.no_grad():
            quantized = used_weight(model, x)
            expected = layer.quantizer.weight(layer.quantizer.normalize(full), full, k)
            torch.testing.assert_close(quantized, expected, rtol=0, atol=1e-7)
            assert len(quantized.unique()) <= 2**k
    model.train()
    joint_step(model, x, torch.zeros(4), (1, 8, 32), loss=lambda out, _: out.square().mean())
    own = [p for n, p in layer.named_parameters() if "quantizer" not in n and "act" not in n and "bias" not in n]
    assert own and all(p.grad is not None and p.grad.abs().sum() > 0 for p in own)


@pytest.mark.parametrize("name", LAYERS)
def test_float_is_bit_equal_and_comes_back(name):
    make, shape = LAYERS[name]
    net, x = nn.Sequential(make()).eval(), torch.rand(shape)
    kind = type(net[0])
    with torch.no_grad():
        expected = net(x)
        model = convert(net, example=x, keep=(), inplace=True)
        assert torch.equal(model(x), expected)
        assert not any("at 32 bits" in note for note in model.conversion.notes)
        if name.startswith(("old", "pruned")):
            return  # torch cannot copy those
        plain = to_float_network(model)
        assert torch.equal(plain(x), expected)
        assert type(plain[0]).__name__ == kind.__name__ and not any(isinstance(m, AnyLayer) for m in plain.modules())


def test_gradients_of_computed_weights_are_those_of_separate_passes():
    net, x = (
        nn.Sequential(nn.Linear(6, 8), parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 3)),
        torch.rand(4, 6),
    )
    model = convert(net, example=x).double()
    x = x.double()
    found = []
    for once in (True, False):
        model.zero_grad()
        with normalize_weights_once(model) if once else bits(model, 8):
            for k in (2, 8):
                with bits(model, k):
                    model(x).square().sum().backward()
        found.append([p.grad.clone() for p in model[1].parametrizations.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_spectral_norm_in_training_takes_no_step_of_its_own():
    net = nn.Sequential(nn.Linear(6, 8), parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 3)).train()
    before = {n: b.clone() for n, b in net.named_buffers()}
    model = convert(net, example=torch.rand(4, 6))
    assert all(torch.equal(b, dict(model.named_buffers())[n]) for n, b in before.items())
    assert all(m.training for m in model.modules())


class Twice(nn.Linear):
    def forward(self, x):
        return super().forward(super().forward(x))


class Scaled(nn.Linear):
    """Multiplies element by element: no layer of ours."""

    def forward(self, x):
        return x * self.weight.sum(1)


class Chooses(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > -1e9 else x


def test_forwards_that_use_the_weight_otherwise_are_left_alone():
    net = nn.Sequential(nn.Linear(6, 8), Twice(8, 8), Scaled(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    kept = convert(net, example=torch.rand(4, 6)).conversion.kept
    assert "uses its weight 2 times, not once" in kept["1"] and "not as a factor of its input" in kept["2"]
    assert "give an example" in convert(net).conversion.kept["1"]


def test_a_decision_by_value_is_noted_with_its_line():
    net = nn.Sequential(nn.Linear(6, 8), Chooses(8, 8), nn.Linear(8, 2))
    model = convert(net, example=torch.rand(4, 6))
    (note,) = (note for note in model.conversion.notes if "decides by the values" in note)
    line = Chooses.forward.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} " in note
    assert isinstance(model[1], AnyLinear)


def test_a_network_without_decisions_has_no_such_note():
    model = convert(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)), example=torch.rand(4, 6)
    )
    assert not any("decides" in note for note in model.conversion.notes)


# --- Attention --------------------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.attention = nn.MultiheadAttention(16, 4, **options)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)
        if self.attention.in_proj_bias is not None:
            nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x, other=None, **options):
        q = self.embed(x)
        other = q if other is None else other
        y, weights = self.attention(q, other, other[..., : self.attention.vdim], **options)
        return self.head(self.norm(q + y)), weights


ATTENTIONS = {
    "plain": ({}, {}),
    "batch first": ({"batch_first": True}, {"need_weights": False}),
    "no bias": ({"bias": False}, {"average_attn_weights": False}),
    "bias_kv": ({"add_bias_kv": True}, {"attn_mask": torch.zeros(7, 7).masked_fill(torch.eye(7).bool(), -1.0)}),
    "zero": ({"add_zero_attn": True, "batch_first": True}, {"attn_mask": torch.ones(7, 7).triu(1).bool()}),
    "causal": ({}, {"attn_mask": torch.ones(7, 7).triu(1).bool(), "is_causal": True, "need_weights": False}),
    "padded": ({"batch_first": True}, {"key_padding_mask": torch.arange(7).expand(3, 7) > 4}),
    "padded and masked": (
        {"batch_first": True, "add_zero_attn": True, "add_bias_kv": True},
        {
            "key_padding_mask": torch.arange(7).expand(3, 7) > 4,
            "attn_mask": torch.ones(12, 7, 7).triu(3).bool(),
            "need_weights": False,
        },
    ),
    "separate": ({"kdim": 10, "vdim": 9}, {}),
}


def attends(name):
    made, called = ATTENTIONS[name]
    net = Attends(**made).eval()
    x = torch.randn(3, 7, 6) if made.get("batch_first") else torch.randn(7, 3, 6)
    other = torch.randn(7, 3, 10) if "kdim" in made else None
    return net, {"x": x, "other": other, **called}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name):
    net, example = attends(name)
    model = convert(net, example=example)
    assert isinstance(model.attention, AnyMultiheadAttention)
    parts = ["attention.out_proj", "attention.query_proj", "attention.key_proj", "attention.value_proj"]
    assert sorted(any_layers(model)) == sorted(parts)
    assert set(net.state_dict()) <= {n.replace("norm.tables.32", "norm") for n in model.state_dict()}
    with torch.no_grad():
        for a, b in zip(model(**example), net(**example), strict=True):
            assert a is b is None or torch.equal(a, b)
        errors = []
        for k in (2, 4, 8):
            with bits(model, k):
                errors.append(float((model(**example)[0] - net(**example)[0]).norm()))
        assert errors[0] > errors[1] > errors[2] and errors[2] < 0.1 * float(net(**example)[0].norm())
    assert not any("at 32 bits" in note for note in model.conversion.notes)
    assert switch_norms(model)["norm"].follows == "attention.out_proj"


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_of_ours_is_torchs(name, monkeypatch):
    """The same parts, unquantized: masks, weights, dropout and layouts are torch's."""
    net, example = attends(name)
    model = convert(net, example=example)
    monkeypatch.setattr(AnyMultiheadAttention, "_is_torchs_own", lambda self: False)
    with torch.no_grad():
        for a, b in zip(model(**example), net(**example), strict=True):
            assert a is b is None or torch.testing.assert_close(a, b) is None


def test_attention_trains_packs_not_and_comes_back(tmp_path):
    net, example = attends("plain")
    x = example["x"]
    model = convert(net, example=example).train()
    found = joint_step(model, x, torch.zeros(3), WIDTHS, loss=lambda out, _: out[0].square().mean())
    assert all(torch.isfinite(value) for value, _ in found.values())
    assert model.attention.in_proj_weight.grad.abs().sum() > 0
    assert all(model.attention.query_proj.quantizer.scales[str(k)].grad is not None for k in WIDTHS[:-1])
    state = copy.deepcopy(model.state_dict())
    other = convert(net)
    other.load_state_dict(state)
    with bits(model, 4), bits(other, 4):
        assert torch.equal(model.eval()(x)[0], other.eval()(x)[0])
    clone = copy.deepcopy(model)
    clone.attention.in_proj_weight.data.zero_()
    assert clone.attention.query_proj.weight.abs().sum() == 0 != model.attention.query_proj.weight.abs().sum()
    plain = to_float_network(convert(net, example=example))
    assert type(plain.attention) is nn.MultiheadAttention and set(plain.state_dict()) == set(net.state_dict())
    assert torch.equal(plain.eval()(x)[0], net.eval()(x)[0])
    with pytest.raises(UnsupportedOperation):
        pack(model, tmp_path / "a.apm", example=x)


def test_attention_with_a_forward_of_its_own_is_left_alone():
    class Own(nn.MultiheadAttention):
        def forward(self, q, k, v):
            return super().forward(q, k, v)[0]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.own = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Own(8, 2)

        def forward(self, x):
            x = self.b(self.a(x))
            return self.c(self.own(x, x, x))

    kept = convert(Net(), example=torch.randn(5, 2, 8)).conversion.kept
    assert kept["own"] == "Own has a forward of its own" and "part of MultiheadAttention" in kept["own.out_proj"]


def test_keep_names_an_attention():
    net, example = attends("plain")
    with pytest.raises(ValueError, match="nothing in Attends could be converted"):
        convert(net, example=example, keep=("first", "last", "attention"))


def test_parametrized_after_conversion_comes_back_too():
    x = torch.rand(4, 6)
    model = convert(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)), example=x).eval()
    parametrizations.weight_norm(model[1])
    plain = to_float_network(model)
    assert parametrize.is_parametrized(plain[1], "weight")
    assert torch.equal(plain(x), model(x)) and not isinstance(plain[1], AnyLayer)


# --- Packing ----------------------------------------------------------------------------------------------


class Around(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.layer, self.last = nn.Conv2d(3, 8, 3, padding=1), layer, nn.Linear(8, 4)

    def forward(self, x):
        return self.last(F.relu(self.layer(F.relu(self.first(x)))).mean((2, 3)))


@pytest.mark.parametrize("name", ["same", "weight_norm", "old weight_norm", "pruned", "standardized"])
def test_pack_reads_the_weight_that_runs(name, tmp_path):
    net, x = Around(LAYERS[name][0]()).eval(), torch.rand(4, 3, 6, 6)
    model = convert(net, example=x, inplace=True)
    pack(model, tmp_path / "net.apm", example=x)  # checked against the module before it returns


def test_pack_refuses_a_call_that_the_layer_does_not_describe(tmp_path):
    net, x = Around(LAYERS["other call"][0]()).eval(), torch.rand(4, 3, 6, 6)
    model = convert(net, example=x)
    assert isinstance(model.layer, ComputedWeightLayer) and isinstance(model.layer, AnyConv2d)
    with pytest.raises(UnsupportedOperation, match="module 'layer'"):
        pack(model, tmp_path / "net.apm", example=x)
    assert not list(tmp_path.iterdir())


# --- Multiply-adds ----------------------------------------------------------------------------------------


def test_multiply_adds():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Flatten(), nn.Linear(8 * 36, 5)
    )
    report = convert(net, example=torch.rand(2, 3, 6, 6)).conversion
    counts = {"0": 2 * 36 * 8 * 27, "1": 2 * 36 * 8 * 36, "3": 2 * 288 * 5}
    assert report.multiply_adds == counts
    assert report.multiply_add_share == counts["1"] / sum(counts.values())
    share = f"{report.multiply_add_share:.1%} of multiply-adds"
    assert share in str(report).splitlines()[0] and "keep='first'); " in str(report)
    assert report.to_dict()["multiply_adds"] == counts


def test_multiply_adds_of_transposed_convolutions_products_and_attention():
    net = nn.Sequential(nn.ConvTranspose2d(3, 8, 2, stride=2), nn.ConvTranspose2d(8, 4, 2, stride=2))
    report = convert(net, example=torch.rand(2, 3, 5, 5), keep=()).conversion
    assert report.multiply_adds == {"0": 2 * 25 * 3 * 8 * 4, "1": 2 * 100 * 8 * 4 * 4}

    net, example = attends("plain")
    report = convert(net, example=example).conversion
    projections = 4 * 21 * 16 * 16
    assert report.multiply_adds["attention"] == projections + 2 * 3 * 7 * 7 * 16
    assert report.multiply_add_share == projections / sum(report.multiply_adds.values())


def test_without_an_example_nothing_is_counted():
    report = convert(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))).conversion
    assert report.multiply_adds == {} and report.multiply_add_share is None and "multiply-adds" not in str(report)


def test_the_new_kinds():
    net = nn.Sequential(nn.Conv3d(2, 4, 3), nn.Conv3d(4, 4, 1), nn.ConvTranspose3d(4, 4, 2), nn.Conv3d(4, 2, 1))
    model = convert(net, example=torch.rand(2, 2, 5, 5, 5))
    assert type(model[1]) is AnyConv3d and type(model[2]) is AnyConvTranspose3d
    net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ConvTranspose1d(4, 4, 2, stride=2), nn.Conv1d(4, 2, 1))
    assert type(convert(net, example=torch.rand(2, 2, 9))[1]) is AnyConvTranspose1d


def test_parametrizations_can_be_removed_after():
    net = nn.Sequential(nn.Linear(6, 8), parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 3))
    x = torch.rand(4, 6)
    model = convert(net, example=x)
    with bits(model, 4):
        expected = model(x)
        parametrize.remove_parametrizations(model[1], "weight")
        assert type(model[1]) is AnyLinear and torch.equal(model(x), expected)
