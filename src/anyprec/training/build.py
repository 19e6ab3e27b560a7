"""The network a recipe names: built from the zoo for its data set, and filled from the checkpoint `init` names.

A model file that `init` names needs training images as well: run.py fills the network from it (packing/unpack.py).
Called by run.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from anyprec.data.catalog import Data
from anyprec.errors import CheckpointError, RecipeError
from anyprec.models import catalog
from anyprec.nn.new_widths import load_widths
from anyprec.preprocessing import Preprocessing
from anyprec.training import checkpoint
from anyprec.training.recipe import Recipe


def build_network(recipe: Recipe, data: Data) -> tuple[nn.Module, list[int]]:
    """The network, and the widths that the checkpoint of `init` was not trained for."""
    from anyprec.zoo import ZOO, build, load_backbone, load_float, widen, widening_factor

    options = {"in_channels": data.shape[-1], "num_classes": data.num_classes, **recipe.net_options}
    model = build(recipe.net, widths=recipe.widths, quantizer=recipe.quantizer, scale=recipe.scale, **options)
    new_widths: list[int] = []
    if recipe.init and model_file_of(recipe.init) is None:
        record = initial_record(recipe.init)
        if ZOO[recipe.net].task == "segmentation" and (record is None or record["net"] != recipe.net):
            load_backbone(model, recipe.init if record is None else record, recipe.init)
        elif record is None:
            load_float(model, recipe.init)
        elif widening_factor(model, record["state_dict"]) != 1:
            widen(model, record["state_dict"], recipe.init, seed=recipe.seed)
        elif set(recipe.widths) - set(record["widths"]):
            load_widths(model, record["state_dict"], record["widths"], recipe.init)
            new_widths = sorted(set(recipe.widths) - set(record["widths"]))
        else:
            checkpoint.restore(model, record["state_dict"], recipe.init)
    return model, new_widths


def model_file_of(init: str) -> Path | None:
    """The model file that `init` names, a path (*.apm) or a model of the catalog; None: it names something else."""
    if init.endswith(".apm") or (not os.path.lexists(init) and init in catalog.names()):
        return Path(catalog.find(init))
    return None


def initial_record(path: str) -> dict[str, Any] | None:
    """The checkpoint `init` names; None where it is a file of float weights, which the zoo reads."""
    try:
        record = checkpoint.load_state(path)
    except CheckpointError:
        return None
    if record["kind"] != "model":
        raise CheckpointError(f"init={path!r} is a training in progress; name the model.pt of one that has ended")
    return record


def trained_preprocessing(init: str) -> Preprocessing | None:
    """What was done to images in the training that made `init`; None where it does not say."""
    if (path := model_file_of(init)) is not None:
        from anyprec.packing.unpack import preprocessing_in_file

        return preprocessing_in_file(path)
    record = initial_record(init)
    return None if record is None else checkpoint.preprocessing_in(record, init)


def check_task(recipe: Recipe, data: Data) -> None:
    from anyprec.zoo import ZOO

    entry = ZOO.get(recipe.net)
    if entry is not None and entry.task != data.task:
        fit = ", ".join(name for name, other in ZOO.items() if other.task == data.task)
        raise RecipeError(
            f"{data.name} is for {data.task}, but net {recipe.net!r} for {entry.task}; choose one of {fit}"
        )
