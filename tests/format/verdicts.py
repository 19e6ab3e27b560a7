"""What the two readers say of a file, side by side: anyprec.format.read (Python) and anyprec.load (C++).

For test_verdicts and the script fuzz_reader.py. A verdict is "opens" or the name of the error's class.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path

from anyprec import format as apm
from anyprec.errors import ModelFileError, UnsupportedBits
from anyprec.run.model import load

MAX_BITS = (None, 1, 3, 8)


def verdict(read: Callable[[], object]) -> tuple[str, str]:
    """The verdict, and the message behind it."""
    try:
        read()
        return "opens", ""
    except (ModelFileError, UnsupportedBits) as error:
        return type(error).__name__, str(error)


def disagreements(path: Path, max_bits: tuple[int | None, ...] = MAX_BITS) -> list[str]:
    """One line for each way of opening the file in which the readers differ."""
    found = []
    for bits, verify in product(max_bits, (True, False)):
        python, why_python = verdict(lambda: apm.read(path, bits, verify))  # noqa: B023
        engine, why_engine = verdict(lambda: load(path, max_bits=bits, verify=verify, isa="scalar"))  # noqa: B023
        if python != engine:
            found.append(
                f"max_bits={bits}, verify={verify}: Python {python} ({why_python}), C++ {engine} ({why_engine})"
            )
    return found
