"""Converted networks, packed: signed inputs, biases, functional calls, ReLU6, padding, every supported operation."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anyprec.nn.convert import convert
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.switching import any_layers

WIDTHS = (1, 2, 3, 4, 8, 32)


def images(side=16, count=4, channels=3):
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(1))


def converted(net, x, **options):
    """Weights that keep signals alive and norms with statistics first, so that ranges are fitted to what will come."""
    dice = torch.Generator().manual_seed(3)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.uniform_(-0.3, 0.3, generator=dice)
            module.running_var.uniform_(0.4, 1.2, generator=dice)
    return convert(net.eval(), widths=WIDTHS, example=x, **options)


class Plain(nn.Module):
    """Biases, no norms, a VGG-like end: conv, ReLU, pool, flatten, linear."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 12, 3, padding="same")
        self.conv3 = nn.Conv2d(12, 12, 3, padding=1, groups=4)
        self.fc1 = nn.Linear(12 * 16, 20)
        self.fc2 = nn.Linear(20, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x), inplace=True), 3, stride=2, padding=1)
        x = torch.relu(self.conv3(x))
        x = F.dropout(x.flatten(1), 0.5, self.training)
        return F.softmax(self.fc2(self.fc1(x).clamp(min=0)), dim=1)


def test_plain_cnn(agree, kinds):
    torch.manual_seed(0)
    x = images()
    graph = agree(converted(Plain(), x), x)
    assert graph.input_shape == (16, 16, 3)  # it flattens a map
    found = kinds(graph)
    assert found == {"conv": 3, "quantize": 3, "max_pool": 2, "flatten": 1, "linear": 2, "clip": 1, "softmax": 1}
    order = [op.kind for op in graph.ops]
    assert order[:4] == ["conv", "quantize", "max_pool", "conv"]  # ReLU gone, the pool moves codes


class Signed(nn.Module):
    """Linear bottlenecks: any-layers that read signed values; an in-place sum; depth-wise with ReLU6."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.Conv2d(8, 16, 1)
        self.deep = nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=16, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.relu6 = nn.ReLU6(inplace=True)
        self.down = nn.Conv2d(16, 8, (1, 3), padding=(0, 1))
        self.fc = nn.Linear(8, 5, bias=False)

    def forward(self, x):
        x = self.norm(self.stem(x))
        y = self.relu6(self.norm2(self.deep(self.up(x))))
        x += self.down(y)
        return {"logits": self.fc(F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1)), "map": x}


@pytest.mark.parametrize("keep_float", [True, False])
def test_signed_inputs_and_two_outputs(agree, kinds, keep_float):
    torch.manual_seed(0)
    x = images()
    model = converted(Signed(), x)
    graph = agree(model, x, keep_float=keep_float)
    signed = [op.name for op in graph.ops if op.kind == "quantize" and op.attributes["signed"]]
    assert signed == ["up.act", "deep.act"]
    assert graph.input_shape == (None, None, 3) and len(graph.outputs) == 2
    # ReLU6 ends where the codes end; at 32 bits it is needed.
    assert kinds(graph).get("clip", 0) == keep_float
    assert graph.weights["down"].shape == (8, 1, 3, 16) and graph.weights["deep"].shape == (16, 3, 3, 1)


class Atrous(nn.Module):
    """The head of DeepLab V3: atrous branches, a pooled branch resized to the others, a map resized to the input."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 6, k, padding=k // 2 * rate, dilation=rate, bias=False), nn.BatchNorm2d(6), nn.ReLU()
            )
            for k, rate in ((1, 1), (3, 2), (3, 4))
        )
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6), nn.ReLU())
        self.project = nn.Sequential(nn.Conv2d(24, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))
        self.classes = nn.Conv2d(8, 4, 1)

    def forward(self, image):
        x = self.stem(image)
        branches = [branch(x) for branch in self.branches]
        pooled = F.interpolate(self.pooled(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
        y = self.classes(self.project(torch.cat([*branches, pooled], dim=1)))
        return F.interpolate(y, size=image.shape[-2:], mode="bilinear", align_corners=False)


def test_atrous_head(agree, kinds):
    torch.manual_seed(0)
    x = images(14)
    model = converted(Atrous(), x)
    graph = agree(model, x)
    assert graph.input_shape == (None, None, 3)
    like = [op.attributes["like"] for op in graph.ops if op.kind == "resize"]
    assert like[1] == "input" and like[0] in {op.name for op in graph.ops}
    # All four branches read one value; those with equal ranges share its codes.
    assert kinds(graph)["concat"] == 1 and kinds(graph)["resize"] == 2

    # The graph made from 14 x 14 images is right for others, odd ones too.
    from anyprec.packing.packing import make_graph
    from anyprec.run.oracle import run_graph

    wide = torch.randn(2, 3, 19, 30)
    again = make_graph(model, example=wide)
    for profile in again.profiles:
        nhwc = wide.permute(0, 2, 3, 1).contiguous().numpy()
        a, b = (next(iter(run_graph(g, nhwc, profile.name).values())) for g in (graph, again))
        assert (a == b).all()


class OneLine(nn.Module):
    """A 1-d network: convolutions along W."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(2, 8, 5, stride=2, padding=2, bias=False)
        self.norm1 = nn.BatchNorm1d(8)
        self.conv2 = nn.Conv1d(8, 8, 3, padding=2, dilation=2)
        self.conv3 = nn.Conv1d(8, 8, 3, padding="same", groups=2)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = F.max_pool1d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.avg_pool1d(F.relu(self.conv2(x)), 2)
        return self.fc(self.conv3(x).mean(-1))


def test_one_dimension(kinds):
    from anyprec.nn.switching import bits
    from anyprec.packing.packing import make_graph
    from anyprec.run.oracle import run_graph

    torch.manual_seed(0)
    x = torch.randn(4, 2, 40)
    model = converted(OneLine(), x)
    graph = make_graph(model, example=x, keep_float=True)
    assert graph.input_shape == (2, 40) and graph.weights["conv2"].shape == (8, 1, 3, 8)
    for profile in graph.profiles:
        with torch.no_grad(), bits(model, int(profile.name)):
            wanted = model(x).numpy()
        (given,) = run_graph(graph, x.numpy(), profile.name).values()
        assert abs(wanted - given.reshape(wanted.shape)).max() < 1e-3 * wanted.std()


class Everything(nn.Module):
    """The operations no other network here has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.3, 0.25]).view(1, 3, 1, 1))
        self.conv1 = nn.Conv2d(3, 8, 3, bias=False)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=(0, 1), stride=2)
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, 8).view(8, 1, 1))
        self.conv3 = nn.Conv2d(12, 8, 3, padding=1)
        self.shared = nn.Conv2d(8, 8, 1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.conv1((x - self.mean) / self.std)
        x = F.hardtanh(x, -1.5, 1.5)
        y = self.conv2(F.pad(torch.relu(x), (0, 0, 0, 1))) * self.gamma
        small = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))  # (N, 12, ...)
        z = self.conv3(F.avg_pool2d(small, 3, 1, padding=1, ceil_mode=True, count_include_pad=False))
        y = F.interpolate(y, scale_factor=2, mode="nearest")
        z = F.interpolate(z, scale_factor=2, mode="bilinear", align_corners=False)
        out = self.shared(self.shared((1 - y[:, :, :]) - z)) * 2 + 0.5
        out = F.avg_pool2d(F.interpolate(out, size=(9, 7), mode="bilinear", align_corners=True), 2, 2, ceil_mode=True)
        return self.fc(F.avg_pool2d(out, out.shape[2:]).squeeze(-1).squeeze(-1))


def test_every_operation(agree, kinds):
    torch.manual_seed(0)
    x = images(14)
    model = converted(Everything(), x)
    graph = agree(model, x)
    found = kinds(graph)
    assert {"avg_pool", "adaptive_avg_pool", "resize", "pad", "clip", "add", "max_pool", "affine"} <= set(found)
    assert found["pad"] == 1  # the one of channels; the other is the convolution's own padding
    conv2 = next(op for op in graph.ops if op.name == "conv2")
    assert conv2.attributes["pad"] == (0, 1, 1, 1)
    half = next(op for op in graph.ops if op.kind == "max_pool")
    assert half.attributes["stride"] == (2, 2) and half.attributes["kernel"] == (1, 1)
    assert [op.name for op in graph.ops if op.attributes.get("weight") == "shared"] == ["shared", "shared_2"]


def transformers_net(name):
    transformers = pytest.importorskip("transformers")
    if name == "mobilenet":
        config = transformers.MobileNetV2Config(depth_multiplier=0.25, image_size=32, num_labels=5)
        return transformers.MobileNetV2ForImageClassification(config)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type=name, num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["basic", "bottleneck", pytest.param("mobilenet", marks=pytest.mark.slow)])
def test_foreign_networks(agree, name):
    torch.manual_seed(0)
    x = images(32)
    model = converted(transformers_net(name), x)
    graph = agree(model, x, example={"pixel_values": x})
    # This MobileNetV2 pads by the size of its input, so what was traced at 32 x 32 serves no other.
    assert graph.input_shape == ((32, 32, 3) if name == "mobilenet" else (None, None, 3))
    assert set(any_layers(model)) <= set(graph.weights)
    assert not any(op.kind == "pad" for op in graph.ops)
    assert sum(isinstance(m, SwitchNorm) for m in model.modules()) > 0 and not any(
        op.kind == "affine" for op in graph.ops
    )


def test_a_norm_alone_and_codes_as_output(agree, kinds):
    """A quantized value that is an output is given as what its codes stand for."""
    from anyprec.nn.act_quantizer import ActQuantizer
    from anyprec.nn.layers import AnyActivation, AnyConv2d
    from anyprec.nn.norms import SwitchBatchNorm2d
    from anyprec.nn.quantizers import Nested

    torch.manual_seed(0)
    widths = (1, 2, 4, 8, 32)
    net = nn.Sequential(
        SwitchBatchNorm2d(3, widths),
        AnyActivation(ActQuantizer(widths, signed=True)),
        AnyConv2d(3, 4, 3, quantizer=Nested(widths, "learned")),
        SwitchBatchNorm2d(4, widths),
        AnyActivation(ActQuantizer(widths)),
    )
    graph = agree(net, images(8))
    assert kinds(graph) == {"quantize": 2, "conv": 1, "dequantize": 1}
