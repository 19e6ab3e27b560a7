"""`anyprec completion SHELL`: bash, zsh and fish, where they are installed, complete what a user would type."""

import os
import re
import shutil
import subprocess

import pytest

from anyprec.cli import dispatch, main

SHELLS = ("bash", "zsh", "fish")

# Each prints a line "match:WORD" for whatever the shell offers at the end of the line that is being typed.
BASH = """
source "$1"
COMP_WORDS=($2); [[ $2 == *' ' ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_anyprec
(( ${#COMPREPLY[@]} )) && printf 'match:%s\\n' "${COMPREPLY[@]}" || compgen -P match: -f -- "${COMP_WORDS[COMP_CWORD]}"
"""
# A real shell in a pseudo-terminal, where Tab is pressed. `compadd`, through which all matches go, prints them as well.
ZSH_TYPED = """
PROMPT=
[[ -n $FROM_FPATH ]] && fpath=(${SCRIPT:h} $fpath) # which holds it as _anyprec
autoload -Uz compinit; compinit -u -D
[[ -n $FROM_FPATH ]] || source "$SCRIPT"
compadd() {
    local -a found
    builtin compadd -A found "$@"
    (( $#found )) && print -rl -- "match:"$^found
    builtin compadd "$@"
}
comppostfuncs=(leave)
leave() { print end:; exit }
bindkey '^I' complete-word
print ready:
"""
ZSH = """
zmodload zsh/zpty
export SCRIPT=$1
zpty typed zsh -f -i
zpty -w typed "source ${1}.typed"
zpty -r typed text '*ready:*'
zpty -n -w typed "$2"$'\\t'
zpty -r typed text '*end:*' && print -r -- $text
"""
FISH = """
source $argv[1]
complete -C $argv[2] | string replace -r '^([^\\t]*).*' 'match:$1'
"""
COMMANDS = {
    "bash": ["bash", "--norc", "-c", BASH, "bash"],
    "zsh": ["zsh", "-f", "-c", ZSH, "zsh"],
    "fish": ["fish", "--no-config", "-c", FISH],
}


@pytest.fixture(scope="module", params=["bash", "zsh", "zsh from fpath", "fish"])
def completed(request, tmp_path_factory):
    """completed("anyprec tr"): what the shell offers there, in a folder with the one file some.apm."""
    shell, _, from_fpath = request.param.partition(" ")
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    folder = tmp_path_factory.mktemp(shell)
    with pytest.MonkeyPatch.context() as patch, open(folder / "_anyprec", "w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", shell]) == 0
    (folder / "_anyprec.typed").write_text(ZSH_TYPED)
    (folder / "here").mkdir()
    (folder / "here" / "some.apm").touch()

    def ask(line: str) -> set[str]:
        command = [*COMMANDS[shell], folder / "_anyprec", line]
        env = {**os.environ, "HOME": str(folder), "TERM": "dumb", "FROM_FPATH": from_fpath}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder / "here", env=env)
        assert done.stderr == "", done.stderr
        return set(re.findall(r"match:([^\s]+)", done.stdout))

    return ask


def test_verbs_are_completed(completed):
    assert completed("anyprec ") - {"--help", "--version"} == {*dispatch.VERBS, "help"}
    assert completed("anyprec tr") == {"train"}
    assert completed("anyprec --") == {"--help", "--version"}
    assert completed("anyprec help insp") == {"inspect"}


def test_options_are_those_of_the_verb(completed):
    assert completed("anyprec train digits --re") == {"--resume"}
    # "run" is a folder here; the verb of that name has --dataset as well
    assert completed("anyprec train run --d") == {"--data", "--device", "--download"}


def test_names_and_choices_are_completed(completed):
    assert completed("anyprec train cifar10-resnet8-c") == {"cifar10-resnet8-cpu"}
    assert completed("anyprec run cifar10-vgg-s") == {"cifar10-vgg-small"}
    assert completed("anyprec attack run --attack ") == {"fgsm", "pgd"}
    assert completed("anyprec completion ") == {"bash", "zsh", "fish"}


def test_files_are_completed_where_they_may_stand(completed):
    assert completed("anyprec run som") == {"some.apm"}
    assert completed("anyprec pack folder --out ") == {"some.apm"}


def test_bash_is_told_to_complete_files_otherwise(tmp_path, capsys):
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    command = ["bash", "--norc", "-c", 'source "$1"; complete -p anyprec', "bash", tmp_path / "script"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "complete -o default -F _anyprec anyprec\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_every_verb_and_option_is_in_the_script(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for verb in dispatch.VERBS:
        assert verb in text
        for action in dispatch.parser_of(verb)._actions:
            for name in action.option_strings:
                assert (name.lstrip("-") if shell == "fish" else name) in text, (verb, name)


def test_an_unknown_shell(capsys):
    assert main(["completion", "csh"]) == 2
    assert "invalid choice: 'csh'" in capsys.readouterr().err
