"""What `anyprec ptq` starts from: a float network by its path, the facts kept with it, training images to look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anyprec.data import DATASETS, batches
from anyprec.data.catalog import Data
from anyprec.errors import CheckpointError, RecipeError, UncalibratedBits
from anyprec.nn.switching import widths_of
from anyprec.preprocessing import Preprocessing
from anyprec.training.checkpoint import load_model, load_state, training_facts
from anyprec.training.evaluate import to_tensor
from anyprec.training.recipe import Recipe
from anyprec.training.run import eval_augment
from anyprec.training.trained_run import as_trained, check_fits, checkpoint_of, preprocessing_for, recipe_of
from anyprec.widths import FLOAT
from anyprec.zoo.float_weights import from_float
from anyprec.zoo.reference import find_layout, from_reference
from anyprec.zoo.weights import read_state_dict

SEEN_AT_ONCE = 128  # training images a batch


def float_model(
    path: str, net: str | None, dataset: str | None, normalization: str | None = None
) -> tuple[nn.Module, Recipe]:
    """A model of the zoo that has a float width, and what is known of its data. A checkpoint says its normalization
    itself; that of a file of weights may be given."""
    file = checkpoint_of(path)
    try:
        load_state(file)
    except CheckpointError:
        if not file.is_file():
            raise
        state = read_state_dict(file)
        model = from_float(state, net, (FLOAT,)) if find_layout(state) is None else from_reference(state)
        if dataset is None:
            raise RecipeError(
                f"{file} holds only weights; name the data set they are for with --dataset, such as cifar10"
            ) from None
        if dataset not in DATASETS:
            raise RecipeError(f"--dataset {dataset!r} is not known; choose one of {', '.join(DATASETS)}") from None
        recipe = Recipe(
            net=str(model.zoo_name), data=dataset, augment=DATASETS[dataset].augment, widths=(FLOAT,),
            normalization=normalization or "dataset",
        )  # fmt: skip
        return model.eval(), recipe
    for option, given in (("--net", net), ("--normalization", normalization)):
        if given is not None:
            raise RecipeError(f"{option} is for files of float weights; {file} says it itself")
    model = load_model(file).eval()
    if FLOAT not in widths_of(model):
        raise UncalibratedBits(
            f"{file} has no float width, only {widths_of(model)}; give a model trained with 32 among its widths"
        )
    return model, recipe_of(file, dataset)


def kept_facts(path: str, training: Data, test: Data, recipe: Recipe) -> dict[str, Any]:
    """Preprocessing and classes of the source's own training; of weights alone, those of the data set named."""
    file = checkpoint_of(path)
    try:
        record = load_state(file)
    except CheckpointError:  # a file of float weights
        return training_facts(training, eval_augment(recipe.augment))
    how = preprocessing_for(file, test)
    facts = training_facts(training, eval_augment(recipe.augment))
    check_fits(record, training)
    return facts if how is None else {"preprocessing": how.to_dict(), "classes": list(training.classes)}


def training_batches(data: Any, recipe: Recipe, device: str, how: Preprocessing | None = None) -> list[torch.Tensor]:
    """Augmented as in training: norms hold the statistics of such images, zero borders and all. `how` is what the
    source was trained with.

    ResNet-20 on CIFAR-10, calibrated at 8 bit: 92.1 % with random crops, 87.3 % without (float: 91.6 %).
    """
    data = as_trained(data, how)
    most = recipe.batch_size if data.task == "segmentation" else SEEN_AT_ONCE
    size = len(data) // -(-len(data) // most)  # 300 images: 3 batches of 100
    source = batches(data, size, augment=recipe.augment, train=True, seed=recipe.seed)
    return [to_tensor(images, device) for images, _ in source]
