"""Set-up for all tests: one thread, no network, and the folder of real data sets for those that want it."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before anything imports torch or transformers. Subprocesses that tests start inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("ANYPREC_ISA", None)  # a developer's own setting is not what the tests are about

# No deadline: it times single examples, and a shared machine may stall any of them.
settings.register_profile("anyprec", deadline=None)
settings.load_profile("anyprec")


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with real data sets (CIFAR-10, float weights); skips where there is none."""
    given = os.environ.get("ANYPREC_DATA")
    root = Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not root.is_dir():
        pytest.skip(f"no data folder {root}; set ANYPREC_DATA to the folder that holds cifar-10-batches-bin")
    return root
