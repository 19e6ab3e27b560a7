"""The benchmarks' graphs: valid, layers and shapes of the zoo's networks, codes that spread at every width."""

import numpy as np
import pytest

from anyprec.bench.random_networks import mobilenetv2_graph, resnet20_graph, resnet_graph
from anyprec.format.check import check_graph
from anyprec.format.record import to_record
from anyprec.run.oracle import run_graph

WIDTHS = (1, 2, 4, 8, 32)
CASES = {
    "resnet18 float": (lambda: resnet_graph(18, "float", 64, WIDTHS, 10, 0.25), "resnet18", {"multiplier": 0.25}),
    "resnet50 quantized": (
        lambda: resnet_graph(50, "quantized", 64, WIDTHS, 10, 0.25),
        "resnet50",
        {"multiplier": 0.25, "skip": "quantized"},
    ),
    "resnet50 float": (lambda: resnet_graph(50, "float", 64, WIDTHS, 10, 0.25), "resnet50", {"multiplier": 0.25}),
    "resnet20 float": (lambda: resnet20_graph(1, "float", None, WIDTHS), "resnet20", {}),
    "resnet20 quantized": (
        lambda: resnet20_graph(2, "quantized", 32, WIDTHS),
        "resnet-cifar",
        {"multiplier": 2, "skip": "quantized"},
    ),
    "mobilenetv2": (lambda: mobilenetv2_graph(8, 32, WIDTHS), "mobilenetv2", {}),
    "mobilenetv2 depth-wise": (lambda: mobilenetv2_graph(1, 32, WIDTHS), "mobilenetv2", {"group_size": 1}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_layers_are_those_of_the_zoo(case):
    pytest.importorskip("torch")
    from anyprec.nn.switching import any_layers
    from anyprec.zoo import build

    make, name, options = CASES[case]
    graph, model = make(), build(name, widths=WIDTHS, **options)
    check_graph(to_record(graph, {}))
    shapes = {}
    for key, tensor in model.state_dict().items():
        if key.endswith((".weight", "fc.weight")) and (tensor.ndim == 4 or key == "fc.weight"):
            out, inside, *kernel = tensor.shape
            shapes[key.removesuffix(".weight")] = (out, *(kernel or (1, 1)), inside)
    assert {name: weight.shape for name, weight in graph.weights.items()} == shapes
    assert {name for name, weight in graph.weights.items() if not weight.is_float} == set(any_layers(model))
    modules = dict(model.named_modules())
    for op in graph.ops:
        if op.kind == "conv":
            layer = modules[op.name]
            assert tuple(op.attributes["stride"]) == layer.stride and op.attributes["groups"] == layer.groups
            assert tuple(op.attributes["pad"]) == layer.padding * 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make",
    [
        lambda: resnet_graph(18, "float", 40, WIDTHS[:4], 10, 0.25),
        lambda: resnet_graph(50, "quantized", 40, WIDTHS[:4], 10, 0.25),
        lambda: resnet_graph(18, "quantized", 40, WIDTHS[:4], 10, 0.25, first_last="8bit"),
        lambda: resnet20_graph(),
        lambda: mobilenetv2_graph(size=16),
    ],
    ids=["resnet18", "resnet50", "resnet18 8-bit first and last", "resnet20", "mobilenetv2"],
)
def test_codes_spread_at_every_width(make):
    graph = make()
    x = np.random.default_rng(0).standard_normal((2, *graph.input_shape)).astype(np.float32)
    for profile in graph.profiles:
        values = run_graph(graph, x, profile.name, all_values=True)
        for op in graph.ops:
            if op.kind == "quantize":
                mean = values[op.name].mean() / (2 ** profile.act_bits(op.name, op.bits) - 1)
                assert 0.25 < mean < 0.6, (profile.name, op.name, mean)
        assert np.isfinite(values["fc"]).all() and values["fc"].std() > 0.05


def test_edges_of_8_bit_change_little():
    """The same network but for the rounding of its first and last layer, in float not even that."""
    plain, fixed = (
        resnet_graph(18, "quantized", 40, WIDTHS, 10, 0.25, first_last=first_last) for first_last in ("float", "8bit")
    )
    check_graph(to_record(fixed, {}))
    assert {name for name, weight in fixed.weights.items() if weight.bits == 8} == {"conv0", "fc"}
    x = np.random.default_rng(0).standard_normal((2, *plain.input_shape)).astype(np.float32).clip(-2.6, 2.6)
    a, b = (run_graph(graph, x, "32")["fc"] for graph in (plain, fixed))
    assert np.array_equal(a, b)
    a, b = (run_graph(graph, x, "8", all_values=True) for graph in (plain, fixed))
    for name, most in (("conv0", 0.06), ("fc", 0.3)):
        assert np.abs(a[name] - b[name]).max() < most * a[name].std(), name
