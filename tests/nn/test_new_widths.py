"""Widths a checkpoint lacks: copied norms, fitted clips, statistics measured with everything quantized."""

import pytest
import torch

from anyprec.errors import CheckpointError
from anyprec.nn.calibrate import estimate_norms
from anyprec.nn.new_widths import fit_widths, load_widths
from anyprec.nn.switching import any_layers, bits, set_bits, switch_norms
from anyprec.zoo import build

OPTIONS = {"channels": (16, 16, 16), "quantizer": "lsq"}


@pytest.fixture
def trained():
    """A float network with norms that know nothing of a clip at 1."""
    torch.manual_seed(0)
    model = build("vgg-speed", widths=(32,), **OPTIONS)
    for name, parameter in model.named_parameters():
        if "tables" in name:
            torch.nn.init.uniform_(parameter, *((1.0, 3.0) if name.endswith("weight") else (-1.0, 1.0)))
    x = torch.randn(64, 3, 16, 16)
    estimate_norms(model, (32,), [x])
    return model.eval(), x


def extended(model, widths=(1, 2, 4, 8, 32)):
    other = build("vgg-speed", widths=widths, **OPTIONS)
    load_widths(other, model.state_dict(), (32,), "float.pt")
    return other.eval()


def error(one, other):
    return ((one - other).norm() / other.norm()).item()


@torch.no_grad()
def test_float_is_untouched_and_wide_widths_come_close_to_it(trained):
    model, x = trained
    other = extended(model)
    fit_widths(other, (1, 2, 4, 8), [x])
    set_bits(other, 32)
    expected = model(x)
    assert torch.equal(other(x), expected)
    found = {}
    for k in (1, 2, 4, 8):
        with bits(other, k):
            found[k] = error(other(x), expected)
    assert found[8] < 0.2 and found[8] < found[4] < min(found[2], found[1])  # untrained, it enlarges every error


@torch.no_grad()
def test_a_model_without_float_is_fitted_to_the_same_values(trained):
    """Dedicated models that start from a float stage must not begin worse than the joint one beside them."""
    model, x = trained
    joint, alone = extended(model, (1, 32)), extended(model, (1,))
    fit_widths(joint, (1,), [x])
    fit_widths(alone, (1,), [x])
    for name, norm in switch_norms(joint).items():
        for leaf, value in norm.tables["1"].state_dict().items():
            assert torch.equal(switch_norms(alone)[name].tables["1"].state_dict()[leaf], value), (name, leaf)
    with bits(joint, 1):
        assert torch.equal(joint(x), alone(x))


@torch.no_grad()
def test_without_the_fit_the_clip_ruins_it(trained):
    """Guards the test above: norms of a float stage are no norms for a clip at 1."""
    model, x = trained
    other = extended(model)
    with bits(other, 8):
        assert error(other(x), model(x)) > 0.6


def test_quantizers_start_where_they_fit_the_trained_weights(trained):
    other = extended(trained[0])
    for layer in any_layers(other).values():
        spread = layer.weight.square().mean().sqrt()
        torch.testing.assert_close(layer.quantizer.range.detach(), 3 * spread.detach())
        assert layer.quantizer.scales["1"] < layer.quantizer.scales["8"]


@torch.no_grad()
def test_a_residual_branch_keeps_its_share():
    """Nothing normalizes the sum of branch and skip, so what the clip's norm is divided by has to come back."""
    torch.manual_seed(0)
    options = {"multiplier": 0.5, "quantizer": "lsq", "skip": "quantized"}
    model, x = build("resnet8", widths=(32,), **options), torch.randn(64, 3, 16, 16)
    for name, parameter in model.named_parameters():
        if "tables" in name and name.endswith("weight"):
            torch.nn.init.constant_(parameter, 3.0)
    estimate_norms(model, (32,), [x])
    other = build("resnet8", widths=(8, 32), **options)
    load_widths(other, model.state_dict(), (32,), "float.pt")
    fit_widths(other, (8,), [x])
    with bits(other, 8):
        assert error(other.eval()(x), model.eval()(x)) < 0.1


def test_activations_read_by_a_float_layer_are_left_alone():
    model, x = build("resnet8", widths=(8, 32), multiplier=0.5), torch.randn(16, 3, 16, 16)
    before = {name: norm.tables["8"].weight.clone() for name, norm in switch_norms(model).items()}
    fit_widths(model, (8,), [x])
    same = [name for name, norm in switch_norms(model).items() if torch.equal(norm.tables["8"].weight, before[name])]
    assert same == ["blocks.1.norm0", "blocks.2.norm0", "norm"]  # two float skips; no activation behind the last


def test_trained_integer_widths_keep_what_they_learned(trained):
    model = extended(trained[0], (4, 32))
    for layer in any_layers(model).values():
        torch.nn.init.constant_(layer.quantizer.range, 0.5)
    more = build("vgg-speed", widths=(2, 4, 32), **OPTIONS)
    load_widths(more, model.state_dict(), (4, 32), "two.pt")
    for layer in any_layers(more).values():
        assert layer.quantizer.range == 0.5
    assert torch.equal(more.norm0.tables["4"].weight, model.norm0.tables["4"].weight)


@torch.no_grad()
def test_a_float_network_starts_one_with_another_quantizer(trained):
    """What the quantizer of a float stage has learned was never used: the authors' codes may start from it as well."""
    model, x = trained
    other = build("vgg-speed", widths=(1, 2, 32), **(OPTIONS | {"quantizer": "dorefa", "scale": "mean"}))
    load_widths(other, model.state_dict(), (32,), "float.pt")
    for name, value in model.named_parameters():
        if ".quantizer." not in name:
            assert torch.equal(dict(other.named_parameters())[name], value), name
    for k in (1, 2, 32):
        with bits(other.eval(), k):
            assert torch.isfinite(other(x)).all()
    trained_at_two = build("vgg-speed", widths=(2, 32), **OPTIONS)
    with pytest.raises(CheckpointError, match="was made for another network"):
        load_widths(other, trained_at_two.state_dict(), (2, 32), "two.pt")


def test_another_network_is_refused(trained):
    other = build("vgg-speed", widths=(1, 32), channels=(16, 16, 24), quantizer="lsq")
    with pytest.raises(CheckpointError, match=r"float\.pt was made for another network"):
        load_widths(other, trained[0].state_dict(), (32,), "float.pt")
