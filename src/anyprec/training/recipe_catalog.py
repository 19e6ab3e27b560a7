"""The recipes that come with anyprec (src/anyprec/recipes/*.toml), by name, and what is known of each.

A recipe's `about` table holds facts that do not change the training: Recipe.load leaves it out. Called by Recipe.load
and `anyprec recipes`. No torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from anyprec.errors import RecipeError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
LIKE_A_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class RecipeInfo:
    summary: str = ""  # one line
    core_hours: float | None = None  # of one CPU core, all stages together
    needs: str = ""  # where that is not known: "a GPU"
    after: str = ""  # the recipe of the stage before
    accuracy: Mapping[str, float] = field(default_factory=dict)  # bits -> percent of the test set, as measured here
    miou: Mapping[str, float] = field(default_factory=dict)  # the same of a segmentation
    paper: str = ""  # the row of the paper's table that it repeats, a name in reproduce/paper.py


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find(given: str | Path) -> Path:
    """The recipe file that a user means: a file that exists, else a recipe of the package by its name."""
    path, text = Path(given), str(given)
    if path.is_file() or not LIKE_A_NAME.fullmatch(text):
        return path
    if text in names():
        return FOLDER / f"{text}.toml"
    raise RecipeError(f"there is no file {text!r}, and no recipe has that name; {advice(text)}")


def advice(name: str) -> str:
    """What to type instead."""
    near = get_close_matches(name.lower().replace("_", "-"), names(), n=3)
    return f"did you mean {' or '.join(near)}?" if near else "`anyprec recipes` lists those there are"


def about(name: str) -> RecipeInfo:
    if name not in names():
        raise RecipeError(f"no recipe is called {name!r}; {advice(name)}")
    return RecipeInfo(**read_toml(FOLDER / f"{name}.toml").get("about", {}))


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = f"; a recipe of anyprec has that name: give {path.stem}" if path.stem in names() else ""
        raise RecipeError(f"cannot read recipe {path}: {error.strerror}{hint}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
