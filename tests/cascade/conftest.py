"""A trained network that comes with the package, with a cascade in its file; smooth made-up images."""

from dataclasses import replace

import numpy as np
import pytest

from anyprec.cascade.cascade import Cascade, Stage
from anyprec.format import read, write
from anyprec.models.catalog import find


@pytest.fixture(scope="session")
def images():
    """(N, 32, 32, 3) uint8 with large shapes in them."""
    draw = np.random.default_rng(0)
    coarse = draw.integers(0, 256, (48, 4, 4, 3)).astype(np.float32)
    fine = np.repeat(np.repeat(coarse, 8, 1), 8, 2)
    return np.clip(fine + draw.normal(0, 12, fine.shape), 0, 255).astype(np.uint8)


@pytest.fixture(scope="session")
def graph():
    return read(find("cifar10-vgg-small"))


@pytest.fixture(scope="session")
def cascade():
    stages = (Stage("1", 0.5, 1.5, 1.0), Stage("4", 0.7, 1.0, 0.6), Stage("8", None, 1.0, 0.3))
    return Cascade("margin", stages, 99.0)


@pytest.fixture(scope="session")
def path(graph, cascade, tmp_path_factory):
    made = tmp_path_factory.mktemp("cascade") / "auto.apm"
    write(replace(graph, cascade=cascade.text()), made)
    return made
