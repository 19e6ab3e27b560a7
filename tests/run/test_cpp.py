"""docs/cpp.md as a C++ user follows it: build without Python, install, compile the page's program, run it."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anyprec.format.file import write
from anyprec.run.oracle import run_graph

ROOT = Path(__file__).parents[2]


def tool(name):
    """Beside the interpreter, as `make setup` installs it, or anywhere on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def call(*command, code=0):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_page_as_typed(net, tmp_path):
    cmake, compiler = tool("cmake"), tool("c++")
    build, prefix = tmp_path / "build", tmp_path / "prefix"
    call(cmake, "-S", ROOT, "-B", build, "-DANYPREC_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=Release")
    call(cmake, "--build", build)
    call(cmake, "--install", build, "--prefix", prefix)

    page = (ROOT / "docs" / "cpp.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```cpp\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "classify.cpp").write_text(source)
    program, library = tmp_path / "classify", next(prefix.glob("lib*"))
    flags = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror")
    call(compiler, *flags, tmp_path / "classify.cpp", f"-I{prefix / 'include'}", f"-L{library}",
         "-lanyprec_engine", "-pthread", "-o", program)  # fmt: skip

    model = tmp_path / "net.apm"
    graph = replace(net.graph, image_scale=(1 / 255,) * 3, image_shift=(-0.5,) * 3)
    write(graph, model)
    pixels = (np.arange(32 * 32 * 3) * 37).astype(np.uint8).reshape(1, 32, 32, 3)
    x = np.float32(np.float64(pixels) * np.float32(1 / 255) - 0.5)  # exact in double, so rounded once
    wanted = {p.name: run_graph(graph, x, p.name)["fc"].ravel() for p in graph.profiles}
    expected = [f"{profile}: class {y.argmax()}, {y.max():.6g}" for profile, y in wanted.items()]
    assert call(program, model).splitlines() == expected

    np.save(tmp_path / "x.npy", pixels)
    call(prefix / "bin" / "anyprec-run", model, tmp_path / "x.npy", "--layout", "NHWC", "--out", tmp_path / "y.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), wanted["32"][None])
    call(program, tmp_path / "gone.apm", code=1)
