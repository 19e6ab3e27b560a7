"""Who may set a width, load and unload: holders of a control key, the owner of the control socket, and programs of this
machine where the server was told so."""

import http.client
import os
import socket
import stat
import time

import pytest
from serving import Reply, ask, process, running

from anyprec.cli import main
from anyprec.serve.http.keys import read_keys

KEY, BOSS = "k" * 20, "b" * 20
PATH = "/v2/models/net/precision"
FORWARDING = ["X-Forwarded-For", "X-Forwarded-Host", "x-forwarded-anything", "Forwarded", "X-Real-IP", "Via"]


class OverUnix(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=20)
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(self.path)


def ask_socket(path, method, target, body=None, **headers) -> Reply:
    connection = OverUnix(path)
    try:
        return ask(0, method, target, body, connection, **headers)
    finally:
        connection.close()


# --- over the network ---


@pytest.mark.parametrize("path", [PATH, "/v2/repository/models/net/load", "/v2/repository/models/net/unload"])
def test_an_api_key_is_no_control_key(model_path, path):
    """The finding: with an API key alone, a local-looking request unloaded a model."""
    keys = read_keys(environ={"ANYPREC_API_KEYS": KEY})
    with running({"net": model_path}, keys=keys, local=True) as found:
        refused = ask(found.port, "POST", path, {}, x_api_key=KEY)
        assert refused.status == 403 and "--control-key-file" in refused.json["error"]
        assert ask(found.port, "POST", path, {}).status == 401
        assert ask(found.port, "GET", "/v2/health/ready").status == 200


@pytest.mark.parametrize("name", FORWARDING)
def test_what_a_proxy_passes_on_is_not_local(model_path, name):
    with running({"net": model_path}, local=True) as found:
        assert ask(found.port, "POST", PATH, {"bits": 2}).status == 200
        refused = ask(found.port, "POST", PATH, {"bits": 4}, **{name: "127.0.0.1"})
        assert refused.status == 403 and "proxy" in refused.json["error"]
        assert ask(found.port, "GET", PATH).json["bits"] == 2
        for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}):
            assert ask(found.port, "POST", PATH, {"bits": 4}, **headers).status == 403


def test_a_control_key_is_good_through_a_proxy(model_path):
    keys = read_keys(environ={"ANYPREC_CONTROL_KEYS": BOSS})
    with running({"net": model_path}, keys=keys, local=False) as found:
        assert ask(found.port, "POST", PATH, {"bits": 2}, x_api_key=BOSS, x_forwarded_for="192.0.2.1").status == 200
        assert ask(found.port, "POST", PATH, {"bits": 2}).status == 401


@pytest.mark.thorough
def test_control_is_closed_unless_it_is_opened(model_path):
    """Also to this machine: a proxy that adds no header makes everybody look local."""
    with process(str(model_path)) as (child, port):
        refused = ask(port, "POST", PATH, {"bits": 2})
        assert refused.status == 403
        assert all(
            way in refused.json["error"] for way in ("--control-key-file", "--control-socket", "--local-control")
        )
        child.terminate()
        assert "control by=nobody" in child.communicate(timeout=20)[1]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in"),
        (["--api-key-file", "{keys}"], "there are keys"),
        (["--control-key-file", "{keys}"], "there are keys"),
        (["--trusted-proxy", "127.0.0.1"], "--trusted-proxy"),
    ],
)
def test_local_control_is_for_a_machine_of_ones_own(model_path, tmp_path, capsys, arguments, says):
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    given = [argument.format(keys=keys) for argument in arguments]
    assert main(["serve", str(model_path), "--port", "0", "--local-control", *given]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("anyprec: error:")]
    assert says in error and "--control-socket" in error


def test_a_proxy_is_an_address(model_path, capsys):
    assert main(["serve", str(model_path), "--trusted-proxy", "nginx"]) == 2
    assert "'nginx' is no address" in capsys.readouterr().err


# --- the socket ---


@pytest.fixture
def folder(tmp_path_factory):
    """A short path: a socket's may have some 100 letters."""
    found = tmp_path_factory.mktemp("s")
    if len(str(found)) > 80:
        pytest.skip("the temporary folder's path is too long for a socket")
    return found


@pytest.mark.thorough
def test_the_socket_is_its_owners(model_path, folder):
    keys, path = folder / "keys", folder / "control"
    keys.write_text(KEY)
    keys.chmod(0o600)
    with process(str(model_path), "--control-socket", str(path), "--api-key-file", str(keys)) as (child, port):
        mode = os.stat(path)
        assert stat.S_ISSOCK(mode.st_mode) and stat.S_IMODE(mode.st_mode) == 0o600
        assert ask(port, "POST", PATH, {"bits": 2}, x_api_key=KEY).status == 403
        assert ask_socket(path, "POST", PATH, {"bits": 2}).json == {"policy": "fixed", "bits": 2}
        assert ask_socket(path, "POST", "/v2/repository/models/net/unload").json["state"] == "UNAVAILABLE"
        assert ask_socket(path, "POST", "/v2/repository/models/net/load").json["state"] == "READY"
        assert ask_socket(path, "GET", "/v2").status == 200  # nor is an API key needed
        for name in FORWARDING:  # somebody put a proxy before it
            assert ask_socket(path, "POST", PATH, {"bits": 4}, **{name: "192.0.2.1"}).status == 401
        assert ask_socket(path, "POST", PATH, {"bits": 4}, x_forwarded_for="::1", x_api_key=KEY).status == 403
        assert ask(port, "GET", PATH, x_api_key=KEY).json["policy"] == "adaptive"  # as loaded anew
        child.terminate()
        _, err = child.communicate(timeout=20)
    assert child.returncode == 0 and not path.exists() and "control by=socket" in err


def test_the_socket_stays_open_when_the_server_is_full(model_path, folder):
    path = folder / "control"
    with process(str(model_path), "--control-socket", str(path), "--max-connections", "2") as (_, port):
        busy = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        try:
            for client in busy:
                client.sendall(b"POST /v2/models/net/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
            time.sleep(0.05)
            assert ask_socket(path, "GET", "/v2/repository/index").json[0]["state"] == "READY"
        finally:
            for client in busy:
                client.close()


@pytest.mark.thorough
def test_sockets_left_behind_and_in_use(model_path, folder, capsys):
    path = folder / "control"
    with process(str(model_path), "--control-socket", str(path)) as (child, _):
        assert main(["serve", str(model_path), "--port", "0", "--control-socket", str(path)]) == 2
        assert "another server listens" in capsys.readouterr().err
        assert ask_socket(path, "GET", "/v2").status == 200
        child.kill()
        child.wait()
    assert path.exists()
    with process(str(model_path), "--control-socket", str(path)):
        assert ask_socket(path, "POST", PATH, {"bits": 2}).status == 200
    path.unlink()
    path.write_text("mine")
    assert main(["serve", str(model_path), "--port", "0", "--control-socket", str(path)]) == 2
    assert "no socket" in capsys.readouterr().err and path.read_text() == "mine"
    for bad in (folder / "none" / "control", folder / ("x" * 200)):
        assert main(["serve", str(model_path), "--port", "0", "--control-socket", str(bad)]) == 2
        assert "cannot listen on --control-socket" in capsys.readouterr().err
