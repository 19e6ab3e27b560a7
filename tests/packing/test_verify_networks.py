"""Every network of the zoo, and foreign ones of many kinds: packed with the check, which lets them all pass."""

import pytest
import torch
from foreign import FOREIGN
from sampling import sampled

from anyprec.nn.calibrate import calibrate
from anyprec.nn.convert import convert
from anyprec.nn.switching import any_layers
from anyprec.packing.packing import pack
from anyprec.zoo import ZOO, build

WIDTHS = (1, 8, 32)

# name -> options that make it small, image side
SMALL = {
    "resnet8": ({"multiplier": 0.5}, 16),
    "resnet20": ({"multiplier": 0.5}, 16),
    "resnet20x5": ({}, 8),
    "resnet-cifar": ({"blocks": (1, 1, 1), "multiplier": 0.5}, 16),
    "alexnet": ({"multiplier": 0.125, "hidden": 32, "size": 16}, 16),
    "mobilenetv2": ({"multiplier": 0.25}, 16),
    "cnn8": ({"expand": 1}, 40),
    "resnet18": ({"multiplier": 0.125}, 40),
    "resnet50": ({"multiplier": 0.125}, 40),
    "resnet20-he": ({}, 12),
    "resnet56-he": ({}, 8),
    "resnet-he": ({"depth": 8}, 12),
    "deeplab-resnet50": ({"multiplier": 0.125, "pyramid": 8, "blocks": (1, 1, 1, 2)}, 40),
    "deeplab-resnet18": ({"multiplier": 0.125, "pyramid": 8, "blocks": (1, 1, 1, 2)}, 40),
    "deeplab-small": ({"multiplier": 0.5, "pyramid": 8}, 33),
    "vgg-speed": ({"channels": (8, 12, 16)}, 17),
    "vgg-speed-small": ({}, 16),
}


def assert_agrees(report, widths):
    assert list(report.check.profiles) == [str(k) for k in widths]
    for found in report.check.profiles.values():
        assert found.answers >= 3 and found.same_answers >= 0.6 * found.answers  # free runs: moved codes add up
        assert found.moved_codes <= 1e-3 * found.codes


def test_every_network_of_the_zoo_is_here():
    assert set(SMALL) == set(ZOO)


LONG = (
    "resnet20-he",
    "resnet18",
    "resnet20x5",
    "resnet56-he",
    "resnet50",
    "mobilenetv2",
    "deeplab-resnet18",
    "deeplab-resnet50",
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sampled(SMALL, 1, slow=LONG))
def test_zoo(name, tmp_path):
    torch.manual_seed(0)
    options, side = SMALL[name]
    model = build(name, widths=WIDTHS, **options)
    x = torch.randn(4, 3, side, side)
    calibrate(model, [x], WIDTHS[:-1], progress=False)
    example = torch.zeros(1, 3, side, side)
    assert_agrees(pack(model, tmp_path / "net.apm", example=example, keep_float=True), WIDTHS)


LONG_FOREIGN = ("transformers MobileNetV2", "transformers ResNet", "norm-act DenseNet", "Inception")


@pytest.mark.thorough
@pytest.mark.parametrize("name", sampled(FOREIGN, 1, slow=LONG_FOREIGN))
def test_foreign(name, tmp_path):
    if "transformers" in name:
        pytest.importorskip("transformers")
    net, x = FOREIGN[name]()
    model = convert(net, widths=WIDTHS, example=x)
    assert len(any_layers(model)) >= 2
    example = {"pixel_values": x} if "transformers" in name else x
    assert_agrees(pack(model, tmp_path / "net.apm", example=example, keep_float=True), WIDTHS)
