"""Resize in the engine against the oracle, bit for bit: lines cut into parts, parts of lines that threads take."""

import numpy as np
import pytest
from engine_check import assert_exact, usable_isas

from anyprec.format import INPUT, Graph, GraphProfile, Op, nested_planes

MODES = [("nearest", False), ("bilinear", False), ("bilinear", True)]


def resize(name, mode, align, size, source=INPUT):
    return Op(name, "resize", (source,), {"mode": mode, "align": align, "size": size, "scale": None, "like": None})


@pytest.mark.parametrize(("mode", "align"), MODES)
@pytest.mark.parametrize(
    "shape, size",
    [
        ((9, 11, 11), (36, 44)),  # a segmentation's last step
        ((3, 5, 3), (17, 700)),  # more columns than a part has
        ((2, 3, 900), (5, 7)),  # two columns a part
        ((2, 3, 2051), (3, 5)),  # a pixel in two parts
        ((40, 30, 8), (7, 5)),  # smaller: most lines are skipped
        ((1, 1, 5), (6, 9)),
        ((13, 1, 16), (1, 1)),
    ],
)
def test_sizes(shape, size, mode, align, tmp_path):
    ops = (resize("r", mode, align, size),)
    graph = Graph("resize", (None, None, shape[2]), (GraphProfile("8", 8, 8),), nested_planes({8}), {}, ops, ("r",), {})
    x = np.random.default_rng(shape[2]).standard_normal((2, *shape)).astype(np.float32)
    assert_exact(graph, [x], tmp_path / "net.apm", usable_isas(), threads=(1, 2, 5))


@pytest.mark.parametrize(("mode", "align"), MODES)
def test_into_a_concatenation(mode, align, tmp_path):
    """Pixels of the output may lie apart: the branches of an ASPP write into one value."""
    ops = (
        resize("small", mode, align, (2, 3)),
        resize("large", mode, align, (12, 20), "small"),
        resize("other", mode, align, (12, 20)),
        Op("both", "concat", ("large", "other", "large"), {}),
    )
    graph = Graph("resize", (None, None, 7), (GraphProfile("8", 8, 8),), nested_planes({8}), {}, ops, ("both",), {})
    x = np.random.default_rng(0).standard_normal((3, 6, 5, 7)).astype(np.float32)
    assert_exact(graph, [x], tmp_path / "net.apm", usable_isas(), threads=(1, 3))
