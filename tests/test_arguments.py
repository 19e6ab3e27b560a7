"""Times, bytes and counts as users write them."""

import argparse

import pytest

from anyprec.arguments import delay, duration, positive, size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20ms", 0.02), ("1.5s", 1.5), (".5", 0.5), ("2m", 120), ("500us", 5e-4), ("3", 3), ("1e-2", 0.01), (" 2 s ", 2)],
)
def test_times(text, seconds):
    assert duration(text) == pytest.approx(seconds)
    assert delay(text) == duration(text)


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
