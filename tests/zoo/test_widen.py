"""A wide network that starts as a narrow one gives its answers at every integer width."""

import pytest
import torch

from anyprec.errors import CheckpointError
from anyprec.nn.switching import set_bits
from anyprec.zoo import build, widen, widening_factor

WIDTHS = (1, 2, 4, 8)


def network(name="resnet8", multiplier=0.25, widths=WIDTHS, **options):
    return build(name, widths=widths, num_classes=5, multiplier=multiplier, **options)


@pytest.fixture(scope="module")
def narrow():
    """Trained so far that norms and scales are not as they started."""
    torch.manual_seed(0)
    model = network(widths=(*WIDTHS, 32), skip="quantized")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(3):
        for bits in (*WIDTHS, 32):
            set_bits(model, bits)
            model(torch.randn(16, 3, 16, 16)).square().mean().backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("times", [2, 3])
def test_the_same_answers_at_every_integer_width(narrow, times):
    model = network(multiplier=0.25 * times, skip="quantized").eval()
    assert widening_factor(model, narrow.state_dict()) == times
    widen(model, narrow.state_dict(), "narrow.pt", noise=0)
    x = torch.randn(8, 3, 16, 16)
    for bits in WIDTHS:
        answers = [set_bits(m, bits) or m(x).detach() for m in (narrow, model)]
        assert answers[0].std() > 0.01
        # Where a sum falls next to the border of a code, another order of adding may take it to the other side.
        assert torch.isclose(*answers, rtol=1e-3, atol=1e-4).float().mean() > 0.95


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_imagenet_networks(name):
    torch.manual_seed(0)
    narrow = network(name, multiplier=0.0625, skip="quantized").eval()
    model = network(name, multiplier=0.125, skip="quantized").eval()
    widen(model, narrow.state_dict(), "narrow.pt", noise=0)
    x = torch.randn(2, 3, 64, 64)
    for m in (narrow, model):
        set_bits(m, 8)
    assert torch.allclose(narrow(x), model(x), rtol=1e-2, atol=1e-2)


def test_copies_differ_by_the_noise_alone(narrow):
    model = network(multiplier=0.5, skip="quantized")
    widen(model, narrow.state_dict(), "narrow.pt", noise=0.1, seed=3)
    again = network(multiplier=0.5, skip="quantized")
    widen(again, narrow.state_dict(), "narrow.pt", noise=0.1, seed=3)
    before, after = narrow.blocks[1].conv0.weight, model.blocks[1].conv0.weight
    assert torch.equal(after, again.blocks[1].conv0.weight)
    difference = after.detach() - before.detach().repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert difference.std() == pytest.approx(0.1 * before.std().item(), rel=0.2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"multiplier": 0.375}, "not narrower by a whole factor"),
        ({"multiplier": 0.5, "widths": (1, 8, 32)}, "only for integer widths; set widths without 32"),
        ({"multiplier": 0.5, "scale": "mean"}, "only with learned scales"),
        ({"multiplier": 0.5, "name": "resnet20"}, "made for another network"),
        ({"multiplier": 0.5, "widths": (1, 3)}, "it has no blocks.0.norm0.tables.3"),
        ({"multiplier": 0.5, "skip": "float"}, "made for another network"),
    ],
)
def test_what_does_not_fit(narrow, options, words):
    model = network(**{"skip": "quantized", **options})
    with pytest.raises(CheckpointError, match=words):
        widen(model, narrow.state_dict(), "narrow.pt")


def test_networks_that_are_alike(narrow):
    assert widening_factor(network(skip="quantized"), narrow.state_dict()) == 1
    assert widening_factor(torch.nn.Linear(2, 2), narrow.state_dict()) == 1
