"""Model files and servers that several tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Running, running, save


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("serve") / "net.apm")


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[Running]:
    """A server with one model, `net`, which no test of the module may leave changed."""
    with running({"net": model_path}) as found:
        yield found
