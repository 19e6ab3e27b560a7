"""`mixed_bits` of recipes: passes with random bits per layer beside those of the widths."""

import pytest
import torch

from anyprec.errors import RecipeError
from anyprec.nn.switching import any_layers, bits_state
from anyprec.training.checkpoint import load_state
from anyprec.training.joint import joint_step, random_bits
from anyprec.training.recipe import Recipe
from anyprec.training.run import train
from anyprec.zoo import build

SMALL = Recipe(net="resnet8", data="digits", net_options={"multiplier": 0.25}, epochs=1, batch_size=64, limit=128,
               widths=(1, 4, 32), eval_every=0)  # fmt: skip


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build("resnet8", in_channels=1, multiplier=0.25, widths=(1, 4, 32)).train()


def stepped(model, mixed, loss="hard"):
    torch.manual_seed(1)
    images, labels = torch.rand(8, 1, 8, 8), torch.arange(8)
    results = joint_step(model, images, labels, (1, 4, 32), loss=loss, mixed=mixed)
    return results, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_bits_are_drawn_by_seed_and_step(model):
    drawn = [random_bits(model, (1, 4, 32), 0.5, 0, step) for step in range(200)]
    assert drawn == [random_bits(model, (1, 4, 32), 0.5, 0, step) for step in range(200)]
    plans = [plan for plan in drawn if plan is not None]
    assert 70 < len(plans) < 130
    assert all(set(plan) == set(any_layers(model)) for plan in plans)
    assert {bits for plan in plans for bits in plan.values()} == {1, 4}
    assert len({tuple(plan.values()) for plan in plans}) > 20
    assert all(random_bits(model, (1, 4, 32), 0.0, 0, step) is None for step in range(50))


@pytest.mark.parametrize("loss", ["hard", "wider+label"])
def test_the_pass_adds_gradients_and_nothing_else(model, loss):
    """Results, running statistics and the width that is set are those of a step without it."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    results, plain = stepped(model, None, loss)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    setting = [values for _, values in bits_state(model)]
    model.load_state_dict(state)
    model.zero_grad()
    plan = {name: (1, 4)[i % 2] for i, name in enumerate(any_layers(model))}
    mixed_results, mixed = stepped(model, plan, loss)
    assert {b: v[0].item() for b, v in results.items()} == {b: v[0].item() for b, v in mixed_results.items()}
    assert all(torch.equal(after[name], value) for name, value in model.state_dict().items())
    assert [values for _, values in bits_state(model)] == setting
    assert any(not torch.equal(plain[name], mixed[name]) for name in plain)


def test_a_plan_of_one_width_counts_it_twice(model):
    """The gradient of a pass with every layer at 1 bit is that of width 1."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    _, plain = stepped(model, None)
    gradients = []
    for widths, mixed in (((1, 4, 32), dict.fromkeys(any_layers(model), 1)), ((1,), None)):
        model.load_state_dict(state)
        model.zero_grad()
        torch.manual_seed(1)
        joint_step(model, torch.rand(8, 1, 8, 8), torch.arange(8), widths, loss="hard", mixed=mixed)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    both, one = gradients
    for name in one:
        assert torch.allclose(both[name], plain[name] + one[name], rtol=1e-4, atol=1e-6), name


def test_a_run_repeats_and_differs_from_one_without(tmp_path):
    def weights(name, *settings):
        train(SMALL.override(settings), tmp_path / name, progress=False)
        return load_state(tmp_path / name / "model.pt")["state_dict"]

    plain, mixed, again = weights("a"), weights("b", "mixed_bits=1"), weights("c", "mixed_bits=1")
    assert any(not torch.equal(plain[key], mixed[key]) for key in plain)
    assert all(torch.equal(mixed[key], again[key]) for key in mixed)


def test_wrong_values_are_refused():
    with pytest.raises(RecipeError, match=r"mixed_bits=1\.5 is not allowed; it must be between 0 and 1"):
        SMALL.override(["mixed_bits=1.5"])
    with pytest.raises(RecipeError, match="would compile the network anew"):
        SMALL.override(["mixed_bits=0.5", "compile=true"])
    with pytest.raises(RecipeError, match=r"draws bits from the integer widths; widths=\[8, 32\] needs at least two"):
        SMALL.override(["mixed_bits=0.5", "widths=[8,32]"])
