"""What options of several verbs may be: times, bytes, counts. Each is an argparse type, and says what is wrong."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
LONGEST_S = 1e9  # thirty years; what comes after it overflows somewhere


def delay(text: str) -> float:
    """'50ms' -> 0.05; '2s' -> 2.0; '1m' -> 60.0; '0' -> 0.0. '50' is refused: 50 ms and 50 s are worlds apart."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(us|ms|s|m|)", text.strip())
    number = float(found[1]) if found else math.inf
    if not found or number * SECONDS[found[2] or "s"] > LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write for example 50ms, 1.5s or 2m")
    if not found[2] and number:
        raise argparse.ArgumentTypeError(f"{text!r} has no unit; write {found[1]}ms or {found[1]}s")
    return number * SECONDS[found[2] or "s"]


def duration(text: str) -> float:
    """A delay that takes some time: '50ms' -> 0.05."""
    seconds = delay(text)
    if seconds == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time at all; write for example 50ms, 1.5s or 2m")
    return seconds


def span(text: str) -> float:
    """A duration of an option that is called --seconds: '30' is 30 s there, and '2m' is 120."""
    is_number = re.fullmatch(r"[0-9.eE+-]+", text.strip())
    return duration(f"{text.strip()}s" if is_number else text)


def size(text: str) -> int:
    """'16MiB' -> 16777216; '1e6' is not a size, '1MB' is."""
    found = re.fullmatch(r"([0-9]{1,18})\s*([kKMG]?)(i?B?)", text.strip())
    step = 1000 if found and found[3] == "B" and found[2] else 1024
    number = int(found[1]) * step ** " kMG".index(found[2].replace("K", "k") or " ") if found else 0
    if not 0 < number < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; write 16MiB or 1000000")
    return number


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of a whole number within bounds: whole(1, 64)('8') -> 8."""

    def read(text: str) -> int:
        number = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return number

    return read


seed = whole(0, 2**63 - 1)  # what numpy and torch both take


def real(text: str) -> float:
    """Any finite number: float() also takes 'nan' and 'inf'."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return number


def positive(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,17}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def names(text: str) -> tuple[str, ...]:
    """1,2,auto -> ("1", "2", "auto")"""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names; write for example 1,2,auto")
    return found
