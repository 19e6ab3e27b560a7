"""A plan into the model file: one more profile and one more row of every table; no weight is repeated.

add_profile(graph, ...) -> Graph; file.write writes it. Called by cli/search.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from anyprec.errors import ProfileError
from anyprec.format.graph import Graph
from anyprec.search.layers import Plan, PlanLayers
from anyprec.search.tables import Rows
from anyprec.search.trial import stored_tables
from anyprec.widths import Profile

RESERVED = ("auto", "random")  # bits="auto" is a cascade, bits="random" draws a width
MOST_PROFILES = 256  # FORMAT.md, section 4


def check_name(graph: Graph, name: str) -> str:
    """A name that a mixed profile of this file may have; one it has already is replaced."""
    if name in RESERVED:
        raise ProfileError(f"profile name {name!r} is not allowed: bits={name!r} means something else; choose another")
    Profile(name, {"layer": 1})  # refuses what no profile may be called
    if len(graph.profiles) >= MOST_PROFILES and name not in {p.name for p in graph.profiles}:
        raise ProfileError(f"{graph.name} has {MOST_PROFILES} profiles, as many as a file can hold; leave some out")
    return name


def add_profile(layers: PlanLayers, name: str, plan: Plan, rows: Rows, accuracy: float | None = None) -> Graph:
    """The file's graph with this plan as its last profile. `rows` are those of PlanTrial."""
    graph = layers.file_graph
    check_name(graph, name)
    kept = [row for row, profile in enumerate(graph.profiles) if profile.name != name]
    new = stored_tables(rows)
    return replace(
        graph,
        profiles=(*(graph.profiles[row] for row in kept), layers.graph_profile(name, plan, accuracy)),
        tables={op: np.concatenate([table[kept], new[op][None]]) for op, table in graph.tables.items()},
    )
