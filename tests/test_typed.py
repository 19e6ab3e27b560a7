"""The public interface under `mypy --strict`: a user's file that has every name of `anyprec.__all__`, with types."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import anyprec

ROOT = Path(__file__).parents[1]
USER_CODE = ROOT / "tests" / "typed" / "user_code.py"


def test_the_file_uses_every_public_name():
    words = set(re.findall(r"\w+", USER_CODE.read_text(encoding="utf-8")))
    assert set(anyprec.__all__) <= words


@pytest.mark.slow  # `make check` does the same
def test_user_code_is_clean(tmp_path):
    pytest.importorskip("mypy")
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"),
               "--cache-dir", str(ROOT / ".mypy_cache"), str(USER_CODE)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
