"""README and docs are true: every ```python block runs as printed, links lead somewhere, nothing is missing."""

import importlib.util
import re
import runpy
from pathlib import Path

import pytest
from sampling import sampled

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ROOT_PAGES = ["README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY", "CHANGELOG", "RELEASE", "CODE_OF_CONDUCT"]
PAGES = [*(ROOT / f"{name}.md" for name in ROOT_PAGES), *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
WIDE = re.compile(r"\s*\||    |!\[|#|.*\]\(http|.*\]: http")  # tables, code, pictures, titles, long addresses


def named(path):
    return path.relative_to(ROOT).with_suffix("").as_posix()


def blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def prose(path):
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path):
    """What Python-Markdown makes of the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    plain = [
        re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)).strip().lower() for title in titles
    ]
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


LONG = [ROOT / "docs" / "cli" / "reproduce.md", ROOT / "docs" / "guides" / "compliance.md"]
TUTORIAL = ROOT / "docs" / "tutorial.md"
WITH_BLOCKS = [path for path in PAGES if blocks(path) and path != TUTORIAL]
SAMPLE = [*sampled(WITH_BLOCKS, 1, slow=LONG), pytest.param(TUTORIAL, marks=pytest.mark.thorough)]


@pytest.mark.parametrize("path", SAMPLE, ids=named)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": path.stem}
    for source in blocks(path):
        exec(compile(source, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_links_lead_somewhere(path):
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", prose(path)):
        page = path.parent / target if target else path
        assert page.exists(), f"{named(path)} links to {target}"
        if anchor:
            assert anchor in anchors(page), f"{named(path)} links to {target}#{anchor}"


def test_every_verb_has_a_file_a_page_and_tests():
    """anyprec VERB = cli/VERB.py = docs/VERB.md (or docs/cli/VERB.md) = tests/**/test_cli_VERB.py."""
    from anyprec.cli.dispatch import VERBS

    for verb, (module, _) in VERBS.items():
        assert module.removesuffix("_") == f"anyprec.cli.{verb}"  # import_: `import` is a word of Python
        assert (ROOT / "src" / f"{module.replace('.', '/')}.py").exists()
        assert any((ROOT / "docs" / place / f"{verb}.md").exists() for place in (".", "cli")), f"no page for {verb}"
        assert list((ROOT / "tests").rglob(f"test_cli_{verb}.py")), f"no tests/**/test_cli_{verb}.py"


@pytest.mark.thorough
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


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_lines_are_short(path):
    shown = prose(path).partition("<!-- tables of")[0]  # what a script writes may be longer
    long = [line for line in shown.splitlines() if len(line) > 100 and not WIDE.match(line)]
    assert not long


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_files_that_are_named_exist(path):
    """`tests/run/test_cpp.py`, `bench/engine.py` and their like; a name with a placeholder in capitals is no file."""
    if path.stem == "CHANGELOG":
        pytest.skip("names what once was, too")
    for name in re.findall(r"\b(?:tests|bench|recipes|examples|native|src/anyprec)/[\w/-]+\.\w+", prose(path)):
        if not re.search(r"[A-Z]{3}", name):
            assert (ROOT / name).exists(), f"{named(path)} names {name}"


def test_every_verb_has_a_page_that_lists_its_options():
    from anyprec.cli.dispatch import VERBS

    assert set(VERBS) == {page.stem for page in (DOCS / "cli").glob("*.md")} - {"index"}
    index = (DOCS / "cli" / "index.md").read_text(encoding="utf-8")
    for verb in VERBS:
        page = (DOCS / "cli" / f"{verb}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# anyprec {verb}\n") and page.count("\n<!-- options -->\n") == 1
        assert f"({verb}.md)" in index


def test_options_are_made_from_the_parser():
    pytest.importorskip("torch")
    from anyprec.cli.dispatch import VERBS

    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    for verb in VERBS:
        table = hooks.options_of(verb)
        assert table.startswith("| argument | meaning |") and "\n| `" in table
        assert "%(" not in table


def test_options_that_are_shown_exist():
    """What the synopsis at the top of a command's page shows is what its parser takes."""
    pytest.importorskip("torch")
    import argparse

    from anyprec.cli.dispatch import VERBS

    for verb, (module, _) in VERBS.items():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        page = (DOCS / "cli" / f"{verb}.md").read_text(encoding="utf-8")
        (synopsis,) = re.findall(r"\A# .*\n\n((?:    .*\n)+)", page)
        unknown = set(re.findall(r"--[a-z][a-z-]*", synopsis)) - set(parser._option_string_actions)
        assert not unknown, f"docs/cli/{verb}.md shows {unknown}"


def test_the_api_page_has_every_public_name():
    import anyprec

    listed = re.findall(r"^::: anyprec\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(anyprec.__all__)


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages <= listed


def test_the_glossary_is_short():
    rows = re.findall(
        r"^\| (?!word|---)", (DOCS / "concepts" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert 10 <= len(rows) <= 25


def test_decisions_have_four_fields():
    page = (DOCS / "decisions.md").read_text(encoding="utf-8")
    for entry in page.split("\n### ")[1:]:
        fields = re.findall(r"^- \*\*(.+?)\.\*\*", entry, re.MULTILINE)
        assert fields == ["Context", "Choice", "Evidence", "Would change it"], entry.splitlines()[0]
