"""`from_reference`: a checkpoint of the paper's released code in, our model with the same outputs out.

Three layouts: the CIFAR ResNet, CNN-8 and the ImageNet bottleneck ResNet. Widths, depth, channel multiplier,
classes and input channels are read off names and shapes; the quantizer is theirs, 'dorefa'. Called by users
and by cli/import.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anyprec.errors import CheckpointError, UnsupportedBits
from anyprec.widths import check_widths
from anyprec.zoo.registry import build
from anyprec.zoo.weights import Source, load_exact, read_state_dict

Shapes = dict[str, tuple[int, ...]]
Renames = list[tuple[str, str]]  # (pattern, replacement), applied in turn


@dataclass(frozen=True)
class ReferenceLayout:
    """How one of their networks names its tensors: `marks` tell it from the others, the first is its stem."""

    about: str
    marks: tuple[str, ...]
    network: Callable[[Shapes], tuple[str, dict[str, Any], Renames]]  # -> our network, its options, our names


def from_reference(source: Source) -> nn.Module:
    """Our model from a checkpoint of the authors' code: a state dict, or a file with one.

    It comes in eval mode, at its widest width.
    """
    state = read_state_dict(source)
    layout = find_layout(state)
    if layout is None:
        shown = ", ".join(list(state)[:3])
        expected = "; ".join(f"{known.about}: {', '.join(known.marks)}" for known in LAYOUTS)
        raise CheckpointError(
            f"this is not a checkpoint of the reference code: found {len(state)} tensors ({shown}, ...), "
            f"expected one of [{expected}] and switched norms (.bn_dict.)"
        )
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    first = layout.marks[0]
    if len(shapes.get("fc.weight", ())) != 2 or len(shapes[first]) != 4:
        raise CheckpointError(f"this {layout.about} has no usable 'fc.weight' or {first!r}; the file is incomplete")
    name, options, renames = layout.network(shapes)
    model = build(
        name,
        widths=widths_in(state),
        num_classes=shapes["fc.weight"][0],
        in_channels=shapes[first][1],
        quantizer="dorefa",
        scale="mean",
        **options,
    )
    load_exact(model, {rename(key, renames): value for key, value in state.items()}, "the checkpoint's tensors")
    return model.eval()


def find_layout(state: Mapping[str, Tensor]) -> ReferenceLayout | None:
    """Which of the three it is; None for anything else."""
    if not any(".bn_dict." in name for name in state):
        return None
    return next((known for known in LAYOUTS if all(mark in state for mark in known.marks)), None)


def widths_in(state: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The widths that have norms, in order of number: a file may name '32' before '8'."""
    found = {int(match[1]) for name in state if (match := re.search(r"\.bn_dict\.(\d+)\.", name))}
    try:
        return check_widths(found)
    except UnsupportedBits as error:
        raise CheckpointError(f"the checkpoint has norms for widths {sorted(found)}: {error}") from error


def rename(name: str, renames: Renames) -> str:
    for pattern, ours in renames:
        name = re.sub(pattern, ours, name)
    return name


def multiplier(channels: int, one: int) -> int | float:
    """80 channels where the plain net has 16 -> 5; 8 -> 0.5."""
    return channels // one if channels % one == 0 else channels / one


def indices(shapes: Shapes, pattern: str) -> list[int]:
    """The numbers that `pattern`'s group takes, sorted; an error where one is left out."""
    found = sorted({int(match[1]) for name in shapes if (match := re.match(pattern, name))})
    if found != list(range(len(found))):
        raise CheckpointError(
            f"the checkpoint has blocks {found} of {pattern!r}; one is missing, the file is incomplete"
        )
    return found


# theirs: layers.4.bn1.bn_dict.8.bias; ours: blocks.4.norm1.tables.8.bias
_NORM = (r"\bbn(\d?)\.bn_dict\.", r"norm\1.tables.")


def _cifar(shapes: Shapes) -> tuple[str, dict[str, Any], Renames]:
    total = len(indices(shapes, r"layers\.(\d+)\."))
    # A stage begins with a stride of 2, and so with a skip convolution.
    starts = [i for i in range(total) if f"layers.{i}.skip_conv.weight" in shapes]
    if len(starts) != 2 or starts[0] == 0:
        raise CheckpointError(
            f"this CIFAR ResNet has skip convolutions in blocks {starts}; expected two, none in block 0"
        )
    blocks = (starts[0], starts[1] - starts[0], total - starts[1])
    times = multiplier(shapes["conv0.weight"][0], 16)
    renames = [(r"^layers\.", "blocks."), (r"\bskip_bn\.", "skip_norm."), _NORM]
    if blocks == (3, 3, 3) and times == 5:
        return "resnet20x5", {}, renames
    names = {(1, 1, 1): "resnet8", (3, 3, 3): "resnet20"}
    if blocks in names:
        return names[blocks], {"multiplier": times}, renames
    return "resnet-cifar", {"blocks": blocks, "multiplier": times}, renames


def _cnn8(shapes: Shapes) -> tuple[str, dict[str, Any], Renames]:
    channels = shapes["layers.0.weight"][0]
    if channels % 6:
        raise CheckpointError(f"this CNN-8 has {channels} channels in its first layer; expected a multiple of 6")
    # Convolutions by their place in the authors' nn.Sequential; norms come right after all but the first and
    # last.
    places = (0, 3, 6, 10, 13, 16, 20)
    renames = [(rf"^layers\.{place}\.", f"conv{i}.") for i, place in enumerate(places)]
    renames += [(rf"^layers\.{place + 1}\.bn_dict\.", f"norm{i}.tables.") for i, place in enumerate(places)]
    return "cnn8", {"expand": channels // 6}, renames


def _bottleneck(shapes: Shapes) -> tuple[str, dict[str, Any], Renames]:
    blocks = tuple(len(indices(shapes, rf"layer{stage}\.(\d+)\.")) for stage in (1, 2, 3, 4))
    options: dict[str, Any] = {} if blocks == (3, 4, 6, 3) else {"blocks": blocks}
    if (times := multiplier(shapes["conv1.weight"][0], 64)) != 1:
        options["multiplier"] = times
    # Our blocks are counted through: layer2.1 of (3, 4, 6, 3) is blocks.4.
    renames = [
        (rf"^layer{stage + 1}\.{i}\.", f"blocks.{sum(blocks[:stage]) + i}.")
        for stage in range(4)
        for i in range(blocks[stage])
    ]
    renames += [(r"^conv1\.", "conv0."), (r"\bdownsample\.0\.", "skip_conv.")]
    renames += [(r"\bdownsample\.1\.bn_dict\.", "skip_norm.tables."), _NORM]
    return "resnet50", options, renames


LAYOUTS = (
    ReferenceLayout("CIFAR ResNet", ("conv0.weight", "layers.0.conv0.weight", "layers.0.conv1.weight"), _cifar),
    ReferenceLayout("CNN-8", ("layers.0.weight", "layers.3.weight", "layers.20.weight"), _cnn8),
    ReferenceLayout("ImageNet ResNet", ("conv1.weight", "layer1.0.conv2.weight", "layer4.0.conv2.weight"), _bottleneck),
)
