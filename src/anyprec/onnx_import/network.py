"""OnnxNetwork: the nodes of an ONNX model as torch layers and functions, run in order.

Layers with weights are nn.Conv2d, nn.Linear, nn.BatchNorm2d and their like, under the names of the graph, so that
`convert` sees them. Shapes are worked out once, when the network is built: it runs on two batch sizes, and whatever
follows only from shapes and constants is computed for both. What differs between them is the batch. operators.py says
what each operator becomes; importing.py reads files and checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyprec.errors import UnsupportedOperation

BATCHES = (2, 3)  # the network is built by running these two
Function = Callable[..., Any]


@dataclass(frozen=True)
class Step:
    """One node: calls the submodule `module`, or `function`; `inputs` are values or constants by name."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    module: str = ""
    function: Function | None = None


class OnnxNetwork(nn.Module):
    """A float network read from ONNX. Call it with the model's inputs, in order."""

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.input_names, self.output_names = tuple(inputs), tuple(outputs)
        self.steps: list[Step] = []
        self.constants: dict[str, str] = {}  # value -> the parameter or buffer that holds it
        self.expanded: dict[str, int] = {}  # constants that have one row and need one for each image, along this axis
        self.input_shapes: tuple[tuple[int, ...], ...] = ()  # without the batch
        self.onnx_graph: Tensor = torch.zeros(0, dtype=torch.uint8)  # no part of the state: what it was built from
        self.imported: Any = None  # importing.ImportReport

    def forward(self, *inputs: Tensor) -> Any:
        if len(inputs) != len(self.input_names):
            raise TypeError(f"this network takes {len(self.input_names)} inputs ({', '.join(self.input_names)})")
        values: dict[str, Any] = dict(zip(self.input_names, inputs, strict=True))
        for step in self.steps:
            made = self.run_step(step, values, inputs[0].shape[0])
            values.update(zip(step.outputs, made if len(step.outputs) > 1 else (made,), strict=True))
        found = tuple(self.read(name, values, inputs[0].shape[0]) for name in self.output_names)
        return found[0] if len(found) == 1 else found

    def run_step(self, step: Step, values: Mapping[str, Any], batch: int) -> Any:
        read = [self.read(name, values, batch) for name in step.inputs]
        return self.get_submodule(step.module)(*read) if step.function is None else step.function(*read)

    def read(self, name: str, values: Mapping[str, Any], batch: int) -> Any:
        if name in values:
            return values[name]
        constant = getattr(self, self.constants[name])
        if name in self.expanded:
            sizes = [-1] * constant.dim()
            sizes[self.expanded[name]] = batch
            return constant.expand(sizes)
        return constant

    # --- Building ----------------------------------------------------------------------------------------------------

    def add_layer(self, path: str, layer: nn.Module) -> str:
        """Registers a layer under a dotted name, in containers as needed; returns the name it got."""
        parts = [safe_name(part) for part in path.split(".") if part] or ["layer"]
        while True:
            parent: nn.Module = self
            for part in parts[:-1]:
                inner = parent._modules.get(part)
                if inner is None:
                    inner = Container()
                    parent.add_module(part, inner)
                if not isinstance(inner, Container):
                    break
                parent = inner
            else:
                if parts[-1] not in parent._modules:
                    parent.add_module(parts[-1], layer)
                    return ".".join(parts)
            parts[-1] += "_"
            if len(parts) > 1 and not isinstance(parent, (Container, OnnxNetwork)):
                parts = ["_".join(parts)]

    def add_constant(self, name: str, array: np.ndarray, trained: bool) -> None:
        """Float arrays that came with the model are parameters: position embeddings, scales of layers."""
        held = safe_name(name)
        while held in {*self._parameters, *self._buffers, *self._modules}:
            held += "_"
        tensor = torch.from_numpy(np.array(array))
        if trained and tensor.is_floating_point() and tensor.numel() > 1:
            self.register_parameter(held, nn.Parameter(tensor))
        else:
            self.register_buffer(held, tensor)
        self.constants[name] = held


class Container(nn.Module):
    """A part of a dotted name: holds layers, does nothing."""


def safe_name(text: str) -> str:
    made = re.sub(r"\W", "_", text) or "_"
    return f"{made}_" if hasattr(nn.Module, made) or made in ("steps", "constants", "expanded") else made


@dataclass(frozen=True)
class Known:
    """A value that follows from shapes and constants alone, for each of BATCHES."""

    arrays: tuple[np.ndarray, np.ndarray]
    initializer: bool = False

    @property
    def same(self) -> bool:
        a, b = self.arrays
        return a.shape == b.shape and np.array_equal(a, b)


class NetworkBuilder:
    """Builds an OnnxNetwork node by node. operators.py has a function of (builder, node) for each operator."""

    def __init__(
        self, onnx: Any, model: Any, inputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], fixed_batch: bool
    ) -> None:
        self.onnx, self.graph, self.fixed_batch = onnx, model.graph, fixed_batch
        self.taken_in: set[str] = set()  # outputs of nodes that went into the layer before them
        self.opset = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 1)
        self.net = OnnxNetwork(list(inputs), [value.name for value in model.graph.output])
        self.net.input_shapes = tuple(shape for shape, _ in inputs.values())
        self.known: dict[str, Known] = {}
        self.used: set[str] = set()  # initializers that became parameters
        for one in model.graph.initializer:
            array = (
                onnx.numpy_helper.to_array(one) if one.raw_data or not is_stripped(one) else np.zeros(one.dims, "f4")
            )
            self.known[one.name] = Known((array, array), initializer=True)
        rng = torch.Generator().manual_seed(0)
        self.values: list[dict[str, Any]] = [
            {name: example(shape, kind, batch, rng) for name, (shape, kind) in inputs.items()} for batch in BATCHES
        ]
        self.readers: dict[str, int] = {}
        for node in model.graph.node:
            for name in node.input:
                self.readers[name] = self.readers.get(name, 0) + 1
        for value in model.graph.output:
            self.readers[value.name] = self.readers.get(value.name, 0) + 1

    # --- What operators ask for --------------------------------------------------------------------------------------

    def refuse(self, node: Any, why: str) -> UnsupportedOperation:
        return UnsupportedOperation(f"{node.op_type} {node.name or node.output[0]!r}: {why}")

    def attributes(self, node: Any) -> dict[str, Any]:
        found = {one.name: self.onnx.helper.get_attribute_value(one) for one in node.attribute}
        return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}

    def has(self, node: Any, index: int) -> bool:
        return len(node.input) > index and bool(node.input[index])

    def constant(self, node: Any, index: int) -> np.ndarray | None:
        """An input that is the same for every batch; None where it is left out or computed."""
        if not self.has(node, index):
            return None
        found = self.known.get(node.input[index])
        return found.arrays[0] if found is not None and found.same else None

    def needed(self, node: Any, index: int, what: str) -> np.ndarray:
        found = self.constant(node, index)
        if found is None:
            raise self.refuse(node, f"its {what} is computed; only a constant one is supported")
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a value, with the first of BATCHES."""
        if name in self.known:
            return self.known[name].arrays[0].shape
        return tuple(self.values[0][name].shape)

    def weight(self, node: Any, index: int, what: str = "weight") -> Tensor:
        """A weight that goes into a layer."""
        array = self.needed(node, index, what)
        self.used.add(node.input[index])
        return torch.from_numpy(np.array(array, np.float32))

    def layer(self, node: Any, layer: nn.Module, *inputs: str, weight: int | None = 1, output: str = "") -> None:
        """The node becomes this layer. It is called after its weight (`conv1.weight`), or after the node."""
        name = self.net.add_layer(self.path(node, weight), layer.eval())  # or norms would learn from the examples
        self.add(Step((output or node.output[0],), inputs or (node.input[0],), module=name))

    def path(self, node: Any, weight: int | None) -> str:
        if weight is not None and self.has(node, weight):
            owner, dot, leaf = node.input[weight].rpartition(".")
            if dot and leaf in ("weight", "weight_v", "scale") and "::" not in owner:
                return str(owner)
        parts = [part for part in re.split(r"[/]+", node.name) if part]
        if len(parts) > 1 and re.fullmatch(rf"{node.op_type}(_\d+)?", parts[-1]):
            parts = parts[-2:-1] if "." in parts[-2] else parts[:-1]
        return ".".join(parts) or f"{node.op_type.lower()}_{len(self.net.steps)}"

    def function(self, node: Any, function: Function, inputs: Sequence[str] | None = None) -> None:
        self.add(Step(tuple(node.output), tuple(node.input if inputs is None else inputs), function=function))

    def add(self, step: Step) -> None:
        """Adds a step and runs it on both batches."""
        for name in step.inputs:
            self.hold(name)
        self.net.steps.append(step)
        for batch, values in zip(BATCHES, self.values, strict=True):
            with torch.no_grad():
                made = self.net.run_step(step, values, batch)
            values.update(zip(step.outputs, made if len(step.outputs) > 1 else (made,), strict=True))

    def hold(self, name: str) -> None:
        """A known value that is read as a tensor becomes a parameter or buffer."""
        if name not in self.known or name in self.net.constants:
            return
        known = self.known[name]
        if known.same:
            self.net.add_constant(name, known.arrays[0], trained=known.initializer)
            self.used.add(name)
            return
        a, b = known.arrays
        axes = [i for i, sizes in enumerate(zip(a.shape, b.shape, strict=False)) if sizes == BATCHES]
        if a.ndim == b.ndim and len(axes) == 1:
            one = np.take(a, [0], axes[0])
            if all(np.array_equal(np.broadcast_to(one, array.shape), array) for array in known.arrays):
                self.net.add_constant(name, one, trained=True)
                self.net.expanded[name] = axes[0]
                return
        raise UnsupportedOperation(f"value {name!r} depends on the batch size in a way that is not supported")

    def sizes(self, node: Any, index: int, given: Any = None) -> Callable[[Tensor], list[int]]:
        """Sizes from an input or attribute: a function of the value that is read. Those that differ between the two
        batches are the batch, or whatever is left (-1)."""
        known = self.known.get(node.input[index]) if given is None else Known((np.array(given), np.array(given)))
        if known is None:
            raise self.refuse(
                node, "its sizes are computed from values; only sizes that follow from shapes are supported"
            )
        first, second = (array.astype(np.int64).reshape(-1).tolist() for array in known.arrays)
        if len(first) != len(second):
            raise self.refuse(node, "its number of sizes depends on the batch")
        varying = [i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]]
        batch_at = {i for i in varying if (first[i], second[i]) == BATCHES}
        rest = [i for i in varying if i not in batch_at]
        if len(rest) > 1 or (rest and -1 in first):
            raise self.refuse(node, "two of its sizes depend on the batch")
        fixed = [-1 if i in rest else size for i, size in enumerate(first)]
        return lambda x: [x.shape[0] if i in batch_at else size for i, size in enumerate(fixed)]

    # --- All nodes ---------------------------------------------------------------------------------------------------

    def build(self, operators: Mapping[str, Callable[[NetworkBuilder, Any], None]]) -> OnnxNetwork:
        unknown = {
            node.op_type: node.name or node.output[0] for node in self.graph.node if not self.is_known(node, operators)
        }
        if unknown:
            shown = ", ".join(f"{kind} (node {name!r})" for kind, name in list(unknown.items())[:5])
            raise UnsupportedOperation(
                f"operators that cannot be imported: {shown}; supported are {', '.join(sorted(operators))}"
            )
        for node in self.graph.node:
            if node.output[0] in self.taken_in:
                continue
            if node.op_type == "Shape":
                self.shape_of(node)
            elif node.op_type == "Constant" or all(name in self.known for name in node.input if name):
                self.fold(node)
            else:
                try:
                    operators[node.op_type](self, node)
                except (RuntimeError, IndexError, TypeError, KeyError) as error:
                    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                    raise self.refuse(node, f"it does not run in torch: {first}") from error
        for name in self.net.output_names:
            self.hold(name)
        return self.net.eval()

    def is_known(self, node: Any, operators: Mapping[str, Any]) -> bool:
        return node.domain in ("", "ai.onnx") and (node.op_type in operators or node.op_type in ("Shape", "Constant"))

    def shape_of(self, node: Any) -> None:
        at = self.attributes(node)
        if node.input[0] in self.known:
            shapes = [array.shape for array in self.known[node.input[0]].arrays]
        else:
            shapes = [tuple(values[node.input[0]].shape) for values in self.values]
        a, b = (np.array(shape[at.get("start", 0) : at.get("end")], np.int64) for shape in shapes)
        self.known[node.output[0]] = Known((a, b))

    def fold(self, node: Any) -> None:
        """A node that reads only what is known, by ONNX's own reference."""
        make, reference = self.onnx.helper, __import__("onnx.reference").reference
        names = list(dict.fromkeys(name for name in node.input if name))
        results: list[list[np.ndarray]] = []
        for which in (0, 1):
            feeds = {name: self.known[name].arrays[which] for name in names}
            kinds = {name: self.onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
            inputs = [make.make_tensor_value_info(name, kinds[name], None) for name in names]
            outputs = [make.make_tensor_value_info(name, 0, None) for name in node.output if name]
            body = make.make_graph([node], "one", inputs, outputs)
            model = make.make_model(body, opset_imports=[make.make_opsetid("", self.opset)])
            results.append([np.asarray(v) for v in reference.ReferenceEvaluator(model).run(None, feeds)])
        for name, a, b in zip([name for name in node.output if name], *results, strict=True):
            trained = node.op_type in ("Identity", "Constant", "Cast", "Transpose", "Reshape", "Unsqueeze")
            self.known[name] = Known((a, b), initializer=trained)


def is_stripped(initializer: Any) -> bool:
    """A weight whose numbers are kept elsewhere: in the state dict of a checkpoint."""
    fields = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
    return bool(np.prod(initializer.dims)) and not any(len(getattr(initializer, one)) for one in fields)


def example(shape: tuple[int, ...], kind: Any, batch: int, rng: torch.Generator) -> Tensor:
    """Noise; indices are 0 and 1, which any table has."""
    made = torch.randn((batch, *shape), generator=rng)
    return made.to(kind) if kind.is_floating_point else (made > 0).to(kind)
