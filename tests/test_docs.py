"""The code in README and docs runs as printed: every ```python block, file by file, in one namespace each."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p)], ids=lambda p: p.stem)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": path.stem}
    for source in blocks(path):
        exec(compile(source, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_verb_has_a_file_a_page_and_tests():
    """anyprec VERB = cli/VERB.py = docs/VERB.md (or docs/cli/VERB.md) = tests/**/test_cli_VERB.py."""
    from anyprec.cli.dispatch import VERBS

    for verb, (module, _) in VERBS.items():
        assert module.removesuffix("_") == f"anyprec.cli.{verb}"  # import_: `import` is a word of Python
        assert (ROOT / "src" / f"{module.replace('.', '/')}.py").exists()
        assert any((ROOT / "docs" / place / f"{verb}.md").exists() for place in (".", "cli")), f"no page for {verb}"
        assert list((ROOT / "tests").rglob(f"test_cli_{verb}.py")), f"no tests/**/test_cli_{verb}.py"


@pytest.mark.parametrize("path", [ROOT / "examples" / "convert_your_net.py"], ids=lambda p: p.stem)
def test_examples_run(path, tmp_path, monkeypatch):
    """As a user types it, in a folder of his own. A few epochs say whether it still works."""
    pytest.importorskip("torch")
    namespace = runpy.run_path(str(path))
    monkeypatch.chdir(tmp_path)
    if "train_jointly" in namespace:
        for name in ("train_float", "train_jointly"):
            real = namespace[name]
            monkeypatch.setitem(namespace["main"].__globals__, name, lambda net, count, real=real: real(net, 1))
    namespace["main"]()
    assert (tmp_path / "net.apm").exists()
