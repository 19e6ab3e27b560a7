"""Times, bytes and counts as users write them."""

import argparse
import importlib

import pytest

from anyprec.arguments import delay, duration, positive, size, span
from anyprec.cli import dispatch as cli


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20ms", 0.02), ("1.5s", 1.5), (".5s", 0.5), ("2m", 120), ("500us", 5e-4), ("1e-2s", 0.01), (" 2 s ", 2)],
)
def test_times(text, seconds):
    assert duration(text) == pytest.approx(seconds)
    assert delay(text) == duration(text) == span(text)


def test_seconds_of_an_option_that_is_called_so():
    assert [span(text) for text in ("30", "0.5", "1e1", "2m", "50ms")] == [30, 0.5, 10, 120, 0.05]
    for wrong in ("0", "-3", "nan", "inf", "1e999", "soon", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="write for example 50ms"):
            span(wrong)


@pytest.mark.parametrize("text", ["50", "0.05", "1e3"])
def test_a_time_without_a_unit_is_refused_with_what_to_type(text):
    for read in (duration, delay):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' has no unit; write {text}ms or {text}s"):
            read(text)


def options_of(verb):
    parser = argparse.ArgumentParser()
    importlib.import_module(cli.VERBS[verb][0]).add_arguments(parser)
    return parser._actions


TIMES = {"--slo", "--warm-up", "--header-timeout", "--body-timeout", "--write-timeout", "--drain-delay",
         "--drain-timeout", "--deadline", "--timeout", "--image-timeout", "--starts-in", "--margin",
         "--fail"}  # fmt: skip


@pytest.mark.parametrize(("verb", "positionals"), [
    ("serve", ["x.apm"]), ("loadtest", ["http://127.0.0.1:9"]), ("simulate", ["{table}"]), ("bench", ["x.apm"]),
])  # fmt: skip
def test_every_option_that_takes_a_time_wants_a_unit(verb, positionals, tmp_path, capsys):
    """50 seconds where 50 ms were meant is a server that keeps every target."""
    table = tmp_path / "table.json"
    table.write_text('{"ms": {"8": {"1": 2.0}}, "accuracy": {"8": 70.0}}')
    found = {option for action in options_of(verb) for option in action.option_strings} & TIMES
    assert found
    for option in sorted(found):
        assert cli.main([verb, *(p.format(table=table) for p in positionals), option, "50"]) == 2, option
        error = capsys.readouterr().err
        assert "'50' has no unit; write 50ms or 50s" in error and option in error and error.count("\n") == 1


def test_no_option_that_takes_a_time_is_forgotten():
    """Whatever reads a time reads it with `delay`, `duration` or `span`; the list above has all but the last."""
    for verb in ("serve", "loadtest", "simulate", "bench"):
        for action in options_of(verb):
            if action.type in (delay, duration):
                assert set(action.option_strings) <= TIMES, action.option_strings


def test_no_time():
    assert delay("0") == delay("0ms") == 0
    with pytest.raises(argparse.ArgumentTypeError, match="'0ms' is no time at all"):
        duration("0ms")


def test_bytes():
    assert [size(text) for text in ("16MiB", "1MB", "5", "4k", "1GiB")] == [16 << 20, 10**6, 5, 4096, 1 << 30]


@pytest.mark.parametrize(
    ("read", "text", "says"),
    [
        (duration, "fast", "'fast' is not a time; write for example 50ms"),
        (duration, "-1s", "is not a time"),
        (duration, "1e999", "is not a time"),
        (duration, "1.2.3", "is not a time"),
        (size, "1e6", "is not a number of bytes; write 16MiB"),
        (size, "0", "is not a number of bytes"),
        (positive, "0", "is not a whole number above 0"),
        (positive, "-3", "is not a whole number above 0"),
        (positive, "2.5", "is not a whole number above 0"),
    ],
)
def test_what_they_refuse(read, text, says):
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        read(text)
