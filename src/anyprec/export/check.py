"""Does an exported model answer as the engine does? Both run the same random images; export.py reports the outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anyprec.export.onnx_writer import outer_sizes
from anyprec.export.stock_engine import EngineFailed, run_elsewhere
from anyprec.format.graph import INPUT, Graph
from anyprec.format.shapes import Shape
from anyprec.run.model import load

CHECK_ENGINE = "onnxruntime"
CHECK_IMAGES = 32
LEAST_SHARE = 0.95  # of equal answers below which an export counts as wrong: one unlucky image of 32 may differ
TYPICAL = 1e-4  # a difference of the median image that only rounding explains
CELLS = 4  # along each side of a random image: blocks of color, so that nets see edges and areas


@dataclass(frozen=True)
class Agreement:
    """Equal answers (the largest output of an image, a pixel or a token), and the largest difference of an output over
    the deviation of our outputs: about 1e-6 where every code is the same, more where one fell on the other side.
    `typical` is that of the median image."""

    same_answers: int
    answers: int
    difference: float
    typical: float = 0.0

    @property
    def agrees(self) -> bool:
        """Answers of untrained networks are decided by so little that one code in another place can change them."""
        return self.same_answers >= LEAST_SHARE * self.answers or self.typical <= TYPICAL

    def __str__(self) -> str:
        said = (
            f"same answer {self.same_answers:,} of {self.answers:,}, difference {self.typical:.1e}, "
            f"largest {self.difference:.1e}"
        )
        return said if self.agrees else f"DISAGREES: {said}"


def check_models(
    model: str | Path, graph: Graph, files: Sequence[tuple[str, str]], shapes: Mapping[str, Shape]
) -> tuple[str, list[Agreement | None]]:
    """Why nothing could be checked ("" where it was), and the agreement of each (profile, ONNX file)."""
    given = random_inputs(graph, shapes)
    try:
        theirs = run_elsewhere(CHECK_ENGINE, [path for _, path in files], given)
    except EngineFailed as error:
        return str(error), [None] * len(files)
    with load(model) as engine:
        ours = [engine(*given.values(), bits=profile) for profile, _ in files]
    return "", [compare(a if isinstance(a, tuple) else (a,), b) for a, b in zip(ours, theirs, strict=True)]


def whole_inputs(graph: Graph) -> list[str]:
    """Names of the inputs that hold whole numbers."""
    more = [op.name for op in graph.ops if op.kind == "input" and op.attributes["integer"]]
    return [*([INPUT] if graph.integer_input else []), *more]


def random_inputs(graph: Graph, shapes: Mapping[str, Shape], count: int = CHECK_IMAGES) -> dict[str, np.ndarray]:
    """Every input by name: images, standard normal numbers, whole numbers that embeddings have rows for."""
    rng, made = np.random.default_rng(1), {}
    for name, shape in shapes.items():
        if name in whole_inputs(graph):
            made[name] = rng.integers(0, index_limit(graph, name), (count, *shape))
            made[name].reshape(count, -1)[:, 0] = min(1, index_limit(graph, name) - 1)  # a mask hides not everything
        elif len(shape) == 3:
            made[name] = random_images(graph if name == INPUT else None, (count, *outer_sizes(shape)))  # type: ignore[arg-type]
        else:
            made[name] = rng.standard_normal((count, *shape)).astype(np.float32)
    return made


def index_limit(graph: Graph, name: str) -> int:
    """Whole numbers below this are rows of all embeddings that read `name`, perhaps moved about; 2 where none does."""
    reached, rows = {name}, []
    for op in graph.ops:
        if op.inputs and op.inputs[0] in reached:
            if op.kind in ("reshape", "transpose", "slice", "gather"):
                reached.add(op.name)
            elif op.kind == "embedding":
                rows.append(graph.weights[op.attributes["weight"]].shape[0])
    return min(rows, default=2)


def random_images(graph: Graph | None, shape: tuple[int, ...]) -> np.ndarray:
    """(N, C, H, W) float32: blocks of random color under noise, normalized as the graph says."""
    rng = np.random.default_rng(0)
    count, channels, height, width = shape
    cells = rng.uniform(0, 255, (count, channels, CELLS, CELLS))
    rows, columns = (np.arange(size) * CELLS // size for size in (height, width))
    pixels = cells[:, :, rows][:, :, :, columns] + rng.normal(0, 25, shape)
    pixels = np.clip(np.rint(pixels), 0, 255)
    if graph is None or graph.image_scale is None or graph.image_shift is None:
        return ((pixels - 127.5) / 73.6).astype(np.float32)  # 73.6: deviation of 0..255, all equally likely
    scale, shift = (np.array(v).reshape(-1, 1, 1) for v in (graph.image_scale, graph.image_shift))
    made: np.ndarray = (pixels * scale + shift).astype(np.float32)
    return made


def compare(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> Agreement:
    same = answers = 0
    difference = typical = 0.0
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape, f"the engine gives {a.shape}, the exported model {b.shape}"
        axis = 2 if a.ndim == 3 else 1  # (N, tokens, classes); else (N, classes, ...)
        equal = a.argmax(axis) == b.argmax(axis)
        same, answers = same + int(equal.sum()), answers + equal.size
        off = np.abs(a.astype(np.float64) - b).reshape(len(a), -1).max(1) / max(float(a.std()), 1e-12)  # (N,)
        difference, typical = max(difference, float(off.max())), max(typical, float(np.median(off)))
    return Agreement(same, answers, difference, typical)
