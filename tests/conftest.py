"""Set-up for all tests: one thread, no network, half precision that works, a limit on the whole run, and the folder of
real data sets for those that want it.
"""

import faulthandler
import gc
import logging
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

from anyprec.run.cpu import cpu_features, cpu_name
from anyprec.training.half_precision import VARIABLE, hold_onednn

# Before anything imports torch or transformers. Subprocesses that tests start inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("ANYPREC_ISA", None)  # a developer's own setting is not what the tests are about

RUN_LIMIT = 45 * 60  # seconds; `make test` takes 4 to 6 minutes. ANYPREC_TEST_LIMIT changes it

gc.disable()  # until all tests are collected: nothing of that is garbage


def pytest_collection_finish():
    """What is there by now stays, and is not looked at again whenever a test leaves garbage."""
    gc.freeze()
    gc.enable()


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # inherits what follows
    hold_half_precision(config)
    # Whatever hangs, in a test or in pytest itself, ends the run with a traceback of all threads and exit code 1.
    limit = float(os.environ.get("ANYPREC_TEST_LIMIT", RUN_LIMIT))
    faulthandler.dump_traceback_later(limit, exit=True, file=os.dup(sys.__stderr__.fileno()))


def hold_half_precision(config):
    """Before any test imports torch. The answer is kept in pytest's cache, for this CPU and torch."""
    if os.environ.get(VARIABLE):
        return
    key = f"half_precision/{cpu_name()} {version('torch')} {len(cpu_features())}".replace(" ", "_")
    cache = getattr(config, "cache", None)
    limit = cache.get(key, None) if cache else None
    if limit is None:
        for kind in ("bf16", "fp16"):
            hold_onednn(kind)
        limit = os.environ.get(VARIABLE, "")
        if cache:
            cache.set(key, limit)
    if limit:
        os.environ[VARIABLE] = limit


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


@pytest.fixture
def mount_disk(tmp_path):
    """mount_disk("size=1m"): a small file system in memory; skips where mounting is not permitted."""
    mounted = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True).returncode:
            pytest.skip("no permission to mount a file system")
        mounted.append(place)
        return place

    if os.name != "posix" or shutil.which("mount") is None:
        pytest.skip("file systems are mounted as on Linux")
    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def one_line_error(capsys):
    """one_line_error("evaluate", folder, ...): what a command says that ends with exit code 2 and one line."""
    from anyprec.cli import main

    def run(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("anyprec: error: ") and err.count("\n") == 1, err
        return err

    return run


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """`anyprec serve` inside a test sends the server's lines to that test's stderr, which is closed after it."""
    loggers = [logging.getLogger(name) for name in ("anyprec.serve", "uvicorn.error")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
