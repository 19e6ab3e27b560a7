"""The catalog of pretrained models: a name in, the path of its model file or its Card out. Standard library only.

`find` is what `anyprec.load` and every verb that takes a model file call first; it reads no card unless it must. The
cards are the NAME.json of this folder; a model whose card has a `url` is not in the package but in the cache folder,
once `fetch` has downloaded it. Written by bench/ship_model.py.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from anyprec.errors import AnyprecError, NotAModelFile, UnknownModel

FOLDER = Path(__file__).parent
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# What a user may have meant as a name: a path with a folder or a suffix in it is a path.
LIKE_A_NAME = re.compile(r"[A-Za-z0-9_-]+")
MAX_SHIPPED_BYTES = 4_000_000  # of all model files in the package together


@dataclass(frozen=True)
class ProfileFacts:
    """What was measured of one profile ("4", "32", or a mixed one) over the whole test set, by the engine."""

    accuracy: float  # percent: top-1, or of a segmentation the share of pixels
    bytes: int  # of the file, from its start
    agreement: float  # percent of the answers that are torch's as well
    miou: float | None = None  # percent, of a segmentation
    ms: float | None = None  # median, batch 1, one thread; None until it was timed on a quiet machine


@dataclass(frozen=True)
class ModelCard:
    """The facts of one model. `training` holds its recipes (stages in order), seed, commit and core-hours."""

    name: str
    summary: str
    task: str  # "classification" or "segmentation"
    data: str  # a name of anyprec.data.DATASETS
    network: str
    parameters: int  # weights of all layers
    input: tuple[int | None, int | None, int]  # H, W, C
    classes: int
    test_images: int
    license: str
    bytes: int
    sha256: str
    profiles: Mapping[str, ProfileFacts]
    training: Mapping[str, Any]
    made_by: str
    timing: Mapping[str, Any] | None = None  # CPU, instruction set, rounds; None until it was timed
    url: str | None = None  # of a model that is downloaded
    notes: tuple[str, ...] = field(default=())

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted(int(name) for name in self.profiles if name.isdigit()))

    def to_dict(self) -> dict[str, Any]:
        """As in the file: what is not known is left out."""
        record = {key: value for key, value in asdict(self).items() if value not in (None, ())}
        record["profiles"] = {
            name: {key: value for key, value in asdict(facts).items() if value is not None}
            for name, facts in self.profiles.items()
        }
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ModelCard:
        known = {one.name for one in fields(cls)}
        if unknown := sorted(set(record) - known):
            raise ValueError(f"it has {unknown[0]!r}, which is not known")
        profiles = {name: ProfileFacts(**facts) for name, facts in record["profiles"].items()}
        rest = {key: tuple(record[key]) for key in ("input", "notes") if key in record}
        return cls(**{**record, **rest, "profiles": profiles})


def names() -> list[str]:
    """All models there are, in the package or to be downloaded."""
    return sorted(path.stem for path in FOLDER.glob("*.json") if NAME.fullmatch(path.stem))


def card(name: str) -> ModelCard:
    path = FOLDER / f"{name}.json"
    if not NAME.fullmatch(name) or not path.is_file():
        raise UnknownModel(f"no model is called {name!r}; {advice(name)}")
    try:
        made = ModelCard.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise AnyprecError(f"{path} is no card of a model ({error}); install anyprec again") from error
    return made


def advice(name: str) -> str:
    """What to type instead."""
    known = names()
    near = difflib.get_close_matches(name.lower().replace("_", "-"), known, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    if not known:
        return "this anyprec comes without models"
    return f"there are {', '.join(known)}" if len(known) <= 8 else "`anyprec models` lists those there are"


def find(given: str | Path) -> str | Path:
    """The model file that a user means: a path that exists, else a model of the catalog.

    What looks like a path and does not exist is given back as it is: whoever opens it says what is wrong.
    """
    text = os.fsdecode(given)
    check_packed(text)
    if not LIKE_A_NAME.fullmatch(text) or os.path.lexists(text):
        return given
    shipped = FOLDER / f"{text}.apm"
    if NAME.fullmatch(text) and shipped.is_file():
        return shipped
    if text not in names():
        raise UnknownModel(f"there is no file {text!r}, and no model has that name; {advice(text)}")
    path = model_path(card(text))
    if not path.is_file():
        raise UnknownModel(f"{text} is not in the package and not downloaded yet; run: anyprec models --fetch {text}")
    return path


def check_packed(path: str) -> None:
    """A checkpoint is a ZIP archive, as torch.save writes it; a run's folder has one in it. Neither is packed yet."""
    checkpoint = os.path.join(path, "model.pt") if os.path.isdir(path) else path
    try:
        if not os.path.isfile(checkpoint):
            return
        with open(checkpoint, "rb") as file:
            if file.read(4) != b"PK\x03\x04":
                return
    except OSError:  # whoever opens it says what is wrong
        return
    raise NotAModelFile(
        f"{path}: this is a checkpoint, not packed yet; pack it first: anyprec pack {shlex.quote(path)} --out net.apm"
    )


def model_path(found: ModelCard) -> Path:
    """Where its model file is, or will be once it is fetched: in the package, or in the cache folder.

    There it has a folder named after its checksum, so that another version of a model is another file.
    """
    shipped = FOLDER / f"{found.name}.apm"
    if found.url is None or shipped.is_file():
        return shipped
    from anyprec.data.cache import cache_folder

    return cache_folder() / "models" / found.sha256[:16] / f"{found.name}.apm"


def fetch(name: str) -> Path:
    """Download a model into the cache folder, unless it is here; its size and SHA-256 must be those of its card."""
    found = card(name)
    path = model_path(found)
    if found.url is None or path.parent == FOLDER:
        return path
    from anyprec.data import download

    with download.locked(path.parent):
        return download.fetch(found.url, path, checksum=f"sha256:{found.sha256}", size=found.bytes)
