"""anyprec: train a network once, run it at 1 to 8 bit or float.

    model = anyprec.convert(net, widths=(1, 2, 4, 8, 32), example=x)
    anyprec.set_bits(model, 4)
    with anyprec.bits(model, 2): ...
    anyprec.pack(model, "net.apm", example=x)

    m = anyprec.load("net.apm")  # numpy and the C++ engine, no torch
    y = m(images, bits=2)

Importing this is quick and needs no torch: names are looked up on first use (PEP 562).
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING, Any

import anyprec.bits as _bits_module
from anyprec.bits import Profile

if TYPE_CHECKING:
    from anyprec import data, pack, ptq, run, train, zoo
    from anyprec.preprocessing import Preprocessing
    from anyprec.run.model import load
    from anyprec.train.calibrate import calibrate
    from anyprec.train.convert import convert
    from anyprec.train.switch import any_layers, bits, set_bits

__version__ = "0.3.0"  # the only place: pyproject.toml reads it from here

__all__ = [
    "Preprocessing",
    "Profile",
    "any_layers",
    "bits",
    "calibrate",
    "convert",
    "data",
    "load",
    "pack",
    "ptq",
    "run",
    "set_bits",
    "train",
    "zoo",
]

# Public name -> the module that holds it.
_LAZY = {
    "Preprocessing": "anyprec.preprocessing",
    "any_layers": "anyprec.train.switch",
    "calibrate": "anyprec.train.calibrate",
    "convert": "anyprec.train.convert",
    "load": "anyprec.run.model",
    "set_bits": "anyprec.train.switch",
}
_NEED_TORCH = {"any_layers", "calibrate", "convert", "pack", "ptq", "set_bits", "train", "zoo"}
_SUBMODULES = ("data", "pack", "ptq", "run", "train", "zoo")  # `anyprec.pack(...)` works: the package can be called


class _CallableBits(ModuleType):
    """The module `anyprec.bits` that is the context manager `anyprec.bits(model, 2)` as well."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _load("bits", "anyprec.train.switch")(*args, **kwargs)


# `anyprec.bits` means two things: the torch-free module with Profile and the width rules, and the context
# manager of anyprec.train.switch. Were the latter bound to the name, the import system would bind the module
# again at the first `import anyprec.bits`. So the module stays and learns to be called; that imports torch.
_bits_module.__class__ = _CallableBits


def _load(name: str, module: str) -> Any:
    return getattr(_module(name, module), name)


def _module(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from anyprec.errors import MissingExtra

        raise MissingExtra(f"anyprec.{name} needs PyTorch: pip install 'anyprec[train]'") from error


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return _module(name, f"anyprec.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'anyprec' has no attribute {name!r}")
    value = _load(name, _LAZY[name])
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    """Without torch only what works without it: `help(anyprec)` looks at every name that stands here."""
    return sorted({*globals(), *__all__} - (set() if _has_torch() else _NEED_TORCH))


def _has_torch() -> bool:
    try:
        return importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):  # blocked: None in sys.modules, or a finder that refuses it
        return False
