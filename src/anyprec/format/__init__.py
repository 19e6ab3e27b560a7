"""The model file: a Graph (graph.py) on disk. Needs only numpy; FORMAT.md describes it. Used by pack, run, inspect.

sizes = write(graph, "net.apm")
graph = read("net.apm", max_bits=4)
with ModelFile("net.apm") as file: file.codes("layer1.0.conv1", 2)
"""

from anyprec.format.file import read, rewrite, truncate, write
from anyprec.format.graph import FORMATS, INPUT, Graph, GraphProfile, Op, Weight
from anyprec.format.model_file import ModelFile
from anyprec.format.planes import nested_planes, separate_planes
from anyprec.format.sizes import Sizes

__all__ = [
    "FORMATS",
    "INPUT",
    "Graph",
    "GraphProfile",
    "ModelFile",
    "Op",
    "Sizes",
    "Weight",
    "nested_planes",
    "read",
    "rewrite",
    "separate_planes",
    "truncate",
    "write",
]
