"""Behind a real nginx, started here on loopback with a folder of its own: control stays closed, nothing is smuggled."""

import contextlib
import re
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from attacks import HIDDEN, INFER, reached, statuses, talk
from serving import ask, expected, images, infer, output, process, running
from test_control import ask_socket
from test_smuggling import TWO_ENDS, UPGRADES

from anyprec.serve.http.keys import read_keys

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="no nginx here")

DEPLOY = Path(__file__).parents[3] / "deploy"
KEY, BOSS = "k" * 20, "b" * 20
PATH = "/v2/models/net/precision"
# What people write who add nothing: the server sees Host 127.0.0.1:PORT and no word of a proxy.
BARE = "server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{upstream}; }} }}"
KEPT = """
upstream kept {{ server 127.0.0.1:{upstream}; keepalive 1; }}
server {{ listen 127.0.0.1:{port}; location / {{
    proxy_pass http://kept; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_request_buffering off;
}} }}
"""
# As for websockets: the upgrade is passed on.
UPGRADING = """
server {{ listen 127.0.0.1:{port}; location / {{
    proxy_pass http://127.0.0.1:{upstream}; proxy_http_version 1.1; proxy_request_buffering off;
    proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection "upgrade";
}} }}
"""


def documented(upstream: int, port: int) -> str:
    """deploy/nginx.conf, on this machine and without TLS."""
    text = (DEPLOY / "nginx.conf").read_text()
    text = re.sub(r"\n\s*ssl_certificate.*", "", text)
    changed = text.replace("listen 443 ssl", f"listen 127.0.0.1:{port}").replace(
        "127.0.0.1:8000", f"127.0.0.1:{upstream}"
    )
    assert changed.count(f":{port}") == 1 and changed.count(f":{upstream}") == 1
    return changed


@contextlib.contextmanager
def nginx(folder: Path, upstream: int, site: str = BARE):
    """Its port. `site` has places for {port} and {upstream}, or is deploy/nginx.conf."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = documented(upstream, port) if site == "documented" else site.format(port=port, upstream=upstream)
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off;\nworker_processes 1;\npid {folder}/pid;\nerror_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\nlog_format uri $uri;\naccess_log {folder}/access.log uri;\n{paths}{server}\n}}\n"
    )
    command = [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(500):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert child.poll() is None, (folder / "error.log").read_text()
            time.sleep(0.01)
        yield port
    finally:
        child.terminate()
        child.wait(10)


# --- control ---


@pytest.mark.parametrize("site", [BARE, KEPT, UPGRADING, "documented"], ids=["bare", "kept", "upgrading", "documented"])
def test_an_api_key_from_outside_controls_nothing(model_path, tmp_path, site):
    """The finding: a model was unloaded through the documented proxy, with an API key."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    socket_path = tmp_path / "control"
    arguments = [str(model_path), "--slo", "2s", "--api-key-file", str(keys), "--trusted-proxy", "127.0.0.1"]
    if len(str(socket_path)) < 100:
        arguments += ["--control-socket", str(socket_path)]
    with process(*arguments) as (_, upstream), nginx(tmp_path, upstream, site) as port:
        good = {"authorization": f"Bearer {KEY}"}
        assert ask(port, "GET", "/v2/models/net", **good).status == 200
        assert ask(port, "GET", PATH, **good).json["policy"] == "adaptive"
        assert ask(port, "GET", "/v2/models/net").status == 401
        for host in ("localhost", "127.0.0.1", "models.example"):
            for path, body in ((PATH, {"bits": 1}), ("/v2/repository/models/net/unload", {})):
                assert ask(port, "POST", path, body, host=host, **good).status == 403
        assert ask(port, "GET", PATH, **good).json["policy"] == "adaptive"
        assert ask(port, "GET", "/v2/health/ready").status == 200


@pytest.mark.parametrize("site", [BARE, "documented"], ids=["bare", "documented"])
def test_without_keys_control_is_closed_too(model_path, tmp_path, site):
    with process(str(model_path), "--slo", "2s") as (_, upstream), nginx(tmp_path, upstream, site) as port:
        assert ask(port, "POST", PATH, {"bits": 1}, host="localhost").status == 403
        assert ask(port, "GET", PATH).json["policy"] == "adaptive"
        x = images(1)
        reply = infer(port, x, bits=8)
        np.testing.assert_array_equal(output(reply), expected(model_path, x, 8))


def test_local_control_sees_a_proxy_that_names_itself(model_path, tmp_path):
    site = BARE.replace("proxy_pass", "proxy_set_header X-Forwarded-For $remote_addr; proxy_pass")
    with process(str(model_path), "--local-control") as (_, upstream), nginx(tmp_path, upstream, site) as port:
        assert ask(port, "POST", PATH, {"bits": 1}).status == 403
        assert ask(upstream, "POST", PATH, {"bits": 1}).status == 200


def test_a_control_key_from_outside(model_path, tmp_path):
    """Where the proxy lets it through."""
    keys = read_keys(environ={"ANYPREC_API_KEYS": KEY, "ANYPREC_CONTROL_KEYS": BOSS})
    with running({"net": model_path}, keys=keys, local=False) as found, nginx(tmp_path, found.port, KEPT) as port:
        assert ask(port, "POST", PATH, {"bits": 2}, x_api_key=BOSS).status == 200
        assert ask(port, "POST", PATH, {"bits": 2}, x_api_key=KEY).status == 403


@pytest.mark.thorough
def test_the_documented_proxy_passes_on_addresses_and_streams(model_path, tmp_path):
    with process(str(model_path), "--slo", "2s", "--trusted-proxy", "127.0.0.1", "--log-requests") as (child, upstream):
        with nginx(tmp_path, upstream, "documented") as port:
            forged = {"x_forwarded_for": "6.6.6.6", "forwarded": "for=6.6.6.6", "x_real_ip": "6.6.6.6"}
            assert ask(port, "GET", "/v2", **forged).status == 200
            watch = b"GET /v2/models/net/live HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n\r\n"
            raw = talk(port, watch)
            assert b"data: {" in raw  # before the second is over, though the answer never ends
            assert ask(port, "POST", "/v2/models/net/infer", bytes(17 << 20)).status == 413
        child.terminate()
        _, err = child.communicate(timeout=20)
    assert "6.6.6.6" not in err and "path=/v2 status=200" in err


def test_the_unit_behind_the_documented_proxy(model_path, tmp_path):
    """The command of anyprec.service with other paths, and deploy/nginx.conf before it."""
    keys, control = tmp_path / "keys", tmp_path / "control"
    if len(str(control)) > 100:
        pytest.skip("the temporary folder's path is too long for a socket")
    keys.write_text(f"web: {KEY}")
    said = (DEPLOY / "anyprec.service").read_text()
    command = re.search(r"ExecStart=\S+/anyprec serve (.*)", said)[1]
    paths = {"/srv/models/net.apm": str(model_path), "%d/keys": str(keys), "/run/anyprec/control": str(control)}
    assert all(command.count(path) == 1 for path in paths) and "RuntimeDirectory=anyprec" in said
    arguments = [paths.get(argument, argument) for argument in shlex.split(command)]
    with process(*arguments) as (_, upstream), nginx(tmp_path, upstream, "documented") as port:
        good = {"authorization": f"Bearer {KEY}"}
        assert ask(port, "GET", "/v2/models/net", **good).status == 200
        for place in (port, upstream):
            for path in (PATH, "/v2/repository/models/net/unload"):
                assert ask(place, "POST", path, {"bits": 1}, host="localhost", **good).status == 403
        assert ask_socket(control, "POST", PATH, {"bits": 1}).json["bits"] == 1
        assert ask(port, "GET", PATH, **good).json["bits"] == 1


# --- smuggling ---


@pytest.fixture(scope="module", params=[KEPT, UPGRADING], ids=["kept", "upgrading"])
def pair(request, model_path, tmp_path_factory):
    """nginx before a server. `kept`: one connection for all clients, on which what one hides would hit another."""
    folder = tmp_path_factory.mktemp("nginx")
    with running({"net": model_path}) as found, nginx(folder, found.port, request.param) as port:
        yield found, port, folder / "access.log"


@pytest.mark.parametrize("form", [*TWO_ENDS, *UPGRADES])
def test_no_request_that_the_proxy_has_not_seen(pair, form):
    """nginx may refuse, or send on what it understood. What it takes for a body never runs as a request."""
    found, port, log = pair
    before = log.read_text().split().count("/hidden") if log.exists() else 0
    raw = INFER + TWO_ENDS[form] if form in TWO_ENDS else (
        INFER + UPGRADES[form] + b"content-length: %d\r\n\r\n" % len(HIDDEN)
    )  # fmt: skip
    with reached(found) as paths:
        if form in UPGRADES:
            for told in (talk(port, raw + HIDDEN), talk(port, raw, HIDDEN)):
                assert statuses(told)[0] == 400 and b"JSON" in told and "/hidden" not in paths
        else:
            talk(port, raw + HIDDEN, answers=2)
        assert ask(port, "GET", "/v2").status == 200  # another client
    assert paths[-1] == "/v2"
    assert paths.count("/hidden") <= log.read_text().split().count("/hidden") - before
