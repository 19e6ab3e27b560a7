"""Files written whole or not at all, on disks that are full, read-only or no disks; folders locked for one process."""

import errno
import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from anyprec import files
from anyprec.errors import CheckpointError, OutputError
from anyprec.files import append_line, locked, make_folder, new_file, write_text, written_whole

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files as on Unix")


@pytest.fixture
def small_disk(mount_disk):
    return mount_disk("size=1m")


@pytest.fixture
def small_files():
    """No file may grow beyond 100 kB. The limit is this process's, so it is lifted again at once."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    with written_whole(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["x"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_error_of_the_writer_keeps_the_old_file_and_its_own_type(tmp_path):
    (tmp_path / "x").write_text("old")
    with pytest.raises(KeyError), written_whole(tmp_path / "x") as file:
        file.write(b"half")
        raise KeyError
    assert (tmp_path / "x").read_text() == "old" and os.listdir(tmp_path) == ["x"]


def write_much(path):
    with written_whole(path, CheckpointError) as file:
        for _ in range(30):
            file.write(bytes(100_000))


def test_a_full_disk(small_disk):
    (small_disk / "x").write_text("old")
    with pytest.raises(CheckpointError, match=r"cannot write .*/x: No space left on device; make room on that disk"):
        write_much(small_disk / "x")
    assert (small_disk / "x").read_text() == "old" and os.listdir(small_disk) == ["x"]


def test_a_limit_on_file_sizes(tmp_path, small_files):
    (tmp_path / "x").write_text("old")
    with pytest.raises(CheckpointError, match=r"cannot write .*/x: File too large; raise the limit"):
        write_much(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "old" and os.listdir(tmp_path) == ["x"]


def test_a_writer_that_hides_the_reason(tmp_path, small_files):
    """torch's zip writer turns an OSError of its file into a RuntimeError of its own."""
    with pytest.raises(OutputError, match="File too large"), written_whole(tmp_path / "x") as file:
        try:
            file.write(bytes(1_000_000))
            file.flush()
            os.fsync(file.fileno())
            raise OSError(errno.EFBIG, "File too large")
        except OSError as error:
            file.error = error
            raise RuntimeError("PytorchStreamWriter failed writing file") from None
    assert os.listdir(tmp_path) == []


def test_a_read_only_disk(small_disk):
    (small_disk / "x").write_text("old")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for write in (write_text, append_line):
        with pytest.raises(OutputError, match=r"cannot write .*/x: Read-only file system; choose a folder that can be"):
            write(small_disk / "x", "new")
    with pytest.raises(OutputError, match=r"cannot write .*/deep: Read-only"):
        make_folder(small_disk / "deep")
    with pytest.raises(OutputError, match="Read-only"), locked(small_disk):
        pass
    assert (small_disk / "x").read_text() == "old"


def test_a_line_is_whole_or_not_there(small_disk):
    log = small_disk / "log.jsonl"
    append_line(log, "first")
    (small_disk / "rest").write_bytes(bytes(900_000))
    with pytest.raises(OutputError, match="No space left"):
        append_line(log, "x" * 300_000)
    assert log.read_text() == "first\n"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "that is no name of a file"),
        ("none/x", "No such file or directory; make the folder first"),
        ("file/x", "Not a directory; a part of that path is a file"),
        ("folder", "Is a directory; that is a folder"),
        ("n" * 300, "File name too long; choose a shorter name"),
    ],
)
def test_places_that_are_none(tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    with pytest.raises(OutputError, match=says):
        write_text(name, "x")
    assert sorted(os.listdir()) == ["file", "folder"]


def test_odd_names(tmp_path):
    for name in (b"\xff\xfe", b"a\nb", "ä".encode()):
        path = tmp_path / os.fsdecode(name)
        write_text(path, "x")
        assert path.read_text() == "x"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    """`--out /dev/null` as root: a renamed file would take the device's place for the whole machine."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_text(pipe, "through")
    reader.join(20)
    assert read == [b"through"] and stat.S_ISFIFO(pipe.lstat().st_mode) and os.listdir(tmp_path) == ["pipe"]
    with pytest.raises(OSError, match="a device or pipe"):
        new_file(pipe)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


@pytest.mark.parametrize(("number", "says"), [(3, None), (7, "No space left on device")])
def test_a_device_stays_a_device(tmp_path, number, says):
    """Copies of /dev/null and /dev/full, never those themselves."""
    node = tmp_path / "node"
    try:
        os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, number))
        node.read_bytes() if number == 3 else None
    except OSError:
        pytest.skip("no permission to make a device")
    if says is None:
        write_text(node, "x")
    else:
        with pytest.raises(OutputError, match=says):
            write_text(node, "x")
    assert stat.S_ISCHR(node.lstat().st_mode) and os.listdir(tmp_path) == ["node"]


def test_new_file_removes_a_link_and_spares_its_target(tmp_path):
    (tmp_path / "victim").write_text("old")
    (tmp_path / "x").symlink_to(tmp_path / "victim")
    with new_file(tmp_path / "x") as file:
        file.write(b"new")
    assert (tmp_path / "victim").read_text() == "old" and not (tmp_path / "x").is_symlink()


# --- Locks ---

HOLD = """
import sys, time
from anyprec.files import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_folder_in_use_is_refused_and_says_by_whom(tmp_path, holder):
    with pytest.raises(OutputError) as caught, locked(tmp_path):
        pass
    assert re.fullmatch(
        rf".* is in use by process {holder.pid} on \S+ since [0-9: -]+; wait until it has ended, or choose another .*",
        str(caught.value),
    )


@pytest.mark.parametrize("ending", ["kill", "communicate"])
def test_a_lock_ends_with_its_process(tmp_path, holder, ending):
    getattr(holder, ending)()
    holder.wait()
    if ending == "kill":
        assert (tmp_path / files.LOCK).exists()  # left behind, and no obstacle
    with locked(tmp_path):
        assert json.loads((tmp_path / files.LOCK).read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_who_waits_comes_next(tmp_path):
    order = []

    def other():
        with locked(tmp_path, wait=True):
            order.append("second")

    with locked(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_once(tmp_path, monkeypatch, capsys, number):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path):
        pass
    assert re.fullmatch(
        r"anyprec: note: .* is not locked, its file system has no locks \(.*\); start no second run into it\n",
        capsys.readouterr().err,
    )


def test_garbage_in_a_lock_file_names_nobody(tmp_path, holder):
    (tmp_path / files.LOCK).write_bytes(b"\xff")
    with pytest.raises(OutputError, match="in use by another process; wait"), locked(tmp_path):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit on Windows")
def test_the_file_limit_is_raised_as_far_as_allowed():
    script = """import resource
from anyprec.files import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1000))
found = []
for connections in (10, 300, 5000, 10):
    raise_file_limit(connections)
    found.append(resource.getrlimit(resource.RLIMIT_NOFILE))
print(found)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[(266, 1000), (556, 1000), (1000, 1000), (1000, 1000)]\n", done.stderr
