"""A network by the name a user types: `module:function`, `file.py:function` or a timm name in, an `nn.Module` out.

Called by cli/quantize.py. A function may return the network, or the network and its Preprocessing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from anyprec.errors import AnyprecError, MissingExtra
from anyprec.preprocessing import Preprocessing


def named_network(name: str) -> tuple[nn.Module, Preprocessing | None]:
    """Runs code that the user names: the function's, or timm's."""
    if name.endswith(".onnx"):
        return from_onnx(name)
    if ":" in name:
        return from_function(name)
    return from_timm(name), None


def from_onnx(path: str) -> tuple[nn.Module, Preprocessing | None]:
    """The place for the ONNX importer."""
    raise AnyprecError(f"{path}: ONNX files are not read yet; give a timm name, or module:function in Python")


def from_function(name: str) -> tuple[nn.Module, Preprocessing | None]:
    place, _, attribute = name.rpartition(":")
    try:
        module = load_file(Path(place)) if place.endswith(".py") else load_module(place)
        make: Callable[[], Any] = getattr(module, attribute)
    except (ImportError, AttributeError, OSError) as error:
        raise AnyprecError(f"{name}: {error}; give module:function or file.py:function, which makes the network") from (
            error
        )
    made = make if isinstance(make, nn.Module) else make()
    net, how = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(net, nn.Module) or not isinstance(how, (Preprocessing, type(None))):
        raise AnyprecError(
            f"{name} gives a {type(made).__name__}; it must give an nn.Module, or that and Preprocessing"
        )
    return net, how


def load_module(name: str) -> Any:
    """As `python -m` finds it: the working folder first."""
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove("")


def load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # so that classes of it can be pickled and copied
    spec.loader.exec_module(module)
    return module


def from_timm(name: str) -> nn.Module:
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise MissingExtra(
            f"{name!r} is a timm name, and timm is not installed: pip install timm; or give module:function"
        ) from error
    try:
        net: nn.Module = timm.create_model(name, pretrained=True)
    except Exception as error:  # an unknown name, no network, no pretrained weights: timm's own words say which
        raise AnyprecError(f"timm cannot make {name!r}: {str(error).splitlines()[0] if str(error) else error}") from (
            error
        )
    return net
