"""The networks: shapes, stem and body, size, skips, and a forward and backward pass at every width."""

import pytest
import torch
from sampling import sampled
from torch import nn

from anyprec.errors import DataError, UncalibratedBits
from anyprec.nn.layers import AnyLayer
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.switching import any_layers, set_bits
from anyprec.zoo import ZOO as ALL
from anyprec.zoo import build

ZOO = {name: entry for name, entry in ALL.items() if entry.task == "classification"}  # the rest: test_deeplab.py
WIDTHS = (1, 2, 4, 8, 32)

# name -> (options that make it small, image side)
SMALL = {
    "resnet8": ({"multiplier": 0.25}, 16),
    "resnet20": ({"multiplier": 0.25}, 16),
    "resnet20x5": ({}, 8),
    "resnet-cifar": ({"blocks": (1, 2, 1), "multiplier": 0.25, "skip": "quantized"}, 16),
    "alexnet": ({"multiplier": 0.125, "hidden": 32, "size": 16}, 16),
    "mobilenetv2": ({"multiplier": 0.25}, 16),
    "cnn8": ({"expand": 1}, 40),
    "vgg-speed": ({"channels": (8, 12, 16)}, 16),
    "vgg-speed-small": ({}, 9),
    "resnet18": ({"multiplier": 0.125}, 64),
    "resnet50": ({"multiplier": 0.125, "blocks": (1, 1, 2, 1)}, 64),
    "resnet20-he": ({}, 16),
    "resnet56-he": ({}, 8),
    "resnet-he": ({"depth": 8}, 16),
}


LARGE = (
    "resnet20x5",
    "resnet56-he",
    "vgg-speed-small",
)  # two widths are enough: their class is tried at all of them by others


def small(name, **more):
    torch.manual_seed(0)
    options, side = SMALL[name]
    model = build(name, **{**options, **more})
    for layer in any_layers(model).values():
        if layer.act is not None:
            for held in layer.act.ranges.values():  # as data would give them
                torch.nn.init.constant_(held, 2.0)
    return model, torch.randn(4, more.get("in_channels", 3), side, side)


def test_every_network_is_tried():
    assert set(SMALL) == set(ZOO)


MOST = sampled(ZOO, 1, slow=["resnet20x5", "resnet56-he", "deeplab-resnet50", "resnet50"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", MOST)
def test_forward_and_backward_at_every_width(name):
    model, x = small(name, num_classes=5)
    outputs = []
    for bits in (1, 32) if name in LARGE else WIDTHS:
        set_bits(model, bits)
        model.zero_grad()
        y = model(x)
        assert y.shape == (4, 5)
        y.square().sum().backward()
        used = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert all(torch.isfinite(g).all() for g in used.values())
        # Every weight takes part; of the tables, just those of this width.
        assert {f"{n}.weight" for n in any_layers(model)} <= set(used)
        tables = {n.split(".tables.")[1].split(".")[0] for n in used if ".tables." in n}
        assert tables == {str(bits)}
        assert all(g.abs().sum() > 0 for n, g in used.items() if n.endswith("conv0.weight"))
        outputs.append(y.detach())
    for i, one in enumerate(outputs):
        assert all(not torch.equal(one, other) for other in outputs[:i]), "two widths gave the same output"


@pytest.mark.parametrize("name", MOST)
def test_stem_is_float_and_body_finishes_it(name):
    model, x = small(name)
    model.eval()
    stems = []
    for bits in (1, 32) if name in LARGE else WIDTHS:
        set_bits(model, bits)
        z = model.stem(x)
        torch.testing.assert_close(model.body(z), model(x), rtol=0, atol=0)
        stems.append(z)
    assert all(torch.equal(z, stems[0]) for z in stems)  # the trainer computes it once for all widths


@pytest.mark.thorough
@pytest.mark.parametrize("name", ZOO)
def test_first_and_last_layer_are_float(name):
    model, _ = small(name)
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    convs = [m for m in layers if isinstance(m, nn.Conv2d)]
    linears = [m for m in layers if isinstance(m, nn.Linear)]
    assert not isinstance(convs[0], AnyLayer)
    assert not isinstance(linears[-1], AnyLayer)
    assert any(isinstance(m, AnyLayer) for m in layers)


@pytest.mark.parametrize("skip", ["float", "quantized"])
def test_digits_of_8x8x1(skip):
    model = build("resnet8", in_channels=1, num_classes=10, multiplier=0.5, skip=skip)
    for bits in WIDTHS:
        set_bits(model, bits)
        assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "side"), [(n, 224 if n in ("resnet18", "resnet50") else SMALL[n][1]) for n in ZOO])
def test_one_input_channel(name, side):
    if side == 224:
        side = 32  # any size will do for these
    model, _ = small(name, in_channels=1)
    assert model.eval()(torch.randn(2, 1, side, side)).shape == (2, 10)


def parameters(name, **options):
    """(quantized weights, norm parameters of one width, everything else but activation ranges)."""
    with torch.device("meta"):  # nothing is drawn or stored
        model = build(name, widths=WIDTHS, scale="mean", **options)
    quantized = sum(layer.weight.numel() for layer in any_layers(model).values())
    norms = sum(p.numel() for m in model.modules() if isinstance(m, SwitchNorm) for p in m.parameters())
    ranges = sum(p.numel() for n, p in model.named_parameters() if ".act.ranges." in n)
    total = sum(p.numel() for p in model.parameters())
    assert norms % len(WIDTHS) == 0
    return quantized, norms // len(WIDTHS), total - quantized - norms - ranges


@pytest.mark.parametrize(
    ("name", "classes", "one_width"),
    [
        # The published sizes of the float networks: ResNet-18 and -50 for ImageNet, He's ResNet-20 and -56.
        ("resnet18", 1000, 11_689_512),
        ("resnet50", 1000, 25_557_032),
        ("resnet20-he", 10, 269_722),
        ("resnet56-he", 10, 853_018),
        # Ours: their 1x1 skips, and no norm after the stem or in front of the sum.
        ("resnet20", 10, 272_474),
        ("resnet20x5", 10, 6_758_810),
        ("resnet8", 10, 78_042),
        ("cnn8", 10, 131_930),
    ],
)
def test_number_of_parameters(name, classes, one_width):
    assert sum(parameters(name, num_classes=classes)) == one_width


def test_resnet20x5_layer_by_layer():
    """16, 32, 64 times 5, counted by hand."""
    quantized, norms, rest = parameters("resnet20x5")
    a, b, c = 80, 160, 320
    assert quantized == 9 * (6 * a * a + a * b + 5 * b * b + b * c + 5 * c * c) == 6_681_600
    assert norms == 2 * (7 * a + 6 * b + 6 * c)  # 18 before convolutions, one at the end
    assert rest == 9 * 3 * a + (a * b + b * c) + 2 * (b + c) + (10 * c + 10)


def test_resnet50_is_22_3_megabytes_at_1_bit_with_float_skips():
    """The paper's size: 1 bit a quantized weight, 4 bytes all else, one table of four numbers a channel."""
    quantized, norms, rest = parameters("resnet50", num_classes=1000)
    assert round((quantized / 8 + 4 * (rest + 2 * norms)) / 1e6, 1) == 22.3
    quantized, norms, rest = parameters("resnet50", num_classes=1000, skip="quantized")
    assert round((quantized / 8 + 4 * (rest + 2 * norms)) / 1e6, 1) == 11.6


@pytest.mark.parametrize("name", ["resnet8", "resnet18", "resnet50"])
def test_skips(name):
    options = {"multiplier": 0.125, **({"blocks": (1, 1, 1, 1)} if name == "resnet50" else {})}
    plain, quantized = build(name, **options), build(name, skip="quantized", **options)
    changes = [block for block in plain.blocks if block.skip_conv is not None]
    assert len(changes) == {"resnet8": 2, "resnet18": 3, "resnet50": 4}[name]
    for block in changes:
        assert isinstance(block.skip_conv, nn.Conv2d) and not isinstance(block.skip_conv, AnyLayer)
        assert isinstance(block.skip_norm, SwitchNorm) == (name != "resnet8")
    for block in quantized.blocks:
        if block.skip_conv is not None:
            assert isinstance(block.skip_conv, AnyLayer) and isinstance(block.skip_norm, SwitchNorm)


@pytest.mark.parametrize(("name", "raw"), [("resnet8", False), ("resnet18", True), ("resnet50", True)])
@pytest.mark.parametrize("skip", ["float", "quantized"])
def test_what_the_skip_reads(name, raw, skip):
    """CIFAR: the activated input. ImageNet: the raw one; a quantized skip always the activated one."""
    options = {"multiplier": 0.125, **({"blocks": (1, 1, 1, 1)} if name == "resnet50" else {})}
    model = build(name, skip=skip, **options).eval()
    set_bits(model, 2)
    block = next(b for b in model.blocks if b.skip_conv is not None)
    read = {}
    block.register_forward_pre_hook(lambda m, args: read.update(x=args[0]))
    block.act0.register_forward_hook(lambda m, args, out: read.update(a=out))
    block.skip_conv.register_forward_pre_hook(lambda m, args: read.update(skip=args[0]))
    model(torch.randn(2, 3, 32, 32))
    expected = "x" if raw and skip == "float" else "a"
    assert torch.equal(read["skip"], read[expected])
    assert not torch.equal(read["x"], read["a"])


def test_every_quantized_input_of_the_papers_networks_is_on_the_grid():
    for name in ("resnet8", "alexnet", "mobilenetv2", "cnn8", "resnet18", "resnet50"):
        more = {"skip": "quantized"} if "skip" in ZOO[name].options() else {}
        model, x = small(name, **more, **({"dropout": 0.0} if "dropout" in ZOO[name].options() else {}))
        set_bits(model, 2)
        seen = []
        for layer in any_layers(model).values():
            layer.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0]))
        model(x)
        assert len(seen) == len(any_layers(model))
        grid = torch.tensor([0, 1 / 3, 2 / 3, 1])
        for a in seen:
            assert torch.isin(a, grid).all(), name


def test_mobilenet_has_groups_of_eight_and_no_depthwise():
    model = build("mobilenetv2")
    groups = [layer for layer in any_layers(model).values() if layer.groups > 1]
    assert len(groups) == 17  # one a block
    assert {layer.in_channels // layer.groups for layer in groups} == {8}
    depthwise = build("mobilenetv2", group_size=1)
    assert {m.in_channels // m.groups for m in any_layers(depthwise).values() if m.groups > 1} == {1}
    identities = sum(block.identity for block in model.blocks)
    assert identities == 10  # as in the original


def test_cnn8_and_alexnet_name_the_size_they_need():
    with pytest.raises(DataError, match="CNN-8 reads 40x40 images, not 32x32"):
        build("cnn8", expand=1)(torch.zeros(1, 3, 32, 32))
    with pytest.raises(DataError, match="reads 32x32 images, not 40x40; resize them, or build it with size=40"):
        build("alexnet", multiplier=0.1, hidden=8)(torch.zeros(1, 3, 40, 40))


def test_cnn8_ends_clipped_but_not_rounded():
    model, x = small("cnn8", dropout=0.0)  # in training mode: the norms of a new net know no statistics yet
    set_bits(model, 1)
    seen = []
    model.fc.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model(x)
    assert seen[0].min() >= 0 and seen[0].max() <= 1
    assert ((seen[0] > 0.01) & (seen[0] < 0.99)).any()


def test_textbook_net_says_when_it_is_not_calibrated():
    model = build("resnet-he", depth=8)
    model(torch.randn(2, 3, 8, 8))  # at 32 bits it runs
    set_bits(model, 4)
    with pytest.raises(UncalibratedBits, match="bits=4 has no activation range"):
        model(torch.randn(2, 3, 8, 8))


def gammas(model):
    """Norm name -> key -> the value its gammas start at."""
    norms = {n: m for n, m in model.named_modules() if isinstance(m, SwitchNorm)}
    return {n: {k: t.weight.unique().item() for k, t in m.tables.items()} for n, m in norms.items()}


def test_norms_in_front_of_a_clip_start_inside_it():
    ours = gammas(build("resnet8", multiplier=0.25, skip="quantized"))
    inside = {"1": 1, "2": 0.5, "4": 0.5, "8": 0.5, "32": 1}
    plain = dict.fromkeys(inside, 1)
    assert ours["blocks.1.norm0"] == ours["blocks.1.norm1"] == inside
    assert ours["blocks.1.skip_norm"] == ours["norm"] == plain  # no clip follows
    shared = gammas(build("resnet8", multiplier=0.25, skip="float"))
    assert shared["blocks.1.norm0"] == plain and shared["blocks.1.norm1"] == inside
    assert all(start == plain for start in gammas(build("resnet8", multiplier=0.25, scale="mean")).values())
