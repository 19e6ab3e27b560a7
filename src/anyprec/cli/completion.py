"""`anyprec completion bash|zsh|fish`: a script for the shell that completes verbs, options, choices and names.

Made from the parsers of all verbs, so it knows what they know; the shell then completes without starting Python.
Where a file or a folder is wanted, the shell completes it itself.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass

SHELLS = ("bash", "zsh", "fish")
ROOT_OPTIONS = {"--help": "the verbs, a line each", "--version": "the version of anyprec"}
EXAMPLE = "anyprec completion bash"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete in")


def run(args: argparse.Namespace) -> int:
    print({"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[args.shell](all_verbs()), end="")
    return 0


@dataclass(frozen=True)
class Option:
    names: tuple[str, ...]  # "-h", "--help"
    help: str
    takes_value: bool
    values: tuple[str, ...]  # what the value may be; empty: a file, or anything


@dataclass(frozen=True)
class VerbWords:
    name: str
    summary: str
    options: tuple[Option, ...]
    values: tuple[str, ...]  # names that may stand without an option
    takes_files: bool  # whether a file may stand there, too

    @property
    def flags(self) -> list[str]:
        return [name for option in self.options for name in option.names]


def all_verbs() -> list[VerbWords]:
    from anyprec.cli.dispatch import VERBS, parser_of
    from anyprec.models import catalog
    from anyprec.training import recipe_catalog

    # A metavar tells what a name is of.
    names = {"RECIPE": tuple(recipe_catalog.names()), "MODEL.apm": tuple(catalog.names())}
    found = []
    for verb, (_, summary) in VERBS.items():
        options: list[Option] = []
        values: list[str] = ["list", "all"] if verb == "reproduce" else []
        takes_files = False
        for action in parser_of(verb)._actions:
            choices = tuple(map(str, action.choices or ()))
            if action.option_strings:
                options.append(Option(tuple(action.option_strings), action.help or "", action.nargs != 0, choices))
            else:
                values += choices or names.get(str(action.metavar), ())
                takes_files |= not choices
        found.append(VerbWords(verb, summary, tuple(options), tuple(values), takes_files))
    found.append(VerbWords("help", "the options of one verb", (), tuple(VERBS), takes_files=False))
    return found


# --- bash and zsh -----------------------------------------------------------------------------------------------------


def bash_script(verbs: list[VerbWords]) -> str:
    values, options, names = [], [], []
    for verb in verbs:
        free = []  # options whose value is a file, or anything
        for option in (option for option in verb.options if option.takes_value):
            keys = [f'"{verb.name} {name}"' for name in option.names]
            if option.values:
                words = f'COMPREPLY=($(compgen -W "{" ".join(option.values)}" -- "$current"))'
                values.append(f"        {'|'.join(keys)}) {words}; return ;;")
            else:
                free += keys
        if free:
            values.append(f"        {'|'.join(free)}) return ;;")
        options.append(f'            {verb.name}) words="{" ".join(verb.flags)}" ;;')
        names.append(f'            {verb.name}) words="{" ".join(verb.values)}" ;;')
    return f"""# Completion of anyprec for bash. To have it in every shell:
#   anyprec completion bash > ~/.local/share/bash-completion/completions/anyprec
_anyprec() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local verb="${{COMP_WORDS[1]}}" words=""
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "{" ".join([*(verb.name for verb in verbs), *ROOT_OPTIONS])}" -- "$current"))
        return
    fi
    case "$verb $before" in # the value of an option; without a reply bash completes files
{chr(10).join(values)}
    esac
    if [[ $current == -* ]]; then
        case "$verb" in
{chr(10).join(options)}
        esac
    else
        case "$verb" in
{chr(10).join(names)}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _anyprec anyprec
"""


def zsh_script(verbs: list[VerbWords]) -> str:
    cases = []
    for verb in verbs:
        names = "_anyprec_names" if verb.takes_files else "compadd --"
        specs = [f"'*:name: {names} {' '.join(verb.values)}'"] if verb.takes_files or verb.values else []
        for option in verb.options:
            action = f"({' '.join(option.values)})" if option.values else "_files"
            value = f":value:{action}" if option.takes_value else ""
            for name in option.names:
                both = "=" if option.takes_value and name.startswith("--") else ""  # --out FILE and --out=FILE
                specs.append(f"'{name}{both}[{escaped(option.help)}]{value}'")
        cases.append(f"        {verb.name}) _arguments {' '.join(specs)} ;;")
    listed = "\n".join(f"        '{verb.name}:{escaped(verb.summary)}'" for verb in verbs)
    root = " ".join(f"'{name}[{escaped(text)}]'" for name, text in ROOT_OPTIONS.items())
    return f"""#compdef anyprec
# Completion of anyprec for zsh. To have it in every shell, in a folder of $fpath:
#   anyprec completion zsh > ~/.zfunc/_anyprec
_anyprec_names() {{ # a name, or a file
    (( $# )) && compadd -- "$@"
    _files
}}
_anyprec() {{
    local -a verbs=(
{listed}
    )
    if (( CURRENT == 2 )); then
        if [[ $words[2] == -* ]]; then
            _arguments {root}
        else
            _describe verb verbs
        fi
        return
    fi
    local verb=$words[2]
    shift words
    (( CURRENT -= 1 ))
    case $verb in
{chr(10).join(cases)}
    esac
}}
if [[ $funcstack[1] == _anyprec ]]; then
    _anyprec "$@"
else
    compdef _anyprec anyprec
fi
"""


def escaped(text: str) -> str:
    """Inside '...[...]' of zsh: quotes, closing brackets and colons have a meaning there."""
    plain = text.replace("%%", "%").replace("'", "'\\''")
    return plain.replace("]", "\\]").replace(":", "\\:")


def fish_script(verbs: list[VerbWords]) -> str:
    # fish's own __fish_seen_subcommand_from takes any word for the verb: a run folder called "run" among them.
    lines = [
        "# Completion of anyprec for fish. To have it in every shell:",
        "#   anyprec completion fish > ~/.config/fish/completions/anyprec.fish",
        "function __anyprec_verb # whether the verb is this one; without an argument, whether there is none yet",
        "    set -l words (commandline -opc)",
        '    test "$words[2]" = "$argv[1]"',
        "end",
        "complete -c anyprec -n __anyprec_verb -f",
    ]
    for name, text in ROOT_OPTIONS.items():
        lines.append(f"complete -c anyprec -n __anyprec_verb -l {name[2:]} -d {shlex.quote(text)}")
    for verb in verbs:
        lines.append(f"complete -c anyprec -n __anyprec_verb -a {verb.name} -d {shlex.quote(verb.summary)}")
        inside = f"complete -c anyprec -n '__anyprec_verb {verb.name}'"
        if not verb.takes_files:
            lines.append(f"{inside} -f")
        if verb.values:
            lines.append(f"{inside} -a '{' '.join(verb.values)}'")
        for option in verb.options:
            names = [f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names]
            value = ["-rF"] if option.takes_value and not option.values else []  # -F: a file, whatever the verb takes
            value += [f"-rfa '{' '.join(option.values)}'"] if option.values else []
            lines.append(" ".join([inside, *names, *value, "-d", shlex.quote(option.help.replace("%%", "%"))]))
    return "\n".join(lines) + "\n"
