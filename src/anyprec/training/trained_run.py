"""A trained run as later commands need it: its checkpoint, its recipe, and data that fits what it was trained on.

A run folder of `anyprec train` or a checkpoint (.pt) in. Called by `anyprec evaluate`, `calibrate`, `attack`, `ptq`
and `pack`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyprec.data import DATASETS, FileData
from anyprec.data.catalog import Data, renormalized
from anyprec.data.loader import check_channels_fit
from anyprec.errors import DataError, RecipeError
from anyprec.files import locked
from anyprec.preprocessing import Preprocessing
from anyprec.training.checkpoint import load_record, preprocessing_in, save_state
from anyprec.training.recipe import Recipe
from anyprec.zoo import ZOO


def checkpoint_of(path: str | Path) -> Path:
    """A run folder -> its model.pt; a file is itself."""
    return Path(path) / "model.pt" if Path(path).is_dir() else Path(path)


def recipe_of(path: Path, dataset: str | None) -> Recipe:
    """The recipe a model was trained by; `dataset` replaces its data, and is needed where there is no recipe."""
    record = load_record(path)["extra"].get("recipe")
    if record is None:
        if dataset is None:
            raise RecipeError(f"{path} does not say which data set it is for; name it with --dataset, such as cifar10")
        if dataset not in DATASETS:
            raise RecipeError(f"--dataset {dataset!r} is not known; choose one of {', '.join(DATASETS)}")
        record = {"net": "", "data": dataset, "augment": DATASETS[dataset].augment}
    return Recipe.from_dict({**record, "data": dataset or record["data"]})


def preprocessing_for(path: Path, data: Data) -> Preprocessing | None:
    """What the model was trained on is done to `data` too; None, from before that was kept: what `data` usually gets.

    Refuses data the network cannot take, and other classes than those it was trained for.
    """
    record = load_record(path)
    check_fits(record, data)
    classes = record.get("extra", {}).get("classes")
    if classes is not None and list(data.classes) != classes:
        names, others = (", ".join(map(str, some[:3])) for some in (classes, data.classes))
        raise DataError(
            f"{path} was trained for the {len(classes)} classes {names}, ..., {data.name} has {len(data.classes)}: "
            f"{others}, ...; name a data set with the same classes"
        )
    return preprocessing_in(record, path)


def check_fits(record: Mapping[str, Any], data: Data) -> None:
    """Photographs can be made gray, so a gray network takes them in testing."""
    known = ZOO.get(record.get("net") or "")
    if known is None or (isinstance(data, FileData) and record.get("extra", {}).get("preprocessing")):
        return
    check_channels_fit(data, record["net_options"].get("in_channels", known.shape[2]))


def as_trained(data: Data, how: Preprocessing | None) -> Data:
    """For training batches: normalized as in the network's training, photographs brought to the side it had there."""
    if how is None:
        return data
    if (data.mean, data.std) != (how.mean, how.std) and len(data.mean) == how.channels:
        data = renormalized(data, how.mean, how.std)
    if isinstance(data, FileData) and how.size is not None:
        data.size = how.size[0]
    return data


def note_accuracy(path: Path, results: Mapping[int | str, Mapping[str, float]]) -> None:
    """Put the results of uniform widths beside those the training ended with."""
    with locked(path.parent):
        record = load_record(path)
        tested = {str(bits): dict(result) for bits, result in results.items() if isinstance(bits, int)}
        record["extra"] = {**record["extra"], "test": {**record["extra"].get("test", {}), **tested}}
        save_state(record, path)
