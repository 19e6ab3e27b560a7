"""Every network of the zoo, packed: the oracle computes from the Graph what torch computes from the module."""

import pytest
import torch
from sampling import sampled

from anyprec.nn.calibrate import calibrate
from anyprec.nn.switching import any_layers, bits, widths_of
from anyprec.widths import Profile
from anyprec.zoo import build

ALL = (1, 2, 3, 4, 5, 6, 7, 8, 32)

# name -> (options, image side)
NETS = {
    "resnet8": ({"multiplier": 0.5}, 16),
    "resnet20": ({"multiplier": 0.25}, 12),
    "resnet20-he": ({}, 8),
    "alexnet": ({"multiplier": 0.125, "hidden": 32, "size": 16}, 16),
    "cnn8": ({"expand": 1}, 40),
    "vgg-speed": ({"channels": (8, 12, 16)}, 17),
    "mobilenetv2": ({"multiplier": 0.25}, 8),
    "resnet18": ({"multiplier": 0.125}, 40),
    "resnet50": ({"multiplier": 0.125}, 40),
    "deeplab-small": ({"multiplier": 0.5, "pyramid": 8, "skip": "quantized"}, 33),
    "deeplab-resnet18": ({"multiplier": 0.125, "pyramid": 8, "blocks": (1, 1, 1, 2)}, 40),
    "deeplab-resnet50": ({"multiplier": 0.125, "pyramid": 8, "blocks": (1, 1, 1, 2)}, 40),
}


def images(side, count=6, channels=3, seed=1):
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(seed))


def network(name, **more):
    torch.manual_seed(0)
    options, side = NETS[name]
    model = build(name, **{"widths": ALL, **options, **more})
    x = images(side)
    if any(layer.act is not None for layer in any_layers(model).values()):
        calibrate(model, [x], ALL[:-1], progress=False)  # ranges
    return model, x


LONG = ("mobilenetv2", "resnet20", "resnet18", "resnet50", "deeplab-resnet18", "deeplab-resnet50")


@pytest.mark.thorough
@pytest.mark.parametrize("name", sampled(NETS, 1, slow=LONG))
def test_all_widths(agree, name):
    model, x = network(name)
    graph = agree(model, x)
    assert [p.name for p in graph.profiles] == [str(k) for k in ALL]
    assert graph.outputs == (graph.ops[-1].name,)
    assert set(graph.weights) >= set(any_layers(model))
    free = name not in ("alexnet", "cnn8", "vgg-speed")  # these read images of one size
    assert (graph.input_shape == (None, None, 3)) == free
    maps = name.startswith("deeplab")  # which have no size of their own
    assert graph.image_size == (tuple(x.shape[2:]) if free and not maps else None)


@pytest.mark.thorough
@pytest.mark.parametrize("quantizer, scale", [("nested", "mean"), ("dorefa", "mean"), ("lsq", "learned")])
@pytest.mark.parametrize("name", sampled(["resnet8", "resnet20-he"]))
def test_all_quantizers(agree, name, quantizer, scale):
    more = {"depth": 8} if name == "resnet20-he" else {}
    model, x = network("resnet8", quantizer=quantizer, scale=scale)
    if more:
        torch.manual_seed(0)
        model = build("resnet-he", widths=ALL, quantizer=quantizer, scale=scale, **more)
        calibrate(model, [x], ALL[:-1], progress=False)
    graph = agree(model, x)
    if quantizer == "dorefa":
        assert graph.planes[2] == (1, 2) and graph.planes[8][-1] == 35
    else:
        assert graph.planes[2] == (0, 1) and graph.planes[8] == tuple(range(8))


@pytest.mark.parametrize("name", sampled(["resnet8", "resnet18", "resnet50"], 3))
def test_quantized_skips(agree, kinds, name):
    model, x = network(name, skip="quantized")
    graph = agree(model, x)
    floats = [name for name, weight in graph.weights.items() if weight.is_float]
    assert floats == ["conv0", "fc"]
    # Block and skip read one quantized value: no more quantizes than activations.
    acts = [m for m in model.modules() if type(m).__name__ == "AnyActivation"]
    assert kinds(graph)["quantize"] == len(acts)


@pytest.mark.thorough
def test_norms_are_folded(agree, kinds):
    model, x = network("resnet20")
    graph = agree(model, x)
    found = kinds(graph)
    # Nine pre-activation norms and all that follow a convolution are in others' tables; the last norm is alone.
    assert found["affine"] == 1 and "clip" not in found
    alone = [op.name for op in graph.ops if op.kind == "quantize" and not op.attributes["affine"]]
    assert alone == [f"blocks.{i}.act1" for i in range(9)]


def sources_of_pools(graph):
    kind = {op.name: op.kind for op in graph.ops}
    return [kind[op.inputs[0]] for op in graph.ops if op.kind == "max_pool"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "sources"), [("alexnet", ["quantize"] * 3), ("vgg-speed", ["quantize"] * 3 + ["clip"])]
)
def test_pools_move_codes(agree, name, sources):
    """Behind a norm, and before one whose scales are all above 0."""
    model, x = network(name)
    assert sources_of_pools(agree(model, x, positive=True)) == sources


@pytest.mark.thorough
def test_norms_with_negative_scales_stay_behind_their_pools(agree):
    model, x = network("vgg-speed")
    assert sources_of_pools(agree(model, x)) == ["conv", "conv", "conv", "clip"]
    model, x = network("alexnet")
    assert sources_of_pools(agree(model, x)) == ["conv", "quantize", "quantize"]


def test_as_it_was(agree):
    model, x = network("resnet8")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    from anyprec.packing.packing import make_graph

    with bits(model, 2):
        dice = torch.get_rng_state()
        make_graph(model, example=x[:1])
        assert torch.equal(torch.get_rng_state(), dice)
        assert {layer.bits for layer in any_layers(model).values()} == {2}
    assert model.training and all(m.training for m in model.modules())
    assert all("forward" not in vars(m) for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_only_what_is_calibrated(agree):
    model, x = network("resnet8", widths=(1, 4, 8))
    graph = agree(model, x, keep_float=False)
    assert [p.name for p in graph.profiles] == ["1", "4", "8"] and graph.planes.keys() == {1, 4, 8}
    assert all(weight.is_float or weight.values is None for weight in graph.weights.values())
    assert widths_of(model) == (1, 4, 8)


def test_mixed_profile(agree):
    model, x = network("resnet8")
    layers = list(any_layers(model))
    mixed = Profile("fast", {layers[0]: 2, layers[1]: (8, 4), layers[2]: 32, layers[3]: 3})
    calibrate(model, [x], (), profiles=(mixed,), progress=False)
    graph = agree(model, x, profiles=(mixed,))
    profile = graph.profiles[-1]
    assert profile.name == "fast" and not profile.is_float
    assert [profile.weight_bits(name) for name in layers[:4]] == [2, 8, 32, 3]
    assert [profile.act_bits(f"blocks.{i}.act{j}") for i in (0, 1) for j in (0, 1)] == [2, 4, 32, 3]


def test_quantized_in_float_alone(agree):
    model, x = network("resnet8")
    graph = agree(model, x, widths=(32,))
    assert [p.name for p in graph.profiles] == ["32"] and all(weight.is_float for weight in graph.weights.values())
