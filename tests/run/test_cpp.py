"""docs/cpp.md as a C++ user follows it: build without Python, install, then build and run its program.

The build takes minutes, so these tests are slow; they are skipped where CMake or a C++ compiler is missing.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import anyprec
from anyprec.format.file import write
from anyprec.run.oracle import run_graph

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cpp.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.slow


def tool(name):
    """Beside the interpreter, as `make setup` installs it, or anywhere on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def call(*command, code=0):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=1800)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def block(language):
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return text


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """The engine, built without Python and installed."""
    cmake, _ = tool("cmake"), tool("c++")
    folder = tmp_path_factory.mktemp("cpp")
    call(cmake, "-S", ROOT, "-B", folder / "build", "-DANYPREC_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=Release")
    call(cmake, "--build", folder / "build")
    call(cmake, "--install", folder / "build", "--prefix", folder / "prefix")
    return folder / "prefix"


@pytest.fixture
def model(net, tmp_path):
    """A model file that takes uint8 images, the page's image, and the outputs of every profile."""
    path = tmp_path / "net.apm"
    graph = replace(net.graph, image_scale=(1 / 255,) * 3, image_shift=(-0.5,) * 3)
    write(graph, path)
    pixels = (np.arange(32 * 32 * 3) * 37).astype(np.uint8).reshape(1, 32, 32, 3)
    x = np.float32(np.float64(pixels) * np.float32(1 / 255) - 0.5)  # exact in double, so rounded once
    return path, pixels, {p.name: run_graph(graph, x, p.name)["fc"].ravel() for p in graph.profiles}


def lines_of(outputs):
    return [f"{profile}: class {y.argmax()}, {y.max():.6g}" for profile, y in outputs.items()]


def test_program_without_cmake(prefix, model, tmp_path):
    path, pixels, outputs = model
    (tmp_path / "classify.cpp").write_text(block("cpp"))
    program, library = tmp_path / "classify", next(prefix.glob("lib*"))
    flags = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror")
    call(tool("c++"), *flags, tmp_path / "classify.cpp", f"-I{prefix / 'include'}", f"-L{library}",
         "-lanyprec_engine", "-pthread", "-o", program)  # fmt: skip
    assert call(program, path).splitlines() == lines_of(outputs)
    call(program, tmp_path / "gone.apm", code=1)

    np.save(tmp_path / "x.npy", pixels)
    call(prefix / "bin" / "anyprec-run", path, tmp_path / "x.npy", "--layout", "NHWC", "--out", tmp_path / "y.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), outputs["32"][None])


def test_program_with_find_package(prefix, model, tmp_path):
    """Outside the tree, against a prefix that was moved: the package must not name the folder it was built in."""
    path, _, outputs = model
    cmake, moved, build = tool("cmake"), tmp_path / "moved", tmp_path / "build"
    shutil.copytree(prefix, moved)
    (tmp_path / "classify.cpp").write_text(block("cpp"))
    (tmp_path / "CMakeLists.txt").write_text(block("cmake"))
    call(cmake, "-S", tmp_path, "-B", build, f"-DCMAKE_PREFIX_PATH={moved}", "-DCMAKE_BUILD_TYPE=Release")
    call(cmake, "--build", build)
    assert call(build / "classify", path).splitlines() == lines_of(outputs)


def test_package_version(prefix, tmp_path):
    """find_package refuses a version that is too new, and a missing package."""
    cmake, _ = tool("cmake"), tool("c++")
    for version, found in ((anyprec.__version__, True), ("99.0", False)):
        folder = tmp_path / version
        folder.mkdir()
        (folder / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.18)\nproject(app LANGUAGES CXX)\n"
            f"find_package(anyprec {version} CONFIG REQUIRED)\n"
        )
        call(cmake, "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}", code=0 if found else 1)


def test_every_public_header_alone(prefix, tmp_path):
    headers = sorted(path.name for path in (prefix / "include" / "anyprec").iterdir())
    assert headers == ["cpu.h", "engine.h", "input_error.h", "model_error.h"]
    for header in headers:
        (tmp_path / "one.cpp").write_text(f"#include <anyprec/{header}>\n")
        call(tool("c++"), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{prefix / 'include'}",
             tmp_path / "one.cpp")  # fmt: skip
