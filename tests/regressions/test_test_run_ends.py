"""The options of `make test` with tests that kill their workers, as half precision did on a CPU with AMX."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import anyprec

pytestmark = pytest.mark.slow

MAKEFILE = Path(anyprec.__file__).parents[2] / "Makefile"


def test_a_run_whose_workers_die_ends(tmp_path):
    """xdist started dead workers anew and, after the fourth, waited for ever."""
    options = shlex.split(re.search(r"-m pytest (-n.*)$", MAKEFILE.read_text(), re.M)[1])
    for number in range(6):
        dies = "import os, signal\ndef test_dies(): os.kill(os.getpid(), signal.SIGILL)\n"
        (tmp_path / f"test_dies{number}.py").write_text(dies)
        (tmp_path / f"test_good{number}.py").write_text("def test_good(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", *options, "-p", "no:cacheprovider", "--rootdir", "."]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as child:
        try:
            assert child.wait(45) in (1, 3)  # 3: xdist was just writing to a worker when it died
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(child.pid, signal.SIGKILL)
