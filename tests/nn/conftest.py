"""What the tests of nn share: a fixed seed, and how far a network at each width is from its original."""

import pytest
import torch

from anyprec.nn.switching import bits


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def relative_errors():
    """relative_errors(net, model, x, widths, call): width -> |model(x) - net(x)| / |net(x)|, all outputs finite."""

    def measure(net, model, x, widths, call):
        found = {}
        with torch.no_grad():
            original = call(net, x)
            for k in widths:
                with bits(model, k):
                    out = call(model, x)
                assert torch.isfinite(out).all(), k
                found[k] = ((out - original).norm() / original.norm()).item()
        return found

    return measure
