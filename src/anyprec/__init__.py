"""anyprec: train a network once, run it at 1 to 8 bit or float.

    model = anyprec.convert(net, widths=(1, 2, 4, 8, 32), example=x)
    anyprec.set_bits(model, 4)
    with anyprec.bits(model, 2): ...
    anyprec.pack(model, "net.apm", example=x)
    anyprec.quantize(net, "photos", "net.apm")  # or without training

    m = anyprec.load("net.apm")  # numpy and the C++ engine, no torch
    y = m(images, bits=2)

`__all__` is the public interface, here and in the modules it names; everything else is private and may change.
Importing anyprec is quick and needs no torch: a name is looked up when it is first used (PEP 562).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from anyprec.errors import AnyprecError, MissingExtra
from anyprec.widths import Profile

if TYPE_CHECKING:
    from anyprec import analysis, data, errors, nn, ray, zoo
    from anyprec.export.export import ExportReport, export_onnx
    from anyprec.nn.calibrate import calibrate
    from anyprec.nn.convert import convert
    from anyprec.nn.switching import any_layers, bits, set_bits
    from anyprec.onnx_import.importing import import_onnx
    from anyprec.packing.packing import PackReport, pack
    from anyprec.post_training.methods import ptq
    from anyprec.post_training.quantize import quantize
    from anyprec.preprocessing import Preprocessing
    from anyprec.run.model import CancelToken, PackedModel, load
    from anyprec.training.evaluate import evaluate
    from anyprec.training.joint import joint_step
    from anyprec.training.recipe import Recipe
    from anyprec.training.run import train

__version__ = "0.3.0"  # the only place: pyproject.toml reads it from here

__all__ = [
    "AnyprecError",
    "CancelToken",
    "ExportReport",
    "PackReport",
    "PackedModel",
    "Preprocessing",
    "Profile",
    "Recipe",
    "analysis",
    "any_layers",
    "bits",
    "calibrate",
    "convert",
    "data",
    "errors",
    "evaluate",
    "export_onnx",
    "import_onnx",
    "joint_step",
    "load",
    "nn",
    "pack",
    "ptq",
    "quantize",
    "ray",
    "set_bits",
    "train",
    "zoo",
]

# Public name -> the module that holds it.
_LAZY = {
    "CancelToken": "anyprec.run.model",
    "ExportReport": "anyprec.export.export",
    "PackReport": "anyprec.packing.packing",
    "PackedModel": "anyprec.run.model",
    "Preprocessing": "anyprec.preprocessing",
    "Recipe": "anyprec.training.recipe",
    "any_layers": "anyprec.nn.switching",
    "bits": "anyprec.nn.switching",
    "calibrate": "anyprec.nn.calibrate",
    "convert": "anyprec.nn.convert",
    "evaluate": "anyprec.training.evaluate",
    "export_onnx": "anyprec.export.export",
    "import_onnx": "anyprec.onnx_import.importing",
    "joint_step": "anyprec.training.joint",
    "load": "anyprec.run.model",
    "pack": "anyprec.packing.packing",
    "ptq": "anyprec.post_training.methods",
    "quantize": "anyprec.post_training.quantize",
    "set_bits": "anyprec.nn.switching",
    "train": "anyprec.training.run",
}
_MODULES = ("analysis", "data", "errors", "nn", "ray", "zoo")
_TORCH_FREE = {
    "AnyprecError", "CancelToken", "ExportReport", "PackedModel", "Preprocessing", "Profile", "Recipe", "data",
    "errors", "export_onnx", "load", "ray",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY and name not in _MODULES:
        raise AttributeError(f"module 'anyprec' has no attribute {name!r}")
    try:
        module = importlib.import_module(_LAZY.get(name, f"anyprec.{name}"))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra(f"anyprec.{name} needs PyTorch: pip install 'anyprec[train]'") from error
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    """Without torch only what works without it: `help(anyprec)` looks at every name that stands here."""
    return sorted({*globals(), *__all__} - (set() if _has_torch() else set(__all__) - _TORCH_FREE))


def _has_torch() -> bool:
    try:
        return importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):  # blocked: None in sys.modules, or a finder that refuses it
        return False
