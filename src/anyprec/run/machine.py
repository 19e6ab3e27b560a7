"""Versions, CPU and instruction set of this machine, for `anyprec info` and for records of measurements.

It reports what it finds and imports nothing optional (torch), so it also works on a broken install.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform

from anyprec import __version__

# What fewer bits save, by instruction set (docs/internals/kernels.md); others: time as well.
SAVINGS = {
    "avx512vnni": "fewer bits save memory and download, and time in 3x3 layers from 4 bit down, in all at 1 bit",
    "amx": "fewer bits save file, download and memory, not multiplications: 2 to 8 bit all run as int8 matrices",
    "dotprod": "fewer bits save memory and download; 2 to 8 bit multiply equally fast, 1 bit faster",
    "i8mm": "fewer bits save memory and download; 2 to 8 bit multiply equally fast, 1 bit faster",
    "scalar": "fewer bits save memory and download, not time: all widths run the same loop",
}


def collect() -> dict[str, str | int | list[str] | None]:
    found: dict[str, str | int | list[str] | None] = {
        "anyprec": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "numpy": installed("numpy"),
        "torch": installed("torch"),
        "cores": os.cpu_count(),
    }
    try:
        from anyprec.run import cpu
    except ImportError as error:  # built for another Python or libc: the very thing this command should show
        found["engine"] = f"cannot be loaded: {error}"
        return found
    found["cpu"] = cpu.cpu_name()
    found["features"] = list(cpu.cpu_features())
    found["isas"] = cpu.usable_isas()
    found["isa"] = isa = cpu.isa()
    found["bits"] = SAVINGS.get(isa, "fewer bits save time, memory and download")
    return found


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
