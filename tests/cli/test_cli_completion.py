"""`anyprec completion SHELL`: the scripts are valid, and bash completes what a user would type."""

import shutil
import subprocess

import pytest

from anyprec.cli import dispatch, main

BASH = shutil.which("bash")
COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_anyprec
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "anyprec.bash"
    with pytest.MonkeyPatch.context() as patch, open(path, "w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


def completed(script, *words):
    """What bash offers behind `anyprec WORDS`, the last of them being typed."""
    command = [BASH, "--norc", "-c", COMPLETE, "bash", script, "anyprec", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.split()


@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_bash_completes(script):
    assert set(completed(script, "")) == {*dispatch.VERBS, "help", "--help", "--version"}
    assert completed(script, "tr") == ["train"]
    assert completed(script, "train", "cifar10-resnet8-c") == ["cifar10-resnet8-cpu"]
    assert completed(script, "train", "digits", "--re") == ["--resume"]
    assert completed(script, "attack", "run", "--attack", "") == ["fgsm", "pgd"]
    assert completed(script, "run", "cifar10-vgg-s") == ["cifar10-vgg-small"]
    assert completed(script, "pack", "run", "--out", "") == []  # a file: bash's own
    assert completed(script, "completion", "") == ["bash", "zsh", "fish"]
    assert completed(script, "help", "insp") == ["inspect"]


@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_bash_is_told_to_complete_files_otherwise(script):
    done = subprocess.run(
        [BASH, "--norc", "-c", 'source "$1"; complete -p anyprec', "bash", script], capture_output=True, text=True
    )
    assert done.stdout == "complete -o default -F _anyprec anyprec\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_verb_and_option_is_in_the_script(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for verb in dispatch.VERBS:
        assert verb in text
        for action in dispatch.parser_of(verb)._actions:
            for name in action.option_strings:
                assert (name.lstrip("-") if shell == "fish" else name) in text, (verb, name)


@pytest.mark.parametrize(("shell", "check"), [("zsh", ["-n"]), ("fish", ["--no-execute"])])
def test_other_shells_can_read_theirs(shell, check, tmp_path, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    assert main(["completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    done = subprocess.run([shell, *check, tmp_path / "script"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_unknown_shell(capsys):
    assert main(["completion", "csh"]) == 2
    assert "invalid choice: 'csh'" in capsys.readouterr().err
