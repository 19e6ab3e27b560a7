"""Average: an exponential mean of a model's weights over the steps of a run. Kept by run.py, saved in its checkpoint.

The mean is of the float weights that all widths share and of every width's own tables; what the integer widths make of
it is quantized from it as from any weight. Norm statistics are not averaged: those measured with other weights do not
fit, least of all at 1 bit, where a mean near zero has either sign. run.py measures them anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """`decay` is what a step leaves of the mean so far: 0.999 looks back about 1,000 steps."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values: dict[str, Tensor] = {n: p.detach().clone() for n, p in model.named_parameters()}

    def load(self, values: dict[str, Tensor]) -> None:
        """The mean as a checkpoint kept it; other names or shapes are refused."""
        for name, own in self.values.items():
            if values[name].shape != own.shape:
                raise ValueError(f"its mean of {name} has shape {tuple(values[name].shape)}, not {tuple(own.shape)}")
        self.values = {name: values[name].to(own) for name, own in self.values.items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """A width that a step leaves out has moved nothing: its tables' mean stays where it was."""
        parameters = {n: p for n, p in model.named_parameters() if p.grad is not None}
        torch._foreach_lerp_([self.values[n] for n in parameters], list(parameters.values()), 1 - self.decay)

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the mean; on leaving, its own weights and buffers are back, bit for bit."""
        own = {n: v.detach().clone() for n, v in model.state_dict().items() if isinstance(v, Tensor)}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.values[name])
        try:
            yield
        finally:
            model.load_state_dict(own)
