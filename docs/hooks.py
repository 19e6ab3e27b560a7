"""What `make docs` does beyond MkDocs: pages from the root of the repository, links between them, options of commands.

The Markdown stays readable as it lies in the repository. ARCHITECTURE.md and its like join the site under `internals/`;
links to files that are not part of the site (recipes, examples) become plain text; in `cli/VERB.md` the line
`<!-- options -->` becomes a table made from the parser of that verb. mkdocs.yml names this file; tests/test_docs.py
calls `options_of`.
"""

from __future__ import annotations

import argparse
import importlib
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "ARCHITECTURE.md": "internals/architecture.md",
    "FORMAT.md": "internals/format.md",
    "ARITHMETIC.md": "internals/arithmetic.md",
    "CONTRIBUTING.md": "internals/contributing.md",
    "SECURITY.md": "internals/security-policy.md",
    "CHANGELOG.md": "internals/changelog.md",
    "README.md": "index.md",
}
SOURCES = {site: root for root, site in ROOT_PAGES.items() if root != "README.md"}
SHIM = "https://unpkg.com/iframe-worker/shim"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config):
    """A root page that is not there leaves the navigation."""
    missing = {site for site, root in SOURCES.items() if not (ROOT / root).exists()}
    config.nav = [_without(entry, missing) for entry in config.nav]
    return config


def on_files(files, config):
    from mkdocs.structure.files import File

    for site, root in SOURCES.items():
        if (ROOT / root).exists():
            files.append(File.generated(config, site, content=(ROOT / root).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    if uri.startswith("cli/") and uri != "cli/index.md":
        markdown = markdown.replace("<!-- options -->", options_of(Path(uri).stem))
    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(lambda match: _link(match, uri), part) for part in parts[::2]]
    return "".join(parts)


def on_post_page(output, page, config):
    """No script from elsewhere: ours stands for the one that Material's plugin `offline` would fetch."""
    return output.replace(SHIM, posixpath.relpath("file_search.js", posixpath.dirname(page.url) or "."))


def on_post_template(output, template_name, config):
    return output.replace(SHIM, "/file_search.js")  # 404.html, which only a server shows


def options_of(verb: str) -> str:
    """A Markdown table of the verb's arguments, from its own parser."""
    from anyprec.cli.dispatch import VERBS

    parser = argparse.ArgumentParser(prog=f"anyprec {verb}", add_help=False)
    importlib.import_module(VERBS[verb][0]).add_arguments(parser)
    rows = ["| argument | meaning |", "|---|---|"]
    for action in parser._actions:
        if action.help is argparse.SUPPRESS:
            continue
        rows.append(f"| {_names(action)} | {_escaped((action.help or '') % _values(action, parser))} |")
    return "\n".join(rows)


def _names(action: argparse.Action) -> str:
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return f"`{_escaped(str(value))}`"
    takes = "" if action.nargs == 0 else f" {value}"
    return ", ".join(f"`{_escaped(name + takes)}`" for name in action.option_strings)


def _values(action: argparse.Action, parser: argparse.ArgumentParser) -> dict[str, object]:
    return {**vars(action), "prog": parser.prog}


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _link(match: re.Match[str], uri: str) -> str:
    image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
    if not target or ":" in target:
        return match[0]
    here = SOURCES.get(uri, f"docs/{uri}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    if path in ROOT_PAGES:
        site = ROOT_PAGES[path]
    elif path.startswith("docs/"):
        site = path.removeprefix("docs/")
    elif (ROOT / path).exists():
        return text
    else:
        return match[0]  # broken: MkDocs says so
    return f"{image}[{text}]({posixpath.relpath(site, posixpath.dirname(uri) or '.')}{anchor})"


def _without(entry, missing):
    if isinstance(entry, dict):
        return {
            title: [_without(each, missing) for each in below if not _is_missing(each, missing)]
            if isinstance(below, list)
            else below
            for title, below in entry.items()
        }
    return entry


def _is_missing(entry, missing) -> bool:
    return (
        entry in missing if isinstance(entry, str) else any(v in missing for v in entry.values() if isinstance(v, str))
    )
