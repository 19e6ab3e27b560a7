"""The folder of a training run: opened for a new run or to go on with one, cleared, and its logs.

recipe.toml, last.pt (the run so far), log.jsonl, tensorboard/ and model.pt. Called by run.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from anyprec.errors import CheckpointError, RecipeError
from anyprec.files import append_line, cannot_write, make_folder
from anyprec.training import checkpoint
from anyprec.training.recipe import Recipe


def clear_run(out: Path) -> None:
    """Remove what an earlier run wrote into `out`, and nothing else."""
    try:
        for name in ("last.pt", "model.pt", "log.jsonl", "recipe.toml"):
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(out, error) from error
    shutil.rmtree(out / "tensorboard", ignore_errors=True)


def open_folder(out: Path, recipe: Recipe, resume: bool, writes: bool) -> dict[str, Any] | None:
    """What last.pt holds of the run to go on with, None of a new one; `writes` makes the folder, with the recipe."""
    last = out / "last.pt"
    saved = None
    if resume and last.exists():
        saved = checkpoint.load_state(last)
        if saved["kind"] != "run":
            raise CheckpointError(f"{last} is a model, not a run that can be resumed; use another --out")
        # Fields that came later have their defaults in a run from before.
        then, now = Recipe.from_dict(saved["recipe"]).to_dict(), recipe.to_dict()
        for name in now:
            if now[name] != then.get(name):
                raise RecipeError(
                    f"{out} was started with {name}={then.get(name)!r}, not {now[name]!r}; resume with the "
                    "same recipe, or use another --out"
                )
    elif last.exists() or (out / "model.pt").exists():
        raise RecipeError(
            f"{out} holds a run already; add --resume to go on, --overwrite to begin anew, or change --out"
        )
    if writes:
        make_folder(out)
        recipe.save(out / "recipe.toml")
    return saved


class RunLog:
    """One line an epoch in log.jsonl, and the same numbers for TensorBoard where that is installed."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.writer: Any = None  # of TensorBoard, from the first epoch on

    def write(self, line: dict[str, Any]) -> None:
        """`line` has "epoch", "lr", and results by width of "train" and of one other split."""
        append_line(self.out / "log.jsonl", json.dumps(line))
        try:
            self._tensorboard(line)
        except OSError as error:
            raise cannot_write(self.out / "tensorboard", error) from error

    def _tensorboard(self, line: dict[str, Any]) -> None:
        epoch = line["epoch"]
        if self.writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            self.writer = SummaryWriter(str(self.out / "tensorboard"), purge_step=epoch)
        self.writer.add_scalar("lr", line["lr"], epoch)
        for split in line.keys() - {"epoch", "lr"}:
            for bits, values in line[split].items():
                for name, value in values.items():
                    self.writer.add_scalar(f"{name}/{split}/{bits}", value, epoch)
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
