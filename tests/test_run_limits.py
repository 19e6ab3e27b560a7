"""`make test` always ends: a test that kills its worker, or hangs, or a pytest that hangs, fails the run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The Makefile's own options: those are what is tested here.
OPTIONS = shlex.split(re.search(r"^PYTEST := .* -m pytest (.*)$", (ROOT / "Makefile").read_text(), re.M)[1])
GOOD = "def test_good(): pass\n"


def run(folder: Path, files: dict[str, str], *options: str, **environment: str) -> subprocess.CompletedProcess:
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nfaulthandler_exit_on_timeout = true\n")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", *OPTIONS, "-p", "no:cacheprovider", *options],
        cwd=folder, capture_output=True, text=True, timeout=120,
        env={**inherited, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
    )  # fmt: skip


@pytest.mark.thorough
def test_workers_that_die(tmp_path):
    dies = "import os, signal\ndef test_dies(): os.kill(os.getpid(), signal.SIGILL)\n"
    files = {f"test_dies{i}.py": dies for i in range(6)} | {f"test_good{i}.py": GOOD for i in range(6)}
    done = run(tmp_path, files)
    # 1: a test failed. 3: xdist was just writing to a worker when it died, which pytest calls an internal error.
    assert done.returncode in (1, 3), done.stdout + done.stderr
    assert "node down" in done.stdout and " 12 passed" not in done.stdout


@pytest.mark.thorough
def test_a_test_that_hangs(tmp_path):
    hangs = "import time\ndef test_hangs(): time.sleep(600)\n"
    done = run(tmp_path, {"test_hangs.py": hangs, "test_good.py": GOOD}, "-o", "faulthandler_timeout=2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_hangs" in done.stdout + done.stderr


def test_a_run_that_hangs_as_a_whole(tmp_path):
    """The limit of tests/conftest.py, with a session that never ends by itself."""
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    hangs = "\n\ndef pytest_sessionfinish():\n    import time\n    time.sleep(600)\n"
    files = {"conftest.py": conftest + hangs, "test_good.py": GOOD}
    done = run(tmp_path, files, ANYPREC_TEST_LIMIT="4", ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.returncode == 1 and "Timeout" in done.stderr, done.stdout + done.stderr
