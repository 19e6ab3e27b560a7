"""unpack: a packed network comes back with the same codes and answers, or is refused with one line."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling import sampled

from anyprec.errors import CheckpointError
from anyprec.format.file import read, write
from anyprec.format.model_file import ModelFile
from anyprec.nn.quantizers import Lsq
from anyprec.nn.switching import any_layers, bits, switch_norms
from anyprec.packing.packing import pack
from anyprec.packing.unpack import unpack
from anyprec.zoo import build

WIDTHS = (1, 2, 4, 8, 32)
NETS = {
    "vgg-speed": {"channels": [8, 16, 16]},
    "resnet8": {"multiplier": 0.25},
    "alexnet": {"multiplier": 0.0625},
    "mobilenetv2": {"multiplier": 0.125},
}


def images(count=8, size=32, seed=0):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def made(net, seed, quantizer="lsq", widths=WIDTHS, **options):
    torch.manual_seed(seed)
    options = {**NETS.get(net, {}), **options}
    return build(net, widths=widths, quantizer=quantizer, num_classes=10, in_channels=3, **options)


def batches(count=2):
    return [images(16, seed=seed) for seed in range(count)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory, shaken):
    """(model, path) of a network, packed once."""
    folder, known = tmp_path_factory.mktemp("packed"), {}

    def make(net="vgg-speed", quantizer="lsq", name="", **options):
        key = (net, quantizer, name)
        if key not in known:
            model = shaken(made(net, 1, quantizer), positive=True)
            path = folder / f"{'-'.join(key)}.apm"
            pack(model, path, example=images(), **options)
            known[key] = model, path
        return known[key]

    return make


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("net", "quantizer"),
    [
        *sampled([(net, "lsq") for net in NETS], 1, slow=[("mobilenetv2", "lsq"), ("alexnet", "lsq")]),
        *sampled([("vgg-speed", "nested"), ("resnet8", "nested")]),
    ],
)
def test_the_network_is_that_of_the_file(packed, net, quantizer):
    model, path = packed(net, quantizer)
    again = made(net, 2, quantizer)
    report = unpack(again, path, batches())
    assert report.widths == (1, 2, 4, 8) and report.new_widths == (32,)
    assert set(report.check.profiles) == {"1", "2", "4", "8"}  # compared as pack compares, code by code
    for name, layer in any_layers(again).items():
        for k in (1, 2, 4, 8):
            assert torch.equal(layer.codes(k), any_layers(model)[name].codes(k))


@pytest.mark.thorough
def test_a_file_from_before_toom_cook(packed, tmp_path):
    """How a float convolution is computed is no property of the network."""
    graph = read(packed()[1])
    ops = tuple(
        replace(op, attributes={k: v for k, v in op.attributes.items() if k != "toom_cook"}) for op in graph.ops
    )
    assert ops != graph.ops
    write(replace(graph, ops=ops), tmp_path / "old.apm")
    assert unpack(made("vgg-speed", 2), tmp_path / "old.apm", batches()).widths == (1, 2, 4, 8)


@pytest.mark.thorough
def test_answers_stay_when_statistics_are_measured(packed):
    """On images that were neither measured nor compared."""
    model, path = packed()
    again = made("vgg-speed", 2).eval()
    unpack(again, path, batches())
    x = images(64, seed=9)
    for k in (2, 4, 8):
        with torch.no_grad(), bits(model, k), bits(again, k):
            wanted, found = model(x), again(x)
        close = (wanted - found).abs() < 0.02 * wanted.std()
        assert close.float().mean() > 0.98, k


@pytest.mark.thorough
def test_statistics_are_those_of_the_images(packed):
    """In training, batch statistics take the place of the running ones, and little may change."""
    again = made("vgg-speed", 2)
    unpack(again, packed()[1], batches())
    seen = {}
    hooks = [
        norm.register_forward_pre_hook(lambda _, given, name=name: seen.__setitem__(name, given[0]))
        for name, norm in switch_norms(again).items()
    ]
    for k in (1, 8, 32):
        again.eval()
        with torch.no_grad(), bits(again, k):
            again(torch.cat(batches()))
        for name, norm in switch_norms(again).items():
            table = norm.tables[str(k)]
            x = seen[name].transpose(0, 1).flatten(1)
            assert torch.allclose(table.running_mean, x.mean(1), rtol=1e-3, atol=1e-4), (k, name)
            assert torch.allclose(table.running_var, x.var(1, unbiased=False), rtol=0.02, atol=1e-4), (k, name)
    for hook in hooks:
        hook.remove()


@pytest.mark.thorough
def test_float_starts_as_the_widest(packed):
    again = made("vgg-speed", 2)
    unpack(again, packed()[1], batches())
    for norm in switch_norms(again).values():
        assert torch.equal(norm.tables["32"].weight, norm.tables["8"].weight)
        assert torch.equal(norm.tables["32"].bias, norm.tables["8"].bias)


@pytest.mark.thorough
def test_weights_have_the_size_of_hes_start(packed):
    again = made("vgg-speed", 2)
    unpack(again, packed()[1], batches())
    for layer in any_layers(again).values():
        assert isinstance(layer.quantizer, Lsq)
        rms = layer.weight.square().mean().sqrt().item()
        assert rms == pytest.approx((2 / layer.weight[0].numel()) ** 0.5, rel=1e-4)
        assert layer.quantizer.scales["8"].item() == pytest.approx(layer.quantizer.range.item(), rel=1e-5)


@pytest.mark.thorough
def test_a_width_the_file_lacks_is_new(packed):
    again = made("vgg-speed", 2, widths=(2, 3, 8))
    report = unpack(again, packed()[1], batches())
    assert report.widths == (2, 8) and report.new_widths == (3,)
    with torch.no_grad(), bits(again, 3):
        assert torch.isfinite(again.eval()(images())).all()


@pytest.mark.thorough
@pytest.mark.parametrize("quantizer", sampled(["lsq", "nested"]))
def test_float_weights_come_back(packed, quantizer):
    model, path = packed(quantizer=quantizer, name="float", keep_float=True)
    again = made("vgg-speed", 2, quantizer)
    report = unpack(again, path, batches())
    assert report.widths == WIDTHS and report.new_widths == ()
    for name, layer in any_layers(again).items():
        assert torch.equal(layer.weight, any_layers(model)[name].weight)
        assert torch.equal(layer.codes(8), any_layers(model)[name].codes(8))


@pytest.mark.thorough
def test_float_layers_and_biases(packed):
    model, path = packed()
    again = made("vgg-speed", 2)
    unpack(again, path, batches())
    assert torch.equal(again.whiten.weight, model.whiten.weight)
    assert torch.equal(again.conv0.weight, model.conv0.weight)
    assert torch.equal(again.fc.weight, model.fc.weight)
    assert torch.allclose(again.fc.bias, model.fc.bias, atol=1e-6)
    assert torch.allclose(again.whiten.bias, model.whiten.bias, atol=1e-6)


@pytest.mark.thorough
def test_mode_and_file_stay(packed):
    _, path = packed()
    before = path.read_bytes()
    again = made("vgg-speed", 2).train()
    unpack(again, path, batches(1))
    assert again.training and path.read_bytes() == before
    with ModelFile(path) as file:
        assert np.array_equal(file.codes("conv1", 8), any_layers(again)["conv1"].codes(8).permute(0, 2, 3, 1).numpy())


# --- Refused ---


def refused(model, path, *words):
    with pytest.raises(CheckpointError) as caught:
        unpack(model, path, batches(1))
    text = str(caught.value)
    assert str(path) in text and "\n" not in text
    for word in words:
        assert word in text


def test_other_channels(packed):
    refused(made("vgg-speed", 2, channels=[8, 16, 24]), packed()[1], "'block2.conv0'", "16 x 3 x 3 x 16", "24 x")


def test_other_classes(packed):
    torch.manual_seed(0)
    other = build("vgg-speed", widths=WIDTHS, quantizer="lsq", num_classes=7, in_channels=3, channels=[8, 16, 16])
    refused(other, packed()[1], "'fc'", "10 x 1 x 1 x 16", "7 x 1 x 1 x 16")


def test_other_network(packed):
    refused(made("resnet8", 2), packed()[1], "where the network has")


def test_a_network_whose_codes_do_not_nest(packed):
    refused(made("vgg-speed", 2, "dorefa"), packed()[1], "dorefa", "lsq or nested")


def test_a_file_whose_codes_do_not_nest(packed):
    _, path = packed(quantizer="dorefa")
    refused(made("vgg-speed", 2), path, "do not nest")


def test_no_width_in_common(packed):
    refused(made("vgg-speed", 2, widths=(3, 32)), packed()[1], "1, 2, 4, 8", "3, 32")


def test_8_bit_first_and_last_layers(packed):
    _, path = packed(name="first-last", first_last="8bit")
    refused(made("vgg-speed", 2), path, "8 bit at every width", "--first-last float")


def test_ranges_of_activations(packed):
    refused(made("resnet-he", 2, depth=8), packed()[1], "ranges")


def test_codes_nested_cannot_give(packed):
    """nested has its largest weight at the end of the codes; lsq clips as it likes."""
    model, path = packed()
    assert all(int(c.min()) > 0 and int(c.max()) < 255 for c in [any_layers(model)["conv1"].codes(8)])
    refused(made("vgg-speed", 2, "nested"), path, "quantizer nested", "'conv1'")


@pytest.mark.thorough
def test_another_file_than_that_of_the_names(packed, tmp_path, monkeypatch):
    """Whatever is solved for: a network that answers otherwise is refused by the check."""
    from anyprec.packing import unpack as module

    def shifted(self, *args):
        original(self, *args)
        next(iter(self.norms)).tables[8].bias.add_(0.3)

    original = module.Unpacking.set_tables
    monkeypatch.setattr(module.Unpacking, "set_tables", shifted)
    refused(made("vgg-speed", 2), packed()[1], "8 bit", "answer otherwise")
