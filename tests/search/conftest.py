"""A trained network that comes with the package, smooth made-up images, and a residual network of random weights."""

import numpy as np
import pytest

from anyprec.bench.random_networks import resnet20_graph
from anyprec.format import read, write
from anyprec.models.catalog import find


def smooth_images(count, size, channels=3, seed=0):
    """uint8 (N, H, W, C) with large shapes in them, so that inner values are as varied as those of photographs."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (count, 4, 4, channels)).astype(np.float32)
    fine = np.repeat(np.repeat(coarse, -(-size // 4), 1), -(-size // 4), 2)[:, :size, :size]
    return np.clip(fine + draw.normal(0, 12, fine.shape), 0, 255).astype(np.uint8)


@pytest.fixture(scope="session")
def images():
    return smooth_images(96, 32)


@pytest.fixture(scope="session")
def vgg_path():
    return find("cifar10-vgg-small")


@pytest.fixture(scope="session")
def vgg(vgg_path):
    return read(vgg_path)


@pytest.fixture(scope="session")
def resnet():
    """Convolutions that share codes, a trunk of floats, quantize ops with tables."""
    return resnet20_graph(multiplier=0.25, size=16, widths=(1, 2, 4, 8))


@pytest.fixture(scope="session")
def resnet_path(resnet, tmp_path_factory):
    path = tmp_path_factory.mktemp("resnet") / "resnet.apm"
    write(resnet, path)
    return path
