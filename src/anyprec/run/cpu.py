"""What this CPU can do, and which instruction set the engine uses on it.

Asks the C++ engine (native/include/anyprec/cpu.h), which reads cpuid, or on ARM asks the operating system, and the
environment variable ANYPREC_ISA.
Called by `anyprec info`, benchmarks and tests.
"""

from __future__ import annotations

import platform

from anyprec import _native
from anyprec.errors import UnsupportedIsa


def cpu_name() -> str:
    """The processor as its maker calls it, or else the architecture: never empty."""
    return _native.cpu_name() or platform.processor() or platform.machine() or "unknown"


def cpu_features() -> tuple[str, ...]:
    """What both CPU and operating system support, named as in /proc/cpuinfo: ('avx2', 'fma', ...)."""
    return tuple(_native.cpu_features())


def usable_isas() -> list[str]:
    """Levels that are built in and run on this CPU, slowest first; "scalar" is always among them."""
    usable = []
    for level in _native.built_isas():
        try:
            usable.append(_native.choose_isa(level, _native.cpu_features()))
        except UnsupportedIsa:
            continue
    return usable


def isa() -> str:
    """The level the engine runs at: `ANYPREC_ISA` if set, else the best one built in that this CPU can run.

    Raises UnsupportedIsa, with a message of its own for an unknown name, for a level that is not built in and
    for one that is more than this CPU can run.
    """
    return _native.isa()
