"""First requests that go wrong get the command that works: forms instead of files, wrong methods."""

import json
import shutil
import subprocess

import pytest
from PIL import Image
from serving import ask, images

PATH = "/v2/models/net/classify"
FORM = b'--b\r\nContent-Disposition: form-data; name="image"; filename="photo.png"\r\n\r\n%s\r\n--b--\r\n'


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.jpg"
    Image.fromarray(images(size=20)[0].transpose(1, 2, 0)).save(path)
    return path


def test_a_form_gets_the_command_that_sends_the_file(server, photo):
    body = FORM % photo.read_bytes()
    reply = ask(server.port, "POST", PATH, body, content_type="multipart/form-data; boundary=b")
    assert reply.status == 415
    command = f"curl --data-binary @photo.jpg http://127.0.0.1:{server.port}{PATH}"
    assert reply.json["error"] == f"the body is a form (curl -F); send the file itself: {command}"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_hint_of_curl_works(server, photo):
    def curl(*words):
        return json.loads(subprocess.run(words, cwd=photo.parent, capture_output=True, check=True).stdout)

    hint = curl("curl", "-F", "image=@photo.jpg", f"http://127.0.0.1:{server.port}{PATH}")["error"]
    assert "\n" not in hint
    for _ in range(5):  # on a busy machine the deadline may pass
        answer = curl(*hint.partition("send the file itself: ")[2].split())
        if "results" in answer:
            break
    assert answer["results"][0]["labels"]


@pytest.mark.parametrize(
    ("method", "path", "allow", "hint"),
    [
        ("GET", PATH, "POST", f"POST is; try: curl --data-binary @photo.jpg http://ADDRESS{PATH}"),
        ("GET", "/v2/models/net/infer", "POST", "try: curl -d @request.json http://ADDRESS/v2/models/net/infer"),
        ("POST", "/v2", "GET, HEAD", "POST is not for this path, GET is; try: curl http://ADDRESS/v2"),
        ("GET", "/v2/repository/models/net/load", "POST", "try: curl -X POST http://ADDRESS/v2/repository/models/net/load"),
        ("PUT", "/v2/models/net/precision", "GET, POST, HEAD", "GET or POST is; try: curl http://ADDRESS"),
    ],
)  # fmt: skip
def test_a_wrong_method_gets_the_right_one(server, method, path, allow, hint):
    reply = ask(server.port, method, path)
    assert reply.status == 405 and reply.headers["allow"] == allow
    assert hint.replace("ADDRESS", f"127.0.0.1:{server.port}") in reply.json["error"]


def test_a_strange_host_is_not_repeated(server):
    reply = ask(server.port, "GET", PATH, host="a;b")
    assert "a;b" not in reply.json["error"] and "http://HOST:PORT/v2" in reply.json["error"]
