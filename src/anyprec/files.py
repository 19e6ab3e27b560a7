"""Files that are written whole or not at all, folders that one process writes at a time; errors of both as one line.

`written_whole(path)` gives a file that takes the place of `path` when all of it is on the disk; `append_line` adds a
line or nothing; `locked(folder)` keeps other processes out. Every part of the package that writes for a user uses them.
`raise_file_limit` serves what opens many connections.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import platform
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from anyprec.errors import AnyprecError, OutputError

LOCK = ".anyprec.lock"
ADVICE = {
    errno.ENOSPC: "make room on that disk, or choose another folder",
    errno.EDQUOT: "make room in your quota, or choose another folder",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or choose another folder",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.ENOENT: "make the folder first, or choose another",
    errno.ENOTDIR: "a part of that path is a file; choose another",
    errno.EISDIR: "that is a folder; give the name of a file",
    errno.ENAMETOOLONG: "choose a shorter name",
}
# What a file system without locks answers (NFS without a lock service, some network and FUSE file systems)
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def cannot_write(path: str | Path, error: OSError, kind: type[AnyprecError] = OutputError) -> AnyprecError:
    """The one line for a file or folder that cannot be written."""
    reason = error.strerror or str(error) or type(error).__name__
    advice = ADVICE.get(error.errno or 0)
    return kind(f"cannot write {path}: {reason}" + (f"; {advice}" if advice else ""))


def new_file(path: str | Path, mode: int = 0o666) -> BinaryIO:
    """A file nobody else has open: an old one, or a link in its place, is removed first and never written through.

    For names of our own, such as x.part; a device is not removed.
    """
    if not Path(path).is_symlink() and is_special(path):
        raise OSError(errno.EEXIST, "a device or pipe is in its place")
    Path(path).unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, mode), "wb")


@contextlib.contextmanager
def written_whole(path: str | Path, kind: type[AnyprecError] = OutputError) -> Iterator[BinaryIO]:
    """A file to write into. It becomes `path` at the end, or, after any error, is removed: what was there stays.

    An OSError (no room, read-only, ...) becomes a `kind` of one line, whatever its writer made of it.
    """
    if not Path(path).name:
        raise kind(f"cannot write {str(path)!r}: that is no name of a file")
    if is_special(path):
        with _written_through(path, kind) as special:
            yield special
        return
    path = Path(path)
    # A name nobody can foresee, so that no link can wait there; hidden, for it is no result.
    partial = path.with_name(f".{path.name[:100]}.{os.urandom(4).hex()}.partial")
    try:
        opened = new_file(partial)
    except OSError as error:
        raise cannot_write(path, error, kind) from error
    file = _ErrorRecordingFile(opened)
    try:
        with opened:
            yield file  # type: ignore[misc]
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else file.error
        if cause is None or not isinstance(error, Exception):
            raise
        raise cannot_write(path, cause, kind) from error


def is_special(path: str | Path) -> bool:
    """A device or a pipe, such as /dev/null: it is written to. A file renamed over it would take its place for all."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@contextlib.contextmanager
def _written_through(path: str | Path, kind: type[AnyprecError]) -> Iterator[BinaryIO]:
    """Writers seek, and pipes cannot: all of it is made in memory first."""
    made = io.BytesIO()
    yield made
    try:
        with open(path, "wb") as file:
            file.write(made.getvalue())
    except OSError as error:
        raise cannot_write(path, error, kind) from error


class _ErrorRecordingFile:
    """A file that remembers why a write failed: torch's zip writer raises a RuntimeError of its own instead."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def write_text(path: str | Path, text: str) -> None:
    with written_whole(path) as file:
        file.write(text.encode("utf-8"))


def append_line(path: str | Path, line: str) -> None:
    """The whole line, or none of it: half a line would break every reader of the file."""
    try:
        with open(path, "ab", buffering=0) as file:
            before = file.tell()
            data = line.encode("utf-8") + b"\n"
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(before)
                raise
    except OSError as error:
        raise cannot_write(path, error) from error


def make_folder(path: str | Path) -> Path:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise OutputError(f"cannot make the folder {path}: a file of that name is there; choose another") from error
    except OSError as error:
        raise cannot_write(path, error) from error
    return Path(path)


@contextlib.contextmanager
def locked(folder: str | Path, name: str = LOCK, wait: bool = False) -> Iterator[None]:
    """One process at a time in `folder`, which is made. Another one waits, or is refused and told who is at work.

    The system frees the lock of a process that ends, however it ends; a file `name` left behind locks nobody out.
    """
    folder = make_folder(folder)
    try:
        handle = _lock(folder, name, wait)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)
        if handle is not None:
            os.close(handle)


def _lock(folder: Path, name: str, wait: bool) -> int | None:
    try:
        import fcntl
    except ImportError:  # Windows
        _say_unlocked(folder, "this system has no file locks")
        return None
    path = folder / name
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            who = _holder(handle)
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise OutputError(
                    f"{folder} is in use by {who}; wait until it has ended, or choose another folder"
                ) from None
            if error.errno in NO_LOCKS:
                _say_unlocked(folder, f"its file system has no locks ({error.strerror})")
                return None
            raise
        # If whoever held it before has removed it, a lock on the removed file would keep nobody out: try again.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.lstat()):
                break
        os.close(handle)
    with contextlib.suppress(OSError):  # a full disk: the lock holds, only its holder is not named
        os.ftruncate(handle, 0)
        holder = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.pwrite(handle, json.dumps(holder).encode(), 0)
    return handle


def _holder(handle: int) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(os.pread(handle, 1000, 0))
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    return "another process"


def _say_unlocked(folder: Path, reason: str) -> None:
    print(f"anyprec: note: {folder} is not locked, {reason}; start no second run into it", file=sys.stderr)


def raise_file_limit(connections: int) -> None:
    """Allow so many connections: each is an open file, and many systems allow 1,024 until a process asks for more."""
    try:
        import resource
    except ImportError:  # no such limit on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256  # files of our own
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # what is allowed has to do
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
