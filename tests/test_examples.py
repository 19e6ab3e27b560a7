"""The examples run, and the notebook does what the script of the same name does."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
VERBS = ["train", "calibrate", "pack", "run", "serve"]


def notebook_code(name):
    cells = json.loads((EXAMPLES / name).read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_the_script():
    script, cells = (EXAMPLES / "your_photos.py").read_text(), notebook_code("your_photos.ipynb")
    for part in (r'RECIPE = """.*?"""', r"def draw_photos.*?return folder"):
        assert re.search(part, script, re.DOTALL)[0] in cells[0]
    commands = re.findall(r'!anyprec (\w+)|"anyprec", "(\w+)"', "\n".join(cells))
    assert list(dict.fromkeys(a or b for a, b in commands)) == VERBS


@pytest.mark.slow
def test_the_notebook_answers(tmp_path):
    """Its cells in order, shell commands and all, on fewer pictures and epochs."""
    pytest.importorskip("torch")
    lines = []
    for cell in notebook_code("your_photos.ipynb"):
        cell = cell.replace("epochs = 12", "epochs = 2").replace("per_class: int = 90", "per_class: int = 12")
        lines += [re.sub(r"^!anyprec (.*)$", r'shell(f"\1")', cell, flags=re.MULTILINE)]
    head = (
        "import subprocess as s, sys as y\n"
        "def shell(line): s.run([y.executable, '-m', 'anyprec', *line.split()], check=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert '"label": "circle"' in done.stdout


@pytest.mark.slow
def test_your_photos(tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, str(EXAMPLES / "your_photos.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    accuracy = [float(found) for found in re.findall(r"^[1-8] +([\d.]+) %", done.stdout, re.MULTILINE)]
    assert len(accuracy) == 8 and min(accuracy) > 80
