"""What options of several verbs may be: times, bytes, counts. Each is an argparse type, and says what is wrong."""

from __future__ import annotations

import argparse
import math
import re

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}


def delay(text: str) -> float:
    """'50ms' -> 0.05; '2s' and '2' -> 2.0; '1m' -> 60.0; '0' -> 0.0."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(us|ms|s|m|)", text.strip())
    seconds = float(found[1]) * SECONDS[found[2]] if found else math.inf
    if seconds == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write for example 50ms, 1.5s or 2m")
    return seconds


def duration(text: str) -> float:
    """A delay that takes some time: '50ms' -> 0.05."""
    seconds = delay(text)
    if seconds == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time at all; write for example 50ms, 1.5s or 2m")
    return seconds


def size(text: str) -> int:
    """'16MiB' -> 16777216; '1e6' is not a size, '1MB' is."""
    found = re.fullmatch(r"([0-9]+)\s*([kKMG]?)(i?B?)", text.strip())
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; write 16MiB or 1000000")
    step = 1000 if found[3] == "B" and found[2] else 1024
    return int(found[1]) * step ** " kMG".index(found[2].replace("K", "k") or " ")


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
