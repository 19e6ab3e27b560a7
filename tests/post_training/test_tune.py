"""Tuning: each width learns by itself and only what is its own; what does not help is undone."""

import torch
from torch import nn

import anyprec
from anyprec.nn.switching import any_layers
from anyprec.post_training import GptqSettings, ptq
from anyprec.post_training.tune import distance, mean_distance, own_parameters, tune


def small():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 5),
    )  # fmt: skip
    x = torch.randn(32, 3, 8, 8)
    for _ in range(20):
        net(x)
    net[-1].weight.data.mul_(20)  # sure of its answers, as a trained one is
    net.eval()
    return ptq(net, [x], "gptq", (2, 4, 8), gptq=GptqSettings(tune_steps=0)), [((part,), {}) for part in x.split(8)]


@torch.no_grad()
def outputs(model, calls):
    found = {}
    for k in (2, 4, 8, 32):
        with anyprec.bits(model, k):
            found[k] = torch.cat([model(*args) for args, _ in calls])
    return found


def test_a_width_learns_and_no_other_changes():
    model, calls = small()
    before = outputs(model, calls)
    codes = [layer.codes(8).clone() for layer in any_layers(model).values()]
    flags = [p.requires_grad for p in model.parameters()]
    found = tune(model, calls, (2,), steps=100)
    after = outputs(model, calls)
    assert found[2][1] < found[2][0]
    assert distance(after[2], after[32]) < distance(before[2], before[32])
    assert all(torch.equal(before[k], after[k]) for k in (4, 8, 32))
    assert all(torch.equal(a, layer.codes(8)) for a, layer in zip(codes, any_layers(model).values(), strict=True))
    assert [p.requires_grad for p in model.parameters()] == flags


def test_a_width_is_judged_by_several_calls():
    """The distance of one call may fall while that of all grows: then tuning did not help."""
    model, calls = small()
    made = outputs(model, calls)
    wanted = list(made[32].split(8))
    with anyprec.bits(model, 2):
        found = mean_distance(model, calls, wanted)
    assert abs(found - float(distance(made[2], made[32]))) < 1e-5


def test_what_does_not_help_is_undone(monkeypatch):
    model, calls = small()
    before = outputs(model, calls)

    def spoil(model, calls, wanted, bits, *rest):
        with torch.no_grad():
            for p, _ in own_parameters(model, bits):
                p.fill_(float("nan"))

    monkeypatch.setattr("anyprec.post_training.tune.learn", spoil)
    found = tune(model, calls, (2,), steps=5)
    assert found[2][0] == found[2][1]
    assert torch.equal(outputs(model, calls)[2], before[2])


def test_a_good_width_is_left_alone(monkeypatch):
    model, calls = small()
    monkeypatch.setattr("anyprec.post_training.tune.GOOD_ENOUGH", 1e9)
    monkeypatch.setattr("anyprec.post_training.tune.learn", lambda *_: (_ for _ in ()).throw(AssertionError))
    assert set(tune(model, calls, (2, 8), steps=5)) == {2, 8}


def test_distance():
    a, b = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    assert distance(a, a) == 0 and distance(a, b) > 1
    assert torch.allclose(distance(a + 5, b), distance(a, b))  # probabilities, not scores
    maps = torch.ones(1, 2, 3, 3)
    assert distance(2 * maps, maps) == 1
