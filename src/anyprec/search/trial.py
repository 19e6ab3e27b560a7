"""PlanTrial: plans and images in, tables of each plan and the network's outputs out, computed by the engine.

The graph is cut at every table that may hold a norm. Each piece is a small model file, opened once for each width it
is needed at; plans that begin with the same bits share what they have in common. `opened` gives whole models, whose
profiles are plans: what a stored profile computes, bit for bit.

    input -> [piece 0] -> match -> [piece 1] -> match -> ... -> [last piece] -> output
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from anyprec.format.file import write
from anyprec.format.graph import INPUT, Graph, GraphProfile, Op
from anyprec.run.model import PackedModel, load
from anyprec.search.layers import Plan, PlanLayers, affine_of
from anyprec.search.tables import Moments, PlanTables, Rows, levels, match

BATCH = 32  # images a call: more do not fit the caches
MOST_BYTES = 1 << 30  # of inner values that are kept; fewer images are used where that is not enough
Array = npt.NDArray[np.float32]
Images = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Piece:
    """The ops between cuts that make one value."""

    value: str
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]  # values that were cut, or INPUT
    layers: tuple[int, ...]  # whose bits these ops have
    before: tuple[int, ...]  # whose bits the value depends on, these included


class PlanTrial:
    """Runs plans of one graph over the same images (N, H, W, C)."""

    def __init__(self, layers: PlanLayers, images: Images, *, threads: int = 1) -> None:
        self.layers, self.threads = layers, threads
        self.tables = PlanTables(layers)
        self.pieces = cut(layers, self.tables.matched)
        self._models: dict[tuple[str, tuple[int, ...]], PackedModel] = {}
        self._known: dict[str, tuple[tuple[int, ...], Array]] = {}  # value -> (bits it depends on, before matching)
        self._fitted: dict[Plan, Rows] = {}
        self.images = images[: self._affordable(images)]
        self.wanted: dict[int, dict[str, Moments]] = {}
        for bits in layers.widths:
            found: dict[str, Moments] = {}
            self._pass(layers.uniform(bits), found)
            self.wanted[bits] = found

    def _affordable(self, images: Images) -> int:
        """How many images fit the memory, by the sizes of the values of one."""
        self.images = images[:1]
        self._pass(self.layers.uniform(self.layers.widths[-1]), {})
        each = 2 * sum(y.nbytes for _, y in self._known.values())
        self._known.clear()
        return max(1, min(len(images), MOST_BYTES // max(each, 1)))

    # --- Piece by piece ---

    def outputs(self, plans: Sequence[Plan]) -> list[Array]:
        """The first output of each plan, its tables matched on the way: (N, ..., C)."""
        found = {plan: self._pass(plan, None) for plan in sorted(set(plans))}  # those that begin alike, one by one
        return [found[plan] for plan in plans]

    def rows(self, plan: Plan) -> Rows:
        """The row of every op's table."""
        if plan not in self._fitted:
            self._pass(plan, None)
        return self._fitted[plan]

    def _pass(self, plan: Plan, moments: dict[str, Moments] | None) -> Array:
        """One forward pass. Without `moments` tables are matched; with it, moments of the file's own rows are noted."""
        values: dict[str, Images] = {INPUT: self.images}
        rows = {name: self.tables.first(name, plan) for name in self.layers.graph.tables}
        for piece in self.pieces:
            y = self._value(piece, plan, values)
            if piece.value in self.tables.matched:
                y, rows[piece.value] = self._matched(piece.value, plan, y, moments)
            values[piece.value] = y
        if moments is None:
            self._fitted[plan] = rows
        return values[self.layers.graph.outputs[0]].astype(np.float32, copy=False)

    def _value(self, piece: Piece, plan: Plan, values: dict[str, Images]) -> Array:
        """What a piece makes, with the row of its own width; kept for the next plan."""
        key = tuple(plan[layer] for layer in piece.before)
        known = self._known.get(piece.value)
        if known is not None and known[0] == key and len(known[1]) == len(self.images):
            return known[1]
        model = self._model(piece, plan, values)
        inputs = [values[name] for name in piece.inputs]
        made = []
        for first in range(0, len(self.images), BATCH):
            made.append(first_output(model(*(x[first : first + BATCH] for x in inputs), layout="NHWC")))
        y = np.concatenate(made)
        self._known[piece.value] = key, y
        return y

    def _matched(self, name: str, plan: Plan, y: Array, moments: dict[str, Moments] | None) -> tuple[Array, Array]:
        source = self.layers.sources[name]
        row = self._own_row(name, plan)
        if source.own is not None and source.out is not None:
            units = np.float32(levels(plan[source.out]) / levels(plan[source.own]))
            y, row = y * units, row * units
        found = Moments.of(y)
        if moments is not None:
            moments[name] = found
            return y, row
        if len(set(plan)) == 1:
            return y, row
        row, change = match(row, found, self.wanted[self.tables.width(name, plan)][name])
        y = y * change[0]
        y += change[1]
        return y, row

    def _own_row(self, name: str, plan: Plan) -> Array:
        """Before the units of what reads it are settled, so that a piece need not know them."""
        source = self.layers.sources[name]
        if source.own is None:
            return self.tables.first(name, plan)
        row: Array = self.layers.graph.tables[name][self.layers.rows[plan[source.own]]]
        return row

    def _model(self, piece: Piece, plan: Plan, values: dict[str, Images]) -> PackedModel:
        key = piece.value, tuple(plan[layer] for layer in piece.layers)
        if key not in self._models:
            self._models[key] = open_graph(self._piece_graph(piece, plan, values), self.threads)
        return self._models[key]

    def _piece_graph(self, piece: Piece, plan: Plan, values: dict[str, Images]) -> Graph:
        graph = self.layers.graph
        first, *others = piece.inputs
        rename = {first: INPUT}
        inputs = [Op(name, "input", (), {"shape": values[name].shape[1:], "integer": False}) for name in others]
        ops = tuple(
            replace(op, inputs=tuple(rename.get(v, v) for v in op.inputs), attributes=renamed(op, rename))
            for op in piece.ops
        )
        names = {op.attributes["weight"] for op in ops if "weight" in op.attributes}
        profile = self.layers.graph_profile("p", plan)
        acts = {op.name for op in ops if op.kind == "quantize"}
        tables = {op.name: self.tables.first(op.name, plan) for op in ops if op.name in graph.tables}
        if piece.value in self.tables.matched:
            tables[piece.value] = self._own_row(piece.value, plan)
        is_image = first == INPUT
        return replace(
            graph,
            input_shape=graph.input_shape if is_image else values[first].shape[1:],
            image_scale=graph.image_scale if is_image else None,
            image_shift=graph.image_shift if is_image else None,
            image_size=graph.image_size if is_image else None,
            resize=graph.resize if is_image else None,
            integer_input=graph.integer_input and is_image,
            labels=None,
            profiles=(used_bits(profile, names, acts),),
            weights={name: weight for name, weight in graph.weights.items() if name in names},
            ops=(*inputs, *ops),
            outputs=(piece.value,),
            tables={name: row[None] for name, row in tables.items()},
        )

    # --- Whole models ---

    @contextmanager
    def opened(self, plans: Sequence[Plan]) -> Iterator[PackedModel]:
        """A model whose profiles p0, p1, ... are these plans, as they would be stored."""
        rows = [self.rows(plan) for plan in plans]
        graph = replace(
            self.layers.graph,
            profiles=tuple(self.layers.graph_profile(f"p{i}", plan) for i, plan in enumerate(plans)),
            tables={name: np.stack([row[name] for row in rows]) for name in self.layers.graph.tables},
        )
        with open_graph(graph, self.threads) as model:
            yield model


def cut(layers: PlanLayers, matched: Sequence[str]) -> list[Piece]:
    """One piece for each matched op, in order, and one for the first output."""
    graph = layers.graph
    ops = {op.name: op for op in graph.ops}
    pieces: list[Piece] = []
    depends: dict[str, set[int]] = {}  # of every value that was cut
    for value in dict.fromkeys((*matched, graph.outputs[0])):
        needed: set[str] = set()
        inputs: set[str] = set()
        names = [value]
        while names:
            name = names.pop()
            if name == INPUT or name in depends:
                inputs.add(name)
            elif name not in needed:
                needed.add(name)
                like = ops[name].attributes.get("like")
                names += [*ops[name].inputs, *([like] if like is not None else [])]
        chosen = tuple(op for op in graph.ops if op.name in needed)
        inside = {layer for op in chosen for layer in layers_of(layers, op, op.name == value and value in matched)}
        before = inside.union(*(depends.get(name, set()) for name in inputs))
        ordered = tuple(sorted(inputs, key=lambda name: name != INPUT))
        pieces.append(Piece(value, chosen, ordered, tuple(sorted(inside)), tuple(sorted(before))))
        depends[value] = before.union(layers_of(layers, ops[value], False))
    return pieces


def layers_of(layers: PlanLayers, op: Op, is_matched: bool) -> list[int]:
    """Whose bits an op's numbers depend on. Matching settles the units of a matched op: its own layer is enough."""
    source = layers.sources.get(op.name)
    own, out = (None, None) if source is None else (source.own, source.out)
    found = (layers.layer_of(op), own, None if is_matched and own is not None else out)
    return [layer for layer in found if layer is not None]


def renamed(op: Op, names: dict[str, str]) -> dict[str, object]:
    like = op.attributes.get("like")
    return {**op.attributes, "like": names.get(like, like)} if like is not None else dict(op.attributes)


def used_bits(profile: GraphProfile, weights: set[str], acts: set[str]) -> GraphProfile:
    """A profile that names only what a piece has."""
    assert isinstance(profile.weights, dict) and isinstance(profile.acts, dict)
    kept = {w: bits for w, bits in profile.weights.items() if w in weights}
    return replace(profile, weights=kept, acts={q: bits for q, bits in profile.acts.items() if q in acts})


def open_graph(graph: Graph, threads: int) -> PackedModel:
    """The engine reads files only; this one is gone once it is read."""
    with tempfile.TemporaryDirectory(prefix="anyprec-search-") as folder:
        path = Path(folder) / "plan.apm"
        write(graph, path)
        return load(path, layout="NHWC", verify=False, threads=threads)


def stored_tables(rows: Rows) -> Rows:
    """Rows as the file's own graph has them: tables of quantize ops under their own names."""
    suffix = affine_of("")
    return {name.removesuffix(suffix): row for name, row in rows.items()}


def first_output(y: Array | tuple[Array, ...]) -> Array:
    return y[0] if isinstance(y, tuple) else y
