"""The command line and Python programs as processes of their own: what they print, and how they end."""

import os
import subprocess
import sys

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def anyprec(*arguments, timeout=60, env=None, **options):
    command = [sys.executable, "-m", "anyprec", *map(str, arguments)]
    env = {**ENVIRONMENT, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, **options)


def python(program, *arguments, timeout=60):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)


def said_in_one_line(done, *words):
    """Exit code 2 and one line that has these words, no traceback."""
    assert "Traceback" not in done.stderr, done.stderr[-500:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("anyprec: error: ")]
    assert (done.returncode, len(lines)) == (2, 1), f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    assert all(word in lines[0] for word in words), lines[0]
