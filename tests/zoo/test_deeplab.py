"""DeepLab: sizes, strides and dilations, which layers are quantized, training of all widths, and where weights go."""

import json

import pytest
import torch
from torch import nn

from anyprec.errors import AnyprecError, CheckpointError
from anyprec.nn.layers import AnyLayer
from anyprec.nn.switching import any_layers, set_bits, switch_norms
from anyprec.training.joint import stem_once
from anyprec.zoo import ZOO, build, load_backbone

WIDTHS = (1, 2, 4, 8, 32)
SMALL = {
    "deeplab-small": {"multiplier": 0.5, "pyramid": 8},
    "deeplab-resnet18": {"multiplier": 0.125, "pyramid": 8},
    "deeplab-resnet50": {"multiplier": 0.125, "pyramid": 8, "blocks": (1, 1, 2, 2)},
}


def small(name, **more):
    torch.manual_seed(0)
    return build(name, **{"num_classes": 5, **SMALL[name], **more})


def test_every_segmentation_network_is_tried():
    assert set(SMALL) == {name for name, entry in ZOO.items() if entry.task == "segmentation"}


@pytest.mark.parametrize("skip", ["float", "quantized"])
@pytest.mark.parametrize("name", SMALL)
def test_forward_and_backward_at_every_width(name, skip):
    model = small(name, skip=skip)
    x = torch.randn(2, 3, 45, 58)
    outputs = []
    for bits in WIDTHS:
        set_bits(model, bits)
        model.zero_grad()
        y = model(x)
        assert y.shape == (2, 5, 45, 58)
        y.square().sum().backward()
        used = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert all(torch.isfinite(g).all() for g in used.values())
        assert {f"{n}.weight" for n in any_layers(model)} <= set(used)
        assert {n.split(".tables.")[1].split(".")[0] for n in used if ".tables." in n} == {str(bits)}
        outputs.append(y.detach())
    for i, one in enumerate(outputs):
        assert all(not torch.equal(one, other) for other in outputs[:i]), "two widths gave the same output"


@pytest.mark.parametrize("name", SMALL)
def test_any_size_and_channels(name):
    model = small(name, in_channels=1).eval()
    for size in ((33, 33), (17, 40), (8, 8)):
        assert model(torch.randn(1, 1, *size)).shape == (1, 5, *size)


@pytest.mark.parametrize("name", SMALL)
def test_stem_once_gives_logits_of_the_images_size(name):
    model = small(name).eval()
    x = torch.randn(2, 3, 37, 50)
    with stem_once(model, x) as (z, body):
        torch.testing.assert_close(body(z), model(x), rtol=0, atol=0)
    assert z.shape[2:] == (10, 13) and model.body(z).shape[2:] == (5, 7) if name == "deeplab-small" else True


@pytest.mark.parametrize(("name", "stride"), [("deeplab-small", 8), ("deeplab-resnet18", 16), ("deeplab-resnet50", 16)])
def test_output_stride(name, stride):
    for given in (None, 8, 16):
        model = small(name, **({} if given is None else {"output_stride": given})).eval()
        map_size = model.body(model.stem(torch.zeros(1, 3, 128, 128))).shape[2]
        expected = min(given or stride, 16 if name == "deeplab-small" else 32)
        assert map_size == 128 // expected


def test_stages_that_keep_their_size_dilate():
    model = small("deeplab-resnet50", output_stride=8)
    found = [(block.conv1.stride[0], block.conv1.dilation[0]) for block in model.blocks]
    # A dilated stage begins with the dilation of the one before.
    assert found == [(1, 1), (2, 1), (1, 1), (1, 2), (1, 2), (1, 4)]
    assert all(block.conv1.padding == block.conv1.dilation for block in model.blocks)


@pytest.mark.slow
def test_the_papers_network():
    """ResNet-50, output stride 16, rates 6, 12, 18, 256 channels."""
    model = build("deeplab-resnet50", num_classes=21)
    assert [conv.dilation[0] for conv in model.aspp.convs] == [1, 6, 12, 18]
    assert {conv.out_channels for conv in model.aspp.convs} == {256} and model.aspp.convs[0].in_channels == 2048
    assert model.aspp.project.in_channels == 5 * 256 and model.classifier.out_channels == 21
    quantized = sum(layer.weight.numel() for layer in any_layers(model).values())
    assert quantized == 20_676_608 + 2048 * 256 * (1 + 27 + 1) + 5 * 256 * 256  # the backbone's as in the zoo's table
    assert [m.dilation[0] for m in model.modules() if isinstance(m, nn.Conv2d) and m.dilation[0] == 2] == [2, 2]


@pytest.mark.parametrize("skip", ["float", "quantized"])
@pytest.mark.parametrize("name", SMALL)
def test_which_layers_are_float(name, skip):
    model = small(name, skip=skip)
    plain = {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and not isinstance(m, AnyLayer)}
    ends = {"conv0", "classifier"}
    if skip == "quantized":
        assert plain == ends
    else:
        assert plain - ends == {n for n in plain if n.endswith("skip_conv")} != set()


@pytest.mark.parametrize("skip", ["float", "quantized"])
def test_every_quantized_input_is_on_the_grid(skip):
    model = small("deeplab-small", skip=skip)
    set_bits(model, 2)
    seen = []
    for layer in any_layers(model).values():
        layer.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model(torch.randn(2, 3, 40, 40))
    assert len(seen) == len(any_layers(model))
    grid = torch.tensor([0, 1 / 3, 2 / 3, 1])
    assert all(torch.isin(a, grid).all() for a in seen)


def test_image_pooling_is_the_mean_of_the_input_convolved():
    model = small("deeplab-small")
    a = torch.rand(2, model.aspp.convs[0].in_channels, 6, 9)
    seen = []
    model.aspp.norm0.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model.aspp(a)
    spread = seen[0][:, -8:]  # (2, 8, 6, 9): the last branch
    expected = model.aspp.pool_conv(a.mean(dim=(2, 3), keepdim=True)).expand(-1, -1, 6, 9)
    torch.testing.assert_close(spread, expected)


def test_norms_follow_and_mixed_bits_work():
    model = small("deeplab-small", skip="quantized")
    follows = {name: norm.follows for name, norm in switch_norms(model).items()}
    assert follows["aspp.norm1"] == "aspp.project" and follows["aspp.norm0"] == "aspp.pool_conv"
    set_bits(model, 8)
    set_bits(model, {"aspp.project": 2})
    assert model.aspp.act0.act_bits == 2 and model.aspp.norm1.key == "2"
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5, 32, 32)


def test_options_build_the_same_again():
    model = small("deeplab-small", rates=(2, 4), skip="quantized", output_stride=16)
    kept = json.loads(json.dumps(model.zoo_options))
    again = build(model.zoo_name, **kept)
    again.load_state_dict(model.state_dict())
    assert [conv.dilation[0] for conv in again.aspp.convs] == [1, 2, 4]


BAD = [
    ({"output_stride": 6}, "output_stride=6 is not known; choose 4, 8, 16 or 32"),
    ({"rates": ()}, r"rates=\(\) is not a list of dilations"),
    ({"rates": 6}, "rates=6 is not a list of dilations"),
    ({"rates": (0, 1)}, "is not a list of dilations"),
    ({"pyramid": 0}, "pyramid=0 is not a number of channels"),
    ({"skip": "none"}, "skip='none' is not known"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_mistakes_get_one_line(options, message):
    with pytest.raises(AnyprecError, match=message) as caught:
        small("deeplab-small", **options)
    assert "\n" not in str(caught.value)


# --- Weights of a classification network ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source", "options"),
    [
        ("deeplab-small", "resnet8", {"multiplier": 0.5, "skip": "quantized"}),
        ("deeplab-resnet18", "resnet18", {"multiplier": 0.125}),
        ("deeplab-resnet50", "resnet50", {"multiplier": 0.125, "blocks": (1, 1, 2, 2)}),
    ],
)
def test_backbone_of_an_any_precision_classifier(name, source, options):
    torch.manual_seed(1)
    classifier = build(source, num_classes=3, **options)
    for norm in switch_norms(classifier).values():
        for i, table in enumerate(norm.tables.values()):
            nn.init.constant_(table.bias, 0.1 * i)
    model = small(name, **options)
    before = {n: p.clone() for n, p in model.aspp.named_parameters()}
    load_backbone(model, classifier.state_dict(), "the classifier")
    state = model.state_dict()
    for n, value in classifier.state_dict().items():
        if not n.startswith("fc."):
            assert torch.equal(state[n], value), n
    assert all(torch.equal(p, before[n]) for n, p in model.aspp.named_parameters())


def test_backbone_with_more_widths_gives_those_that_are_needed():
    classifier = build("resnet8", widths=(1, 2, 4, 8, 32), multiplier=0.5)
    model = small("deeplab-small", widths=(2, 8))
    load_backbone(model, classifier.state_dict(), "it")
    assert torch.equal(model.blocks[0].conv0.weight, classifier.blocks[0].conv0.weight)
    fewer = build("resnet8", widths=(8,), multiplier=0.5)
    with pytest.raises(CheckpointError, match=r"it lack .*tables\.2\."):
        load_backbone(model, fewer.state_dict(), "it")


def test_backbone_from_float_weights():
    """Plain names, one norm each: it goes to every width, and the scales are fitted to the weights."""
    classifier = build("resnet8", widths=(32,), multiplier=0.5)
    floats = {n.replace(".tables.32", ""): v for n, v in classifier.state_dict().items() if "quantizer" not in n}
    model = small("deeplab-small")
    load_backbone(model, floats, "floats")
    block = model.blocks[0]
    assert torch.equal(block.conv0.weight, floats["blocks.0.conv0.weight"])
    assert all(torch.equal(t.running_var, floats["blocks.0.norm0.running_var"]) for t in block.norm0.tables.values())
    values = block.conv0.quantizer.values(block.conv0.codes(1), 1)
    best = (block.conv0.weight * values).sum() / (values * values).sum()
    torch.testing.assert_close(block.conv0.quantizer.scale(block.conv0.weight, 1), best)


def test_backbones_that_do_not_fit():
    model = small("deeplab-small")
    with pytest.raises(CheckpointError, match="it has no weights named conv0, blocks or norm"):
        load_backbone(model, {"fc.weight": torch.zeros(3)}, "it")
    with pytest.raises(CheckpointError, match=r"it: 'conv0.weight' has shape \(16, 3, 3, 3\), deeplab-small expects"):
        load_backbone(model, build("resnet8").state_dict(), "it")
    with pytest.raises(CheckpointError, match=r"it lack 'blocks\.1\.skip_norm\.weight'"):
        load_backbone(model, build("resnet18", multiplier=0.125, blocks=(1, 1, 1, 1)).state_dict(), "it")
