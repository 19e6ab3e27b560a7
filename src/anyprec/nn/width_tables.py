"""One number per integer width, kept as a ParameterDict with keys '1'..'8': learned scales, ranges of activations.

Used by quantizers.py, act_quantizer.py and new_widths.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from anyprec.errors import UnsupportedBits
from anyprec.widths import FLOAT, INTEGER_WIDTHS


def width_table(widths: Iterable[int], value: float, learned: bool) -> nn.ParameterDict:
    """One scalar per integer width, as a parameter (learned) or a constant; keys are '1'..'8'."""
    keys = [str(k) for k in widths if k != FLOAT]
    return nn.ParameterDict({key: nn.Parameter(torch.tensor(value), requires_grad=learned) for key in keys})


def nearest_width(bits: int, known: Iterable[int]) -> int:
    """The known width closest to `bits`, the wider one of two at equal distance: 3 of (1, 2, 4, 8) -> 4."""
    return min(known, key=lambda k: (abs(k - bits), -k))


def add_missing_entries(table: nn.ParameterDict, state_dict: dict[str, Tensor], prefix: str, learned: bool) -> None:
    """A checkpoint may hold widths calibrated after the model was built: make room before loading."""
    for name, value in state_dict.items():
        key = name.removeprefix(prefix)
        if name.startswith(prefix) and key not in table:
            like = next(iter(table.values()), value)  # the model's dtype and device, not those of the checkpoint
            table[key] = nn.Parameter(torch.zeros_like(like), requires_grad=learned)


def check_integer_width(bits: int) -> None:
    if bits not in INTEGER_WIDTHS:
        raise UnsupportedBits(f"bits={bits!r} has no integer codes; choose 1..8")
