"""SplitNetwork: a network that says it is body(stem(x)), so that a joint step runs its float stem once for all widths.

The zoo's networks are such; a network of your own may be, too. Used by training/joint.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn


class SplitNetwork(nn.Module, ABC):
    """`stem` computes the same at every width: it has no any-layer and no switched norm. `body` has the rest."""

    shares_stem = True  # False once `convert` has changed the network: its stem may have a width by now
    stem_images = 0  # how many training images `fit_stem` looks at; 0: there is nothing to fit

    @abstractmethod
    def stem(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def body(self, z: Tensor) -> Tensor: ...

    def split(self, images: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The stem's output for these images, and what makes answers of it."""
        return self.stem(images), self.body

    def fit_stem(self, images: Tensor) -> None:
        """Set the stem to suit training images (N, C, H, W), before the first step."""

    def forward(self, x: Tensor) -> Tensor:
        z, body = self.split(x)
        return body(z)
