"""Update compliance: the definition on gradients worked by hand, what the gradients are, and a training observed."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anyprec.analysis.compliance import (
    FILE,
    Compliance,
    compliance_table,
    layer_cosines,
    shared_layers,
    train_observed,
    width_gradients,
)
from anyprec.choices import LOSSES
from anyprec.errors import AnyprecError, CheckpointError, RecipeError
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.layers import AnyLinear
from anyprec.nn.quantizers import Nested
from anyprec.nn.switching import set_bits
from anyprec.training.checkpoint import load_state
from anyprec.training.joint import joint_step
from anyprec.training.recipe import Recipe
from anyprec.training.run import train
from anyprec.zoo import build

WIDTHS = (1, 2, 4, 8, 32)


def vectors(**layers):
    return {name: torch.tensor(values) for name, values in layers.items()}


# --- The definition -------------------------------------------------------------------------------------------------


def test_by_hand():
    """Two layers, two steps. Step 0: cosines 0.6 and 0; step 1: 1 and -0.8. UCA = (0.6 + 0 + 1 - 0.8) / 4 = 0.2."""
    compliance = Compliance((2, 8))
    steps = [
        {2: vectors(a=[1.0, 0.0], b=[0.0, 2.0, 0.0]), 8: vectors(a=[3.0, 4.0], b=[5.0, 0.0, 1.0])},
        {2: vectors(a=[1e-3, 1e-3], b=[-4.0, 0.0, 3.0]), 8: vectors(a=[7.0, 7.0], b=[2.0, 0.0, 0.0])},
    ]
    for gradients in steps:
        compliance.add(layer_cosines(gradients))
    assert compliance.table()[2][8] == pytest.approx(0.2, abs=1e-12)
    assert compliance.table()[8][2] == compliance.table()[2][8] and compliance.table()[2][2] == 1.0
    assert compliance.table(first=1)[2][8] == pytest.approx(0.3, abs=1e-12)
    assert compliance.table(last=1)[2][8] == pytest.approx(0.1, abs=1e-12)
    assert compliance.steps == [0, 1]


def test_length_plays_no_part_and_opposites_are_minus_one():
    g = torch.randn(50, generator=torch.Generator().manual_seed(0))
    found = layer_cosines({1: {"a": g}, 4: {"a": 1e-30 * g}, 32: {"a": -1e10 * g}})
    assert found[1, 4]["a"] == pytest.approx(1, abs=1e-6)
    assert found[1, 32]["a"] == pytest.approx(-1, abs=1e-6)
    assert list(found) == [(1, 4), (1, 32), (4, 32)]


def test_a_layer_without_a_gradient_has_no_angle():
    compliance = Compliance((1, 2))
    compliance.add(layer_cosines({1: vectors(a=[0.0, 0.0], b=[1.0, 0.0]), 2: vectors(a=[1.0, 0.0], b=[3.0, 4.0])}))
    assert compliance.table()[1][2] == pytest.approx(0.6)
    compliance.add(layer_cosines({1: vectors(a=[0.0]), 2: vectors(a=[0.0])}), step=5)
    assert compliance.table()[1][2] == pytest.approx(0.6)
    assert json.loads(compliance.line()) == {"step": 5, "cosines": {"1,2": None}}
    assert math.isnan(Compliance((1, 2)).table()[1][2])


# --- Gradients ------------------------------------------------------------------------------------------------------


class OneLayer(nn.Module):
    """Two inputs, two classes, one any-layer whose input is quantized too."""

    def __init__(self):
        super().__init__()
        self.fc = AnyLinear(2, 2, bias=False, quantizer=Nested((1, 32)), act=ActQuantizer(rectify=False))
        with torch.no_grad():
            self.fc.weight.copy_(torch.tensor([[0.0, 1.0], [0.0, -1.0]]))

    def forward(self, x):
        return self.fc(x)


def test_gradients_by_hand():
    """Input (0.8, 0.2), label 0. At float the gradient is (p - onehot) times the input: p_1 (-0.8, -0.2, 0.8, 0.2). At
    1 bit the input becomes (1, 0), so that the second column has none. The cosine is that of (1, 0) and (0.8, 0.2).
    """
    model = OneLayer()
    found = width_gradients(model, torch.tensor([[0.8, 0.2]]), torch.tensor([0]), (1, 32), loss="hard")
    assert found[1]["fc"][[1, 3]].abs().max() == 0 and found[1]["fc"][[0, 2]].abs().min() > 0
    p1 = 1 / (1 + math.exp(0.4))  # scores 0.2 and -0.2
    torch.testing.assert_close(found[32]["fc"], p1 * torch.tensor([-0.8, -0.2, 0.8, 0.2]))
    assert layer_cosines(found)[1, 32]["fc"] == pytest.approx(0.8 / math.sqrt(0.68), abs=1e-6)


@pytest.fixture
def step():
    torch.manual_seed(0)
    model = build("resnet8", widths=WIDTHS, multiplier=0.25).double().train()
    return model, torch.randn(8, 3, 16, 16, dtype=torch.float64), torch.randint(0, 10, (8,))


@pytest.mark.parametrize("loss", LOSSES)
def test_they_add_up_to_the_joint_step(step, loss):
    model, images, labels = step
    found = width_gradients(model, images, labels, WIDTHS, loss=loss)
    joint_step(model, images, labels, WIDTHS, loss=loss)
    layers = shared_layers(model)
    assert list(found) == list(WIDTHS) and list(found[1]) == list(layers)
    for name, parameters in layers.items():
        total = sum(found[bits][name] for bits in WIDTHS)
        joint = torch.cat([p.grad.flatten() for p in parameters])
        torch.testing.assert_close(total, joint, rtol=1e-8, atol=1e-10, msg=name)


def test_they_add_up_with_smoothed_labels_and_a_teacher(step):
    model, images, labels = step
    options = {"loss": "wider+label", "label_smoothing": 0.2, "teacher": torch.randn(8, 10, dtype=torch.float64)}
    found = width_gradients(model, images, labels, WIDTHS, **options)
    joint_step(model, images, labels, WIDTHS, **options)
    for name, parameters in shared_layers(model).items():
        total = sum(found[bits][name] for bits in WIDTHS)
        joint = torch.cat([p.grad.flatten() for p in parameters])
        torch.testing.assert_close(total, joint, rtol=1e-8, atol=1e-10, msg=name)


def test_layers_are_all_that_widths_share(step):
    model, _, _ = step
    layers = shared_layers(model)
    assert {"conv0", "blocks.0.conv0", "blocks.1.skip_conv", "fc"} <= set(layers)
    assert not any("norm" in name or "quantizer" in name for name in layers)
    assert [p.shape[0] for p in layers["fc"]] == [10, 10]  # weight and bias are one vector
    model.conv0.weight.requires_grad_(False)
    assert "conv0" not in shared_layers(model)


def test_the_widest_against_a_plain_backward_pass(step):
    model, images, labels = step
    found = width_gradients(model, images, labels, (2, 32))
    set_bits(model, 32)
    F.cross_entropy(model(images), labels).backward()
    torch.testing.assert_close(found[32]["conv0"], model.conv0.weight.grad.flatten())


def test_looking_changes_nothing(step):
    model, images, labels = step
    set_bits(model, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    width_gradients(model, images, labels, WIDTHS)
    assert model.training and model.blocks[0].conv0.bits == 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and torch.equal(torch.get_rng_state(), state)


# --- A training -----------------------------------------------------------------------------------------------------

RECIPE = Recipe(
    net="resnet8", data="digits", net_options={"multiplier": 0.25}, widths=(1, 8, 32), limit=128, batch_size=32,
    epochs=2, augment="crop", loss="hard",
)  # fmt: skip


@pytest.mark.thorough
def test_training_is_observed_and_not_changed(tmp_path):
    compliance, results = train_observed(RECIPE, tmp_path / "a", progress=False)
    assert results == train(RECIPE, tmp_path / "b", progress=False)
    a, b = (load_state(tmp_path / name / "model.pt")["state_dict"] for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert compliance.steps == list(range(8))
    table = compliance.table()
    assert set(table) == {1, 8, 32} and all(-1 <= v <= 1 for row in table.values() for v in row.values())
    assert table[8][32] > 0.2  # 8 bit is close to float; two widths at random would give 0
    assert Compliance.load(tmp_path / "a") == compliance
    assert len(Compliance.load(tmp_path / "a" / FILE, before=3).steps) == 3


def test_every_third_step(tmp_path):
    compliance, _ = train_observed(RECIPE, tmp_path / "a", every=3, progress=False)
    assert compliance.steps == [0, 3, 6]


@pytest.mark.slow
def test_a_run_that_was_stopped_resumes_its_record(tmp_path, monkeypatch):
    whole, _ = train_observed(RECIPE, tmp_path / "whole", progress=False)
    from anyprec.analysis import compliance as module

    observe = Compliance.observe

    def stops(self, *args, **kwargs):
        if args[3] == 6:  # its checkpoint is of step 4, the end of the first epoch: 4 and 5 run again
            raise KeyboardInterrupt
        observe(self, *args, **kwargs)

    monkeypatch.setattr(module.Compliance, "observe", stops)
    with pytest.raises(KeyboardInterrupt):
        train_observed(RECIPE, tmp_path / "cut", progress=False)
    monkeypatch.undo()
    assert len((tmp_path / "cut" / FILE).read_text().splitlines()) == 6
    with open(tmp_path / "cut" / FILE, "a") as file:
        file.write('{"step": 6, "cos')
    resumed, _ = train_observed(RECIPE, tmp_path / "cut", resume=True, progress=False)
    assert resumed == whole == Compliance.load(tmp_path / "cut")
    again, _ = train_observed(RECIPE, tmp_path / "cut", overwrite=True, progress=False)
    assert again == whole


def test_table_as_text():
    table = {1: {1: 1.0, 2: 0.929, 32: 0.909}, 2: {1: 0.929, 2: 1.0, 32: 0.955}, 32: {1: 0.909, 2: 0.955, 32: 1.0}}
    assert compliance_table(table).splitlines() == [
        " bits       1       2      32",
        "    1   1.000   0.929   0.909",
        "    2       -   1.000   0.955",
        "   32       -       -   1.000",
    ]


def test_mistakes(tmp_path, step):
    model, images, labels = step
    with pytest.raises(AnyprecError, match=r"widths=\(4,\) is one width; update compliance compares two or more"):
        train_observed(Recipe(net="resnet8", data="digits", widths=(4,)), tmp_path)
    with pytest.raises(AnyprecError, match="every=0 is not a number of steps"):
        train_observed(RECIPE, tmp_path, every=0)
    with pytest.raises(RecipeError, match="loss='mean' is not known; choose one of hard"):
        width_gradients(model, images, labels, WIDTHS, loss="mean")
    with pytest.raises(AnyprecError, match="give first or last, not both"):
        Compliance((1, 2)).table(first=1, last=1)
    with pytest.raises(AnyprecError, match="last=0 is not a number of steps"):
        Compliance((1, 2)).table(last=0)
    with pytest.raises(AnyprecError, match="has no convolution or linear layer that is trained"):
        width_gradients(nn.ReLU(), images, labels, WIDTHS)
    with pytest.raises(CheckpointError, match=r"cannot read .*No such file"):
        Compliance.load(tmp_path / "nowhere.jsonl")
    (tmp_path / FILE).write_text('{"step": 0, "cosines": {"1,2": 0.5}}\n{"step"')  # killed while it wrote
    assert Compliance.load(tmp_path).steps == [0]
    (tmp_path / FILE).write_text('{"step": 0, "cosines": {"1,2": 0.5}}\n{"step"\n')
    with pytest.raises(CheckpointError, match=r"compliance.jsonl is damaged in line 2"):
        Compliance.load(tmp_path)
    (tmp_path / FILE).write_text("")
    with pytest.raises(CheckpointError, match="holds no whole step"):
        Compliance.load(tmp_path)
