"""Load: requests sent to a server at times fixed beforehand, and what became of them. Needs numpy alone.

arrivals.py (when) -> target.py (where, and the bytes) -> client.py (send, receive; wire.py, poller.py; processes.py
for more) -> outcome.py -> report.py, pictures.py (what it means); cli_load.py is `anyprec load URL`. The simulator of
anyprec.serve draws its arrivals here too.

The word has two meanings: `anyprec.load("net.apm")` opens a model file, and still does when this package is imported.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyprec.run.model import PackedModel


class _CallableLoad(ModuleType):
    """The package `anyprec.load` that is the function `anyprec.load(path)` as well."""

    def __call__(self, *args: Any, **kwargs: Any) -> PackedModel:
        from anyprec.run.model import load

        return load(*args, **kwargs)


# As with `anyprec.bits`: a function bound to the name would be replaced by the package at its first import.
sys.modules[__name__].__class__ = _CallableLoad
