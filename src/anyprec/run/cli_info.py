"""`anyprec info`: versions, CPU and instruction set, as a short table or as JSON. Called by anyprec.cli.

It reports what it finds and imports nothing optional (torch), so it also works on a broken install.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform

from anyprec import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    found = collect()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, value in found.items():
        if isinstance(value, list):
            value = " ".join(value) or "none"
        elif value is None:
            value = "not installed"
            if name == "torch":
                value += " (needed for training: pip install 'anyprec[train]')"
        print(f"{name:<9} {value}")
    return 0


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
    found["isa"] = cpu.isa()
    return found


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
