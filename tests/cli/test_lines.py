"""Bad input to every option of every verb, and odd surroundings: one line and the right code, never a traceback.

Paths are those of a temporary folder only: these commands write, and tests may run as root.
"""

import argparse
import contextlib
import functools
import importlib
import os
import signal
import stat
import subprocess
import sys
import time

import pytest
from sampling import sampled

from anyprec.cli import dispatch as cli

pytestmark = pytest.mark.skipif(os.name != "posix", reason="paths and signals as on Unix")
TABLE = '{"ms": {"8": {"1": 2.0}, "1": {"1": 1.0}}, "accuracy": {"8": 70.0, "1": 60.0}}'
NOT_UTF8 = os.fsdecode(b"\xff\xfe")
BAD = ["missing", "folder", "random", NOT_UTF8, "deep.json", "", "random/x", "new\nline", "-1", "0", "nan", "1e308",
       "9" * 20, "x", "1,x"]  # fmt: skip

# verb -> a command that is right but for the option that is tried, and quick
RIGHT = {
    "train": ["recipe.toml", "--out", "missing/x"],
    "evaluate": ["missing.pt"],
    "calibrate": ["missing.pt"],
    "attack": ["missing.pt"],
    "quantize": ["resnet18", "--images", "missing", "--out", "x.apm"],
    "ptq": ["missing.pt"],
    "import": ["missing.pt", "--out", "x.pt"],
    "pack": ["missing.pt", "--out", "x.apm"],
    "models": ["nosuch"],
    "inspect": ["net.apm"],
    "run": ["net.apm", "x.npy"],
    "export": ["missing.apm", "--out", "x.onnx"],
    "search": ["missing.apm", "missing"],
    "cascade": ["missing.apm", "missing"],
    "bench": ["missing.apm"],
    "serve": ["missing.apm", "--port", "0"],
    "loadtest": ["http://127.0.0.1:9", "--seconds", "0.1"],
    "simulate": ["table.json", "--seconds", "0.1"],
    "reproduce": ["list"],
    "report": ["run", "--out", "x.html"],
    "info": [],
    "recipes": ["nosuch"],
    "completion": ["bash"],
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model, images, a table and things that are none of these; it is the current one."""
    from test_cli_bench import tiny_graph  # a graph of one convolution

    from anyprec.format.file import write

    np = pytest.importorskip("numpy")
    monkeypatch.chdir(tmp_path)
    write(tiny_graph(), "net.apm")
    np.save("x.npy", np.zeros((2, 6, 6, 4), np.float32))
    (tmp_path / "table.json").write_text(TABLE)
    (tmp_path / "recipe.toml").write_text('net = "resnet8"\ndata = "nosuch"\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text('{"epoch": 1, "lr": 0.1, "train": {}, "test": {}}\n')
    (tmp_path / "random").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / NOT_UTF8).write_bytes(b"abc")
    return tmp_path


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    with contextlib.suppress(ImportError):
        monkeypatch.setattr("anyprec.serve.connections.server.run", lambda server, listener: 0)


def told(argv, capsys):
    """Runs a command; its code and its error, which must be one line where the code says that there is one."""
    code = cli.main(argv)
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("anyprec: error: ")]
    assert "Traceback" not in error
    assert code in (0, 1, 2), argv
    assert len(lines) == (1 if code == 2 else 0), (argv, error)
    return code, "".join(lines)


@pytest.mark.thorough
@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_every_option_with_bad_values(verb, place, capsys):
    if verb in ("train", "evaluate", "calibrate", "attack", "ptq", "quantize", "import", "pack", "reproduce"):
        pytest.importorskip("torch")
    parser = argparse.ArgumentParser()
    importlib.import_module(cli.VERBS[verb][0]).add_arguments(parser)
    for action in parser._actions:
        for option in action.option_strings[-1:]:
            for value in BAD if action.nargs != 0 else ():
                told([verb, *RIGHT[verb], f"{option}={value}"], capsys)


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if RIGHT[verb]])
def test_every_first_argument_with_bad_values(verb, place, capsys):
    if verb in ("train", "evaluate", "calibrate", "attack", "ptq", "quantize", "import", "pack", "reproduce"):
        pytest.importorskip("torch")
    for value in BAD:
        if not value.startswith("-"):
            code, _ = told([verb, value, *RIGHT[verb][1:]], capsys)
            assert code == 2, value


def test_a_model_at_a_path_that_is_not_utf8(place, capsys):
    os.rename("net.apm", f"{NOT_UTF8}.apm")
    os.rename("x.npy", f"{NOT_UTF8}.npy")
    assert cli.main(["run", f"{NOT_UTF8}.apm", f"{NOT_UTF8}.npy", "--bits", "2"]) == 0
    assert cli.main(["inspect", f"{NOT_UTF8}.apm"]) == 0
    capsys.readouterr()
    code, line = told(["run", f"{NOT_UTF8}-missing.apm", "x.npy"], capsys)
    assert code == 2 and "No such file" in line


def test_files_that_may_not_be_read(place):
    """As another user: root may read everything."""
    command = [sys.executable, "-m", "anyprec", "inspect", "net.apm"]
    if os.geteuid() == 0:
        setpriv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run([*setpriv, *command, "--help"], capture_output=True, cwd="/").returncode == 0:
                command = [*setpriv, *command[:-1], str(place / "net.apm")]
                for folder in (place, *place.parents):
                    if not folder.stat().st_mode & stat.S_IXOTH:
                        pytest.skip(f"another user cannot enter {folder}")
        if command[0] != "setpriv":
            pytest.skip("no way to be another user, and root may read everything")
    os.chmod("net.apm", 0)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode == 2 and "Permission denied" in done.stderr and done.stderr.count("\n") == 1


@pytest.fixture
def read_only(mount_disk):
    return mount_disk("size=1m,ro")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        ["report", "run", "--out", "{}/x.html"],
        ["run", "net.apm", "x.npy", "--out", "{}/x.npy"],
        ["run", "net.apm", "x.npy", "--masks", "{}/masks"],
        ["simulate", "table.json", "--seconds", "0.1", "--save-table", "{}/x.json"],
        ["simulate", "table.json", "--seconds", "0.1", "--picture", "{}/x.png"],
        ["train", "digits.toml", "--out", "{}/run"],
        ["reproduce", "table1", "--scale", "tiny", "--out", "{}/run"],
        ["pack", "model.pt", "--out", "{}/x.apm"],
        ["import", "model.pt", "--net", "resnet8", "--out", "{}/x.pt"],
        ["calibrate", "model.pt", "--dataset", "digits", "--widths", "4", "--batches", "1", "--out", "{}/x.pt"],
        ["ptq", "model.pt", "--dataset", "digits", "--images", "10", "--limit", "10", "--out", "{}/x"],
    ],
    ids=lambda command: " ".join(command[:1] + command[-2:-1]),
)
def test_read_only_file_systems(place, read_only, capsys, command):
    if command[0] in ("train", "reproduce", "pack", "import", "calibrate", "ptq"):
        pytest.importorskip("torch")
        from anyprec.training.checkpoint import save_model
        from anyprec.zoo import build

        save_model(build("resnet8", widths=(2, 32), in_channels=1), "model.pt")
        (place / "digits.toml").write_text('net = "resnet8"\ndata = "digits"\n')
    if "--picture" in command:
        pytest.importorskip("matplotlib")
    code, line = told([part.format(read_only) for part in command], capsys)
    assert code == 2
    if command[0] != "import":  # which reads float weights, and refuses a checkpoint of ours before it writes
        assert "Read-only file system" in line and str(read_only) in line


# --- Odd surroundings, in processes of their own ---


def anyprec(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "anyprec", *arguments], stderr=subprocess.PIPE, timeout=120, text=True, **options
    )


@pytest.mark.parametrize("streams", [">&-", "<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_streams(streams):
    command = f'"{sys.executable}" -m anyprec info {streams}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_behind_standard_output(tmp_path):
    """A copy of /dev/full."""
    try:
        os.mknod(tmp_path / "full", 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        full = open(tmp_path / "full", "wb")  # noqa: SIM115
    except OSError:
        pytest.skip("no permission to make a device")
    with full:
        done = anyprec("info", stdout=full)
    assert (done.returncode, done.stderr) == (2, "anyprec: error: standard output: No space left on device\n")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "surroundings",
    sampled([{"COLUMNS": "1"}, {"COLUMNS": "x"}, {"TERM": "dumb"}, {}, {"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}]),
    ids=str,
)
def test_odd_surroundings(surroundings, place):
    """With nothing else set: no HOME, no PATH."""
    for arguments, code in ((["inspect", "net.apm"], 0), (["run", "--help"], 0), (["run", "ä.apm", "x.npy"], 2)):
        done = anyprec(*arguments, stdout=subprocess.PIPE, env=surroundings)
        assert done.returncode == code and "Traceback" not in done.stderr


@pytest.mark.thorough
def test_ctrl_c(place):
    """From a terminal it reaches the whole process group: workers say nothing, the command one line."""
    command = [sys.executable, "-m", "anyprec", "simulate", "table.json", "--seconds", "600", "--arrivals",
               "poisson:2000"]  # fmt: skip
    # A shell's background jobs ignore the signal, and so would what the tests start from there.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed
    ) as process:
        time.sleep(3)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
    # Python itself ends by the signal where it came inside an import; a shell shows both as 130.
    assert process.returncode in (130, -signal.SIGINT)
    assert error.splitlines()[-1] == "anyprec: interrupted" and "Traceback" not in error


BLOCKED = """
import contextlib, io, json, pydoc, sys
sys.modules["torch"] = None
import anyprec
from anyprec.cli.dispatch import VERBS, main
from anyprec.errors import MissingExtra

assert "Profile" in pydoc.render_doc(anyprec)
for name in dir(anyprec):
    getattr(anyprec, name)
assert not {"convert", "zoo"} & set(dir(anyprec))
for name in ("convert", "set_bits", "zoo", "ptq"):
    try:
        getattr(anyprec, name)
        raise SystemExit(name)
    except MissingExtra as error:
        assert f"anyprec.{name} needs PyTorch: pip install 'anyprec[train]'" == str(error)
found = {}
for verb, arguments in json.loads(sys.argv[1]).items():
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        found[verb] = [main([verb, *arguments]), error.getvalue()]
print(json.dumps(found))
"""


@pytest.mark.thorough
def test_without_torch(place):
    import json

    free = {verb: RIGHT[verb] for verb in ("inspect", "run", "simulate", "report", "info", "completion")}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, json.dumps({**RIGHT, **free})],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for verb, (code, error) in json.loads(done.stdout).items():
        if verb in ("train", "evaluate", "calibrate", "attack", "ptq", "quantize", "import", "pack", "reproduce"):
            assert error == f"anyprec: error: anyprec {verb} needs PyTorch: pip install 'anyprec[train]'\n"
            assert code == 2
        else:
            assert "PyTorch" not in error and code == (0 if verb in free else 2), (verb, error)
