"""The check of `pack`: it finds a file that is not the module, wherever the mistake; it lets rounding pass."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from sampling import later
from torch import nn

from anyprec.cli import main
from anyprec.errors import ModelFileError, VerificationFailed
from anyprec.format.file import read
from anyprec.nn.calibrate import calibrate
from anyprec.nn.convert import convert
from anyprec.packing import answers, packing
from anyprec.packing.images import check_images, image_noise
from anyprec.packing.packing import pack
from anyprec.zoo import build

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
ZEROS = torch.zeros(1, 3, 16, 16)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = build("resnet8", widths=(1, 2, 4, 8, 32), multiplier=0.5).eval()
    calibrate(made, [X], (1, 2, 4, 8), progress=False)
    return made


class Heads(nn.Module):
    """Two outputs, one of them a map; signed inputs, padding in front of a layer, a pool behind one."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1)
        self.map, self.fc = nn.Conv2d(8, 4, 1), nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = nn.functional.max_pool2d(self.a(nn.functional.pad(x, (1, 1, 1, 1))), 2)
        x = self.b(x - 0.3)
        return self.map(x), self.fc(torch.relu(x).mean((2, 3)))


@pytest.fixture
def broken(monkeypatch):
    """broken(change): graphs that `pack` makes from now on are changed by `change(graph) -> graph`."""

    def put(change):
        make = packing.plan_packing

        def changed(*args, **options):
            plan = make(*args, **options)
            return dataclasses.replace(plan, graph=change(plan.graph))

        monkeypatch.setattr(packing, "plan_packing", changed)

    return put


def table(name, change):
    def changed(graph):
        new = graph.tables[name].copy()
        change(new)
        assert not np.array_equal(new, graph.tables[name])
        return dataclasses.replace(graph, tables={**graph.tables, name: new})

    return changed


def attribute(name, **values):
    def changed(graph):
        ops = [
            dataclasses.replace(op, attributes={**op.attributes, **values}) if op.name == name else op
            for op in graph.ops
        ]
        return dataclasses.replace(graph, ops=tuple(ops))

    return changed


def weight(name, change):
    def changed(graph):
        old = graph.weights[name]
        if old.is_float:
            new = dataclasses.replace(old, values=change(old.values.copy()))
        else:
            new = dataclasses.replace(old, codes={k: change(old.codes[k].copy()) for k in old.codes})
        return dataclasses.replace(graph, weights={**graph.weights, name: new})

    return changed


def turned(values):
    values[0] = values[0][::-1].copy()
    return values


# what is wrong -> the change, the width it is found at, the operation it is found at
MISTAKES = {
    "a norm's shift lost at 4 bit": (table("blocks.1.act0", lambda t: t[2, 1].fill(0)), "4 bit", "blocks.1.act0"),
    "a scale 3 % off at 8 bit": (table("blocks.1.conv0", lambda t: t[3].__imul__(1.03)), "8 bit", "blocks.1.act1"),
    "padding at one side": (attribute("blocks.0.conv0", pad=(2, 1, 0, 1)), "1 bit", "blocks.0.act1"),
    "a first layer that is off": (weight("conv0", lambda w: w * np.float32(1.02)), "1 bit", "blocks.0.act0"),
    "a kernel upside down": (weight("blocks.2.conv1", turned), "1 bit", "fc"),
    "a classifier that is off": (weight("fc", lambda w: w + np.float32(0.001)), "1 bit", "fc"),
    "ReLU lost in float": (attribute("blocks.1.act1", rectify=False), "float", "blocks.1.act1"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("what", MISTAKES)
@pytest.mark.parametrize("example", [X, later(ZEROS)], ids=["images", "zeros"])
def test_a_mistake_is_found(model, tmp_path, broken, what, example):
    change, width, where = MISTAKES[what]
    target = tmp_path / "net.apm"
    target.write_bytes(b"what was there")
    broken(change)
    with pytest.raises(VerificationFailed, match=f"at {width}: outputs differ by up to .*, first at '{where}") as error:
        pack(model, target, example=example, keep_float=True)
    assert "\n" not in str(error.value)
    assert target.read_bytes() == b"what was there" and [p.name for p in tmp_path.iterdir()] == ["net.apm"]
    report = pack(model, target, example=example, keep_float=True, verify=False)
    assert report.check is None and "not compared with the module" in str(report) and read(target)


def test_a_mistake_at_another_size_is_found(model, tmp_path, broken):
    """A global pool as a pool of the example's map: the same at that size, another network at others."""

    def change(graph):
        at = {"kernel": (4, 4), "stride": (4, 4), "pad": (0, 0, 0, 0), "ceil": False, "count_pad": True}
        swap = {"adaptive_avg_pool": lambda op: dataclasses.replace(op, kind="avg_pool", attributes=at)}
        return dataclasses.replace(graph, ops=tuple(swap.get(op.kind, lambda op: op)(op) for op in graph.ops))

    broken(change)
    with pytest.raises(VerificationFailed, match=r"images of 16 x 48 are not answered as those of 16 x 16, first at"):
        pack(model, tmp_path / "net.apm", example=X)
    assert not list(tmp_path.iterdir())


def test_the_report(model, tmp_path):
    report = pack(model, tmp_path / "net.apm", example=X, keep_float=True)
    check = report.check
    assert list(check.profiles) == ["1", "2", "4", "8", "32"] and check.images == 3 and check.other_size == (16, 48)
    assert 0 < check.seconds < report.seconds
    for name, found in check.profiles.items():
        assert found.answers == 3 and found.alive and found.difference < 0.5 * found.spread
        assert (found.codes > 10_000) == (name != "32") and found.moved_codes < 0.001 * found.codes + 4
    text = str(report)
    assert "largest difference" in text and "agrees with the module on 3 images, one of 16 x 48" in text
    assert json.loads(json.dumps(report.to_dict()))["check"]["profiles"]["8"]["same_answers"] == 3


def test_a_dead_network_is_named(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    with torch.no_grad():
        net[2].bias.fill_(-100)
    model = convert(net, widths=(2, 8), example=X)
    check = pack(model, tmp_path / "net.apm", example=X).check
    assert check.dead == ["2", "8"] and "at 2, 8 the outputs are the same for every image" in str(check)


@pytest.mark.parametrize(
    "options", [{}, {"first_last": "8bit"}, {"keep_float": True}, {"widths": (32,)}, {"widths": (1,)}]
)
def test_two_heads_pads_and_pools(tmp_path, options):
    torch.manual_seed(0)
    model = convert(Heads().eval(), widths=(1, 3, 8, 32), example=X)
    report = pack(model, tmp_path / "net.apm", example=X, **options)
    assert all(found.alive for found in report.check.profiles.values())


def test_8_bit_edges_that_are_off(model, tmp_path, broken):
    broken(table("conv0", lambda t: t[0, 0].__imul__(1.02)))
    with pytest.raises(VerificationFailed, match="at 1 bit"):
        pack(model, tmp_path / "net.apm", example=X, first_last="8bit")


@pytest.mark.thorough
def test_half_and_double_precision(model, tmp_path):
    import copy

    for kind in (torch.bfloat16, torch.float64):
        report = pack(copy.deepcopy(model).to(kind), tmp_path / "net.apm", example=X)
        assert all(found.alive for found in report.check.profiles.values())


def test_without_the_engine(model, tmp_path, monkeypatch, broken):
    def missing(*args):
        raise ImportError("no module named anyprec._native")

    monkeypatch.setattr(answers, "NativeAnswers", missing)
    assert pack(model, tmp_path / "net.apm", example=X, widths=(2, 8)).check.engine == "oracle"
    broken(table("blocks.1.conv0", lambda t: t[1].__imul__(1.03)))
    with pytest.raises(VerificationFailed, match="at 8 bit"):
        pack(model, tmp_path / "other.apm", example=X, widths=(2, 8))


def test_an_engine_that_answers_otherwise_is_found(model, tmp_path, monkeypatch):
    honest = answers.NativeAnswers.outputs
    monkeypatch.setattr(answers.NativeAnswers, "outputs", lambda *a: [y + np.float32(1e-6) for y in honest(*a)])
    with pytest.raises(VerificationFailed, match="other outputs when it also gives the values between"):
        pack(model, tmp_path / "net.apm", example=X, widths=(2,))


def test_a_folder_that_is_not_there(model, tmp_path):
    with pytest.raises(ModelFileError, match=r"cannot write .*nowhere/net.apm"):
        pack(model, tmp_path / "nowhere" / "net.apm", example=X)


# --- Images ---


def test_images():
    image = ([1 / 64] * 3, [-2.0] * 3)
    made = image_noise(2, (3, 24, 20), image)
    assert made.shape == (2, 3, 24, 20) and made.min() >= -2 and made.max() <= 255 / 64 - 2
    assert torch.equal(made, image_noise(2, (3, 24, 20), image))
    pixels = (made + 2) * 64
    assert torch.allclose(pixels, pixels.round(), atol=1e-3) and len(pixels.round().unique()) > 100
    assert image_noise(2, (3, 7), None).shape == (2, 3, 7) and image_noise(2, (5,), None).shape == (2, 5)
    constant = check_images(ZEROS, image)
    assert torch.equal(constant[:1], ZEROS) and constant[1].std() > 0.5
    several = check_images(X, None)
    assert torch.equal(several[:2], X[:2]) and several[2].std() > 1.5
    assert check_images(X[:1], None).shape == (3, 3, 16, 16) and torch.equal(check_images(X[:1], None)[0], X[0])


# --- The command ---


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, request):
    out = tmp_path_factory.mktemp("verify") / "run"
    sets = ["epochs=1", "limit=128", "net_options.multiplier=0.25"]
    assert main(["train", "digits", *(a for s in sets for a in ("--set", s)), "--out", str(out), "--json"]) == 0
    return out


@pytest.mark.thorough
def test_command(run_folder, tmp_path, capsys, broken):
    out = tmp_path / "digits.apm"
    capsys.readouterr()
    assert main(["pack", str(run_folder), "--out", str(out), "--json"]) == 0
    check = json.loads(capsys.readouterr().out)["check"]
    profiles = check["profiles"]
    assert check["images"] == 3 and all(p["codes"] for p in profiles.values()) and profiles["8"]["alive"]
    assert main(["pack", str(run_folder), "--out", str(out)]) == 0
    assert "agrees with the module" in capsys.readouterr().out
    broken(weight("conv0", lambda w: w * np.float32(1.1)))
    out.unlink()
    assert main(["pack", str(run_folder), "--out", str(out)]) == 2
    assert "does not compute what the module does at 1 bit" in capsys.readouterr().err and not out.exists()
    assert main(["pack", str(run_folder), "--out", str(out), "--no-verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["check"] is None and out.exists()


class ChannelAttention(nn.Module):
    """ECA's: the means of the channels are a line, along which a convolution runs."""

    def __init__(self):
        super().__init__()
        self.stem, self.line = nn.Conv2d(3, 8, 3, padding=1), nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.a, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        weights = torch.sigmoid(self.line(x.mean((2, 3)).view(len(x), 1, -1))).view(len(x), -1, 1, 1)
        return self.fc(torch.relu(self.a(x * weights.expand_as(x))).mean((2, 3)))


def test_another_size_is_checked_with_a_real_batch(tmp_path):
    """In a batch of 1, views of (1, 1, C) cannot tell the batch from a dimension of size 1."""
    model = convert(ChannelAttention().eval(), widths=(4, 8), example=X)
    assert pack(model, tmp_path / "net.apm", example=X).check.other_size is not None


def test_outputs_along_the_same_codes(model, tmp_path):
    found = pack(model, tmp_path / "net.apm", example=X).check.profiles
    assert all(f.led_same_answers == f.led_answers == 2 and f.led_difference < 1e-5 for f in found.values())
