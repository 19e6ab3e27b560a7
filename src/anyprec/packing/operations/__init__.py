"""Operations: one call of an aten operation in, the steps it is in the model file out, or Refused.

Called by recorder.py.

torch breaks every spelling (module, function, method, operator) down to the aten operations listed in OPERATIONS. To
support one, add a function to the file of its group and a row to that file's table. What the file format lacks is made
of what it has; a new operation of the format comes first in FORMAT.md section 3, ARITHMETIC.md, the engine, the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from anyprec.packing.operations.arithmetic import ARITHMETIC
from anyprec.packing.operations.call import OperationCall, operation_name
from anyprec.packing.operations.layers import LAYERS
from anyprec.packing.operations.movement import MOVEMENT
from anyprec.packing.operations.products import PRODUCTS
from anyprec.packing.operations.reductions import REDUCTIONS
from anyprec.packing.steps import Refused
from anyprec.packing.views import View

if TYPE_CHECKING:
    from anyprec.packing.recorder import Recorder

__all__ = ["OPERATIONS", "SUPPORTED", "operation_name", "record"]

SUPPORTED = (
    "convolution (1-d and 2-d, transposed too), linear, norms, attention, recurrent layers, embeddings, the usual "
    "activations, arithmetic with broadcasting, reductions, softmax, pooling, bilinear and nearest resize, padding, "
    "and whatever moves numbers (reshape, permute, slice, concatenate, gather)"
)

OPERATIONS: dict[str, Callable[[OperationCall], View | Sequence[View]]] = {
    **LAYERS,
    **PRODUCTS,
    **ARITHMETIC,
    **REDUCTIONS,
    **MOVEMENT,
}


def record(recorder: Recorder, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> list[View]:
    """Views of the tensors that were made, in their order; fewer where the others have no operation."""
    call = OperationCall(recorder, func, args, kwargs, made)
    if call.name not in OPERATIONS:
        raise Refused("the model file has no such operation")
    found = OPERATIONS[call.name](call)
    return [found] if isinstance(found, View) else list(found)
