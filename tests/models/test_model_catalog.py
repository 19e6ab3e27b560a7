"""Names instead of paths: which file a name means, everywhere a model file is taken; downloads; what is refused."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import anyprec
from anyprec.cli import main
from anyprec.errors import AnyprecError, DataError, DownloadMismatch, ModelFileError, UnknownModel
from anyprec.models import catalog
from anyprec.models.catalog import ModelCard, find
from anyprec.serve.models import named_paths


def test_a_name_is_its_file(models):
    assert catalog.names() == ["large-net", "tiny-net"]
    assert find("tiny-net") == models.path
    x = np.zeros((1, 3, 32, 32), np.float32)
    np.testing.assert_array_equal(anyprec.load("tiny-net")(x), anyprec.load(models.path)(x))


def test_a_path_that_exists_wins(models, tmp_path):
    (tmp_path / "tiny-net").write_bytes(b"not a model at all")
    assert find("tiny-net") == "tiny-net"
    with pytest.raises(ModelFileError, match="tiny-net"):
        anyprec.load("tiny-net")
    (tmp_path / "tiny-net").unlink()
    (tmp_path / "tiny-net").symlink_to(tmp_path / "nothing")  # a link that leads nowhere is a mistake to be told of
    assert find("tiny-net") == "tiny-net"


@pytest.mark.parametrize("given", ["missing.apm", "./tiny-net", "folder/tiny-net", "", "tiny net", "a\0b", "tiny-net/"])
def test_what_looks_like_a_path_stays_one(models, given):
    assert find(given) == given
    assert find(Path("some") / "net.apm") == Path("some") / "net.apm"
    assert find(b"net.apm") == b"net.apm"
    with pytest.raises(ModelFileError):
        anyprec.load(given)


def test_unknown_names_get_close_matches(models):
    cases = {
        "tiny-nett": "there is no file 'tiny-nett', and no model has that name; did you mean tiny-net?",
        "Tiny_Net": "did you mean tiny-net?",
        "zebra": "there are large-net, tiny-net",
    }
    for name, message in cases.items():
        with pytest.raises(UnknownModel) as caught:
            anyprec.load(name)
        assert message in str(caught.value) and "\n" not in str(caught.value)
    for path in models.folder.iterdir():
        path.unlink()
    with pytest.raises(UnknownModel, match="comes without models"):
        find("zebra")


def test_no_card_is_read_for_a_file_that_is_there(models, monkeypatch):
    monkeypatch.setattr(catalog, "card", None)
    monkeypatch.setattr(catalog, "names", None)
    assert find("tiny-net") == models.path and find("missing.apm") == "missing.apm"


@pytest.mark.parametrize("verb", ["run", "inspect", "bench", "simulate"])
def test_verbs_take_names(models, verb, tmp_path, capsys):
    np.save("x.npy", np.zeros((1, 3, 32, 32), np.float32))
    rest = {
        "run": ["x.npy"],
        "inspect": [],
        "bench": ["--rivals", "none", "--rounds", "1"],
        "simulate": ["--seconds", "0.1", "--max-batch", "1"],
    }[verb]
    code = main([verb, "tiny-net", *rest, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert json.loads(out)
    assert main([verb, "tiny-nett", *rest]) == 2
    assert capsys.readouterr().err == (
        "anyprec: error: there is no file 'tiny-nett', and no model has that name; did you mean tiny-net?\n"
    )


def test_serve_takes_names(models, tmp_path):
    wanted = str(models.path)
    assert named_paths(["tiny-net", "other=tiny-net", "a=x.apm"]) == {"tiny-net": wanted, "other": wanted, "a": "x.apm"}
    with pytest.raises(UnknownModel, match="did you mean tiny-net"):
        named_paths(["a=tiny-nett"])


def test_names_need_no_torch_and_no_network():
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import socket; socket.socket.connect = None\n"
        "import anyprec\n"
        "from anyprec.models import catalog\n"
        "for name in catalog.names(): catalog.card(name).url or anyprec.load(name)\n"
        "assert 'urllib.request' not in sys.modules\n"
        "try: anyprec.load('no-such-model')\n"
        "except anyprec.errors.UnknownModel: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- Downloads ---


def test_a_model_is_downloaded_once(models, capsys):
    with pytest.raises(UnknownModel, match="not downloaded yet; run: anyprec models --fetch large-net"):
        anyprec.load("large-net")
    assert models.server.asked == 0  # never unasked
    path = catalog.fetch("large-net")
    assert path == find("large-net") and path.is_relative_to(models.cache) and path.name == "large-net.apm"
    assert path.read_bytes() == models.path.read_bytes()
    assert anyprec.load("large-net").widths == (1, 8)
    assert catalog.fetch("large-net") == path and models.server.asked == 1
    assert sorted(part.name for part in path.parent.iterdir() if not part.name.startswith(".")) == ["large-net.apm"]


def test_a_download_of_other_bytes_is_refused(models):
    right = models.server.content
    models.server.content = right[:-1] + bytes([right[-1] ^ 1])
    with pytest.raises(DownloadMismatch, match="sha256"):
        catalog.fetch("large-net")
    models.server.content = right + b"more"
    with pytest.raises(DataError, match=f"more than the {len(right)} bytes"):
        catalog.fetch("large-net")
    with pytest.raises(UnknownModel, match="not downloaded yet"):
        find("large-net")
    assert not list(models.cache.rglob("*.part"))


def test_another_version_is_another_file(models):
    first = catalog.fetch("large-net")
    newer = replace(models.cards["large-net"], sha256="0" * 64)
    (models.folder / "large-net.json").write_text(json.dumps(newer.to_dict()))
    assert catalog.model_path(newer) != first
    with pytest.raises(UnknownModel, match="not downloaded yet"):
        find("large-net")


def test_what_is_in_the_package_is_not_downloaded(models):
    assert catalog.fetch("tiny-net") == models.path and models.server.asked == 0
    with pytest.raises(UnknownModel, match="no model is called 'tiny-nett'; did you mean tiny-net"):
        catalog.fetch("tiny-nett")


@pytest.mark.skipif(os.name != "posix", reason="a folder that cannot be made, as on Unix")
def test_a_cache_that_cannot_be_written(models, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANYPREC_CACHE", str(tmp_path / "file"))
    with pytest.raises(AnyprecError, match="file"):
        catalog.fetch("large-net")


# --- Cards ---


def test_a_card_survives_its_file(models):
    for name, card in models.cards.items():
        assert catalog.card(name) == card == ModelCard.from_dict(card.to_dict())
    assert models.cards["tiny-net"].widths == (1, 8)


@pytest.mark.parametrize("content", ["", "[]", "{}", "\xff", '{"name": 1}', "null"])
def test_a_broken_card_is_one_line(models, content):
    (models.folder / "tiny-net.json").write_text(content, encoding="latin-1")
    with pytest.raises(AnyprecError, match=r"tiny-net\.json is no card of a model .* install anyprec again"):
        catalog.card("tiny-net")


def test_names_that_leave_the_folder(models):
    for name in ("../tiny-net", "tiny-net/../tiny-net", "Tiny-Net", "", "."):
        with pytest.raises(UnknownModel):
            catalog.card(name)
