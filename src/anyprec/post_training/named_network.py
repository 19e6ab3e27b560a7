"""A network by the name a user types: an ONNX file, `module:function`, `file.py:function` or a timm name in, an
`nn.Module` and what is known of its pictures out.

Called by quantize.py and cli/quantize.py. A function may return the network, or the network and its Preprocessing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from anyprec.errors import AnyprecError, CheckpointError, MissingExtra, UnsupportedOperation
from anyprec.onnx_import.importing import free_input_shape, import_onnx
from anyprec.preprocessing import Preprocessing

FORMS = "an ONNX file, a timm name, or module:function (file.py:function) that makes it"
HUB = ("hf-hub:", "hf_hub:", "local-dir:")  # what timm takes beside its names
WEIGHTS = (".pt", ".pth", ".th", ".ckpt", ".bin", ".safetensors")


def named_network(
    name: str, *, size: tuple[int, int] | None = None, weights: str | Path | None = None
) -> tuple[nn.Module, Preprocessing | None]:
    """Runs code that the user names: the function's, or timm's.

    size: height and width of the pictures, for an ONNX file that leaves them free. weights: of a timm network, from a
    file.
    """
    path = Path(name)
    if path.suffix.lower() == ".onnx":
        refuse_weights(name, weights, "an ONNX file brings its weights")
        return from_onnx(path, size), None
    if name.startswith(HUB):
        return from_timm(name, weights), None
    if ":" in name:
        refuse_weights(name, weights, "let the function load them")
        return from_function(name)
    if path.suffix == ".py":
        raise AnyprecError(f"{name} names no function; give {name}:make, where make() gives the network")
    if path.suffix.lower() in WEIGHTS:
        raise AnyprecError(f"{name} holds weights and no network; give {FORMS}, and load the weights there")
    if path.suffix.lower() == ".apm":
        raise AnyprecError(f"{name} is a packed model file already; give the float network: {FORMS}")
    return from_timm(name, weights), None


def refuse_weights(name: str, weights: str | Path | None, reason: str) -> None:
    if weights is not None:
        raise AnyprecError(f"weights={str(weights)!r} are for timm names; {name} is none: {reason}")


# --- ONNX ---


def from_onnx(path: Path, size: tuple[int, int] | None) -> nn.Module:
    """Imported and compared with the model, at the size it has, or at `size` where it leaves that free."""
    known = free_input_shape(path)
    shape: tuple[int, ...] | None = None
    if None in known:
        sizes = ", ".join("any" if n is None else str(n) for n in known)
        if len(known) != 3:
            raise AnyprecError(f"{path} takes (N, {sizes}), which are not pictures; fix its sizes when it is exported")
        if size is None:
            raise AnyprecError(f"{path} takes pictures of any size (N, {sizes}); give one, such as --size 224")
        shape = (known[0] or 3, known[1] or size[0], known[2] or size[1])
    elif size is not None and len(known) == 3 and known[1:] != size:
        raise AnyprecError(
            f"{path} takes pictures of {known[1]} x {known[2]} only, not {size[0]} x {size[1]}; leave the size out"
        )
    net = import_onnx(path, input_shape=shape)
    if len(net.input_shapes) > 1:
        raise UnsupportedOperation(
            f"{path} has {len(net.input_shapes)} inputs ({', '.join(net.input_names)}), quantize takes networks of "
            "one; in Python: anyprec.import_onnx, anyprec.ptq with batches as dicts, anyprec.pack"
        )
    return net


# --- Python ---


def from_function(name: str) -> tuple[nn.Module, Preprocessing | None]:
    place, _, attribute = name.rpartition(":")
    try:
        module = load_file(Path(place)) if place.endswith(".py") else load_module(place)
        make: Callable[[], Any] = getattr(module, attribute)
    except AnyprecError:
        raise
    except Exception as error:  # the user's own code may raise anything, when it is imported as well
        raise AnyprecError(f"{name}: {first_line(error)}; give module:function or file.py:function") from error
    if not isinstance(make, nn.Module) and not callable(make):
        raise AnyprecError(f"{name} is a {type(make).__name__}; it must be an nn.Module, or a function that makes one")
    with in_one_line(f"{name} does not make a network"):
        made = make if isinstance(make, nn.Module) else make()
    net, how = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(net, nn.Module) or not isinstance(how, (Preprocessing, type(None))):
        raise AnyprecError(
            f"{name} gives a {type(made).__name__}; it must give an nn.Module, or that and Preprocessing"
        )
    return net, how


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """What code of others raises, as an error of ours."""
    try:
        yield
    except AnyprecError:
        raise
    except Exception as error:
        raise AnyprecError(f"{what}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The message, and the kind where the message alone says little: "KeyError: 'x'"."""
    text = (str(error).strip().splitlines() or [""])[0]
    plain = isinstance(error, (AnyprecError, ImportError, AttributeError, OSError)) and text
    return text if plain else f"{type(error).__name__}: {text}".rstrip(": ")


def load_module(name: str) -> Any:
    """As `python -m` finds it: the working folder first."""
    if not name:
        raise ImportError("it names no module")
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


# --- timm ---


def from_timm(name: str, weights: str | Path | None = None) -> nn.Module:
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise MissingExtra(
            f"{name!r} is neither a file nor module:function, so it is a timm name, and timm is not installed: "
            f"pip install timm; or give {FORMS}"
        ) from error
    except Exception as error:  # a torchvision that was built for another torch
        raise AnyprecError(f"{name!r} is a timm name, and timm cannot be imported: {first_line(error)}") from error
    if not name.startswith(HUB) and not timm.is_model(name):
        near = timm.list_models(f"*{name}*")[:3]
        hint = f"; did you mean {', '.join(near)}?" if near else f"; give {FORMS}"
        raise AnyprecError(f"{name!r} is not a network of timm {timm.__version__}{hint}")
    if weights is None:
        with in_one_line(f"timm has no weights of {name!r} at hand (give them with --weights FILE)"):
            return made_by_timm(timm, name, pretrained=True)
    if not Path(weights).is_file():
        raise CheckpointError(f"there is no file {weights}; give the weights of {name}")
    with in_one_line(f"{weights} does not fit {name}"):
        return made_by_timm(timm, name, pretrained=False, checkpoint_path=str(weights))


def made_by_timm(timm: Any, name: str, **options: Any) -> nn.Module:
    net: nn.Module = timm.create_model(name, **options)
    return net
