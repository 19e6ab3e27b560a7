"""Weights from elsewhere: `read_state_dict` reads a torch or safetensors file and executes nothing in it, `load_float`
puts float weights into a zoo network, `load_exact` loads a state dict that must fit in every name and shape.

Called by reference.py and cli/import.py. Files of our own are read by training/checkpoint.py.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anyprec.errors import CheckpointError
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.switching import any_layers, widths_of
from anyprec.zoo.safetensors import SUFFIX, read_safetensors

Source = Mapping[str, Any] | str | os.PathLike[str]


def read_state_dict(source: Source) -> dict[str, Tensor]:
    """Names and tensors of a state dict: given itself, under 'state_dict' in a dict, or as a file of either.

    The prefix `module.` that DataParallel puts before every name is taken off.
    """
    record = source if isinstance(source, Mapping) else _read_file(source)
    where = "the state dict" if isinstance(source, Mapping) else str(source)
    if isinstance(record, Mapping) and isinstance(record.get("state_dict"), Mapping):
        record = record["state_dict"]
    if not isinstance(record, Mapping):
        raise CheckpointError(f"{where} holds a {type(record).__name__}; expected a state dict of names and tensors")
    if not record:
        raise CheckpointError(f"{where} is empty; expected a state dict of names and tensors")
    for name, value in record.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{where} is not a state dict: {name!r} is a {type(value).__name__}, not a tensor; "
                "expected names and tensors, or these under 'state_dict'"
            )
    if all(name.startswith("module.") for name in record):
        return {name.removeprefix("module."): value for name, value in record.items()}
    return dict(record)


def _read_file(path: str | os.PathLike[str]) -> Any:
    if os.fsdecode(path).endswith(SUFFIX):
        return read_safetensors(path)
    try:
        with warnings.catch_warnings():
            # torch warns of odd pickle protocols; the errors below say enough
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # on damaged bytes torch raises whatever it stumbles over, from KeyError up
        # torch names what it refused: "Unsupported global: GLOBAL numpy.core.multiarray.scalar was not ..."
        if isinstance(error, pickle.UnpicklingError) and (found := re.search(r"GLOBAL (\S+)", str(error))):
            raise CheckpointError(
                f"{path} needs code to be read ({found[1]}), which is not executed here; where you trust it, "
                "save its tensors: torch.save(torch.load(path, weights_only=False)['state_dict'], new_path)"
            ) from error
        raise CheckpointError(
            f"{path} is truncated, damaged or not a torch file ({type(error).__name__}); "
            "get a whole one, as written by torch.save"
        ) from error


def load_float(model: nn.Module, source: Source) -> None:
    """Float weights under the model's own names; a norm's go into the table of every width.

    At 32 bits the model then gives what the float network gave, but for quantizer 'dorefa', which reshapes
    float weights too. Learned scales are fitted anew.
    """
    spread = spread_norms(model, read_state_dict(source))
    # Scales and ranges of the quantizers are no part of a float network: they stay as they are.
    own = {n: v for n, v in model.state_dict().items() if ".quantizer." in n or ".act." in n}
    load_exact(model, {**own, **spread}, "the float weights")
    for layer in any_layers(model).values():
        layer.quantizer.fit(layer.weight, widths_of(model))


def spread_norms(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights, a norm's under the names of all its tables."""
    spread: dict[str, Tensor] = {}
    norms = {name: norm for name, norm in model.named_modules() if isinstance(norm, SwitchNorm)}
    for name, value in state.items():
        owner, _, leaf = name.rpartition(".")
        if owner in norms:
            spread.update({f"{owner}.tables.{key}.{leaf}": value for key in norms[owner].tables})
        else:
            spread[name] = value
    return spread


def load_exact(model: nn.Module, state: Mapping[str, Tensor], what: str) -> None:
    """Load, or say the first name or shape that does not fit. Nothing is loaded in that case.

    Files from before torch 0.4.1 have no num_batches_tracked; it matters to nothing here.
    """
    own = model.state_dict()
    state = {**{n: v for n, v in own.items() if n.endswith("num_batches_tracked")}, **state}
    network = getattr(model, "zoo_name", type(model).__name__)
    if missing := [name for name in own if name not in state]:
        raise CheckpointError(f"{what} lack {missing[0]!r} ({len(missing)} names in all), which {network} needs")
    if unknown := [name for name in state if name not in own]:
        raise CheckpointError(
            f"{what} have {unknown[0]!r} ({len(unknown)} names in all), which {network} has no use for"
        )
    for name, value in state.items():
        if value.shape != own[name].shape:
            raise CheckpointError(
                f"{what}: {name!r} has shape {tuple(value.shape)}, {network} expects {tuple(own[name].shape)}"
            )
    model.load_state_dict(state)
