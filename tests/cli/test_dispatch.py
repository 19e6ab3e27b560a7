"""The command line around the verbs: help, errors, exit codes. Options of a verb are tested with the verb."""

import importlib
import os
import shlex
import subprocess
import sys
import types
import warnings

import pytest

import anyprec
from anyprec.cli import dispatch as cli
from anyprec.errors import DataError


@pytest.fixture
def verb(monkeypatch):
    """Registers a verb `probe` whose `run` is the function given."""

    def register(run):
        module = types.ModuleType("anyprec_test_probe")
        module.add_arguments = lambda parser: parser.add_argument("--n", type=int, default=1)
        module.EXAMPLE = "anyprec probe --n 2"
        module.run = run
        monkeypatch.setitem(sys.modules, "anyprec_test_probe", module)
        monkeypatch.setitem(cli.VERBS, "probe", ("anyprec_test_probe", "a verb for tests"))

    return register


def raising(error):
    def run(args):
        raise error

    return run


def command(*args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "anyprec", *args], capture_output=True, text=True, timeout=60, **options
    )


def test_help_lists_every_verb(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (_, summary) in cli.VERBS.items():
        assert f"  {name} " in out
        assert summary in out


def test_no_verb_shows_the_help_as_an_error(capsys):
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: anyprec VERB")


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_version(option, capsys):
    assert cli.main([option]) == 0
    assert capsys.readouterr().out == f"anyprec {anyprec.__version__}\n"


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_every_verb_has_help(name, capsys):
    handler = importlib.import_module(cli.VERBS[name][0])
    assert callable(handler.run)
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"example: anyprec {name}") and f"\n\nusage: anyprec {name}" in out
    assert cli.main(["help", name]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_the_example_is_a_command_that_can_be_typed(name):
    program, verb, *arguments = shlex.split(cli.module_of(name).EXAMPLE)
    assert (program, verb) == ("anyprec", name)
    cli.parser_of(name).parse_intermixed_args(arguments)


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_every_metavar_says_what_is_wanted(name):
    for action in cli.parser_of(name)._actions:
        if action.nargs != 0 and action.choices is None:
            assert action.metavar, f"anyprec {name}: {action.dest} has no metavar"
        assert action.help, f"anyprec {name}: {action.dest} has no help"


def test_help_as_a_verb(capsys):
    assert cli.main(["help"]) == 0
    assert capsys.readouterr().out == cli.usage()
    assert cli.main(["help", "load"]) == 0
    out, err = capsys.readouterr()
    assert "usage: anyprec loadtest" in out and "is now called" in err
    assert cli.main(["help", "trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err
    assert cli.main(["help", "train", "pack"]) == 2


VERBS = ", ".join(cli.VERBS)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("trian", "unknown verb 'trian'; did you mean 'train'?"),
        ("evalute", "unknown verb 'evalute'; did you mean 'evaluate'?"),
        ("xyzzy", f"unknown verb 'xyzzy'; choose one of {VERBS}"),
        ("--verison", f"unknown option '--verison'; choose one of {VERBS}"),
    ],
)
def test_a_wrong_verb(given, line, capsys):
    assert cli.main([given]) == 2
    assert capsys.readouterr().err == f"anyprec: error: {line}\n"


def test_arguments_reach_the_verb_and_its_code_comes_back(verb):
    seen = []
    verb(lambda args: seen.append(args.n) or 7)
    assert cli.main(["probe", "--n", "3"]) == 7
    assert seen == [3]


def test_a_wrong_argument_is_one_line(verb, capsys):
    verb(lambda args: 0)
    assert cli.main(["probe", "--n", "many"]) == 2
    err = capsys.readouterr().err
    assert err == "anyprec: error: argument --n: invalid int value: 'many'; see 'anyprec probe --help'\n"


def test_our_errors_are_one_line_and_code_2(verb, capsys):
    verb(raising(DataError("no images in\n  folder x; give another")))
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == "anyprec: error: no images in folder x; give another\n"


def test_other_errors_keep_their_traceback(verb):
    verb(raising(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_interrupt(verb, capsys):
    verb(raising(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err.strip() == "anyprec: interrupted"


@pytest.mark.parametrize(
    ("module", "package"),
    [("torch", "PyTorch"), ("PIL", "Pillow"), ("scipy", "SciPy"), ("tensorboard", "TensorBoard")],
)
def test_a_missing_extra(verb, capsys, module, package):
    verb(raising(ModuleNotFoundError(f"No module named '{module}'", name=module)))
    assert cli.main(["probe"]) == 2
    expected = f"anyprec: error: anyprec probe needs {package}: pip install 'anyprec[train]'\n"
    assert capsys.readouterr().err == expected


def test_a_missing_module_of_our_own_is_not_blamed_on_an_extra(verb):
    verb(raising(ModuleNotFoundError("No module named 'anyprec.gone'", name="anyprec.gone")))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["probe"])


def test_train_without_torch_says_what_to_install(tmp_path):
    # A torch.py that fails exactly as a missing torch does, found before the real one.
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')\n")
    (tmp_path / "recipe.toml").write_text('net = "resnet8"\ndata = "digits"\n')
    arguments = ("train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"))
    done = command(*arguments, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr == "anyprec: error: anyprec train needs PyTorch: pip install 'anyprec[train]'\n"


def test_a_worker_pipe_that_breaks_is_not_hidden(verb):
    verb(raising(BrokenPipeError("to a worker")))
    with pytest.raises(BrokenPipeError):
        cli.main(["probe"])


@pytest.mark.skipif(os.name != "posix", reason="pipes as in a shell")
def test_a_closed_reader_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)  # as `anyprec info | true` does
    done = subprocess.run([sys.executable, "-m", "anyprec", "info"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141


def test_a_verb_that_was_renamed_says_so_and_runs(capsys):
    assert cli.main(["load", "not a url"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "anyprec: 'load' is now called 'loadtest'" and said[1].startswith("anyprec: error: ")


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line(verb, capsys):
    def run(args):
        warnings.warn("fewer bits\n save no time here", stacklevel=2)
        return 0

    verb(run)
    assert cli.main(["probe"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("anyprec: warning: fewer bits save no time here") and err.count("\n") == 1
