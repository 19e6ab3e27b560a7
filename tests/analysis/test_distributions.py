"""Distributions: the toy example, values before and after switched norms, and how codes lose their bits."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from anyprec.analysis.distributions import (
    Histogram,
    _Moments,
    histogram,
    layer_histograms,
    toy_activations,
    truncate_weights,
)
from anyprec.errors import AnyprecError, UncalibratedBits, UnknownLayer, UnsupportedBits
from anyprec.nn.layers import AnyLinear
from anyprec.nn.switching import set_bits
from anyprec.zoo import build

WIDTHS = (1, 2, 4, 8)


# --- Histograms -----------------------------------------------------------------------------------------------------


def test_histogram_counts_every_value_once():
    found = histogram({1: [0.0, 1.0, 1.0, 4.0], 8: [2.0]}, bins=4)
    assert found.edges.tolist() == [0, 1, 2, 3, 4]
    assert found.counts[1].tolist() == [1, 2, 0, 1] and found.counts[8].tolist() == [0, 0, 1, 0]
    assert found.mean == {1: 1.5, 8: 2.0} and found.std[1] == pytest.approx(1.5) and found.outside == {1: 0, 8: 0}
    assert found.density(1).tolist() == [0.25, 0.5, 0, 0.25]
    record = json.loads(json.dumps(found.to_dict()))
    assert record["widths"]["1"] == {"counts": [1, 2, 0, 1], "mean": 1.5, "std": 1.5, "outside": 0}


def test_moments_of_parts_are_those_of_the_whole():
    values = np.random.default_rng(0).normal(1e4, 2, 1000)
    moments = _Moments()
    for part in np.split(values, [1, 10, 400]):
        moments.add(part)
    assert moments.mean == pytest.approx(values.mean(), rel=1e-12)
    assert moments.std == pytest.approx(values.std(), rel=1e-9)
    assert (moments.low, moments.high) == (values.min(), values.max())


def test_one_value_alone_has_bins():
    found = histogram({1: [3.0, 3.0]}, bins=2)
    assert found.edges.tolist() == [2.5, 3, 3.5] and found.counts[1].sum() == 2


# --- (a) ------------------------------------------------------------------------------------------------------------


def test_toy_example_by_hand():
    """One input of two dimensions, the paper's equations written out."""
    rng = np.random.default_rng(3)
    w, x = rng.standard_normal(2), rng.random((5, 2))
    found = toy_activations((1, 2, 32), inputs=5, dimensions=2, seed=3)
    for bits in (1, 2):
        n = 2**bits - 1
        unit = np.tanh(w) / (2 * np.abs(np.tanh(w)).max()) + 0.5
        weight = np.abs(w).mean() * (2 * np.round(unit * n) / n - 1)
        np.testing.assert_allclose(found[bits], np.round(x * n) / n @ weight, rtol=1e-6, atol=1e-9)
    assert found[32].shape == (5,)


@pytest.mark.parametrize("quantizer", ["dorefa", "nested", "lsq"])
def test_narrow_widths_shift_the_distribution(quantizer):
    """What the figure shows: 8 bit is close to 4, 1 bit is far off."""
    found = toy_activations(quantizer=quantizer)
    assert list(found) == [1, 2, 4, 8] and all(v.shape == (1000,) for v in found.values())
    away = {k: abs(found[k].std() / found[8].std() - 1) + abs(found[k].mean() - found[8].mean()) for k in (1, 2, 4)}
    assert away[1] > away[4] and away[4] < 0.25
    again = toy_activations(quantizer=quantizer)
    assert all(np.array_equal(found[k], again[k]) for k in found)
    assert not np.array_equal(toy_activations(quantizer=quantizer, seed=1)[8], found[8])


# --- (b) ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alexnet():
    torch.manual_seed(0)
    model = build("alexnet", widths=(*WIDTHS, 32), multiplier=0.1, hidden=16, size=16)
    with torch.no_grad():
        for key in model.norm1.tables:
            model.norm1.tables[key].weight.fill_(1)
        model.conv1.quantizer.scales["1"].mul_(3)
    for width in (*WIDTHS, 32):  # statistics of their own, as training gives them
        set_bits(model, width)
        model.train()
        with torch.no_grad():
            for _ in range(60):
                model(torch.randn(16, 3, 16, 16))
    return model.eval()


def images():
    return [torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(2)]


@pytest.mark.thorough
def test_values_are_those_of_the_layer(alexnet):
    found = layer_histograms(alexnet, images(), ["conv1", "norm2"], WIDTHS, bins=20)
    assert list(found) == ["conv1", "norm2"] and set(found["conv1"]) == {"before", "after"}
    assert all(isinstance(h, Histogram) for places in found.values() for h in places.values())
    seen = []
    handle = alexnet.conv1.register_forward_hook(lambda _, __, y: seen.append(y.detach().numpy()))
    set_bits(alexnet, 2)
    with torch.no_grad():
        for x in images():
            alexnet(x)
    handle.remove()
    values = np.concatenate([y.ravel() for y in seen])
    before = found["conv1"]["before"]
    assert before.mean[2] == pytest.approx(values.mean(), rel=1e-5)
    assert before.std[2] == pytest.approx(values.std(), rel=1e-5)
    assert before.counts[2].sum() + before.outside[2] == values.size
    np.testing.assert_array_equal(before.counts[2], np.histogram(values, before.edges)[0])
    assert before.outside[2] < 0.01 * values.size


def test_norms_bring_the_widths_together(alexnet):
    """The claim of the figure: far apart before the norm (here by a scale three times as large), alike behind it."""
    found = layer_histograms(alexnet, images(), ["conv1"], (1, 8))["conv1"]
    apart = {place: abs(np.log(found[place].std[1] / found[place].std[8])) for place in found}
    assert apart["before"] > 0.8 and apart["after"] < 0.1


def test_all_norms_behind_a_layer_unless_named(alexnet):
    assert list(layer_histograms(alexnet, images(), widths=(1,))) == [f"norm{i}" for i in range(1, 7)]


def test_loaders_of_pairs_and_a_number_of_batches(alexnet):
    pairs = [(x, torch.zeros(8)) for x in images()]
    one = layer_histograms(alexnet, pairs, ["conv1"], (4,), batches=1)["conv1"]["before"]
    two = layer_histograms(alexnet, iter(pairs), ["conv1"], (4,))["conv1"]["before"]
    total = [h.counts[4].sum() + h.outside[4] for h in (one, two)]
    assert 2 * total[0] == total[1]


def test_the_model_is_left_as_it_was(alexnet):
    set_bits(alexnet, 8)
    alexnet.train()
    before = {name: value.clone() for name, value in alexnet.state_dict().items()}
    layer_histograms(alexnet, images(), ["conv1"], (1, 2))
    assert alexnet.training and alexnet.conv1.bits == 8 and not alexnet.norm1._forward_hooks
    alexnet.eval()
    assert all(torch.equal(value, before[name]) for name, value in alexnet.state_dict().items())


# --- (c) ------------------------------------------------------------------------------------------------------------


def test_worked_codes():
    """x = 0.7 -> 0b10110011 = 179, then 11, 2, 1; the largest weight has x = 1, code 255."""
    model = nn.Sequential(AnyLinear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.atanh(torch.tensor([[0.5, 0.4 * 0.5]])))
    found = truncate_weights(model, "0", kernel=(0,))
    assert list(found) == [8, 4, 2, 1]
    assert [t.codes.tolist() for t in found.values()] == [[255, 179], [15, 11], [3, 2], [1, 1]]
    assert [t.bits.tolist()[1] for t in found.values()] == ["10110011", "1011", "10", "1"]
    assert [t.signed.tolist()[1] for t in found.values()] == [51, 3, 0, 0]
    assert found[2].values.tolist() == [0.75, 0.25]
    magnitude = model[0].weight.abs().mean().item()
    np.testing.assert_allclose(found[2].weights, [0.75 * magnitude, 0.25 * magnitude], rtol=1e-6)
    assert all(t.shifted for t in found.values())


def test_a_kernel_of_a_network(alexnet):
    found = truncate_weights(alexnet, "conv2", (3, 1))
    for bits, part in found.items():
        assert part.codes.shape == (3, 3) == part.bits.shape and part.shifted
        np.testing.assert_array_equal(part.codes, found[8].codes >> (8 - bits))
        np.testing.assert_array_equal(part.signed, found[8].signed >> (8 - bits))  # arithmetic shift
        assert (np.vectorize(len)(part.bits) == bits).all()
        assert (np.vectorize(lambda text: int(text, 2))(part.bits) == part.codes).all()
        set_bits(alexnet, bits)
        np.testing.assert_allclose(part.weights, alexnet.conv2.quantized_weight()[3, 1].detach(), rtol=1e-6)
    whole = truncate_weights(alexnet, "conv2", (), (1, 8))
    assert whole[1].codes.shape == tuple(alexnet.conv2.weight.shape)


def test_dorefa_does_not_nest():
    torch.manual_seed(0)
    model = build("resnet8", widths=WIDTHS, multiplier=0.5, quantizer="dorefa", scale="mean")
    found = truncate_weights(model, "blocks.2.conv1", ())
    assert found[8].shifted and not found[2].shifted


MISTAKES = {
    "layer": (lambda m: truncate_weights(m, "conv9"), UnknownLayer, "'conv9' is not an any-precision layer"),
    "kernel": (lambda m: truncate_weights(m, "conv2", (999, 0)), AnyprecError, r"kernel=\(999, 0\) is not within"),
    "axes": (lambda m: truncate_weights(m, "conv2", (0,) * 5), AnyprecError, "is not within the weight of 'conv2'"),
    "float": (lambda m: truncate_weights(m, "conv2", widths=(8, 32)), UnsupportedBits, "bits=32 has no integer codes"),
    "norm": (
        lambda m: layer_histograms(m, images(), ["norm9"]),
        UnknownLayer,
        "'norm9' is no switched norm .* did you",
    ),
    "string": (lambda m: layer_histograms(m, images(), "norm1"), UnknownLayer, "layers='norm1' is one name"),
    "no layers": (lambda m: layer_histograms(m, images(), []), UnknownLayer, "layers is empty"),
    "no batches": (lambda m: layer_histograms(m, []), AnyprecError, "the loader gave no batch"),
    "width": (lambda m: layer_histograms(m, images(), widths=(3,)), UncalibratedBits, "bits=3 is not one of"),
    "bins": (lambda m: layer_histograms(m, images(), bins=0), AnyprecError, "bins=0 is not a number of bins"),
    "inputs": (lambda m: toy_activations(inputs=0), AnyprecError, "inputs=0 is not a count"),
    "quantizer": (lambda m: toy_activations(quantizer="x"), AnyprecError, "quantizer='x' is not known"),
    "values": (lambda m: histogram({1: [float("nan")]}), AnyprecError, "none of them NaN or infinite"),
    "nan": (lambda m: layer_histograms(m, [torch.full((2, 3, 16, 16), torch.nan)]), AnyprecError, "batch 0 has NaN"),
}


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call, error, message, alexnet):
    with pytest.raises(error, match=message):
        call(alexnet)
