"""Parameters of which the default tests take a part, and `make slow` the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], every: int = 2, slow: Iterable[Any] = ()) -> list[Any]:
    """The first value and every `every`-th after it are for `make test`, others are slow; so is what `slow` has.

    With every=1 only what `slow` has is slow.
    """
    slow = list(slow)
    return [later(v) if i % every or v in slow else v for i, v in enumerate(values)]


def later(value: Any) -> Any:
    """A tuple is the values of several parameters, as in parametrize."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
