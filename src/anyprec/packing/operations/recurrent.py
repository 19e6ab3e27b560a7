"""Recurrent layers: nn.LSTM and nn.GRU, any number of layers and directions, as linear and `recurrent` steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anyprec.packing.layout import settle
from anyprec.packing.operations.build import joined
from anyprec.packing.steps import Refused
from anyprec.packing.views import Axis, View

if TYPE_CHECKING:
    from anyprec.packing.recorder import Recorder

RECURRENT = (nn.LSTM, nn.GRU)


def record_recurrent(recorder: Recorder, module: Any, x: View) -> list[View]:
    """The output at every position and the last state h of each layer and direction."""
    if getattr(module, "proj_size", 0):
        raise Refused("a projection of the state (proj_size) has no operation")
    length, batch = (1, 0) if module.batch_first else (0, 1)
    if len(x.dims) != 3 or recorder.batch not in x.dims[batch]:
        raise Refused("only sequences of a batch, (N, L, C) or (L, N, C), have an operation")
    more = tuple(axis for axis in x.dims[batch] if axis is not recorder.batch)  # sequences of one image
    x = settle(recorder, x, (*((more,) if more else ()), x.dims[length], x.dims[2]))
    ends: list[View] = []
    for layer in range(module.num_layers):
        ways = []
        for suffix, reverse in (("", False), ("_reverse", True))[: 2 if module.bidirectional else 1]:
            made, end = _direction(recorder, module, x, f"_l{layer}{suffix}", reverse, length, batch)
            ways.append(made)
            ends.append(end)
        x = ways[0] if len(ways) == 1 else joined(recorder, list(ways), 2)
    return [x, joined(recorder, list(ends), 0) if len(ends) > 1 else ends[0]]


def _direction(
    recorder: Recorder, module: Any, x: View, suffix: str, reverse: bool, length: int, batch: int
) -> tuple[View, View]:
    def numbers(name: str) -> Tensor | None:
        found: Tensor | None = getattr(module, name + suffix, None)
        return None if found is None else found.detach()

    inner, outer = numbers("weight_ih"), numbers("weight_hh")
    assert inner is not None and outer is not None
    constants = {"weight": inner[:, :, None, None]}
    if (bias := numbers("bias_ih")) is not None:
        constants["bias"] = bias
    lead = recorder.shape(x.value)[:-1]  # (sequences of an image, where it has several, and) positions
    gates = recorder.add("linear", (x.value,), (*lead, len(inner)), constants=constants, reads=x)
    own = numbers("bias_hh")
    column = outer.new_zeros(len(outer)) if own is None else own
    hidden = outer.shape[1]
    name = recorder.add(
        "recurrent",
        (gates,),
        (*lead, hidden),
        constants={"weight": torch.cat([outer, column[:, None]], 1)},
        attributes={"function": "lstm" if isinstance(module, nn.LSTM) else "gru", "reverse": reverse},
    )
    more = tuple(axis for axis in x.dims[batch] if axis is not recorder.batch)
    channels = (Axis(hidden),) if hidden > 1 else ()
    dims = (*x.dims[:2], channels)
    whole = View(name, (*more, *x.dims[length], *channels), dims)
    attributes = {"axis": len(lead) - 1, "start": 0 if reverse else -1, "stop": 1 if reverse else None, "step": 1}
    end = recorder.add("slice", (name,), (*lead[:-1], 1, hidden), attributes=attributes)
    return whole, View(end, (*more, *channels), ((), x.dims[batch], channels))
