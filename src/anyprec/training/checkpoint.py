"""Checkpoints on disk: `save_model`/`load_model` for a trained model, `save_state`/`load_state` for a run in progress.

Files are written beside their place, flushed and renamed, so a reader (or a run after a crash) sees the old file or
the new one, never half of one. Reading executes no code from the file.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anyprec.data import preprocessing_of
from anyprec.data.catalog import Data
from anyprec.errors import AnyprecError, CheckpointError, DataError, MissingExtra
from anyprec.files import written_whole
from anyprec.nn.switching import set_bits, widths_of
from anyprec.preprocessing import Preprocessing
from anyprec.widths import check_widths

FORMAT = 1


def save_state(record: dict[str, Any], path: str | Path) -> None:
    with written_whole(path, CheckpointError) as file:
        torch.save({"anyprec_format": FORMAT, **record}, file)


def load_state(path: str | Path) -> dict[str, Any]:
    try:
        record = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except IsADirectoryError as error:
        raise CheckpointError(f"{path} is a folder, not a checkpoint file") from error
    except PermissionError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged, or is not a checkpoint that holds only tensors; nothing was executed"
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
    check_fields(record, path)
    rename_options(record)
    return record


# Options of zoo networks as checkpoints of 0.3.0 and before have them -> as they are called now
RENAMED_OPTIONS = {"width": "multiplier"}
RENAMED_VALUES = {"quantised": "quantized"}


def rename_options(record: dict[str, Any]) -> None:
    """A network's options under their present names, wherever the record has them."""
    places = [record, record.get("recipe"), record.get("extra", {}).get("recipe")]
    for place in places:
        if isinstance(place, dict) and isinstance(options := place.get("net_options"), dict):
            place["net_options"] = {
                RENAMED_OPTIONS.get(name, name): RENAMED_VALUES.get(value, value) if isinstance(value, str) else value
                for name, value in options.items()
            }


# kind of checkpoint -> its fields, and what each must be
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "model": {
        "net": (str, type(None)),
        "net_options": dict,
        "widths": list,
        "state_dict": dict,
        "extra": dict,
    },
    "run": {
        "recipe": dict,
        "epoch": int,
        "step": int,
        "totals": dict,
        "log_bytes": int,
        "model": dict,
        "optimizer": dict,
        "scaler": (dict, type(None)),
    },
}


def check_fields(record: dict[str, Any], path: str | Path) -> None:
    """Whatever is read from a checkpoint is there and of its type: its file may come from anywhere."""

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{path} is damaged or was made by another program: {what}; restore or retrain it")

    fields = FIELDS.get(str(record.get("kind")))
    if fields is None:
        raise refuse(f"its kind is {record.get('kind')!r}, not one of {', '.join(FIELDS)}")
    for name, kind in fields.items():
        if name not in record:
            raise refuse(f"it has no {name!r}")
        if not isinstance(record[name], kind) or isinstance(record[name], bool):
            raise refuse(f"its {name!r} is a {type(record[name]).__name__}")
    weights = record["state_dict" if record["kind"] == "model" else "model"]
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise refuse(f"weight {name!r} is a {type(value).__name__}, not a tensor")
    if record["kind"] == "run":
        if min(record["epoch"], record["step"], record["log_bytes"]) < 0:
            raise refuse("it counts below 0")
        return
    check_description(record, refuse)


def check_description(record: dict[str, Any], refuse: Callable[[str], CheckpointError]) -> None:
    """Of a model: what builds its network, and what is noted beside it."""
    if not isinstance(record.get("conversion"), (dict, type(None))):
        raise refuse("its 'conversion' is not a table")
    try:
        check_widths(record["widths"])
    except AnyprecError as error:
        raise refuse(f"widths: {error}") from error
    sizes = {size for value in record["state_dict"].values() for size in value.shape}
    for name in ("num_classes", "in_channels"):  # a network of a billion classes would fill the memory first
        if record["net"] and record["net_options"].get(name, None) not in {None, *sizes}:
            raise refuse(f"none of its weights has {name}={record['net_options'][name]!r}")
    tested = record["extra"].get("test", {})
    if not isinstance(record["extra"].get("recipe"), (dict, type(None))) or not isinstance(tested, dict):
        raise refuse("what is noted of its training is not a table")
    for bits, result in tested.items():
        if not (str(bits).isdecimal() and isinstance(result, dict)):
            raise refuse(f"its test result of {bits!r} bit is not a table")
        if not all(isinstance(value, (int, float)) for value in result.values()):
            raise refuse(f"its test result of {bits!r} bit is not a number")


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


def training_facts(data: Data, augment: str) -> dict[str, Any]:
    """What a model's file must say of the data it was trained on, for `extra`: pictures to pixels, names of classes."""
    return {"preprocessing": preprocessing_of(data, augment).to_dict(), "classes": list(data.classes)}


def preprocessing_in(record: dict[str, Any], path: str | Path) -> Preprocessing | None:
    """The preprocessing of the run that made a checkpoint; None in those from before it was kept."""
    kept = record.get("extra", {}).get("preprocessing")
    try:
        return None if kept is None else Preprocessing.from_dict(kept)
    except DataError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def load_model(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The model saved at `path`, at its widest width. A network of your own is passed as `model`, freshly converted."""
    record = load_record(path)
    if model is None:
        if not record["net"]:
            raise CheckpointError(
                f"{path} holds a network of your own; pass it: load_model(path, model=convert(net, ...))"
            )
        model = rebuild_network(record, path)
    restore(model, record["state_dict"], path)
    set_bits(model, max(widths_of(model)))
    return model


def load_record(path: str | Path) -> dict[str, Any]:
    """The checkpoint of a model, as `save_model` wrote it."""
    record = load_state(path)
    if record["kind"] != "model":
        raise CheckpointError(
            f"{path} is a training in progress, not a model; finish it with `anyprec train ... --resume`, which writes "
            "model.pt beside it"
        )
    return record


def rebuild_network(record: dict[str, Any], path: str | Path) -> nn.Module:
    """The network a checkpoint describes, untrained."""
    from anyprec.nn.convert import convert
    from anyprec.nn.plain import to_float_network
    from anyprec.onnx_import.importing import NET, rebuild
    from anyprec.zoo import build

    try:
        imported = record["net"] == NET
        model: nn.Module = rebuild(record["net_options"]) if imported else build(record["net"], **record["net_options"])
        if conversion := record.get("conversion"):
            model = convert(model if imported else to_float_network(model), **conversion)
            model.zoo_name, model.zoo_options = record["net"], record["net_options"]
            model.zoo_conversion = conversion
    except MissingExtra:
        raise
    except Exception as error:  # options from a file of unknown origin can make a network fail anywhere
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: its network {record['net']!r} cannot be built again: {first}") from error
    return model


def restore(model: nn.Module, state_dict: dict[str, Any], path: str | Path) -> None:
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise CheckpointError(f"{path} was made for another network than {type(model).__name__}: {first}") from error
