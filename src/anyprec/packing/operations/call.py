"""OperationCall: one call of an aten operation, its arguments by the names of its schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from anyprec.packing.steps import Refused, Shape
from anyprec.packing.views import View

if TYPE_CHECKING:
    from anyprec.packing.recorder import Recorder


def operation_name(func: Any) -> str:
    """aten.relu_.default -> 'relu'."""
    return str(func._schema.name).split("::")[-1].rstrip("_")


class OperationCall:
    """One call: its arguments by the names of its schema, `made` the tensors it made, `out` the first of them."""

    def __init__(self, recorder: Recorder, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        self.recorder, self.func, self.made, self.out = recorder, func, made, made[0]
        self.name = operation_name(func)
        arguments = func._schema.arguments
        self.first: str = arguments[0].name
        self.given: dict[str, Any] = {a.name: a.default_value for a in arguments if a.has_default_value()}
        self.given.update({a.name: value for a, value in zip(arguments, args, strict=False)})
        self.given.update(kwargs)

    def __getitem__(self, argument: str) -> Any:
        return self.given[argument]

    @property
    def x(self) -> Tensor:
        """The first argument, whatever its schema calls it."""
        first: Tensor = self.given[self.first]
        return first

    def view(self, argument: str | None = None) -> View:
        return self.recorder.view_of(self.given[argument or self.first])

    def operand(self, argument: str) -> View | Any:
        """A view, or the constant itself."""
        item = self.given[argument]
        return item if self.recorder.is_constant(item) else self.recorder.view_of(item)

    def constant(self, argument: str) -> Tensor | None:
        item = self.given.get(argument)
        if not self.recorder.is_constant(item):
            raise Refused(f"its {argument} is computed from the input; only constant ones have an operation")
        return item

    def step(
        self, kind: str, *inputs: str, shape: Shape, constants: dict[str, Tensor] | None = None,
        reads: View | None = None, **attributes: Any,
    ) -> str:  # fmt: skip
        return self.recorder.add(kind, inputs, shape, attributes=attributes, constants=constants or {}, reads=reads)
