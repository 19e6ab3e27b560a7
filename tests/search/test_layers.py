"""PlanLayers: what may have bits of its own, and which plans are refused."""

import re
from dataclasses import replace

import numpy as np
import pytest

from anyprec.errors import AnyprecError, ProfileError
from anyprec.run.oracle import run_graph
from anyprec.search.layers import PlanLayers, split_quantize
from anyprec.widths import Profile


def test_a_chain_has_one_layer_for_each_convolution(vgg):
    layers = PlanLayers(vgg)
    assert [layer.weights for layer in layers.layers] == [
        (name,) for name, weight in vgg.weights.items() if not weight.is_float
    ]
    assert layers.widths == (1, 2, 3, 4, 5, 6, 7, 8)
    assert all(len(layer.acts) == 1 for layer in layers.layers)


def test_convolutions_that_read_the_same_codes_are_one_layer(resnet):
    layers = PlanLayers(resnet)
    quantized = [name for name, weight in resnet.weights.items() if not weight.is_float]
    assert sorted(w for layer in layers.layers for w in layer.weights) == sorted(quantized)
    reads = {op.attributes["weight"]: op.inputs[0] for op in resnet.ops if op.attributes.get("weight") in quantized}
    for layer in layers.layers:
        assert len({reads[name] for name in layer.weights}) == 1


def test_tables_follow_their_layers(vgg):
    layers = PlanLayers(vgg)
    first, *_, last = [layer.name for layer in layers.layers]
    assert layers.sources[first].own == 0 and layers.sources[first].out == 1
    assert layers.sources[last].own == len(layers.layers) - 1 and layers.sources[last].out is None
    assert layers.sources["conv0"].own is None and layers.sources["conv0"].out == 0  # float, before the first codes
    assert layers.sources["fc"].own == len(layers.layers) - 1  # float, behind the last


def test_splitting_quantize_ops_changes_no_bit(resnet, images):
    x = images[:2, :16, :16].astype(np.float32) / 128 - 1
    split = split_quantize(resnet)
    assert len(split.ops) > len(resnet.ops)
    for profile in ("1", "4"):
        for name in resnet.outputs:
            assert np.array_equal(run_graph(resnet, x, profile)[name], run_graph(split, x, profile)[name])


@pytest.mark.parametrize(
    ("bits", "complaint"),
    [
        ({"conv1": 4}, "leaves out 'block1.conv0'; give the bits of every layer"),
        ({"conv9": 4}, "has no layer 'conv9'; did you mean 'conv1'?"),
        ({"xyzzy": 4}, "has no layer 'xyzzy'; its layers are conv1"),
        ({"conv1": 32}, "conv1 has 32 bits; a layer of this file has one of 1, 2, 3, 4, 5, 6, 7, 8"),
        ({"conv1": (8, 7)}, re.escape("conv1 has (8, 7) bits")),
    ],
)
def test_plans_that_do_not_fit_are_refused(vgg, bits, complaint):
    with pytest.raises(AnyprecError, match=complaint) as caught:
        PlanLayers(vgg).plan(Profile("mine", bits))
    assert "\n" not in str(caught.value)


def test_layers_of_the_same_codes_must_have_the_same_bits(resnet):
    """As where a shortcut reads the codes of the convolution beside it."""
    ops = [replace(op, inputs=("blocks.0.act0",)) if op.name == "blocks.0.conv1" else op for op in resnet.ops]
    layers = PlanLayers(replace(resnet, ops=tuple(ops)))
    shared = layers.layers[0]
    assert shared.weights == ("blocks.0.conv0", "blocks.0.conv1") and shared.acts == ("blocks.0.act0",)
    assert layers.layers[1].weights == () and layers.layers[1].acts == ("blocks.0.act1",)
    bits = {name: 4 for layer in layers.layers for name in layer.weights or layer.acts}
    assert layers.plan(Profile("mine", bits)) == layers.uniform(4)
    with pytest.raises(ProfileError, match=r"give .* the same"):
        layers.plan(Profile("mine", bits | {shared.weights[1]: 2}))


def test_one_width_cannot_be_mixed(vgg):
    one = replace(vgg, profiles=vgg.profiles[:1], tables={name: table[:1] for name, table in vgg.tables.items()})
    with pytest.raises(ProfileError, match=r"needs at least two of 1\.\.8"):
        PlanLayers(one)
