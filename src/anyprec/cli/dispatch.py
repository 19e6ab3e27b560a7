"""The command `anyprec VERB ...`: finds the verb's module, imports it, runs it, turns errors into one line.

A verb module has `add_arguments(parser)` and `run(args) -> int`. It is imported only when its verb is used,
so `anyprec --help` needs no torch. Exit codes: what `run` returns, 2 for a user's mistake, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import io
import os
import re
import select
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO, cast

from anyprec.errors import AnyprecError, MissingExtra

PACKAGE = Path(__file__).resolve().parents[1]

# verb -> (module, one line of help), in the order in which a newcomer meets them
VERBS: dict[str, tuple[str, str]] = {
    "train": ("anyprec.cli.train", "train a network from a recipe, all widths at once"),
    "recipes": ("anyprec.cli.recipes", "the recipes that come with anyprec: data, network, cost, accuracy"),
    "evaluate": ("anyprec.cli.evaluate", "accuracy of a trained run at every width"),
    "calibrate": ("anyprec.cli.calibrate", "prepare a trained run for widths it was not trained for"),
    "attack": ("anyprec.cli.attack", "accuracy at every width on adversarial images made for another one"),
    "quantize": ("anyprec.cli.quantize", "a float network and a folder of pictures to one model file, no training"),
    "ptq": ("anyprec.cli.ptq", "quantize a float model without training: bit shifting, calibrated norms, ACIQ, GPTQ"),
    "import": ("anyprec.cli.import_", "weights or an ONNX network made elsewhere, as an anyprec checkpoint"),
    "pack": ("anyprec.cli.pack", "turn a trained run into one model file of integers, for every width"),
    "models": ("anyprec.cli.models", "the pretrained models that come with anyprec: accuracy, size, speed"),
    "inspect": ("anyprec.cli.inspect", "what a model file holds, and how many bytes each width needs"),
    "run": ("anyprec.cli.run", "run a model file on images, or over a test set, at any width"),
    "export": ("anyprec.cli.export", "a model file as ONNX models for other engines, one for each width"),
    "search": ("anyprec.cli.search", "bits per layer: the best plan within a time or a size, stored in the file"),
    "cascade": ("anyprec.cli.cascade", 'few bits first, more for unsure inputs: thresholds for bits="auto"'),
    "bench": ("anyprec.cli.bench", "time and memory at every width, beside other engines"),
    "serve": ("anyprec.cli.serve", "serve model files over HTTP within a latency target, by choosing the bits"),
    "loadtest": ("anyprec.cli.loadtest", "put a server under load: SLO attainment, latency, bits and accuracy"),
    "simulate": ("anyprec.cli.simulate", "simulate serving in virtual time: how many replicas, what accuracy"),
    "reproduce": ("anyprec.cli.reproduce", "repeat the paper's experiments, one command each"),
    "report": ("anyprec.cli.report", "one HTML page from the results of `reproduce` or `train`"),
    "info": ("anyprec.cli.info", "versions, CPU and instruction set, for a bug report"),
    "completion": ("anyprec.cli.completion", "a script that completes verbs and options in bash, zsh or fish"),
}

# Verbs as they were once called -> as they are called now
RENAMED = {"load": "loadtest"}

# What the optional parts need: module -> (its name for people, the extra that installs it)
EXTRAS: dict[str, tuple[str, str]] = {
    "torch": ("PyTorch", "train"),
    "PIL": ("Pillow", "train"),
    "scipy": ("SciPy", "train"),
    "tensorboard": ("TensorBoard", "train"),
    "matplotlib": ("Matplotlib", "report"),
    "onnx": ("onnx", "onnx"),
    "uvicorn": ("uvicorn", "serve"),
    "httptools": ("httptools", "serve"),
    "prometheus_client": ("prometheus_client", "serve"),
}

# Errors of files and folders, reported in one line. Other OSErrors are our own mistakes and keep their traceback.
OF_THE_SYSTEM = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY,
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE, errno.ENFILE,
    errno.ENOMEM, errno.EBUSY, errno.ETXTBSY, errno.ESTALE, errno.EBADF,
}  # fmt: skip

INTERRUPTED = 128 + 2  # as a shell reports SIGINT
PIPE_CLOSED = 128 + 13  # and SIGPIPE


class Verb(Protocol):
    """What a verb module offers."""

    EXAMPLE: str  # a command line that --help opens with

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


class Parser(argparse.ArgumentParser):
    """argparse with our form of error, one line instead of a page of usage, and an example on top of --help."""

    example = ""

    def format_help(self) -> str:
        return f"example: {self.example}\n\n{super().format_help()}"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"anyprec: error: {message}; see '{self.prog} --help'\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program name); returns the exit code."""
    escape_unprintable_text()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            code = dispatch(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:
            sys.stdout.flush()  # so that a closed pipe or a full disk shows here, not at interpreter exit
        return code
    except AnyprecError as error:
        return print_error(str(error))
    except KeyboardInterrupt as error:
        line = f"anyprec: interrupted; {error}" if str(error) else "anyprec: interrupted"
        print_to_stderr(f"\n{line}" if is_terminal(sys.stderr) else line)  # behind the ^C
        return INTERRUPTED
    except UnicodeEncodeError as error:
        if not re.search("[\udc80-\udcff]", error.object):
            raise
        return print_error(f"{error.object!r} is no text in UTF-8; write it in letters")
    except RecursionError as error:
        return print_error(f"something given is nested too deeply ({error})")
    except MemoryError as error:
        return print_error(f"out of memory ({error}); use smaller batches or images" if str(error) else "out of memory")
    except OSError as error:
        # `anyprec ... | head` is no error. A pipe to a worker that died is one, and keeps its traceback.
        closed = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and is_pipe_closed(stream)]
        if isinstance(error, BrokenPipeError) and closed:
            redirect_to_devnull(closed)
            return PIPE_CLOSED
        if error.errno not in OF_THE_SYSTEM:
            raise
        redirect_to_devnull([stream for stream in (sys.stdout,) if stream is not None])
        return print_error(f"{name_of(error)} {error.strerror}")


def show_warning(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
    """Ours in one line, as errors are; those of other packages with the place they come from."""
    ours = category is UserWarning and Path(filename).is_relative_to(PACKAGE)
    print_to_stderr(f"anyprec: warning: {' '.join(str(message).split())}" + ("" if ours else f" ({filename})"))


def print_error(message: str) -> int:
    print_to_stderr(f"anyprec: error: {' '.join(message.split())}")
    return 2


def print_to_stderr(line: str) -> None:
    """On stderr, if anybody listens."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


def name_of(error: OSError) -> str:
    """Of the file; what cannot be written and has no name is what we print to."""
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    if not names and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        names = ["standard output"]
    return f"{' -> '.join(names)}:" if names else ""


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def escape_unprintable_text() -> None:
    """A path may hold bytes that are no text, or letters a terminal cannot show: these are printed as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def redirect_to_devnull(streams: Sequence[TextIO]) -> None:
    """What they still hold shall not fail again at interpreter exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(devnull, stream.fileno())


def dispatch(argv: list[str]) -> int:
    first = argv[0] if argv else None
    if first in ("-h", "--help"):
        print(usage(), end="")
        return 0
    if first == "help":
        return show_help(argv[1:])
    if first in ("-V", "--version"):
        from anyprec import __version__

        print("anyprec", __version__)
        return 0
    if first is None:
        print(usage(), end="", file=sys.stderr)
        return 2
    verb = known_verb(first)
    try:
        return run_verb(verb, argv[1:])
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        package, extra = EXTRAS[error.name]
        raise MissingExtra(f"anyprec {verb} needs {package}: pip install 'anyprec[{extra}]'") from error


def known_verb(given: str) -> str:
    if given in RENAMED:
        print_to_stderr(f"anyprec: '{given}' is now called '{RENAMED[given]}'")
        return RENAMED[given]
    if given not in VERBS:
        raise AnyprecError(unknown_verb(given))
    return given


def show_help(names: list[str]) -> int:
    """`anyprec help` is `anyprec --help`, `anyprec help VERB` is `anyprec VERB --help`."""
    if len(names) > 1:
        raise AnyprecError(f"help shows one verb at a time; write: anyprec help {names[0]}")
    print(parser_of(known_verb(names[0])).format_help() if names else usage(), end="")
    return 0


def run_verb(verb: str, argv: list[str]) -> int:
    try:
        # `run net.apm --bits 2 x.npy`: options may stand between
        args = parser_of(verb).parse_intermixed_args(argv)
    except SystemExit as done:  # argparse leaves this way after --help and after an error it has printed
        return int(done.code or 0)
    return module_of(verb).run(args)


def parser_of(verb: str) -> Parser:
    """The options of a verb; also for shell completion and the reference pages."""
    parser = Parser(prog=f"anyprec {verb}", description=VERBS[verb][1])
    parser.example = module_of(verb).EXAMPLE
    module_of(verb).add_arguments(parser)
    return parser


def module_of(verb: str) -> Verb:
    return cast(Verb, importlib.import_module(VERBS[verb][0]))


def usage() -> str:
    width = max(map(len, VERBS))
    lines = [
        "usage: anyprec VERB ...",
        "",
        "Train a network once, run it at 1 to 8 bit or float.",
        "",
        *(f"  {verb:<{width}}  {summary}" for verb, (_, summary) in VERBS.items()),
        "",
        "  anyprec help VERB   the options of one verb",
        "  anyprec --version",
    ]
    return "\n".join(lines) + "\n"


def unknown_verb(given: str) -> str:
    kind = "option" if given.startswith("-") else "verb"
    near = difflib.get_close_matches(given, VERBS, n=1)
    advice = f"did you mean '{near[0]}'?" if near else f"choose one of {', '.join(VERBS)}"
    return f"unknown {kind} '{given}'; {advice}"


def is_pipe_closed(stream: TextIO) -> bool:
    """Whether the other end of this stream is closed. False where the system cannot tell."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # errors are reported unasked
        return bool(poll.poll(0))
    except (AttributeError, OSError, ValueError):
        return False
