"""The import rule in one table: who may import whom, and that torch stays out of the torch-free half."""

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import anyprec

SOURCE = Path(anyprec.__file__).parent
TORCH_PARTS = {"nn", "training", "analysis", "zoo", "packing", "post_training", "reproduce", "onnx_import"}

# Part of the package -> the parts it may import, besides itself and FOR_ALL.
# `nn`, `training` and `zoo` share a box: networks are made of any-layers, and training builds them by name.
MAY_IMPORT = {
    "arguments": set(),
    "choices": set(),
    "colors": set(),
    "errors": set(),
    "widths": set(),
    "files": set(),
    "preprocessing": set(),
    "progress": set(),
    "data": {"progress"},
    "nn": {"data", "progress", "training", "zoo", "_native"},  # `_native`: convolutions of training
    # `models` and `packing`: a training may start from a model file; `run`: another may teach it
    "training": {"data", "models", "nn", "onnx_import", "packing", "progress", "run", "zoo"},
    "onnx_import": set(),
    "analysis": {"data", "nn", "progress", "training", "zoo"},
    "zoo": {"data", "format", "nn", "progress", "training"},  # `format` to read safetensors
    "models": {"data"},  # `data` to download
    "format": {"models"},  # `models` for names instead of paths, here and below
    "packing": {"data", "format", "nn", "progress", "run", "training", "zoo"},  # `run` to check what it wrote
    # `packing` and `run`: `quantize` also packs, and reads pictures within the limits of `run`; it takes ONNX files
    "post_training": {"data", "nn", "onnx_import", "packing", "progress", "run", "training", "zoo"},
    "cascade": {"format"},
    "run": {"cascade", "data", "format", "models", "progress", "_native"},
    "search": {"format", "run"},
    "ray": {"data", "models", "run"},
    "export": {"format", "models", "run"},  # `run` to check what it wrote
    "bench": {"data", "export", "format", "models", "progress", "run", "_native"},
    "loadtest": {"data", "progress"},
    "serve": {"bench", "cascade", "loadtest", "models", "run", "format", "progress"},  # `loadtest`: arrivals
    "report": {"run", "format", "progress"},
    "reproduce": {
        "analysis", "bench", "data", "nn", "packing", "post_training", "progress", "report", "run", "training", "zoo",
    },
    "__main__": {"cli"},
    "__init__": set(),
}  # fmt: skip
MAY_IMPORT["cli"] = {*MAY_IMPORT, "_native"}  # the commands: nothing but __main__ imports them
FOR_ALL = {"arguments", "choices", "colors", "errors", "files", "preprocessing", "widths", "__init__"}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, inside functions too."""
    return imports_of(ast.parse(path.read_text(encoding="utf-8")), path)


def imports_of(tree: ast.AST, path: Path) -> Iterator[str]:
    """`if TYPE_CHECKING:` never runs: left out."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending.extend(node.orelse)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import by full name, for this test's sake"
            # `from anyprec import nn` imports anyprec.nn
            yield from (f"{node.module}.{name.name}" for name in node.names)
        else:
            pending.extend(ast.iter_child_nodes(node))


FILES = sorted(SOURCE.rglob("*.py"))


def test_every_part_has_its_row():
    assert {part_of(path) for path in FILES} <= set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_layers(path):
    part = part_of(path)
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package in ("torch", "torchvision", "transformers", "tensorboard"):
            allowed = TORCH_PARTS | {"cli"}  # there inside functions only: see the next test
            assert part in allowed, f"{path} imports {name}; only {sorted(allowed)} may"
        if package == "anyprec":
            target = rest.partition(".")[0]
            if not ((SOURCE / target).exists() or (SOURCE / f"{target}.py").exists() or target == "_native"):
                target = "__init__"  # a name such as __version__
            allowed = MAY_IMPORT[part] | FOR_ALL | {part}
            assert target in allowed, f"{path} imports anyprec.{target}; {part} may import {sorted(allowed)}"


COMMANDS = sorted((SOURCE / "cli").glob("*.py"))


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_commands_import_torch_inside_functions_only(path):
    """`anyprec VERB --help` must not wait for torch. recipe.py and half_precision.py are the torch-free part of it."""
    top = ast.parse(path.read_text(encoding="utf-8"))
    top.body = [node for node in top.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for name in imports_of(top, path):
        package, _, rest = name.partition(".")
        assert package != "torch", f"{path} imports {name} at its top"
        if package == "anyprec" and rest.partition(".")[0] in TORCH_PARTS:
            free = ("training.recipe", "training.half_precision")
            assert rest.startswith(free), f"{path} imports {name} at its top; import it where it is used"


def test_help_of_every_verb_loads_no_torch():
    script = """import contextlib, importlib, io, pkgutil, sys
import anyprec.cli
from anyprec.cli.dispatch import VERBS, main
for module in pkgutil.iter_modules(anyprec.cli.__path__):
    importlib.import_module(f"anyprec.cli.{module.name}")
for verb in VERBS:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([verb, "--help"]) == 0, verb
assert len(VERBS) > 10 and "torch" not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def loaded_by(statement: str) -> set[str]:
    """Packages outside the standard library that a fresh interpreter loads for a statement."""
    script = (
        "import json, sys; before = set(sys.modules)\n"
        f"{statement}\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(json.dumps(sorted(new - sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_importing_anyprec_loads_nothing_else():
    assert loaded_by("import anyprec, anyprec.widths, anyprec.errors") == {"anyprec"}


@pytest.mark.parametrize(
    "statement",
    [
        "import anyprec.cli, anyprec.progress",
        "import anyprec.run.cpu, anyprec.cli.info",
        "import anyprec; anyprec.data",
        "import anyprec; anyprec.Profile('mixed', {'conv': 2}); dir(anyprec)",
        "import anyprec.cli; assert anyprec.cli.main(['--help']) == 0",
        "import anyprec.cli; assert anyprec.cli.main(['info']) == 0",
    ],
)
def test_the_torch_free_half_loads_only_numpy(statement):
    statement = f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()): {statement}"
    assert loaded_by(statement) <= {"anyprec", "numpy"}


def test_every_public_name_is_there():
    pytest.importorskip("torch")
    for name in anyprec.__all__:
        assert getattr(anyprec, name) is not None
    assert set(anyprec.__all__) <= set(dir(anyprec))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'anyprec' has no attribute 'covert'"):
        _ = anyprec.covert


def test_public_names_are_functions_classes_and_modules_that_cannot_be_called():
    """Whatever is imported meanwhile: a submodule must not take the place of a function."""
    pytest.importorskip("torch")
    for name in sorted({path.parent if path.name == "__init__.py" else path.with_suffix("") for path in FILES}):
        if name != SOURCE and "ray" not in name.parts and name.name != "__main__":
            importlib.import_module(".".join(["anyprec", *name.relative_to(SOURCE).parts]))
    modules = {name for name in anyprec.__all__ if isinstance(getattr(anyprec, name), ModuleType)}
    assert modules == {"analysis", "data", "errors", "nn", "ray", "zoo"}
    assert not any(callable(getattr(anyprec, name)) for name in modules)
    assert all(getattr(anyprec, name).__doc__ for name in anyprec.__all__)


@pytest.mark.parametrize("call", ["anyprec.convert", "anyprec.bits(None, 2)", "from anyprec import set_bits"])
def test_without_torch_the_error_says_what_to_install(tmp_path, call):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')\n")
    done = subprocess.run(
        [sys.executable, "-c", f"import anyprec\n{call}"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert "MissingExtra: anyprec." in done.stderr
    assert done.stderr.rstrip().endswith("needs PyTorch: pip install 'anyprec[train]'")
