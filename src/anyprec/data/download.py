"""Files from the network, with the standard library: `fetch` one (resumed, checked, atomic), `unpack` a tar.

A file is first `name.part`; only when its checksum is right does it get its name, so a file with its name is
whole. Called by `catalog` where the user asked for a download.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import os
import shutil
import stat
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from anyprec import files
from anyprec.errors import DataError, DownloadMismatch

SCHEMES = ("http", "https")
LOCK = ".anyprec-download.lock"
CHUNK = 1 << 18
TRIES = 4
PAUSE = 1.0  # seconds before the second try; doubled after every further one
TIMEOUT = 30.0  # seconds without a byte


@dataclass(frozen=True)
class RemoteFile:
    """A file to download: `checksum` is "md5:..." or "sha256:...", `size` in bytes."""

    url: str
    checksum: str
    size: int

    @property
    def name(self) -> str:
        return PurePosixPath(urllib.parse.urlsplit(self.url).path).name


def locate(places: Mapping[str, Iterable[Path]]) -> tuple[list[Path], list[str]]:
    """For each file the first of its places where it is: the files found, and the names of those missing."""
    here = {name: next((place for place in of if place.is_file()), None) for name, of in places.items()}
    return [place for place in here.values() if place], [name for name, place in here.items() if not place]


class _Retry(Exception):
    """This try failed, another may not; the message says why."""


def fetch(url: str, path: str | Path, *, checksum: str | None = None, size: int | None = None) -> Path:
    """Download `url` to `path`, unless it is there already and right; returns the path.

    With a checksum an interrupted download goes on where it stopped; without one it starts again, since
    nothing could tell whether the two parts belong together.
    """
    path = Path(path)
    if urllib.parse.urlsplit(url).scheme not in SCHEMES:
        raise DataError(f"url {url!r} cannot be downloaded; only http:// and https:// can")
    if checksum is not None:
        _hasher(checksum)
    if path.exists():
        _verify(path, checksum, size, f"delete it to download it again from {url}")
        return path
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if checksum is None or not _is_ours(part):
            part.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"cannot write to {path.parent}: {error.strerror}; choose another folder") from error
    _download(url, part, size)
    try:
        _verify(part, checksum, size, f"the download of {url} was deleted; try again, or get the file by hand")
        os.replace(part, path)
    except DataError:
        part.unlink(missing_ok=True)  # going on from wrong bytes could never end well
        raise
    except OSError as error:
        raise files.cannot_write(path, error, DataError) from error
    return path


def _is_ours(part: Path) -> bool:
    """Whether a download may go on in this file. A link, or a file of somebody else's, is not written to."""
    try:
        found = part.lstat()
    except FileNotFoundError:
        return False
    mine = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and mine


def _download(url: str, part: Path, size: int | None) -> None:
    pause = PAUSE
    for attempt in range(1, TRIES + 1):
        try:
            return _transfer(url, part, size)
        except _Retry as error:
            if attempt == TRIES:
                raise DataError(
                    f"cannot download {url} ({error}; {TRIES} tries); check the network and try again, "
                    f"which goes on where this stopped, or save the file as {part.with_suffix('')}"
                ) from error
        time.sleep(pause)
        pause *= 2
    raise AssertionError("the last try returns or raises")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https, and from https to https alone."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        before, after = (urllib.parse.urlsplit(url).scheme for url in (req.full_url, newurl))
        if after not in SCHEMES or (before == "https" and after != "https"):
            allowed = "https:// is" if before == "https" else "http:// and https:// are"
            raise DataError(
                f"cannot download {req.full_url}: it redirects to {newurl}, and from {before}:// only {allowed} "
                "followed; get the file by hand"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        # The base class looks at the scheme first, and refuses with an HTTPError what is refused above in our words.
        target = urllib.parse.urljoin(req.full_url, headers.get("location") or headers.get("uri") or "")
        if urllib.parse.urlsplit(target).scheme not in SCHEMES:
            fp.close()
            self.redirect_request(req, fp, code, msg, headers, target)
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _open(request: urllib.request.Request) -> Any:
    # No handlers for file:, ftp: and data:, whatever a server or an environment asks for.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener.open(request, timeout=TIMEOUT)


def _transfer(url: str, part: Path, size: int | None) -> None:
    """One try: ask for what is missing of `part` and append it."""
    have = part.lstat().st_size if _is_ours(part) else 0
    if size is not None and have >= size:
        return  # complete (or too long): the checksum decides
    request = urllib.request.Request(url, headers={"User-Agent": "anyprec", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with _open(request) as response:
            # 206 goes on at `have`; a server that knows no ranges sends 200 and the whole file.
            resumed = response.status == 206 and _range_start(response.headers.get("Content-Range")) == have
            if response.status == 206 and not resumed:
                part.unlink()
                raise _Retry("the server sent another part than was asked for")
            length = response.headers.get("Content-Length")
            expected = None if length is None or not length.isdigit() else int(length) + (have if resumed else 0)
            _copy(response, part, have if resumed else 0, expected or size, size)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # nothing beyond `have`: complete, or another file than it was
            if error.headers.get("Content-Range") == f"bytes */{have}":
                return
            part.unlink()
            raise _Retry("the file at the server is shorter than the part here") from error
        if error.code >= 500 or error.code in (408, 429):
            raise _Retry(f"HTTP {error.code} {error.reason}") from error
        raise DataError(
            f"cannot download {url}: HTTP {error.code} {error.reason}; get the file by hand and save it as "
            f"{part.with_suffix('')}"
        ) from error
    except urllib.error.URLError as error:
        raise _Retry(str(error.reason)) from error
    except (http.client.HTTPException, OSError) as error:
        raise _Retry(str(error) or type(error).__name__) from error


def _copy(response: http.client.HTTPResponse, part: Path, have: int, expected: int | None, size: int | None) -> None:
    """Append the response to `part` from byte `have` on. A short answer is worth another try; one that goes on past
    the known size is not, and ends there.
    """
    from anyprec.progress import Progress

    try:
        file = _go_on(part, have) if have else files.new_file(part)
    except OSError as error:
        raise files.cannot_write(part, error, DataError) from error
    with file, Progress(part.stem, total=expected, unit="B", done=have) as bar:
        while block := response.read(CHUNK if size is None else min(CHUNK, size - have + 1)):
            have += len(block)
            if size is not None and have > size:
                part.unlink(missing_ok=True)
                raise DataError(
                    f"{response.geturl()} sent more than the {size} bytes that the file has; the download was stopped "
                    f"and deleted; get the file by hand and save it as {part.with_suffix('')}"
                )
            try:
                file.write(block)
                file.flush()  # so that a full disk shows here
            except OSError as error:
                raise files.cannot_write(part, error, DataError) from error
            bar.update(len(block))
    if expected is not None and have < expected:
        raise _Retry(f"the connection ended after {have} of {expected} bytes")


def _go_on(part: Path, have: int) -> BinaryIO:
    """The part that is there, to append to; never through a link that has taken its place."""
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(part, flags), "ab")
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_size != have:
        file.close()
        raise OSError(errno.EBUSY, "it was changed by somebody else")
    return file


def _range_start(header: str | None) -> int | None:
    """'bytes 100-199/200' -> 100."""
    first = (header or "").removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdigit() else None


def _hasher(checksum: str) -> hashlib._Hash:
    kind, _, value = checksum.partition(":")
    length = {"md5": 32, "sha256": 64}.get(kind)
    if length is None or len(value) != length or set(value.lower()) - set("0123456789abcdef"):
        raise DataError(
            f"checksum {checksum!r} is not understood; write md5: and 32 or sha256: and 64 hexadecimal digits"
        )
    return hashlib.new(kind, usedforsecurity=False)


def _verify(path: Path, checksum: str | None, size: int | None, advice: str) -> None:
    given = path.stat().st_size
    if checksum is None:
        if size is not None and given != size:
            raise DataError(f"{path} has {given} bytes, expected {size}; {advice}")
        return
    hasher = _hasher(checksum)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
    kind, _, expected = checksum.partition(":")
    if hasher.hexdigest() != expected.lower():
        raise DownloadMismatch(f"{path} ({given} bytes) has {kind} {hasher.hexdigest()}, expected {expected}; {advice}")


def unpack(archive: str | Path, folder: str | Path) -> None:
    """Copy the regular files of a tar archive into `folder`. Nothing else is created, and nothing outside of
    it.

    Members are never handed to tarfile's own extraction: links, devices, owners and modes do not come into
    it, and a path that leaves the folder is an error. Each file is written under a temporary name first.
    """
    folder = Path(folder)
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                if member.isdir():
                    continue
                parts = PurePosixPath(member.name).parts
                plain = not member.name.startswith(("/", "\\")) and not any(
                    p == ".." or ":" in p or "\\" in p for p in parts
                )
                source = tar.extractfile(member) if member.isfile() and plain and parts else None
                if source is None:
                    raise DataError(f"{archive} has the unsafe member {member.name!r}; it was not unpacked: delete it")
                target = folder.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                part = target.with_name(target.name + ".part")
                with source, files.new_file(part) as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                os.replace(part, target)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive} is no readable tar archive ({error}); delete it and download it again") from error
    except OSError as error:
        raise DataError(f"cannot unpack {archive} into {folder}: {error.strerror or error}") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time download into `folder`; those of a distributed run all ask at once."""
    with files.locked(folder, LOCK, wait=True):
        yield
