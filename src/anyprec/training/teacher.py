"""The teacher of a recipe: model files whose answers every width learns from, beside those of the wider widths.

`recipe.teacher` names one or several, each a path (*.apm) or a model of the catalog, and the engine runs them at their
widest width on the images of each step. Those are normalized for the network that learns; a teacher's file says what
its own training did, and the images are changed to that. Called by run.py; joint.py uses the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from anyprec.data.catalog import Data
from anyprec.errors import RecipeError
from anyprec.run.model import load


class Teacher:
    """Several files teach together (an ensemble): their answer is the mean of their probabilities."""

    def __init__(self, names: Sequence[str], data: Data) -> None:
        self.networks = [TeacherNetwork(name, data) for name in names]

    def __call__(self, images: np.ndarray) -> torch.Tensor:
        """Logits (N, classes), or (N, classes, H, W) of masks, for normalized images (N, H, W, C) of the step."""
        answers = [network(images) for network in self.networks]
        if len(answers) == 1:
            return answers[0]
        if len(shapes := {tuple(answer.shape) for answer in answers}) > 1:
            given = ", ".join(f"{n.name!r} {tuple(a.shape)}" for n, a in zip(self.networks, answers, strict=True))
            raise RecipeError(f"the teachers answer in {len(shapes)} shapes: {given}; choose teachers of one task")
        mean = torch.stack([answer.softmax(1) for answer in answers]).mean(0)
        return mean.clamp_min(torch.finfo(mean.dtype).tiny).log()  # logits of the mean


class TeacherNetwork:
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
        """The logits of this file."""
        answers = self.model(np.ascontiguousarray(images * self.factor + self.offset))
        if not isinstance(answers, np.ndarray):
            raise RecipeError(f"teacher={self.name!r} has {len(answers)} outputs; choose a model with one, its logits")
        if answers.shape[-1] != self.classes:
            raise RecipeError(
                f"teacher={self.name!r} gives {answers.shape[-1]} classes, the data has {self.classes}; choose another"
            )
        logits = torch.from_numpy(answers)
        return logits if logits.dim() == 2 else logits.permute(0, 3, 1, 2)
