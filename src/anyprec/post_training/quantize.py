"""`quantize`: a float network and some pictures in, a packed model file and a report out. No labels, no training.

The pictures are split: most are for `ptq`, the rest are held out, and show how often each width answers as float does.
The file is compared with the network by `pack` before it gets its name. Called by users and cli/quantize.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyprec.data.folder import SUFFIXES
from anyprec.data.sets import pillow_open, undecodable
from anyprec.errors import AnyprecError, DataError, ModelFileError, UnsupportedOperation
from anyprec.files import cannot_write, is_special
from anyprec.nn.convert import convert
from anyprec.nn.observe import run_call
from anyprec.nn.plain import to_float_network
from anyprec.nn.switching import bits as at_bits
from anyprec.packing.packing import PackReport, pack, unsupported
from anyprec.packing.trace import summary
from anyprec.post_training.gptq import GptqSettings
from anyprec.post_training.lockstep import first_tensor
from anyprec.post_training.methods import check_method, integer_widths, ptq
from anyprec.post_training.named_network import named_network
from anyprec.preprocessing import Preprocessing
from anyprec.progress import Progress
from anyprec.run.image_limits import check_file
from anyprec.widths import FLOAT, INTEGER_WIDTHS

MOST_IMAGES = 512  # looked at, unless `count` says otherwise
HELD_OUT = 5  # one picture of so many is held out
AT_ONCE = 32  # images of a batch
PACK_IMAGES = 4  # that the file is compared with the network on


@dataclass(frozen=True)
class QuantizeReport:
    """What each width costs. `str()` is a table to read, `to_dict()` is ready for JSON."""

    path: str
    network: str
    images: int  # that ranges, codes and scales were fitted to
    held_out: int  # that the figures below are measured on; 0: those are measured on the same images
    agreement: dict[int, float]  # width -> percent of answers (top-1) equal to float's
    error: dict[int, float]  # width -> difference of the outputs from float's, relative (root mean square)
    pack: PackReport
    pictures: str = ""  # how pictures became inputs; empty: inputs were given

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        on = f"{self.held_out} held-out images" if self.held_out else f"the same {self.images} images: too few to split"
        lines = [
            f"{self.path}: {self.network}, fitted to {self.images} images, compared with float on {on}",
            *([f"  pictures {self.pictures}"] if self.pictures else []),
            f"  {'bits':>4}  {'same answer':>11}  {'output error':>12}  {'bytes':>12}",
        ]
        for bits, same in self.agreement.items():
            size = self.pack.bytes[str(bits)]
            lines.append(f"  {bits:>4}  {same:>10.1f}%  {100 * self.error[bits]:>11.1f}%  {size:>12,}")
        return "\n".join(lines)


def quantize(
    net: nn.Module | str | Path,
    images: Any,
    path: str | Path,
    *,
    widths: Iterable[int] = INTEGER_WIDTHS,
    method: str = "gptq",
    preprocessing: Preprocessing | None = None,
    labels: Sequence[str] | None = None,
    name: str | None = None,
    keep: Iterable[str] = ("first", "last"),
    first_last: str = "float",
    count: int = MOST_IMAGES,
    gptq: GptqSettings | None = None,
    progress: bool = False,
) -> QuantizeReport:
    """Write `net` to `path` as one model file that runs at any of `widths`, and say what each of them costs.

    net: any float network that `convert` and `pack` take, or an any-precision one, whose float half is taken; or what
        `anyprec quantize` takes: an ONNX file, a timm name, "module:function" or "file.py:function", whose code runs.
    images: a folder of pictures (folders inside it too), a list of picture files, or inputs as the network takes them:
        a tensor (N, ...), or a list of tensors or batches. No labels. Some hundred of the kind it will meet.
    method: one of `ptq` whose result can be packed: "gptq", "bc" or "bs".
    preprocessing: how pictures become inputs; kept in the file. A timm network says it itself.
    labels, name, first_last: those of `pack`. keep: that of `convert`. gptq: parts of that method.
    count: looks at no more images than this, spread evenly over all.
    progress: shows progress lines.
    """
    wanted = integer_widths(widths)
    check_method(method)
    if method == "aciq":
        raise AnyprecError("method='aciq' cannot be packed; choose 'gptq', 'bc' or 'bs'")
    check_output(Path(path))
    known = None
    if isinstance(net, (str, os.PathLike)):
        name = name or network_name(net)
        net, known = named_network(os.fspath(net), size=preprocessing.size if preprocessing else None)
    if not isinstance(net, nn.Module):
        raise AnyprecError(f"quantize was given a {type(net).__name__}; give it an nn.Module, or the name of one")
    net = to_float_network(net).eval()
    how = preprocessing or known or preprocessing_of_timm(net)
    inputs = read_inputs(images, how, count, progress)
    home = next(net.parameters(), torch.empty(0))
    inputs = inputs.to(home.device, home.dtype if inputs.is_floating_point() else inputs.dtype)
    seen, tested = split_images(inputs)
    check_network(net, seen[:2], wanted, keep, labels)
    model = ptq(net, list(torch.split(seen, AT_ONCE)), method, wanted, keep=keep, gptq=gptq, progress=progress)
    report = pack(
        model, path, example=seen[:PACK_IMAGES], widths=wanted, labels=labels, image=how, name=name,
        first_last=first_last,
    )  # fmt: skip
    agreement, error = compare_with_float(model, tested, wanted, progress)
    held_out = 0 if tested is seen else len(tested)
    pictures = str(how) if how is not None and are_files(images) else ""
    return QuantizeReport(str(path), report.network, len(seen), held_out, agreement, error, report, pictures)


def are_files(images: Any) -> bool:
    first = next(iter(images), None) if isinstance(images, (list, tuple)) else images
    return isinstance(first, (str, os.PathLike))


def network_name(net: str | os.PathLike[str]) -> str:
    """What the file calls it: "nets.py:make" -> "make", "folder/net.onnx" -> "net"."""
    text = os.fspath(net)
    return Path(text).stem if text.lower().endswith(".onnx") else text.rpartition(":")[2]


def check_output(path: Path) -> None:
    """Fitting takes minutes: a name that cannot be written is found before."""
    if is_special(path):
        raise ModelFileError(f"{path} is a device or a pipe; give the name of a file, such as net.apm")
    kind = errno.EISDIR if path.is_dir() else 0 if path.parent.is_dir() else errno.ENOENT
    if not kind and not os.access(path.parent, os.W_OK):
        kind = errno.EACCES
    if kind:
        raise cannot_write(path, OSError(kind, os.strerror(kind)), ModelFileError)


@torch.no_grad()
def check_network(
    net: nn.Module, few_inputs: Tensor, widths: Sequence[int], keep: Iterable[str], labels: Sequence[str] | None
) -> None:
    """What `pack` would refuse after minutes of fitting is refused now."""
    made = first_tensor(run_call(net, ((few_inputs,), {}), "the images"))
    if labels is not None and made.dim() == 2 and made.shape[1] != len(labels):
        raise AnyprecError(
            f"{len(labels)} labels for a network with {made.shape[1]} classes; give one for each, in order"
        )
    model = convert(net, [max(widths), FLOAT], few_inputs, keep=keep, clip="calibrated")
    if lines := unsupported(model, few_inputs):
        raise UnsupportedOperation(summary(lines))


def split_images(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Those to fit to, and every fifth, to compare on; fewer than ten are not split."""
    if len(inputs) < 2 * HELD_OUT:
        return inputs, inputs
    out = torch.arange(len(inputs)) % HELD_OUT == HELD_OUT - 1
    return inputs[~out], inputs[out]


@torch.no_grad()
def compare_with_float(
    model: nn.Module, inputs: Tensor, widths: Sequence[int], progress: bool
) -> tuple[dict[int, float], dict[int, float]]:
    """Width -> percent of answers equal to float's; width -> relative error of the outputs."""
    agreement, error = {}, {}
    bar = Progress("compare", len(widths) + 1, "width") if progress else None
    with bar or torch.no_grad():
        plain = outputs(model, inputs, FLOAT)
        for bits in widths:
            if bar is not None:
                bar.update()
            made = outputs(model, inputs, bits)
            axis = class_axis(made)
            agreement[bits] = 100 * float((made.argmax(axis) == plain.argmax(axis)).double().mean())
            error[bits] = float((made - plain).norm() / plain.norm().clamp_min(1e-30))
        if bar is not None:
            bar.update()
    return agreement, error


def class_axis(made: Tensor) -> int:
    """Scores are (N, classes) or (N, classes, H, W); of texts (N, tokens, classes)."""
    return {1: 0, 3: 2}.get(made.dim(), 1)


def outputs(model: nn.Module, inputs: Tensor, bits: int) -> Tensor:
    with at_bits(model, bits):
        return torch.cat([first_tensor(model(x)) for x in torch.split(inputs, AT_ONCE)])


# --- Images ---


def read_inputs(images: Any, how: Preprocessing | None, count: int, progress: bool) -> Tensor:
    """(N, ...) as the network takes them, at most `count`."""
    if count < 1:
        raise DataError(f"count={count} is not a number of images; give at least 1")
    if isinstance(images, (str, os.PathLike)):
        images = find_pictures(Path(images))
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(images)
    if isinstance(images, Tensor):
        return few_tensors(images, count)
    items = list(images) if isinstance(images, Iterable) else []
    if not items:
        raise DataError(f"images is {type(images).__name__} {images!r:.60}; give a folder, picture files or tensors")
    if all(isinstance(item, (str, os.PathLike)) for item in items):
        return read_pictures([Path(items[i]) for i in few(len(items), count)], how, progress)
    parts = [item[0] if isinstance(item, (tuple, list)) else item for item in items]  # (images, labels)
    tensors = [torch.as_tensor(part) for part in parts if isinstance(part, (Tensor, np.ndarray))]
    if len(tensors) < len(parts):
        wrong = next(type(part).__name__ for part in parts if not isinstance(part, (Tensor, np.ndarray)))
        raise DataError(f"images holds a {wrong}; give names of picture files, or tensors as the network takes them")
    if len({t.shape[1:] for t in tensors}) > 1:
        raise DataError(f"images differ in shape: {sorted({tuple(t.shape[1:]) for t in tensors})[:3]}; make them alike")
    single = tensors[0].dim() == 3 and not isinstance(items[0], (tuple, list))
    return few_tensors(torch.stack(tensors) if single else torch.cat(tensors), count)


def few(total: int, count: int) -> list[int]:
    """At most `count` numbers below `total`, evenly spread: a folder is sorted by name, often by class."""
    if not total:
        raise DataError("there are no images; give at least one, better some hundred")
    return [i * total // min(count, total) for i in range(min(count, total))]


def few_tensors(images: Tensor, count: int) -> Tensor:
    return images[torch.tensor(few(len(images), count))]


def find_pictures(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; give one with pictures in it ({' '.join(SUFFIXES)})")
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    if not found:
        raise DataError(f"{folder} has no pictures in it ({' '.join(SUFFIXES)}); give another folder")
    return found


def read_pictures(files: Sequence[Path], how: Preprocessing | None, progress: bool) -> Tensor:
    if how is None:
        raise DataError(
            "how pictures become this network's inputs is not known; give "
            "preprocessing=anyprec.Preprocessing(mean=(...), std=(...), size=224, to=256)"
        )
    if how.size is None:
        raise DataError("pictures of any size cannot be one batch; give preprocessing a size")
    scale, shift = (torch.tensor(numbers).view(-1, 1, 1) for numbers in how.image)
    open_image, made = pillow_open(), []
    bar = Progress("read", len(files), "picture") if progress else None
    with bar or torch.no_grad():
        for file in files:
            check_file(file)
            try:
                with open_image(file) as picture:
                    pixels = how.pixels(picture)
            except Exception as error:  # Pillow raises a dozen kinds on broken files
                raise undecodable(file, error) from error
            made.append(torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float() * scale + shift)
            if bar is not None:
                bar.update()
    return torch.stack(made)


def preprocessing_of_timm(net: nn.Module) -> Preprocessing | None:
    """What a timm network says of its pictures (`pretrained_cfg`); None of others."""
    facts = getattr(net, "pretrained_cfg", None)
    try:
        height, width = facts["input_size"][1:]  # type: ignore[index]
        share = float(facts.get("crop_pct") or 1.0)  # type: ignore[union-attr]
        kind = str(facts.get("interpolation") or "bilinear")  # type: ignore[union-attr]
        to = tuple(max(n, int(n / share)) for n in (height, width))
        return Preprocessing(
            tuple(facts["mean"]), tuple(facts["std"]), (height, width), to=to,  # type: ignore[index]
            filter=kind if kind in ("bilinear", "bicubic", "lanczos", "nearest") else "bilinear",
        )  # fmt: skip
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
