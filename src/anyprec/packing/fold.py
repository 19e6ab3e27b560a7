"""Folding: the nodes of lower.py in, fewer of them out, the same result up to float rounding. Called by packing.py.

What the engine does in one sweep becomes one node: a norm behind a convolution multiplies into its table, the scale of
a quantize behind that too, a norm before a quantize becomes the quantize's table; a ReLU before an unsigned quantize,
which clips at 0 anyway, goes. All products are float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anyprec.packing.lower import DraftNode, GraphDraft
from anyprec.widths import FLOAT

LAYERS = ("conv", "linear")
ONE_WAY = ("max_pool", "flatten", "reshape", "transpose")  # max of codes = code of max; codes in another order


def fold(draft: GraphDraft) -> None:
    """In place, and in this order: each pass makes room for those after it."""
    graph = Folding(draft)
    graph.merge_equal()
    graph.merge_moves()
    graph.norms_before_pools()
    graph.quantize_before_pools()
    graph.pad_in_convs()
    graph.drop_clips()
    graph.multiply_out()
    graph.merge_equal()
    graph.merge_moves()
    graph.drop_unread()
    graph.name_outputs_once()


class Folding:
    def __init__(self, draft: GraphDraft) -> None:
        self.draft = draft

    @property
    def nodes(self) -> list[DraftNode]:
        return self.draft.nodes

    def node(self, name: str) -> DraftNode | None:
        return next((node for node in self.nodes if node.name == name), None)

    def readers(self, name: str) -> list[DraftNode]:
        return [node for node in self.nodes if name in node.inputs]

    def only_reader(self, name: str) -> DraftNode | None:
        readers = self.readers(name)
        return readers[0] if len(readers) == 1 and name not in self.draft.outputs else None

    def replace(self, old: str, new: str) -> None:
        """All that read `old` read `new`, as the module's quantizers do that made it."""
        for node in self.nodes:
            node.inputs = [new if name == old else name for name in node.inputs]
            if node.attributes.get("like") == old:
                node.attributes["like"] = new
        self.draft.outputs[:] = [new if name == old else name for name in self.draft.outputs]
        for point in self.draft.points.values():
            point.value = new if point.value == old else point.value

    def remove(self, node: DraftNode) -> None:
        """A node with one input that is no longer wanted: its readers read that."""
        self.nodes.remove(node)
        self.replace(node.name, node.inputs[0])

    # --- Passes ---

    def name_outputs_once(self) -> None:
        """An output that is an input, or another output as well, gets an op of its own: a clip that clips nothing."""
        outputs = self.draft.outputs
        for i, name in enumerate(outputs):
            source = self.node(name)
            if name not in outputs[:i] and source is not None and source.kind != "input":
                continue
            fresh, number = f"{name}.copy", 1
            while self.node(fresh) is not None:
                fresh, number = f"{name}.copy_{number + 1}", number + 1
            profiles = next(len(node.table) for node in self.nodes if node.table is not None)
            table = np.tile([-np.inf, np.inf], (profiles, 1))  # (P, 2)
            shape = self.draft.inputs[name] if source is None else source.shape
            self.nodes.append(DraftNode(fresh, "clip", [name], shape, table=table))
            outputs[i] = fresh

    def merge_equal(self) -> None:
        """Two nodes that compute the same from the same, such as two layers' quantizers with equal ranges."""
        seen: dict[Any, str] = {}
        for node in list(self.nodes):
            numbers = None if node.table is None else node.table.tobytes()
            key = (node.kind, tuple(node.inputs), repr(sorted(node.attributes.items())), numbers, node.bits)
            if node.kind in ("constant", "input"):
                continue
            if key in seen:
                self.nodes.remove(node)
                self.replace(node.name, seen[key])
            else:
                seen[key] = node.name

    def merge_moves(self) -> None:
        """A reshape of a reshape is one, a transpose of a transpose too; what changes nothing goes."""
        for node in list(self.nodes):
            if node.kind not in ("reshape", "transpose"):
                continue
            before = self.node(node.inputs[0])
            if before is not None and before.kind == node.kind:
                if node.kind == "transpose":
                    order = [before.attributes["order"][i] for i in node.attributes["order"]]
                    node.attributes = {**node.attributes, "order": order}
                node.inputs = list(before.inputs)
            source = self.node(node.inputs[0])
            shape = self.draft.inputs[node.inputs[0]] if source is None else source.shape
            same = (
                shape == node.shape
                if node.kind == "reshape"
                else node.attributes["order"] == list(range(len(node.shape)))
            )
            if same and node.name not in self.draft.outputs:
                self.remove(node)
        for node in reversed([n for n in self.nodes if n.kind in ("reshape", "transpose")]):
            if node.name not in self._used() and not self.readers(node.name):
                self.nodes.remove(node)

    def _used(self) -> set[Any]:
        """Values that are read by no op, but needed."""
        return {n.attributes.get("like") for n in self.nodes} | set(self.draft.outputs)

    def norms_before_pools(self) -> None:
        """norm(max_pool(x)) = max_pool(norm(x)), exactly, where every scale is above 0: rounding keeps the order.

        The norm can then join the convolution that made x, and a quantize can follow it.
        """
        for node in [n for n in self.nodes if n.kind == "affine"]:
            before = self.node(node.inputs[0])
            assert node.table is not None
            if before is None or not self._can_pass(node, before, ("max_pool",)) or not (node.table[:, 0] > 0).all():
                continue
            self._pass(node, before)

    def quantize_before_pools(self) -> None:
        """quantize(max_pool(x)) = max_pool(quantize(x)), exactly: rounding and clipping keep the order of numbers.

        The pool then moves bytes, and the quantize can join what made x. A pool of one tap only drops pixels: better
        before.
        """
        for node in [n for n in self.nodes if n.kind == "quantize"]:
            assert node.table is not None
            alike = bool((node.table == node.table[:, :, :1]).all())  # one number for all channels
            kinds = ONE_WAY if alike else ("max_pool",)
            while (before := self.node(node.inputs[0])) is not None and self._can_pass(node, before, kinds):
                self._pass(node, before)
                source = self.node(node.inputs[0])
                node.shape = self.draft.inputs[node.inputs[0]] if source is None else source.shape
                if alike:  # as many as there are before a flatten
                    node.table = np.repeat(node.table[:, :, :1], node.channels, axis=2)

    def _can_pass(self, node: DraftNode, before: DraftNode, kinds: tuple[str, ...]) -> bool:
        return (
            before.kind in kinds
            and before.attributes.get("kernel") != [1, 1]
            and self.only_reader(before.name) is node
            and self.only_reader(before.inputs[0]) is before
        )

    def _pass(self, node: DraftNode, before: DraftNode) -> None:
        """`node`, which reads `before`, now comes before it."""
        self.nodes.remove(node)
        self.nodes.insert(self.nodes.index(before), node)
        self.replace(node.name, before.name)
        node.inputs, before.inputs = before.inputs, [node.name]

    def drop_clips(self) -> None:
        """ReLU or ReLU6 before a quantize whose codes end there as well, in every profile."""
        for node in [n for n in self.nodes if n.kind == "quantize"]:
            clip = self.node(node.inputs[0])
            if clip is None or clip.kind != "clip" or self.only_reader(clip.name) is not node:
                continue
            assert node.table is not None and clip.table is not None
            plain = np.array([b == FLOAT for b in node.bits])
            top = np.array([0.0 if b == FLOAT else 2.0**b - 1 for b in node.bits])
            low, high = (clip.table[:, i, None] * node.table[:, 0] + node.table[:, 1] for i in (0, 1))  # (P, C)
            # The clip's ends have the first and the last code: no number changes its code by being clipped.
            integer = (low < 0.5).all(1) & (high > top[:, None] - 0.5).all(1)
            relu = (clip.table[:, 0] == 0) & (clip.table[:, 1] == np.inf)
            if not np.where(plain, relu, integer).all():
                continue
            node.attributes["rectify"] = bool(node.attributes["rectify"] or relu[plain].any())
            self.remove(clip)

    def pad_in_convs(self) -> None:
        """Zeros around a map, read by convolutions alone (an unsigned quantize between): their own padding.

        A signed quantize has no code for 0, so what torch computes there is not what padding is here; that of an 8-bit
        first or last layer stands for floats, and padding with 0 is what torch does with those.
        """
        sizes = {node.attributes.get("like") for node in self.nodes}
        for pad in [n for n in self.nodes if n.kind == "pad" and n.attributes["c"] == [0, 0]]:
            readers = self.readers(pad.name)
            exact = [n for n in readers if "bits" in n.attributes or not n.attributes.get("signed", True)]
            between = [n for n in exact if n.kind == "quantize"]
            convs = [n for n in readers if n not in between] + [c for n in between for c in self.readers(n.name)]
            padded = {pad.name, *(n.name for n in between)}
            if padded & {*self.draft.outputs, *sizes} or any(
                n.kind != "conv" or "transposed" in n.attributes for n in convs
            ):
                continue
            (top, bottom), (left, right) = pad.attributes["h"], pad.attributes["w"]
            more = (top, left, bottom, right)
            for conv in convs:
                conv.attributes["pad"] = [a + b for a, b in zip(conv.attributes["pad"], more, strict=True)]
            for point in self.draft.points.values():
                if point.value in padded:
                    point.pad = tuple(a + b for a, b in zip(point.pad, more, strict=True))
            self.remove(pad)

    def multiply_out(self) -> None:
        """Tables of neighbors into one: (x a + b) c + d = x (a c) + (b c + d)."""
        for node in list(self.nodes):
            before = self.node(node.inputs[0]) if len(node.inputs) == 1 else None
            if before is None or node.kind not in ("affine", "quantize") or self.only_reader(before.name) is not node:
                continue
            if before.kind == "affine" and node.kind == "quantize":
                node.table = composed(before.table, node.table)
                self.remove(before)
                before = self.node(node.inputs[0])
                if before is None or self.only_reader(before.name) is not node:
                    continue
            if before.shape[-1] != node.shape[-1]:
                continue
            if before.kind in LAYERS or (before.kind == "affine" and node.kind == "affine"):
                before.table = composed(before.table, node.table)
                if before.kind in LAYERS:
                    before.attributes["affine"] = True
                if node.kind == "affine":
                    self.remove(node)
                else:
                    assert node.table is not None
                    node.table = np.zeros_like(node.table)
                    node.table[:, 0] = 1.0
        for node in self.nodes:
            if node.kind in ("quantize", *LAYERS) and is_identity(node.table):
                node.table, node.attributes["affine"] = None, False

    def drop_unread(self) -> None:
        for node in reversed(list(self.nodes)):
            if node.kind != "input" and node.name not in self._used() and not self.readers(node.name):
                self.nodes.remove(node)
        kept = {node.attributes["weight"] for node in self.nodes if "weight" in node.attributes}
        for name in [name for name in self.draft.weights if name not in kept]:
            del self.draft.weights[name]
            self.draft.weight_bits.pop(name, None)


def composed(first: np.ndarray | None, then: np.ndarray | None) -> np.ndarray:
    assert then is not None
    if first is None:
        return then.copy()
    return np.stack([first[:, 0] * then[:, 0], first[:, 1] * then[:, 0] + then[:, 1]], axis=1)  # (P, 2, C)


def is_identity(table: np.ndarray | None) -> bool:
    return table is None or bool((table[:, 0] == 1).all() and (table[:, 1] == 0).all())
