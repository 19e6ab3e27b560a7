"""A model file that runs, for verify.py: images and a profile in, outputs and values between them out.

By the native engine, or by the oracle where the extension is not built.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from anyprec.errors import BadGraph, InputError
from anyprec.format.check import check_graph
from anyprec.format.file import metadata_of, read
from anyprec.format.graph import INPUT, Graph, Op
from anyprec.format.header import make_header
from anyprec.format.model_file import ModelFile
from anyprec.format.record import to_record
from anyprec.run.oracle import run_graph

Inputs = Mapping[str, np.ndarray]  # by name, in the order of the file


class Mismatch(Exception):
    """Where a file leaves the module it was made from, and how."""


class PackedAnswers(Protocol):
    """A model file that runs, on inputs by name: images (N, H, W, C), others in torch's order."""

    engine: str

    def outputs(self, x: Inputs, profile: str) -> list[np.ndarray]: ...

    def values(self, x: Inputs, profile: str) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Outputs, and the values that are wanted: codes, or floats in float profiles."""


class OracleAnswers:
    engine = "oracle"

    def __init__(self, path: Path) -> None:
        self.graph = read(path, verify=True)

    def outputs(self, x: Inputs, profile: str) -> list[np.ndarray]:
        return self.values(x, profile)[0]

    def values(self, x: Inputs, profile: str) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        more = {name: array for name, array in x.items() if name != INPUT}
        try:
            values = run_graph(self.graph, x[INPUT], profile, more=more, all_values=True)
        except (AssertionError, BadGraph) as error:
            raise InputError(str(error)) from error
        return [values[name] for name in self.graph.outputs], values


class NativeAnswers:
    """The engine tells outputs alone, so a second file has the values as outputs; both must answer the same."""

    def __init__(self, path: Path, graph: Graph, wanted: Sequence[str], probe: Path) -> None:
        from anyprec.run.model import load

        self.wanted = wanted
        write_probe(with_outputs(graph, wanted), path, probe)
        self.file, self.probe = (load(p, layout="NHWC") for p in (path, probe))
        self.engine = self.file.isa

    def outputs(self, x: Inputs, profile: str) -> list[np.ndarray]:
        return self._run(self.file, x, profile)

    @staticmethod
    def _run(model: Any, x: Inputs, profile: str) -> list[np.ndarray]:
        return as_list(model(*x.values(), bits=profile))

    def values(self, x: Inputs, profile: str) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        made, more = self.outputs(x, profile), self._run(self.probe, x, profile)
        for ours, other in zip(made, more, strict=False):
            if not np.array_equal(ours, other, equal_nan=True):
                raise Mismatch("the engine gives other outputs when it also gives the values between")
        return made, dict(zip(self.wanted, more[len(made) :], strict=True))


def as_list(outputs: np.ndarray | tuple[np.ndarray, ...]) -> list[np.ndarray]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def with_outputs(graph: Graph, wanted: Sequence[str]) -> Graph:
    """The graph with these values (codes, or floats in float profiles) as further outputs."""
    taken = {op.name for op in graph.ops}
    names: list[str] = []
    for number in range(len(wanted)):
        name = f"value{number}"
        while name in taken:
            name += "_"
        taken.add(name)
        names.append(name)
    unit = np.tile(np.array([1, 0], np.float32), (len(graph.profiles), 1))  # (P, 2)
    return replace(
        graph,
        ops=(*graph.ops, *(Op(name, "dequantize", (value,)) for name, value in zip(names, wanted, strict=True))),
        outputs=(*graph.outputs, *names),
        tables={**graph.tables, **dict.fromkeys(names, unit)},
    )


def write_probe(graph: Graph, source: Path, probe: Path) -> None:
    """A model file of this graph; all but the tables it adds is copied from `source`, as it is there."""
    record = to_record(graph, {})
    needed = check_graph(record).tensors
    with ModelFile(source) as file, open(probe, "xb") as out:
        known = file.graph_json["checksums"]
        added = {name: graph.tables[name.removeprefix("table.")] for name in needed if name not in known}
        record["checksums"] = {name: known.get(name) or f"{zlib.crc32(added[name].data):08x}" for name in needed}
        out.write(make_header(metadata_of(record), [(name, *form) for name, form in needed.items()]))
        for name in needed:
            if name in added:
                out.write(added[name].data)
            else:
                place = file.tensors[name]
                out.write(file.read(file.data_start + place.begin, file.data_start + place.end))


def open_answers(path: Path, graph: Graph, wanted: Sequence[str], probe: Path) -> PackedAnswers:
    """The engine; the oracle where it is not built."""
    try:
        return NativeAnswers(path, graph, wanted, probe)
    except ImportError:
        return OracleAnswers(path)
