"""The layers of a graph as a plan sees them: which parts may have bits of their own, and which layers a table follows.

A layer is the least set of weights and quantize ops that must have one width for the file's tables to be usable: a
weight and the codes it reads, all layers that read the same codes, both sides of a product of codes. Used by tables.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property

from anyprec.errors import ProfileError, UnknownLayer, UnsupportedBits
from anyprec.format.check import check_graph
from anyprec.format.graph import Graph, GraphProfile, Op
from anyprec.format.record import to_record
from anyprec.widths import FLOAT, Profile

Plan = tuple[int, ...]  # bits of each layer, in the order of PlanLayers.layers


@dataclass(frozen=True)
class PlanLayer:
    """Weights and quantize ops that have the same bits in every plan."""

    name: str  # of its first weight; of its first quantize op where it has none
    weights: tuple[str, ...]
    acts: tuple[str, ...]  # quantize ops


@dataclass(frozen=True)
class TableSource:
    """Which layers' bits one op's table depends on; None where it is the same at every width, or float."""

    own: int | None  # its weights and the codes it reads
    out: int | None  # the quantize behind it: its numbers are then in units of that one's codes


class PlanLayers:
    """The layers of `graph`, its uniform widths, and for each op with a table the layers that it follows."""

    def __init__(self, graph: Graph) -> None:
        self.file_graph = graph
        self.graph = graph = split_quantize(graph)  # the one all names here are of
        self.rows = {
            profile.weights: row
            for row, profile in enumerate(graph.profiles)
            if isinstance(profile.weights, int) and profile.weights == profile.acts != FLOAT
        }
        self.widths = tuple(sorted(self.rows))
        if len(self.widths) < 2:
            have = ", ".join(profile.name for profile in graph.profiles)
            raise ProfileError(
                f"{graph.name} has the profiles {have}; a plan mixes uniform widths, so it needs at least two of 1..8"
            )
        if any(op.kind == "input" for op in graph.ops):
            raise ProfileError(f"{graph.name} has several inputs; plans are searched for models with one")
        self._codes_of = check_graph(to_record(graph, {})).codes_of  # value -> the quantize op whose codes it is
        self._ops = {op.name: op for op in graph.ops}
        self.layers = self._join()
        if not self.layers:
            raise ProfileError(f"{graph.name} has no layer whose bits a profile sets; there is nothing to plan")
        self._layer_of = {
            ("weight" if name in layer.weights else "act", name): number
            for number, layer in enumerate(self.layers)
            for name in (*layer.weights, *layer.acts)
        }
        self.sources = {op.name: self._source(op) for op in graph.ops if op.name in graph.tables}

    # --- Which ones belong together ---

    def _join(self) -> tuple[PlanLayer, ...]:
        joined: dict[tuple[str, str], tuple[str, str]] = {}  # union-find: an item -> one nearer to its root

        def root(item: tuple[str, str]) -> tuple[str, str]:
            while joined.setdefault(item, item) != item:
                item = joined[item]
            return item

        def join(items: Sequence[tuple[str, str]]) -> None:
            for item in items:
                joined[root(item)] = root(items[0])

        for op in self.graph.ops:
            if op.kind == "quantize" and op.bits is None:
                join([("act", op.name)])
            weight = self.graph.weights.get(op.attributes.get("weight", ""))
            in_planes = weight is not None and not weight.is_float and weight.bits is None
            acts = [("act", q) for q in map(self._codes_of.get, op.inputs) if q and self._ops[q].bits is None]
            if in_planes:
                join([("weight", op.attributes["weight"]), *acts])
            elif op.kind == "matmul" and acts:
                join(acts)
        groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for item in joined:
            groups.setdefault(root(item), []).append(item)
        order = {op.attributes.get("weight", op.name): place for place, op in enumerate(self.graph.ops)}
        order |= {op.name: place for place, op in enumerate(self.graph.ops) if op.kind == "quantize"}
        found = []
        for items in groups.values():
            weights = sorted((name for kind, name in items if kind == "weight"), key=order.__getitem__)
            quantizers = sorted((name for kind, name in items if kind == "act"), key=order.__getitem__)
            found.append(PlanLayer([*weights, *quantizers][0], tuple(weights), tuple(quantizers)))
        return tuple(sorted(found, key=lambda layer: order[layer.name]))

    def readers(self, name: str) -> list[Op]:
        return [op for op in self.graph.ops if name in op.inputs or op.attributes.get("like") == name]

    def layer_of(self, op: Op) -> int | None:
        """The layer that an op's time belongs to: that of its weight, or of the codes it makes or reads."""
        named = self._layer_of.get(("weight", op.attributes.get("weight", "")))
        if named is not None:
            return named
        codes = op.name if op.kind == "quantize" else next((v for v in op.inputs if v in self._codes_of), "")
        return self._layer_of.get(("act", self._codes_of.get(codes, "")))

    def _source(self, op: Op) -> TableSource:
        readers = self.readers(op.name)
        is_layer = op.kind in ("conv", "linear", "affine")
        units = [r for r in readers if r.kind == "quantize" and not r.attributes["affine"] and r.bits is None]
        if is_layer and units:
            if len(readers) > 1 or op.name in self.graph.outputs:
                raise ProfileError(
                    f"{op.name} of {self.graph.name} is read by {len(readers)} ops, one of them the quantize "
                    f"{units[0].name}, in units of its codes; such a file cannot have plans: pack it again"
                )
            return TableSource(self.layer_of(op), self._layer_of["act", units[0].name])
        return TableSource(self._followed(op), None)

    def _followed(self, op: Op) -> int | None:
        """Its own layer; of an op without bits the nearest one before it, as a norm follows its layer."""
        seen, names = set(), [op.name]
        while names:
            now = self._ops[names.pop(0)]
            layer = self.layer_of(now)
            if layer is not None:
                return layer
            for value in now.inputs:
                if value in self._ops and value not in seen:
                    seen.add(value)
                    names.append(value)
        return None

    @cached_property
    def depends(self) -> frozenset[str]:
        """Values that differ between plans: those behind a layer."""
        found: set[str] = set()
        for op in self.graph.ops:
            if self.layer_of(op) is not None or any(value in found for value in op.inputs):
                found.add(op.name)
        return frozenset(found)

    # --- Plans ---

    def uniform(self, bits: int) -> Plan:
        return (bits,) * len(self.layers)

    def plan(self, profile: Profile) -> Plan:
        """The bits of every layer; all must be named, and no others. A weight and its codes have the same."""
        known = {name: number for number, layer in enumerate(self.layers) for name in (layer.name, *layer.weights)}
        bits: dict[int, int] = {}
        for name, given in profile.bits.items():
            if name not in known:
                near = get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"its layers are {', '.join(list(known)[:6])}"
                raise UnknownLayer(f"profile {profile.name!r}: {self.graph.name} has no layer {name!r}; {hint}")
            if isinstance(given, tuple) or given not in self.rows:
                raise UnsupportedBits(
                    f"profile {profile.name!r}: {name} has {given!r} bits; a layer of this file has one of "
                    f"{', '.join(map(str, self.widths))}"
                )
            number = known[name]
            if bits.setdefault(number, given) != given:
                raise ProfileError(
                    f"profile {profile.name!r}: {name} has {given} bits, and layers that read the same values "
                    f"{bits[number]}; give {', '.join(self.layers[number].weights)} the same"
                )
        for number, layer in enumerate(self.layers):
            if number not in bits:
                raise ProfileError(f"profile {profile.name!r} leaves out {layer.name!r}; give the bits of every layer")
        return tuple(bits[number] for number in range(len(self.layers)))

    def graph_profile(self, name: str, plan: Plan, accuracy: float | None = None) -> GraphProfile:
        weights = {w: bits for layer, bits in zip(self.layers, plan, strict=True) for w in layer.weights}
        acts = {q: bits for layer, bits in zip(self.layers, plan, strict=True) for q in layer.acts}
        return GraphProfile(name, weights, acts, accuracy)

    def named(self, plan: Plan) -> Mapping[str, int]:
        return {layer.name: bits for layer, bits in zip(self.layers, plan, strict=True)}


def split_quantize(graph: Graph) -> Graph:
    """The same graph with tables of quantize ops as affine ops of their own: fma, then rounding, as before."""
    ops: list[Op] = []
    tables = dict(graph.tables)
    for op in graph.ops:
        if op.kind == "quantize" and op.attributes["affine"]:
            tables[affine_of(op.name)] = tables.pop(op.name)
            ops.append(Op(affine_of(op.name), "affine", op.inputs))
            op = Op(op.name, op.kind, (affine_of(op.name),), {**op.attributes, "affine": False})
        ops.append(op)
    return replace(graph, ops=tuple(ops), tables=tables)


def affine_of(quantize: str) -> str:
    return f"{quantize}~affine"[-200:]
