"""Any-layers against plain float64 references at every width, and what a joint step shares between widths."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyprec.errors import AnyprecError, UnsupportedBits
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.layers import (
    ANY_LAYERS,
    AnyActivation,
    AnyConv2d,
    AnyLayer,
    AnyLinear,
    PointwiseConv2d,
    normalize_weights_once,
)
from anyprec.nn.norms import SwitchBatchNorm2d
from anyprec.nn.quantizers import QUANTIZERS, make_quantizer
from anyprec.nn.switching import set_bits

WIDTHS = tuple(range(1, 9))
TRAINED = (1, 2, 4, 8, 32)

# (torch layer, its arguments, options, shape of the input)
LAYERS = [
    (nn.Conv1d, (4, 6, 3), {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}, (2, 4, 11)),
    (nn.Conv1d, (4, 6, 3), {"padding": 1, "padding_mode": "circular", "bias": False}, (2, 4, 11)),
    (nn.Conv2d, (4, 6, 3), {"stride": 2, "padding": 1, "groups": 2}, (2, 4, 7, 8)),
    (nn.Conv2d, (4, 6, (3, 1)), {"padding": "same", "bias": False}, (2, 4, 7, 8)),
    (nn.Conv2d, (4, 4, 3), {"padding": 1, "padding_mode": "reflect", "groups": 4}, (2, 4, 7, 8)),
    (nn.ConvTranspose2d, (4, 6, 3), {"stride": 2, "padding": 1, "output_padding": 1}, (2, 4, 5, 6)),
    (nn.ConvTranspose2d, (4, 6, 2), {"stride": 2, "groups": 2, "bias": False}, (2, 4, 5, 6)),
    (nn.Linear, (12, 5), {}, (2, 3, 12)),
    (nn.Linear, (12, 5), {"bias": False}, (7, 12)),
]
every_layer = pytest.mark.parametrize(
    ("kind", "args", "options", "shape"), LAYERS, ids=lambda v: v.__name__ if isinstance(v, type) else ""
)
every_quantizer = pytest.mark.parametrize("name", sorted(QUANTIZERS))


def pair(kind, args, options, name="nested", act=None) -> tuple[nn.Module, AnyLayer]:
    """A float64 torch layer, and the any-layer with the same weights."""
    torch.manual_seed(0)
    plain = kind(*args, **options).double()
    ours = ANY_LAYERS[kind](*args, **options, quantizer=make_quantizer(name, WIDTHS), act=act).double()
    ours.load_state_dict(plain.state_dict(), strict=False)
    ours.quantizer.fit(ours.weight, WIDTHS)
    return plain, ours


def reference_weight(layer: AnyLayer, name: str, bits: int) -> Tensor:
    """The arithmetic of docs/concepts/quantizers.md in numpy."""
    w = layer.weight.detach().numpy()
    if name == "lsq":
        x = np.clip(w / (2 * layer.quantizer.range.item()), -0.5, 0.5) + 0.5
    else:
        x = np.tanh(w) / (2 * np.abs(np.tanh(w)).max()) + 0.5
    scale = layer.quantizer.scales[str(bits)].item() if name == "lsq" else np.abs(w).mean()
    if name == "dorefa":
        return torch.from_numpy(scale * (2 * np.rint(x * (2**bits - 1)) / (2**bits - 1) - 1))
    code = np.minimum(np.floor(256 * x), 255).astype(np.int64) >> (8 - bits)
    return torch.from_numpy(scale * (2 * code + 1 - 2**bits) / 2**bits)


@every_layer
@every_quantizer
def test_every_width_against_a_reference(kind, args, options, shape, name):
    plain, ours = pair(kind, args, options, name, ActQuantizer())
    y = torch.rand(shape, dtype=torch.float64) * 1.5 - 0.25
    for bits in WIDTHS:
        ours.bits = bits
        levels = 2**bits - 1
        with torch.no_grad():
            plain.weight.copy_(reference_weight(ours, name, bits))
            expected = plain(torch.round(y.clamp(0, 1) * levels) / levels)
        assert torch.allclose(ours(y), expected, rtol=1e-12, atol=1e-13)


@every_layer
@pytest.mark.parametrize("name", ["nested", "lsq"])
def test_float_is_bit_identical_to_torch(kind, args, options, shape, name):
    plain, ours = pair(kind, args, options, name)
    plain, ours, y = plain.float(), ours.float(), torch.randn(shape)
    assert ours.bits == 32
    assert torch.equal(ours(y), plain(y))
    ours.act = ActQuantizer(rectify=False)  # a converted network keeps its own activation functions
    assert torch.equal(ours(y), plain(y))
    ours.act = ActQuantizer()
    assert torch.equal(ours(y), plain(torch.relu(y)))


@every_layer
def test_the_state_dict_is_that_of_the_torch_layer(kind, args, options, shape):
    plain, ours = pair(kind, args, options)
    assert list(ours.state_dict()) == list(plain.state_dict())


@every_layer
def test_half_precision_runs(kind, args, options, shape):
    _, ours = pair(kind, args, options, act=ActQuantizer())
    double = copy.deepcopy(ours)
    ours, y = ours.bfloat16(), torch.rand(shape)
    for bits in (1, 2):
        ours.bits = double.bits = bits
        expected = double(y.bfloat16().double())
        assert ours(y.bfloat16()).dtype == torch.bfloat16
        assert torch.allclose(ours(y.bfloat16()).double(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("bits", WIDTHS)
def test_different_bits_for_weight_and_input(bits):
    plain, ours = pair(nn.Linear, (12, 5), {}, act=ActQuantizer())
    y = torch.rand(7, 12, dtype=torch.float64)
    ours.bits = (8, bits)
    assert ours.bits == ((8, bits) if bits != 8 else 8)
    assert (ours.weight_bits, ours.act_bits) == (8, bits)
    expected = F.linear(ActQuantizer()(y, bits), reference_weight(ours, "nested", 8), plain.bias)
    assert torch.allclose(ours(y), expected, rtol=1e-12)


@pytest.mark.parametrize("bits", [0, 9, -1, True, "4", None, (8,), (8, 9)])
def test_a_layer_refuses_what_is_no_width(bits):
    layer = AnyLinear(3, 2)
    with pytest.raises(UnsupportedBits):
        layer.bits = bits
    assert layer.bits == 32


def test_codes_are_those_of_the_weight():
    layer = AnyConv2d(3, 4, 3)
    assert torch.equal(layer.codes(), layer.quantizer.codes(layer.weight, 8))
    assert torch.equal(layer.codes(2), layer.codes() >> 6)


@pytest.mark.parametrize("size", [(9, 11), (10, 12)])
def test_transposed_convolution_to_a_given_size(size):
    plain, ours = pair(nn.ConvTranspose2d, (4, 6, 3), {"stride": 2, "padding": 1})
    y = torch.rand(2, 4, 5, 6, dtype=torch.float64)
    assert torch.equal(ours(y, output_size=size), plain(y, output_size=size))
    ours.bits = 2
    assert ours(y, output_size=size).shape == (2, 6, *size)
    with pytest.raises(ValueError, match="output size"):
        ours(y, output_size=(99, 99))


def test_channels_last_stays():
    layer = AnyConv2d(4, 8, 3, act=ActQuantizer()).to(memory_format=torch.channels_last)
    layer.bits = 2
    y = torch.rand(2, 4, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    out = layer(y)
    assert out.is_contiguous(memory_format=torch.channels_last)
    out.sum().backward()
    assert y.grad.is_contiguous(memory_format=torch.channels_last)


def test_learned_scales_start_at_the_weights():
    layer = AnyConv2d(4, 8, 3, quantizer=make_quantizer("nested", TRAINED, "learned"))
    layer.bits = 8
    error = (layer.quantized_weight() - layer.weight).norm() / layer.weight.norm()
    assert error < 0.05


def test_built_on_the_meta_device():
    layer = AnyConv2d(4, 8, 3, quantizer=make_quantizer("lsq", TRAINED), device="meta")
    assert layer.weight.is_meta


def test_deepcopy_is_independent():
    layer = AnyLinear(3, 2, act=ActQuantizer())
    twin = copy.deepcopy(layer)
    twin.bits = 2
    with torch.no_grad():
        twin.weight.zero_()
    assert layer.bits == 32 and layer.weight.abs().max() > 0


# --- A shared activation ------------------------------------------------------------------------------------


def test_any_activation():
    act, y = AnyActivation(), torch.randn(50)
    assert torch.equal(act(y), torch.relu(y))
    act.act_bits = 2
    assert torch.equal(act(y), torch.round(y.clamp(0, 1) * 3) / 3)


def test_an_activation_that_clips_and_does_not_round():
    act, y = AnyActivation(quantize=False), torch.randn(50)
    assert torch.equal(act(y), torch.relu(y))
    act.act_bits = 2
    assert torch.equal(act(y), y.clamp(0, 1))


# --- normalize_weights_once ------------------------------------------------------------------------------------------


def network(name: str, scale: str = "mean") -> nn.Module:
    """One float layer, three any-layers and norms between, in float64."""
    torch.manual_seed(0)

    def quantizer():
        return make_quantizer(name, TRAINED, scale)

    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        SwitchBatchNorm2d(6, TRAINED),
        AnyActivation(),
        AnyConv2d(6, 6, 3, padding=1, bias=False, quantizer=quantizer()),
        SwitchBatchNorm2d(6, TRAINED),
        AnyConv2d(6, 8, 3, stride=2, quantizer=quantizer(), act=ActQuantizer()),
        nn.Flatten(),
        AnyLinear(32, 5, quantizer=quantizer(), act=ActQuantizer()),
    ).double()


def all_widths(model: nn.Module, images: Tensor) -> None:
    for bits in reversed(TRAINED):
        set_bits(model, bits)
        model(images).square().sum().backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def images() -> Tensor:
    return torch.rand(3, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@every_quantizer
@pytest.mark.parametrize("scale", ["mean", "learned"])
def test_the_gradients_are_those_of_separate_passes(name, scale, images):
    together, apart = network(name, scale), network(name, scale)
    all_widths(apart, images)
    with normalize_weights_once(together):
        all_widths(together, images)
    expected, found = gradients(apart), gradients(together)
    assert found.keys() == expected.keys()
    assert "3.weight" in found and found["3.weight"].abs().max() > 0
    for key, grad in expected.items():
        assert torch.allclose(found[key], grad, rtol=1e-9, atol=1e-12 * float(grad.abs().max())), key


@every_quantizer
def test_what_is_common_to_all_widths_is_computed_once(name, images, monkeypatch):
    model = network(name)
    calls = {"normalize": 0, "magnitude": 0}
    kind = QUANTIZERS[name]
    for method in calls:
        whole = getattr(kind, method)

        def counted(self, w, whole=whole, method=method):
            calls[method] += 1
            return whole(self, w)

        monkeypatch.setattr(kind, method, counted)
    with normalize_weights_once(model):
        all_widths(model, images)
    assert calls == {"normalize": 3, "magnitude": 3}  # one for each any-layer
    calls.update(normalize=0, magnitude=0)
    all_widths(model, images)
    assert calls["normalize"] == {"nested": 12, "lsq": 12, "dorefa": 15}[name]


def unshared(model: nn.Module) -> bool:
    return all(m.normalized is None and m.magnitude is None for m in model.modules() if isinstance(m, AnyLayer))


def test_an_error_inside_leaves_nothing_behind(images):
    model = network("nested")
    with pytest.raises(ZeroDivisionError), normalize_weights_once(model):
        all_widths(model, images)
        raise ZeroDivisionError
    assert unshared(model)
    model.zero_grad()
    all_widths(model, images)  # and the next step is whole
    fresh = network("nested")
    all_widths(fresh, images)
    assert torch.equal(model[3].weight.grad, fresh[3].weight.grad)


def test_an_error_on_entering_leaves_nothing_behind(monkeypatch):
    model = network("nested")

    def broken(w):
        raise ZeroDivisionError

    monkeypatch.setattr(model[7].quantizer, "normalize", broken)
    with pytest.raises(ZeroDivisionError), normalize_weights_once(model):
        pass
    assert unshared(model)


def test_one_inside_another(images):
    model, apart = network("nested"), network("nested")
    with normalize_weights_once(model):
        all_widths(model, images)
        with normalize_weights_once(model):
            all_widths(model, images)
        assert not unshared(model)
        all_widths(model, images)
    for _ in range(3):
        all_widths(apart, images)
    assert unshared(model)
    assert torch.allclose(model[3].weight.grad, apart[3].weight.grad, rtol=1e-9)


def test_a_backward_pass_that_comes_too_late(images):
    """Its gradients would end at the cut, and the weights would never learn."""
    model = network("nested")
    set_bits(model, 2)
    with normalize_weights_once(model):
        loss = model(images).sum()
    with pytest.raises(AnyprecError, match="after `normalize_weights_once` was left; call it inside"):
        loss.backward()


def test_frozen_weights_and_no_grad(images):
    model = network("nested")
    model[3].weight.requires_grad_(False)
    with normalize_weights_once(model):
        all_widths(model, images)
    assert model[3].weight.grad is None and model[5].weight.grad is not None
    with torch.no_grad(), normalize_weights_once(model):
        set_bits(model, 4)
        inside = model.eval()(images)
    assert torch.equal(inside, model(images))


# --- Other ways to run --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, tracing us
@pytest.mark.slow
def test_compiled(images):
    """One graph per width without a break; none anew at the second step, where the shared tensors are new."""
    torch._dynamo.reset()
    model, plain = network("nested"), network("nested")
    graphs = 0

    def count(graph, example):
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(model, backend=count, fullgraph=True)
    for _ in range(2):
        with normalize_weights_once(model):
            for bits in TRAINED:
                set_bits(model, bits)
                compiled(images).square().sum().backward()
    torch._dynamo.reset()
    assert graphs == len(TRAINED)
    for _ in range(2):
        with normalize_weights_once(plain):
            for bits in TRAINED:
                set_bits(plain, bits)
                plain(images).square().sum().backward()
    assert torch.allclose(model[3].weight.grad, plain[3].weight.grad, rtol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("bits", [1, 8, 32])
def test_exported(bits, images):
    model = network("nested").eval()
    set_bits(model, bits)
    exported = torch.export.export(model, (images,)).module()
    assert torch.equal(exported(images), model(images))


def test_every_torch_layer_has_its_any_layer():
    assert len(ANY_LAYERS) == 7 and all(ours.__name__ == f"Any{plain.__name__}" for plain, ours in ANY_LAYERS.items())
    assert all(issubclass(ours, plain) for plain, ours in ANY_LAYERS.items())


STRIDED = """
import torch
from anyprec.nn.layers import AnyConv2d, PointwiseConv2d
for kind, channels in [(AnyConv2d, 4), (AnyConv2d, 8), (AnyConv2d, 12), (PointwiseConv2d, 4), (PointwiseConv2d, 12)]:
    layer = kind(channels, 16, 1, stride=2).to(memory_format=torch.channels_last)
    layer.bits = 32
    x = torch.randn(16, channels, 64, 63).to(memory_format=torch.channels_last).requires_grad_(True)
    layer(x).square().sum().backward()
    exact = [t.detach().double().contiguous().requires_grad_(True) for t in (x, layer.weight)]
    torch.nn.functional.conv2d(*exact, layer.bias.double(), stride=2).square().sum().backward()
    for found, right in zip((x, layer.weight), exact, strict=True):
        torch.testing.assert_close(found.grad.double(), right.grad, rtol=1e-4, atol=1e-4)
"""


def test_float_skips_of_the_zoo_are_safe_to_train():
    from anyprec.zoo import build

    model = build("resnet8", widths=(1, 32), multiplier=0.25)
    strided = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (1, 1)]
    assert strided and all(isinstance(m, (AnyConv2d, PointwiseConv2d)) for m in strided)


@pytest.mark.slow
def test_strided_pointwise_convolutions_with_few_channels():
    """In a process of its own: torch's own backward pass writes outside its memory there, and mostly crashes."""
    done = subprocess.run([sys.executable, "-c", STRIDED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr or done.returncode
