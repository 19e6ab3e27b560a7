"""The list of networks and `build`: names, options, errors, and that a built model can be built again."""

import json

import pytest
import torch

from anyprec.errors import AnyprecError, UnsupportedBits
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.switching import any_layers, set_bits, switch_norms, widths_of
from anyprec.zoo import ZOO, build

PAPER = {  # Table 1
    "Cifar-10 Resnet-20": "resnet20x5",
    "Cifar-10 AlexNet": "alexnet",
    "Cifar-10 MobileNetV2": "mobilenetv2",
    "SVHN Resnet-8": "resnet8",
    "SVHN CNN-8": "cnn8",
    "ImageNet Resnet-18": "resnet18",
    "ImageNet Resnet-50": "resnet50",
}


def test_every_row_of_the_paper_has_its_network():
    assert {entry.row: name for name, entry in ZOO.items() if entry.row} == PAPER


def test_entries_say_what_they_are():
    for entry in ZOO.values():
        assert entry.about and "\n" not in entry.about
        assert len(entry.shape) == 3 and entry.shape[2] == 3


def test_default_build_is_at_its_widest_width_with_the_widths_given():
    model = build("resnet8", widths=(8, 1, 32), num_classes=7)
    assert widths_of(model) == (1, 8, 32)
    assert {layer.bits for layer in any_layers(model).values()} == {32}
    assert {norm.key for norm in switch_norms(model).values()} == {"32"}
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_a_dedicated_model_has_one_width():
    model = build("resnet8", widths=(2,))
    assert widths_of(model) == (2,)
    assert {layer.bits for layer in any_layers(model).values()} == {2}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet8", {"widths": (1, 2), "multiplier": 0.5, "skip": "quantized", "in_channels": 1}),
        ("resnet20x5", {"quantizer": "dorefa", "num_classes": 3, "widths": (1,)}),
        ("resnet-cifar", {"blocks": (1, 2, 1), "multiplier": 0.25}),
        ("resnet50", {"blocks": (1, 1, 1, 1), "multiplier": 0.125, "quantizer": "lsq", "scale": "learned"}),
        ("alexnet", {"multiplier": 0.1, "hidden": 20, "size": 16, "dropout": 0.0}),
        ("cnn8", {"expand": 1}),
        ("vgg-speed", {"channels": (8, 12, 16)}),
        ("mobilenetv2", {"multiplier": 0.25, "group_size": 4}),
        ("resnet-he", {"depth": 14, "clip": "calibrated"}),
    ],
)
def test_zoo_name_and_options_build_the_same_network_again(name, options):
    model = build(name, **options)
    kept = json.loads(json.dumps(model.zoo_options))
    assert kept == model.zoo_options
    again = build(model.zoo_name, **kept)
    assert again.zoo_options == model.zoo_options
    again.load_state_dict(model.state_dict())  # every name and shape agrees
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]


def test_options_do_not_list_what_the_name_fixes():
    assert set(ZOO["resnet20x5"].options()) == {"skip"}
    assert set(ZOO["resnet20"].options()) == {"multiplier", "skip"}
    assert set(ZOO["resnet20-he"].options()) == {"clip"}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ZOO)
def test_every_norm_is_linked_to_an_any_layer(name):
    small = {"cnn8": {"expand": 1}, "alexnet": {"multiplier": 0.1, "hidden": 8}, "mobilenetv2": {"multiplier": 0.1}}
    width = {"multiplier": 0.125} if "multiplier" in ZOO[name].options() else {}
    model = build(name, **small.get(name, width))
    layers = any_layers(model)
    norms = switch_norms(model)
    assert norms and all(norm.follows in layers for norm in norms.values())


def test_norms_of_a_block_follow_the_layers_that_feed_them():
    model = build("resnet8", skip="quantized")
    follows = {name: norm.follows for name, norm in switch_norms(model).items()}
    assert follows["blocks.0.norm0"] == "blocks.0.conv0"  # none runs before it: the first one after it
    assert follows["blocks.1.norm0"] == "blocks.0.conv1"
    assert follows["blocks.1.norm1"] == "blocks.1.conv0"
    assert follows["blocks.1.skip_norm"] == "blocks.1.skip_conv"
    assert follows["blocks.2.norm0"] == "blocks.1.conv1"  # not the skip, which is defined after conv1
    assert follows["norm"] == "blocks.2.conv1"


def test_an_activation_shared_with_the_skip_takes_the_bits_of_the_main_path():
    model = build("resnet8", skip="quantized")
    set_bits(model, 8)
    set_bits(model, {"blocks.1.conv0": 2, "blocks.1.skip_conv": 4})
    assert model.blocks[1].act0.act_bits == 2
    assert model.blocks[1].norm1.key == "2" and model.blocks[1].skip_norm.key == "4"


@pytest.mark.parametrize(
    ("name", "options"),
    [("resnet8", {"multiplier": 0.25}), ("resnet18", {"multiplier": 0.125}), ("resnet-he", {"depth": 8})],
)
def test_learned_scales_start_at_the_fit_to_the_weights(name, options):
    """Also where a network draws its weights anew after its layers were made."""
    model = build(name, scale="learned", widths=(1, 4), **options)
    for layer in any_layers(model).values():
        values = layer.quantizer.values(layer.codes(1), 1)
        best = (layer.weight * values).sum() / (values * values).sum()
        torch.testing.assert_close(layer.quantizer.scale(layer.weight, 1), best)


def test_plain_norm_of_the_float_skip_is_no_switched_one():
    block = build("resnet8").blocks[1]
    assert not isinstance(block.skip_norm, SwitchNorm)
    assert type(block.skip_norm).__module__ == "anyprec.nn.norms"  # can share statistics between processes


BAD = [
    (("resnet21",), {}, r"'resnet21' is not in the zoo; did you mean 'resnet20'\?"),
    (("zzz",), {}, "'zzz' is not in the zoo; There are resnet8, "),
    (("resnet20",), {"depth": 20}, "resnet20 has no option 'depth'; its options are multiplier, skip"),
    (("resnet20x5",), {"multiplier": 2}, "resnet20x5 has no option 'multiplier'; its options are skip"),
    (("resnet8",), {"skip": "none"}, "skip='none' is not known; choose 'float' or 'quantized'"),
    (("resnet8",), {"multiplier": 0}, "multiplier=0 is not a channel multiplier"),
    (("resnet8",), {"multiplier": "5"}, "multiplier='5' is not a channel multiplier"),
    (("resnet8",), {"num_classes": 0}, "num_classes=0 is not a count"),
    (("resnet8",), {"in_channels": 1.5}, "in_channels=1.5 is not a count"),
    (
        ("resnet8",),
        {"quantizer": "ternary"},
        "quantizer='ternary' is not known; choose one of nested, dorefa, lsq",
    ),
    (("resnet8",), {"scale": "max"}, "scale='max' is not known"),
    (("resnet-cifar",), {"blocks": (3, 3)}, r"blocks=\(3, 3\) is not a list of 3 block counts"),
    (("resnet-cifar",), {"blocks": 3}, "blocks=3 is not a list of 3 block counts"),
    (("resnet50",), {"blocks": (3, 4, 6, 0)}, "is not a list of 4 block counts"),
    (("cnn8",), {"expand": 0}, "expand=0 is not a channel multiplier"),
    (("vgg-speed",), {"channels": (64, 256)}, r"channels=\(64, 256\) is not allowed; give three whole numbers"),
    (("vgg-speed",), {"channels": (64, 256, 0.5)}, r"channels=\(64, 256, 0.5\) is not allowed"),
    (("cnn8",), {"dropout": 1.0}, "dropout=1.0 is not a probability"),
    (("alexnet",), {"size": 30}, "size=30 is not an image side"),
    (("alexnet",), {"hidden": 0}, "hidden=0 is not a layer size"),
    (("mobilenetv2",), {"group_size": 5}, "group_size=5 does not divide the 32 channels"),
    (("mobilenetv2",), {"group_size": 0}, "group_size=0 is not a number of channels"),
    (("resnet-he",), {"depth": 21}, r"depth=21 is not a CIFAR ResNet's; give 6n \+ 2"),
    (("resnet20-he",), {"clip": "max"}, "clip='max' is not known"),
]


@pytest.mark.parametrize(("args", "options", "message"), BAD)
def test_mistakes_get_one_line(args, options, message):
    with pytest.raises(AnyprecError, match=message) as caught:
        build(*args, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("widths", [(0,), (9,), (-1, 2), (), (1, 1), (16,)])
def test_widths_that_are_none(widths):
    with pytest.raises(UnsupportedBits):
        build("resnet8", widths=widths)
