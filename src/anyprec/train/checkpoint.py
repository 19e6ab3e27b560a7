"""Checkpoints on disk: `save_model`/`load_model` for a trained model, `save_state`/`load_state` for a run in progress.

Files are written beside their place, flushed and renamed, so a reader (or a run after a crash) sees the old file or
the new one, never half of one. Reading executes no code from the file.
"""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anyprec.errors import CheckpointError
from anyprec.train.switch import set_bits, widths_of

FORMAT = 1


def save_state(record: dict[str, Any], path: str | Path) -> None:
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            torch.save({"anyprec_format": FORMAT, **record}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def load_state(path: str | Path) -> dict[str, Any]:
    try:
        record = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except IsADirectoryError as error:
        raise CheckpointError(f"{path} is a folder, not a checkpoint file") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is no checkpoint of tensors alone, or is damaged; nothing was executed"
        ) from error
    except (
        RuntimeError,
        EOFError,
        OSError,
        LookupError,
        ValueError,
        struct.error,
        zipfile.BadZipFile,
    ) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged ({type(error).__name__}); restore or retrain it"
        ) from error
    if not isinstance(record, dict) or record.get("anyprec_format") != FORMAT:
        found = record.get("anyprec_format") if isinstance(record, dict) else type(record).__name__
        raise CheckpointError(
            f"{path} is not an anyprec checkpoint of format {FORMAT} (found {found}); "
            "checkpoints of the reference code are read by `anyprec import`"
        )
    return record


def save_model(model: nn.Module, path: str | Path, extra: dict[str, Any] | None = None) -> None:
    """A model with all it needs to be built again, if it is one of the zoo's; `extra` is kept beside it (JSON-like)."""
    record = {
        "kind": "model",
        "net": getattr(model, "zoo_name", None),
        "net_options": dict(getattr(model, "zoo_options", {})),
        "conversion": getattr(model, "zoo_conversion", None),  # of a float one that was then converted
        "widths": list(widths_of(model)),
        "state_dict": model.state_dict(),
        "extra": extra or {},
    }
    save_state(record, path)


def load_model(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The model saved at `path`, at its widest width. A network of your own is passed as `model`, freshly converted."""
    record = load_state(path)
    if model is None:
        if not record.get("net"):
            raise CheckpointError(
                f"{path} holds a network of your own; pass it: load_model(path, model=convert(net, ...))"
            )
        from anyprec.zoo import build

        model = build(record["net"], **record["net_options"])
        if conversion := record.get("conversion"):
            from anyprec.train.convert import convert
            from anyprec.train.plain import as_float

            model = convert(as_float(model), **conversion)
            model.zoo_name, model.zoo_options = record["net"], record["net_options"]
            model.zoo_conversion = conversion
    restore(model, record["state_dict"], path)
    set_bits(model, max(widths_of(model)))
    return model


def restore(model: nn.Module, state_dict: dict[str, Any], path: str | Path) -> None:
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise CheckpointError(f"{path} was made for another network than {type(model).__name__}: {first}") from error
