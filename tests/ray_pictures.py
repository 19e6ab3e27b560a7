"""Answers of anyprec.ray.map_images as JSON, in a process of its own, for test_ray.py: Ray warns too much for pytest's.

    python ray_pictures.py '{"source": "photos", "model": "cifar10-vgg-small", "bits": 2, "kill": true}'

"kill" ends the process of a worker (SIGKILL) once both have answered something. Prints {"rows": [...], "pids": [...]}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.data

import anyprec.ray
from anyprec.errors import AnyprecError


class Noted(anyprec.ray._Worker):
    """A worker that leaves its process id, and is slow enough to be caught at work."""

    def __call__(self, table: Any) -> Any:
        Path(os.environ["NOTES"], str(os.getpid())).touch()
        time.sleep(0.3)
        return super().__call__(table)


def kill_one() -> None:
    notes = Path(os.environ["NOTES"])
    until = time.monotonic() + 120
    while time.monotonic() < until and len(list(notes.iterdir())) < 2:
        time.sleep(0.05)
    first = min(notes.iterdir(), key=lambda path: path.stat().st_mtime)
    os.kill(int(first.name), signal.SIGKILL)


def main(text: str) -> None:
    given = json.loads(text)
    say, sys.stdout = sys.stdout, sys.stderr  # Ray prints
    killer = threading.Thread(target=kill_one, daemon=True) if given.pop("kill", False) else None
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        if killer:
            anyprec.ray._Worker = Noted  # type: ignore[misc]
            killer.start()
        rows = anyprec.ray.map_images(**given).take_all()
        for row in rows:
            row.update({name: len(value) for name, value in row.items() if isinstance(value, bytes)})
        pids = sorted(path.name for path in Path(os.environ["NOTES"]).iterdir())
        print(json.dumps({"rows": rows, "pids": pids}), file=say, flush=True)
    except AnyprecError as error:
        print(json.dumps({"error": str(error)}), file=say, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
