"""Recipe: a frozen record of everything needed to repeat a training run, read from and written to TOML.

`Recipe.load("digits")` or a path, `recipe.override(["epochs=3", "net_options.multiplier=2"])`. Fields are plain
scalars, tuples or tables of scalars; strings become objects only in run.py. A typo or a wrong type is a RecipeError.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from anyprec import choices
from anyprec.errors import AnyprecError, RecipeError
from anyprec.files import write_text
from anyprec.training.recipe_catalog import find, read_toml
from anyprec.widths import DEFAULT_WIDTHS, FLOAT, INTEGER_WIDTHS, check_widths

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHOICES = {
    "quantizer": tuple(choices.QUANTIZERS),
    "scale": tuple(choices.SCALES),
    "loss": tuple(choices.LOSSES),
    "sampling": ("all", "sandwich", "lowest"),
    "optimizer": tuple(choices.OPTIMIZERS),
    "schedule": ("steps", "cosine", "poly", "constant", "triangle", "one-cycle"),
    "amp": ("off", "bf16", "fp16"),
    "normalization": ("dataset", "imagenet"),
    "gradients": ("float32", "bf16"),
}
TABLES = ("net_options", "width_weights")
POSITIVE = ("epochs", "batch_size", "lr", "sandwich_random", "eval_batch_size", "scale_lr", "norm_lr", "power")

NOT_NEGATIVE = (
    "limit", "validation", "eval_every", "save_minutes", "warmup_epochs", "weight_decay", "kurtosis", "seed",
)  # fmt: skip

SHARES = (
    "label_weight", "mixed_bits", "momentum", "sign_window", "sign_window_end", "start_lr", "end_lr", "peak_at",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A training run as plain data, checked when it is made; docs/cli/train.md describes the fields.

    `Recipe.load` reads a TOML file, or a recipe of the package by its name.
    """

    # What is trained, on what
    net: str  # a name of anyprec.zoo
    data: str  # a name of anyprec.data
    net_options: Mapping[str, Any] = field(default_factory=dict)
    augment: str = "none"
    normalization: str = "dataset"  # mean and deviation of pixels; "imagenet": what most published weights expect
    limit: int = 0  # use this many training images; 0 is all
    validation: int = 0  # hold this many training images out and evaluate on them, not on the test set; 0: none
    init: str = ""  # float weights, a model checkpoint or a model file (.apm, or a name) to start from

    # Any-precision
    widths: tuple[int, ...] = DEFAULT_WIDTHS  # one width makes a dedicated model
    quantizer: str = "nested"
    scale: str = "learned"
    loss: str = "wider+label"
    teacher: tuple[str, ...] = ()  # model files (.apm, or names) whose answers all widths learn from; one may stand
    # without a list; not with loss="hard"
    label_smoothing: float = 0.0  # this share of each label is spread evenly over all classes
    label_weight: float = 0.5  # the labels' share of the loss in "recursive+label" and "wider+label"
    width_weights: Mapping[str, float] = field(default_factory=dict)  # of a width's loss in the sum; 1 if not named
    sign_window: float = 0.0  # 1 bit moves only weights this near to a change of sign; 0: all, as in the paper
    sign_window_end: float = 0.0  # the window changes evenly to this over the run; 0: it stays
    kurtosis: float = 0.0  # of a penalty in the loss that spreads the weights of each layer evenly; 0: none
    sampling: str = "all"
    sandwich_random: int = 1  # random widths a step beside those that are always there: the lowest and the highest
    # ("sandwich") or the two lowest ("lowest")
    mixed_bits: float = 0.0  # this share of the steps has one more pass, with random bits for each layer

    # Optimization
    epochs: int = 10
    batch_size: int = 128  # over all processes
    optimizer: str = "adam"
    lr: float = 1e-3
    momentum: float = 0.9
    nesterov: bool = False  # of "sgd": look ahead along the momentum
    weight_decay: float = 0.0
    schedule: str = "steps"
    milestones: tuple[int, ...] = ()  # epochs at which "steps" multiplies the rate by `decay`
    decay: float = 0.1
    power: float = 0.9  # "poly": lr * (1 - share of the run that is done) ** power
    peak_at: float = 0.25  # "triangle", "one-cycle": the share of the run after which the rate is lr
    start_lr: float = 0.2  # ... at the first step: its rate as a share of lr
    end_lr: float = 0.05  # ... at the last step
    warmup_epochs: float = 0.0
    scale_lr: float = 1.0  # learned scales and ranges: their learning rate as a multiple of lr
    norm_lr: float = 1.0  # norms and biases: theirs
    decay_norms: bool = True  # whether weight_decay is for norms and biases, too
    average: float = 0.0  # evaluate and keep the mean of the weights that forgets with this factor a step: 0.999; 0: no
    seed: int = 0

    # How it is computed
    amp: str = "off"
    compile: bool = False
    winograd: bool = False  # 3x3 convolutions of 16 channels and more in fewer products: the sums differ by rounding
    gradients: str = "float32"  # "bf16": Winograd's backward products of bfloat16, where the CPU multiplies it
    channels_last: bool = True
    sync_norm: bool = True  # batch statistics over all processes: the result does not depend on their number
    eval_batch_size: int = 500
    eval_every: int = 1  # epochs; 0 evaluates only at the end
    save_minutes: float = 5.0  # between checkpoints inside an epoch (0: after every step); each epoch ends with one

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            object.__setattr__(self, spec.name, _typed(spec.name, spec.type, getattr(self, spec.name)))
        for name, allowed in CHOICES.items():
            if (given := getattr(self, name)) not in allowed:
                raise RecipeError(f"{name}={given!r} is not allowed; choose one of {', '.join(allowed)}")
        for name in POSITIVE:
            if not getattr(self, name) > 0:
                raise RecipeError(f"{name}={getattr(self, name)} is not allowed; it must be above 0")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise RecipeError(f"{name}={getattr(self, name)} is not allowed; it must be 0 or more")
        for name in SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise RecipeError(f"{name}={getattr(self, name)} is not allowed; it must be between 0 and 1")
        for name in ("label_smoothing", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise RecipeError(f"{name}={getattr(self, name)} is not allowed; it must be 0 or more and below 1")
        if self.winograd and (self.amp != "off" or self.compile):
            raise RecipeError(
                "winograd=true computes in float32, layer by layer; set amp to 'off' and compile to false"
            )
        if self.gradients == "bf16" and not self.winograd:
            raise RecipeError("gradients='bf16' is for Winograd convolutions; set winograd to true")
        if self.teacher and self.loss == "hard":
            raise RecipeError(
                f"teacher={', '.join(self.teacher)} needs a loss that learns from answers; set loss to 'wider+label' "
                "or another"
            )
        if self.nesterov and (self.optimizer != "sgd" or self.momentum == 0):
            raise RecipeError("nesterov=true needs optimizer='sgd' and a momentum above 0")
        if self.sign_window_end and not self.sign_window:
            raise RecipeError(
                f"sign_window_end={self.sign_window_end} needs a sign_window to start from; set it, up to 1"
            )
        try:
            object.__setattr__(self, "widths", check_widths(self.widths))
        except AnyprecError as error:
            raise RecipeError(f"widths: {error}") from error
        if self.mixed_bits and self.compile:
            raise RecipeError("mixed_bits would compile the network anew for every plan it draws; set compile to false")
        if self.mixed_bits and len([bits for bits in self.widths if bits != FLOAT]) < 2:
            raise RecipeError(
                f"mixed_bits={self.mixed_bits} draws bits from the integer widths; widths={list(self.widths)} needs at "
                "least two of them"
            )
        for key, weight in self.width_weights.items():
            if key not in map(str, (*INTEGER_WIDTHS, FLOAT)):
                raise RecipeError(f"width_weights names {key!r}, which is not a bit-width; write 1..8 or 32")
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
                raise RecipeError(f"width_weights.{key}={weight!r} is not allowed; it must be a number, 0 or more")

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], where: str = "recipe") -> Recipe:
        names = [spec.name for spec in dataclasses.fields(cls)]
        for name in record:
            if name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(names)}"
                raise RecipeError(f"{where}: unknown field {name!r}; {hint}")
        missing = [name for name in ("net", "data") if name not in record]
        if missing:
            raise RecipeError(f"{where}: field {missing[0]!r} is missing; every recipe names a net and a data set")
        return cls(**record)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Of a TOML file, or of a recipe that comes with anyprec, by its name (`anyprec recipes` lists them)."""
        record = read_toml(find(path))
        record.pop("about", None)  # facts for people: recipe_catalog.py
        return cls.from_dict(record, where=str(path))

    def override(self, settings: Iterable[str]) -> Recipe:
        """As typed on the command line: 'epochs=3', 'widths=[1,8]', 'net_options.multiplier=2', 'loss=hard'."""
        record = self.to_dict()
        for setting in settings:
            name, equals, text = setting.partition("=")
            if not equals:
                raise RecipeError(f"--set {setting!r} is not of the form name=value, for example --set epochs=3")
            try:
                value = tomllib.loads(f"value = {text}")["value"]
            except tomllib.TOMLDecodeError:
                value = text  # a bare word is a string
            table, dot, key = name.strip().partition(".")
            if dot:
                if not isinstance(record.get(table), dict):
                    raise RecipeError(f"--set {setting!r}: {table!r} is not a table; {' and '.join(TABLES)} are")
                record[table][key] = value
            else:
                record[table] = value
        return Recipe.from_dict(record, where="--set")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: str | Path) -> None:
        lines = []
        for name, value in self.to_dict().items():
            if name not in TABLES:
                lines.append(f"{name} = {_toml(value)}")
        for table in TABLES:
            lines.append(f"\n[{table}]")
            lines += [f"{name} = {_toml(value)}" for name, value in getattr(self, table).items()]
        write_text(path, "\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)  # JSON's strings, integers and booleans are TOML's too


def _typed(name: str, annotation: Any, value: Any) -> Any:
    """Hold a field to its annotation; an int may stand for a float, a list for a tuple."""
    kind = str(annotation).split("[")[0]
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    item = str if annotation == "tuple[str, ...]" else int
    if item is str and type(value) is str:
        return (value,) if value else ()
    if kind == "tuple" and isinstance(value, (list, tuple)) and all(type(v) is item for v in value):
        return tuple(value)
    if kind == "Mapping" and isinstance(value, Mapping):
        return dict(value)
    expected = {"str": str, "int": int, "float": float, "bool": bool}.get(kind)
    if expected is None or type(value) is not expected:
        words = {"str": "a string", "int": "a whole number", "float": "a number", "bool": "true or false",
                 "tuple": "a list of " + ("strings" if item is str else "whole numbers"),
                 "Mapping": "a table"}  # fmt: skip
        raise RecipeError(f"{name}={value!r} is of the wrong type; it must be {words[kind]}")
    return value
