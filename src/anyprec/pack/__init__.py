"""Packing: a trained any-precision module in, a Graph and a model file without torch out. Calling this needs torch.

`anyprec.pack(model, "net.apm", example=x)` calls the package itself. trace.py (what runs) -> lower.py (numbers per
profile) -> fold.py (fewer operations) -> packing.py (the file, the report); cli_pack.py is `anyprec pack`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyprec.pack.packing import PackReport, make_graph

__all__ = ["PackReport", "make_graph"]


class _CallablePack(ModuleType):
    """The package `anyprec.pack` that is the function `anyprec.pack(model, path, example=x)` as well."""

    def __call__(self, *args: Any, **kwargs: Any) -> PackReport:
        return _load("pack")(*args, **kwargs)


# As with `anyprec.bits`: a function bound to the name would be replaced by the package at its first import.
sys.modules[__name__].__class__ = _CallablePack


def _load(name: str) -> Any:
    try:
        from anyprec.pack import packing
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from anyprec.errors import MissingExtra

        raise MissingExtra("anyprec.pack needs PyTorch: pip install 'anyprec[train]'") from error
    return getattr(packing, name)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'anyprec.pack' has no attribute {name!r}")
    return _load(name)
