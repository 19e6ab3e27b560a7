"""Downloads against a server on this machine: resumed, checked, atomic; every failure with its message."""

import contextlib
import errno
import hashlib
import io
import os
import random
import re
import subprocess
import sys
import tarfile
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from anyprec.data import download
from anyprec.data.download import RemoteFile, fetch, locked, unpack
from anyprec.errors import DataError, DownloadMismatch, OutputError

CONTENT = random.Random(0).randbytes(300_000)  # the same in every test process
MD5 = "md5:" + hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
SHA256 = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT at any path but /404; the fields below say how badly."""

    daemon_threads = True
    ranges = True  # answers Range with 206
    wrong_range = False  # answers Range with another part than was asked for
    chunked = False  # tells no length
    cut: list[int]  # ends the next answers after so many bytes
    errors: list[int]  # gives these status codes first
    redirects: list[str]  # sends the next requests there
    endless = False  # goes on after the content
    sent = 0  # bytes, of which the client may have read fewer
    asked: list[str | None]  # the Range headers seen
    content = CONTENT

    def url(self, name: str = "file.bin") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        wanted = self.headers.get("Range")
        server.asked.append(wanted)
        if self.path == "/404":
            return self.send_error(404)
        if server.errors:
            return self.send_error(server.errors.pop(0))
        if server.redirects:
            self.send_response(302)
            self.send_header("Location", server.redirects.pop(0))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        first = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and server.ranges else 0  # type: ignore[index]
        total = len(server.content)
        if first >= total:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{total}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        if wanted and server.ranges:
            first -= 1 if server.wrong_range else 0
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{total - 1}/{total}")
        else:
            self.send_response(200)
        body = server.content[first:]
        if not server.chunked:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cut.pop(0)] if server.cut else body)
        with contextlib.suppress(OSError):  # the client has had enough
            while server.endless and server.sent < 500_000_000:
                server.sent += self.wfile.write(bytes(1 << 20))
        return None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(("127.0.0.1", 0), Handler) as running:
        running.cut, running.errors, running.asked, running.redirects = [], [], [], []
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "file.bin"


def part(path: Path) -> Path:
    return path.with_name("file.bin.part")


@pytest.mark.parametrize("checksum", [None, MD5, SHA256, SHA256.upper().replace("SHA256", "sha256")])
@pytest.mark.parametrize("size", [None, len(CONTENT)])
@pytest.mark.parametrize("chunked", [False, True])
def test_fetches(server: Server, path: Path, checksum: str | None, size: int | None, chunked: bool) -> None:
    server.chunked = chunked
    assert fetch(server.url(), path, checksum=checksum, size=size) == path
    assert path.read_bytes() == CONTENT and os.listdir(path.parent) == ["file.bin"]
    assert server.asked == [None]


def test_what_is_there_and_right_is_not_fetched_again(server: Server, path: Path) -> None:
    for _ in range(2):
        fetch(server.url(), path, checksum=MD5)
    assert len(server.asked) == 1


def test_what_is_there_and_wrong_is_kept_and_told(server: Server, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"mine")
    with pytest.raises(
        DownloadMismatch, match=r"file\.bin \(4 bytes\) has md5 .*, expected .*; delete it to download it again"
    ):
        fetch(server.url(), path, checksum=MD5)
    with pytest.raises(DataError, match=r"file\.bin has 4 bytes, expected 9; delete it"):
        fetch(server.url(), path, size=9)
    assert path.read_bytes() == b"mine" and not server.asked


@pytest.mark.parametrize("have", [1, 1000, len(CONTENT) - 1])
def test_resumes_from_the_part(server: Server, path: Path, have: int) -> None:
    path.parent.mkdir()
    part(path).write_bytes(CONTENT[:have])
    fetch(server.url(), path, checksum=SHA256)
    assert path.read_bytes() == CONTENT and server.asked == [f"bytes={have}-"]


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_complete_part_is_only_checked(server: Server, path: Path, size: int | None) -> None:
    path.parent.mkdir()
    part(path).write_bytes(CONTENT)
    fetch(server.url(), path, checksum=SHA256, size=size)
    assert path.read_bytes() == CONTENT and len(server.asked) == (1 if size is None else 0)


def test_a_server_that_ignores_range_sends_all_again(server: Server, path: Path) -> None:
    server.ranges = False
    path.parent.mkdir()
    part(path).write_bytes(CONTENT[:1000])
    fetch(server.url(), path, checksum=SHA256)
    assert path.read_bytes() == CONTENT and server.asked == ["bytes=1000-"]


def test_a_server_that_sends_another_range_is_asked_for_all(server: Server, path: Path) -> None:
    server.wrong_range = True
    path.parent.mkdir()
    part(path).write_bytes(CONTENT[:1000])
    fetch(server.url(), path, checksum=SHA256)
    assert path.read_bytes() == CONTENT and server.asked == ["bytes=1000-", None]


def test_a_part_longer_than_the_file_is_thrown_away(server: Server, path: Path) -> None:
    path.parent.mkdir()
    part(path).write_bytes(CONTENT + b"more")
    fetch(server.url(), path, checksum=SHA256)
    assert path.read_bytes() == CONTENT and server.asked == [f"bytes={len(CONTENT) + 4}-", None]


def test_without_a_checksum_parts_are_not_trusted(server: Server, path: Path) -> None:
    path.parent.mkdir()
    part(path).write_bytes(b"another file")
    fetch(server.url(), path)
    assert path.read_bytes() == CONTENT and server.asked == [None]


def test_a_cut_connection_goes_on_where_it_stopped(server: Server, path: Path) -> None:
    server.cut = [70_000, 50_000]
    fetch(server.url(), path, checksum=MD5)
    assert path.read_bytes() == CONTENT and server.asked == [None, "bytes=70000-", "bytes=120000-"]


def test_a_connection_cut_every_time_keeps_the_part(server: Server, path: Path) -> None:
    server.cut = [10_000] * 4
    with pytest.raises(DataError) as caught:
        fetch(server.url(), path, checksum=MD5)
    text = str(caught.value)
    assert f"cannot download {server.url()} (the connection ended after 40000 of 300000 bytes; 4 tries)" in text
    assert f"save the file as {path}" in text
    assert part(path).stat().st_size == 40_000 and not path.exists()
    fetch(server.url(), path, checksum=MD5)
    assert path.read_bytes() == CONTENT and server.asked[-1] == "bytes=40000-"


def test_a_wrong_checksum_deletes_the_part(server: Server, path: Path) -> None:
    wrong = "md5:" + "0" * 32
    with pytest.raises(DownloadMismatch) as caught:
        fetch(server.url(), path, checksum=wrong)
    assert f"has {MD5.replace(':', ' ')}, expected {'0' * 32}" in str(caught.value)
    assert os.listdir(path.parent) == []


def test_a_truncated_file_at_the_server_is_a_wrong_checksum(server: Server, path: Path) -> None:
    server.content = CONTENT[:1000]
    with pytest.raises(DownloadMismatch, match=r"\(1000 bytes\) has md5"):
        fetch(server.url(), path, checksum=MD5, size=len(CONTENT))
    with pytest.raises(DataError, match="has 1000 bytes, expected 300000"):
        fetch(server.url(), path, size=len(CONTENT))
    assert os.listdir(path.parent) == []


def test_404_is_told_at_once(server: Server, path: Path) -> None:
    with pytest.raises(DataError, match="HTTP 404 Not Found; get the file by hand and save it as"):
        fetch(server.url("404"), path, checksum=MD5)
    assert len(server.asked) == 1 and not path.exists()


def test_a_busy_server_is_asked_again(server: Server, path: Path) -> None:
    server.errors = [503, 429, 500]
    fetch(server.url(), path, checksum=MD5)
    assert path.read_bytes() == CONTENT
    path.unlink()
    server.errors = [503] * 4
    with pytest.raises(DataError, match=r"HTTP 503 Service Unavailable; 4 tries"):
        fetch(server.url(), path, checksum=MD5)


def test_nobody_listens(server: Server, path: Path) -> None:
    url = server.url()
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError, match=r"cannot download .*refused; 4 tries\); check the network"):
        fetch(url, path, checksum=MD5)


def test_refuses_what_it_cannot_do(path: Path) -> None:
    with pytest.raises(DataError, match="only http:// and https:// can"):
        fetch("file:///etc/passwd", path)
    for checksum in ("1234", "crc:1234", "md5:12", "sha256:" + "g" * 64, MD5 + "0"):
        with pytest.raises(DataError, match="is not understood; write md5: and 32 or sha256: and 64"):
            fetch("http://127.0.0.1/x", path, checksum=checksum)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write to .*; choose another folder"):
        fetch("http://127.0.0.1/x", tmp_path / "file" / "x.bin")


def test_a_full_disk_is_told_and_not_tried_again(server: Server, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, block: object) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("anyprec.files.new_file", lambda *args: Full())
    with pytest.raises(DataError, match=r"cannot write .*: No space left on device; make room"):
        fetch(server.url(), path, checksum=MD5)
    assert len(server.asked) == 1


@pytest.mark.parametrize("have", [0, 100_000])
def test_a_download_stops_right_after_the_known_size(server: Server, path: Path, have: int) -> None:
    server.endless = server.chunked = True
    path.parent.mkdir()
    part(path).write_bytes(CONTENT[:have])
    with pytest.raises(DataError, match=r"sent more than the 300000 bytes that the file has; .* stopped and deleted"):
        fetch(server.url(), path, checksum=MD5, size=len(CONTENT))
    assert os.listdir(path.parent) == []
    assert server.sent < 64_000_000  # what buffers of sockets hold, not what the server would have sent
    assert len(server.asked) == 1  # another try would bring the same


def test_a_longer_file_than_known_is_refused(server: Server, path: Path) -> None:
    server.content = CONTENT + b"more"
    with pytest.raises(DataError, match="sent more than the 300000 bytes"):
        fetch(server.url(), path, size=len(CONTENT))
    assert os.listdir(path.parent) == []


def test_a_redirect_is_followed(server: Server, path: Path) -> None:
    server.redirects = [server.url("second"), "/third"]
    fetch(server.url(), path, checksum=MD5, size=len(CONTENT))
    assert path.read_bytes() == CONTENT and len(server.asked) == 3


@pytest.mark.parametrize(
    "target", ["ftp://127.0.0.1:9/x", "file:///etc/hostname", "data:text/plain,x", "gopher://127.0.0.1/x"]
)
def test_a_redirect_to_another_scheme_is_refused(server: Server, path: Path, target: str) -> None:
    server.redirects = [target]
    with pytest.raises(DataError, match=rf"it redirects to {re.escape(target)}, and from http:// only http:// and"):
        fetch(server.url(), path, checksum=MD5)
    assert len(server.asked) == 1 and os.listdir(path.parent) == []


def test_a_redirect_from_https_to_http_is_refused() -> None:
    asked = urllib.request.Request("https://host/file")
    asked.type = "http"  # as behind a proxy
    follow = download._Redirects().redirect_request
    for code in (301, 302, 303, 307):
        with pytest.raises(DataError, match="from https:// only https:// is followed; get the file by hand"):
            follow(asked, None, code, "", {}, "http://host/file")
        assert follow(asked, None, code, "", {}, "https://other/file")
        assert follow(urllib.request.Request("http://host/file"), None, code, "", {}, "https://host/file")


@pytest.mark.skipif(os.name != "posix", reason="links as on Unix")
@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("checksum", [None, MD5])
def test_nothing_is_written_through_a_linked_part(server: Server, path: Path, link, checksum: str | None) -> None:
    path.parent.mkdir()
    victim = path.parent.parent / "victim"
    victim.write_bytes(CONTENT[:1000])
    link(victim, part(path))
    fetch(server.url(), path, checksum=checksum, size=len(CONTENT))
    assert victim.read_bytes() == CONTENT[:1000]
    assert path.read_bytes() == CONTENT and not path.is_symlink() and os.listdir(path.parent) == ["file.bin"]


@pytest.mark.skipif(os.name != "posix", reason="links as on Unix")
def test_a_link_that_takes_the_place_of_the_part_is_not_followed(tmp_path: Path) -> None:
    """Between the look at the part and its opening."""
    (tmp_path / "victim").write_bytes(b"1234")
    (tmp_path / "x.part").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError) as caught:
        download._go_on(tmp_path / "x.part", 4)
    assert caught.value.errno == errno.ELOOP
    (tmp_path / "y.part").write_bytes(b"12345")
    with pytest.raises(OSError, match="changed by somebody else"):
        download._go_on(tmp_path / "y.part", 4)


@pytest.mark.skipif(os.name != "posix", reason="links as on Unix")
def test_unpack_and_the_lock_follow_no_links(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"old")
    (tmp_path / "one.part").symlink_to(tmp_path / "victim")
    unpack(make_tar(tmp_path / "a.tar.gz", ("one", b"1")), tmp_path)
    assert (tmp_path / "one").read_bytes() == b"1" and (tmp_path / "victim").read_bytes() == b"old"
    (tmp_path / download.LOCK).symlink_to(tmp_path / "made")
    with pytest.raises(OutputError, match="cannot write"), locked(tmp_path):
        pass
    assert not (tmp_path / "made").exists()


def test_name_of_a_remote_file() -> None:
    assert RemoteFile("http://host/a/b%20c/file.tar.gz?x=1", MD5, 1).name == "file.tar.gz"


def make_tar(path: Path, *members: tuple[str, bytes | None], kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content or b"")
            member.type = tarfile.DIRTYPE if content is None else kind
            member.mode = 0o4777
            member.linkname = "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            tar.addfile(member, io.BytesIO(content or b""))
    return path


def test_unpack(tmp_path: Path) -> None:
    archive = make_tar(tmp_path / "a.tar.gz", ("data", None), ("data/one", b"1"), ("./data/sub/two", b"22"))
    (tmp_path / "out" / "data").mkdir(parents=True)
    (tmp_path / "out" / "data" / "one").write_bytes(b"an older one")
    unpack(archive, tmp_path / "out")
    files = {
        p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()
    }
    assert files == {"data/one": b"1", "data/sub/two": b"22"}
    assert not (tmp_path / "out/data/one").stat().st_mode & 0o4000


@pytest.mark.parametrize("name", ["../out-of-here", "/out-of-here", "data/../../out-of-here", "C:/x", "a\\..\\b", "."])
def test_unpack_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    archive = make_tar(tmp_path / "a.tar.gz", (name, b"evil"))
    with pytest.raises(DataError, match=r"has the unsafe member .*; it was not unpacked: delete it"):
        unpack(archive, tmp_path / "deep" / "out")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.tar.gz"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_unpack_makes_files_only(tmp_path: Path, kind: bytes) -> None:
    archive = make_tar(tmp_path / "a.tar.gz", ("data/link", b""), kind=kind)
    with pytest.raises(DataError, match="unsafe member 'data/link'"):
        unpack(archive, tmp_path / "out")


def test_unpack_of_no_archive(tmp_path: Path) -> None:
    whole = make_tar(tmp_path / "a.tar.gz", ("data/one", os.urandom(50_000))).read_bytes()
    for content in (b"", b"no archive", whole[:25_000]):
        (tmp_path / "b.tar.gz").write_bytes(content)
        with pytest.raises(DataError, match="is no readable tar archive"):
            unpack(tmp_path / "b.tar.gz", tmp_path / "out")
    assert not (tmp_path / "out/data/one").exists()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """Three processes each read, wait and write the same counter; without the lock some count is lost."""
    program = (
        "import sys, time, pathlib; from anyprec.data.download import locked\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "for _ in range(20):\n"
        "    with locked(folder):\n"
        "        count = folder / 'count'\n"
        "        n = int(count.read_text()) if count.exists() else 0\n"
        "        time.sleep(0.001)\n"
        "        count.write_text(str(n + 1))\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in running] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "60"
    assert os.listdir(tmp_path) == ["count"]


def test_the_lock_is_freed_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    with locked(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_the_server_of_this_test_is_plain(server: Server) -> None:
    with urllib.request.urlopen(server.url()) as response:
        assert response.read() == CONTENT
