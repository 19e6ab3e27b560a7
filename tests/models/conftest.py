"""A catalog of its own for the tests: one model in the package's folder, one to be downloaded from this machine."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from anyprec.bench.random_networks import resnet20_graph
from anyprec.format import ModelFile, write
from anyprec.models import catalog
from anyprec.models.catalog import ModelCard, ProfileFacts


def card_of(path, name, url=None):
    """Made-up facts, but those of the file: bytes, checksum, widths."""
    with ModelFile(path) as file:
        sizes = {profile.name: file.bytes_for_profile(profile) for profile in file.profiles}
    return ModelCard(
        name=name, summary="Made by a test", task="classification", data="cifar10", network="resnet20",
        parameters=1234, input=(32, 32, 3), classes=10, test_images=10_000, license="Apache-2.0",
        bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        profiles={bits: ProfileFacts(80.0 + int(bits), size, 99.95) for bits, size in sizes.items()},
        training={"recipes": [{"net": "resnet20", "widths": [1, 8]}], "seed": 3, "commit": "abc", "core_hours": 1.5},
        made_by="anyprec 0", url=url,
    )  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.asked += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content)


@pytest.fixture
def server():
    """Gives `content` at any path, and counts how often."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.content, made.asked, made.daemon_threads = b"", 0, True
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def models(tmp_path, monkeypatch, server):
    """Folder, path and cards of "tiny-net" (in the folder) and "large-net" (at the server); an empty cache folder."""
    folder = tmp_path / "catalog"
    folder.mkdir()
    path = folder / "tiny-net.apm"
    write(resnet20_graph(multiplier=0.25, widths=(1, 8)), path)
    server.content = path.read_bytes()
    cards = {
        "tiny-net": card_of(path, "tiny-net"),
        "large-net": card_of(path, "large-net", f"http://127.0.0.1:{server.server_address[1]}/large.apm"),
    }
    for name, card in cards.items():
        (folder / f"{name}.json").write_text(json.dumps(card.to_dict()))
    monkeypatch.setattr(catalog, "FOLDER", folder)
    monkeypatch.setenv("ANYPREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(folder=folder, path=path, cards=cards, cache=tmp_path / "cache", server=server)
