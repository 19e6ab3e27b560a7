"""The teacher of a recipe: a model file whose answers every width learns from, beside those of the wider widths.

`recipe.teacher` names it, a path (*.apm) or a model of the catalog, and the engine runs it at its widest width on the
images of each step. Those are normalized for the network that learns; the teacher's file says what its own training
did, and the images are changed to that. Called by run.py; joint.py uses the logits.
"""

from __future__ import annotations

import numpy as np
import torch

from anyprec.data.catalog import Data
from anyprec.errors import RecipeError
from anyprec.run.model import load


class Teacher:
    def __init__(self, name: str, data: Data) -> None:
        """Refuses a model that does not answer the question of `data`: other classes, sizes or channels."""
        self.name = name
        self.model = load(name, layout="NHWC", threads=torch.get_num_threads())
        how = self.model.preprocessing
        if how is None:
            raise RecipeError(f"teacher={name!r} does not say how its training normalized images; pack it again")
        if how.channels != len(data.mean):
            raise RecipeError(
                f"teacher={name!r} is for {how.channels} channels, {data.name} has {len(data.mean)}; choose another"
            )
        if self.model.labels and data.classes and self.model.labels != tuple(data.classes):
            theirs, ours = (", ".join(map(str, names[:3])) for names in (self.model.labels, data.classes))
            raise RecipeError(
                f"teacher={name!r} knows the classes {theirs}, ..., {data.name} has {ours}, ...; choose a model that "
                "was trained for the same"
            )
        # x = (p - mean) / std for the learner, (p - m) / s for the teacher: x * std / s + (mean - m) / s
        mean, std = np.asarray(data.mean), np.asarray(data.std)
        self.factor = (std / np.asarray(how.std)).astype(np.float32)
        self.offset = ((mean - np.asarray(how.mean)) / np.asarray(how.std)).astype(np.float32)
        self.classes = data.num_classes

    def __call__(self, images: np.ndarray) -> torch.Tensor:
        """Its logits (N, classes), or (N, classes, H, W) of masks, for normalized images (N, H, W, C) of the step."""
        answers = self.model(np.ascontiguousarray(images * self.factor + self.offset))
        if not isinstance(answers, np.ndarray):
            raise RecipeError(f"teacher={self.name!r} has {len(answers)} outputs; choose a model with one, its logits")
        if answers.shape[-1] != self.classes:
            raise RecipeError(
                f"teacher={self.name!r} gives {answers.shape[-1]} classes, the data has {self.classes}; choose another"
            )
        logits = torch.from_numpy(answers)
        return logits if logits.dim() == 2 else logits.permute(0, 3, 1, 2)
