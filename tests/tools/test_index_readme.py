"""The package index's page: README.md as the long description, whose links lead somewhere without the repository."""

import email
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from index_readme import with_absolute_links

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://example.org/x"
METADATA = """
import sys
from scikit_build_core.build import prepare_metadata_for_build_wheel
print(prepare_metadata_for_build_wheel(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("see [Results](docs/results.md#serving).", f"see [Results]({ADDRESS}/blob/v1/docs/results.md#serving)."),
        ("![two\nlines](./docs/a.png)", f"![two\nlines]({ADDRESS}/raw/v1/docs/a.png)"),
        ("[![a](b.svg)](c.md)", f"[![a]({ADDRESS}/raw/v1/b.svg)]({ADDRESS}/blob/v1/c.md)"),
        ("[a [b]](c.md)", f"[a [b]]({ADDRESS}/blob/v1/c.md)"),
        ("[name]: CHANGELOG.md", f"[name]: {ADDRESS}/blob/v1/CHANGELOG.md"),
        ("[up](#install) [out](https://a.b/c) [mail](mailto:a@b.c)", None),
        ("[name]: https://a.b/c", None),
        ("`m(x)`, [text] alone", None),
    ],
)
def test_links(given, wanted):
    assert with_absolute_links(given, ADDRESS, "v1") == (given if wanted is None else wanted)


@pytest.fixture(scope="module")
def description(tmp_path_factory):
    """(repository, version, long description) of the package as it is built from this tree."""
    if not (ROOT / "README.md").is_file() or importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("needs the source tree and scikit-build-core")
    folder = tmp_path_factory.mktemp("metadata")
    # bin of the environment: the build backend looks for CMake there
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", METADATA, folder], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = email.message_from_string(next(folder.glob("*.dist-info/METADATA")).read_text(encoding="utf-8"))
    urls = dict(line.split(", ") for line in found.get_all("Project-URL"))
    assert found["Description-Content-Type"] == "text/markdown"
    return urls["Repository"], found["Version"], found.get_payload()


def test_the_description_has_no_relative_link(description):
    _, _, text = description
    targets = re.findall(r"\]\(\s*([^)\s]+)", text) + re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)
    targets += re.findall(r"""(?:src|href)=["']?([^"'\s>]+)""", text)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


def test_links_to_the_repository_name_files_that_are_there(description):
    repository, version, text = description
    found = re.findall(re.escape(repository) + r"/(raw|blob)/([^/]+)/([^)\s#]+)", text)
    assert {kind for kind, _, _ in found} == {"raw", "blob"}
    assert {revision for _, revision, _ in found} == {f"v{version}"}
    assert [path for _, _, path in found if not (ROOT / path).is_file()] == []
