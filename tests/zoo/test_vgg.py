"""The whitening stem of the speed-run VGG: what it does to patches, and that it does not learn."""

import pytest
import torch
import torch.nn.functional as F

from anyprec.errors import DataError
from anyprec.training.joint import joint_step
from anyprec.zoo import build


def correlated_images(count=64, side=12):
    """Neighboring pixels and colors that resemble each other, as in photographs."""
    dice = torch.Generator().manual_seed(0)
    noise = torch.randn(count, 3, side + 4, side + 4, generator=dice)
    mixed = torch.einsum("ij,njhw->nihw", torch.tensor([[1.0, 0.5, 0.2], [0.3, 1.0, 0.4], [0.6, 0.1, 1.0]]), noise)
    return F.avg_pool2d(mixed, 5, stride=1) + 0.3


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build("vgg-speed", channels=(4, 6, 8))


def test_whitened_components_have_variance_1_and_no_correlation(model):
    images = correlated_images()
    model.fit_stem(images)
    components = model.whiten(images)[:, :12].double()  # (N, 12, 11, 11)
    rows = components.transpose(0, 1).flatten(1)
    covariance = torch.cov(rows)
    off = covariance - torch.diag(covariance.diagonal())
    assert off.abs().max() < 0.01
    assert (covariance.diagonal() <= 1).all() and covariance.diagonal()[0] > 0.9  # a little less: the floor
    torch.testing.assert_close(model.whiten(images)[:, 12:], -model.whiten(images)[:, :12])


def test_whitening_is_the_same_whatever_signs_the_eigenvectors_had(model, monkeypatch):
    images = correlated_images()
    model.fit_stem(images)
    before = model.whiten.weight.clone()
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (eigh(m)[0], -eigh(m)[1]))
    model.fit_stem(images)
    torch.testing.assert_close(model.whiten.weight, before)


def test_whitening_does_not_learn_but_its_bias_does(model):
    images = correlated_images(8, 16)
    joint_step(model, images, torch.randint(0, 10, (8,)), (1, 32))
    assert model.whiten.weight.grad is None and model.whiten.bias.grad is not None


def test_small_images_are_refused(model):
    with pytest.raises(DataError, match="reads images of at least 9x9, not 8x8"):
        model(torch.randn(2, 3, 8, 8))
    with pytest.raises(DataError, match="at least 9x9"):
        model.fit_stem(torch.randn(2, 3, 8, 8))


def test_multiplications_of_the_large_one():
    """118 million, as the float networks of this kind have."""
    model, count = build("vgg-speed"), 0

    def add(layer, given, out):
        nonlocal count
        count += layer.weight[0].numel() * out[0].numel()

    for layer in model.modules():
        if hasattr(layer, "weight") and isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(add)
    model.eval()(torch.randn(1, 3, 32, 32))
    assert round(count / 1e6) == 118
