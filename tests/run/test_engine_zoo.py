"""Whole networks of the zoo, packed: the engine against the oracle, bit for bit, at every width."""

import pytest
from engine_check import assert_exact, usable_isas
from sampling import sampled

from anyprec.format import read
from anyprec.run.model import load
from anyprec.widths import INTEGER_WIDTHS

torch = pytest.importorskip("torch", reason="packing needs PyTorch")

import anyprec  # noqa: E402
from anyprec.data import batches, load_data  # noqa: E402
from anyprec.training.evaluate import to_tensor  # noqa: E402
from anyprec.training.joint import joint_step  # noqa: E402

ALL = (*INTEGER_WIDTHS, 32)
ISAS = usable_isas()

# name -> options, image side, images
NETS = {
    "resnet8": ({"multiplier": 0.5, "quantizer": "dorefa"}, 16, 2),
    "resnet20": ({"multiplier": 0.25, "skip": "quantized"}, 13, 2),
    "resnet20-he": ({}, 8, 1),
    "alexnet": ({"multiplier": 0.125, "hidden": 32, "size": 16}, 16, 2),
    "cnn8": ({"expand": 1}, 40, 1),
    "vgg-speed": ({"channels": (8, 12, 16)}, 17, 1),
    "mobilenetv2": ({"multiplier": 0.25}, 8, 2),
    "resnet50": ({"multiplier": 0.125}, 40, 1),
}
FULL = {"resnet20": ({}, 32, 1), "mobilenetv2": ({}, 32, 1), "resnet18": ({"skip": "quantized"}, 64, 1)}


def packed(name, options, side, path):
    torch.manual_seed(0)
    model = anyprec.zoo.build(name, widths=ALL, **options)
    x = torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(1))
    anyprec.calibrate(model, [x], ALL[:-1], progress=False)  # norms and ranges that spread the codes
    anyprec.pack(model, path, example=x[:1], keep_float=True)
    return read(path), x.permute(0, 2, 3, 1).contiguous().numpy()


LONG = ("mobilenetv2", "resnet50", "resnet20", "resnet20-he")


@pytest.mark.thorough
@pytest.mark.parametrize("name", sampled(NETS, 1, slow=LONG))
def test_small_networks(name, tmp_path):
    options, side, count = NETS[name]
    graph, x = packed(name, options, side, tmp_path / "packed.apm")
    assert [p.name for p in graph.profiles] == [str(k) for k in ALL]
    assert_exact(graph, [x[:count]], tmp_path / "net.apm", ISAS, threads=(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_full_width(name, tmp_path):
    options, side, count = FULL[name]
    graph, x = packed(name, options, side, tmp_path / "packed.apm")
    assert_exact(graph, [x[:count]], tmp_path / "net.apm", ISAS, threads=(1, 2))


@pytest.mark.slow
def test_a_trained_network(tmp_path):
    torch.manual_seed(0)
    train, test = load_data("digits", "train"), load_data("digits", "test")
    model = anyprec.zoo.build("resnet8", widths=(1, 2, 4, 8, 32), in_channels=1, multiplier=0.5).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for images, labels in batches(train, 64, train=True):
        optimizer.zero_grad()
        joint_step(model, to_tensor(images), torch.from_numpy(labels), (1, 2, 4, 8, 32))
        optimizer.step()
    anyprec.calibrate(model, [to_tensor(images) for images, _ in batches(train, 256)], (3, 5, 6, 7), progress=False)
    images, labels = next(iter(batches(test, 200)))
    anyprec.pack(model.eval(), tmp_path / "packed.apm", example=to_tensor(images[:1]), keep_float=True)
    x = to_tensor(images)
    models = assert_exact(
        read(tmp_path / "packed.apm"), [x[:8].permute(0, 2, 3, 1).contiguous().numpy()], tmp_path / "net.apm", ISAS
    )
    assert models["scalar"].widths == ALL
    packed_model = load(tmp_path / "packed.apm")
    for bits in (2, 4, 8, 32):
        with torch.no_grad(), anyprec.bits(model, bits):
            wanted = model(x).argmax(1).numpy()
        given = packed_model(x.numpy(), bits).argmax(1)
        assert (given == labels).mean() > 0.5
        assert (given == wanted).mean() >= 0.99  # float rounding at the border of a code may turn a close call
