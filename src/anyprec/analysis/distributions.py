"""The data behind the paper's pictures: activations under different widths, and how weights lose their bits.

`toy_activations` (a random layer, the toy example), `layer_histograms` (before and after the switched norms of a
trained network) and `truncate_weights` (one kernel at every width). Plain numpy comes out; drawing is others' work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from anyprec.errors import AnyprecError, UnknownLayer, UnsupportedBits
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.layers import AnyLayer
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.observe import calls_from_loader, preserve_state
from anyprec.nn.quantizers import make_quantizer
from anyprec.nn.switching import any_layers, set_bits, switch_norms, widths_of
from anyprec.widths import FLOAT, INTEGER_WIDTHS, check_widths

PLACES = ("before", "after")  # the norm
SPREAD = 4.0  # deviations from the mean that a histogram reaches


@dataclass(frozen=True)
class Histogram:
    """Values of several widths in the same bins. Those outside of the bins are counted in `outside`."""

    edges: npt.NDArray[np.float64]  # (bins + 1,)
    counts: dict[int, npt.NDArray[np.int64]]  # bits -> (bins,)
    mean: dict[int, float]
    std: dict[int, float]
    outside: dict[int, int]

    def density(self, bits: int) -> npt.NDArray[np.float64]:
        """Counts as a density: its area is the share of values inside the bins."""
        total = self.counts[bits].sum() + self.outside[bits]
        return self.counts[bits] / (max(int(total), 1) * np.diff(self.edges))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "edges": self.edges.tolist(),
            "widths": {
                str(k): {
                    "counts": self.counts[k].tolist(), "mean": self.mean[k], "std": self.std[k],
                    "outside": self.outside[k],
                }
                for k in self.counts
            },
        }  # fmt: skip


def histogram(values: Mapping[int, npt.ArrayLike], bins: int = 60) -> Histogram:
    """Values of each width -> one Histogram that reaches from the least to the greatest of them."""
    arrays = {bits: np.asarray(v, np.float64).ravel() for bits, v in values.items()}
    if not arrays or any(a.size == 0 or not np.isfinite(a).all() for a in arrays.values()):
        raise AnyprecError("a histogram needs at least one value a width, none of them NaN or infinite")
    moments = {bits: _Moments.of(a) for bits, a in arrays.items()}
    low, high = min(m.low for m in moments.values()), max(m.high for m in moments.values())
    tally = _HistogramCounts(_edges(low, high, bins), moments)
    for bits, array in arrays.items():
        tally.add(bits, array)
    return tally.histogram()


# --- (a) The toy example --------------------------------------------------------------------------------------------


def toy_activations(
    widths: Iterable[int] = (1, 2, 4, 8),
    *,
    inputs: int = 1000,
    dimensions: int = 16,
    seed: int = 0,
    quantizer: str = "dorefa",
) -> dict[int, npt.NDArray[np.float64]]:
    """bits -> activations (inputs,) of a random one-channel layer, its weights and inputs at that width; 32 is float.

    Weights are drawn from a normal distribution, inputs uniformly from [0, 1), which the activations of a layer before
    would be. The scale of the weights is mean|w|, and there is no bias: the paper's equations.
    """
    for name, count in (("inputs", inputs), ("dimensions", dimensions)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise AnyprecError(f"{name}={count!r} is not a count; give a whole number of at least 1")
    rng = np.random.default_rng(seed)
    w = torch.from_numpy(rng.standard_normal(dimensions))  # (dimensions,)
    x = torch.from_numpy(rng.random((inputs, dimensions)))  # (inputs, dimensions)
    checked = check_widths(widths)
    weights, act = make_quantizer(quantizer, checked, "mean"), ActQuantizer(checked)
    weights.fit(w.float(), checked)  # `lsq` alone has something to fit
    result = {}
    with torch.no_grad():
        for bits in checked:
            at = weights.float_weight(w) if bits == FLOAT else weights.weight(weights.normalize(w), w, bits)
            result[bits] = (act(x, bits) @ at.double()).numpy()
    return result


# --- (b) Before and after the norms of a network --------------------------------------------------------------------


def layer_histograms(
    model: nn.Module,
    loader: Iterable[Any],
    layers: Sequence[str] | None = None,
    widths: Iterable[int] | None = None,
    *,
    bins: int = 60,
    batches: int | None = None,
    device: str | torch.device | None = None,
) -> dict[str, dict[str, Histogram]]:
    """layer -> "before" / "after" its switched norm -> the values there under each width, on the same images.

    loader:  batches of inputs, normalized; (images, labels) will do
    layers:  names of switched norms, or of the any-layers before them (default: all norms that follow an any-layer)
    The network runs twice over the batches: first for the range of each histogram, which is that of the widths' means,
    four deviations to each side, and then to count. It is left as it was.
    """
    checked = check_widths(widths_of(model) if widths is None else widths)
    norms = _norms_named(model, layers)
    calls = list(calls_from_loader(model, loader, batches, device))
    if not calls:
        raise AnyprecError("the loader gave no batch; give at least one")
    moments: dict[tuple[str, str], dict[int, _Moments]] = {
        (name, place): {bits: _Moments() for bits in checked} for name in norms for place in PLACES
    }

    def measure(name: str, place: str, bits: int, y: npt.NDArray[np.float32]) -> None:
        moments[name, place][bits].add(y)

    _watch(model, calls, norms, checked, measure)
    if silent := [name for name in norms if any(m.count == 0 for m in moments[name, "before"].values())]:
        raise AnyprecError(f"the norm of {silent[0]!r} did not run on these inputs; name another layer")
    tallies = {key: _HistogramCounts(_reach(by_width.values(), bins), by_width) for key, by_width in moments.items()}
    _watch(model, calls, norms, checked, lambda name, place, bits, y: tallies[name, place].add(bits, y))
    return {name: {place: tallies[name, place].histogram() for place in PLACES} for name in norms}


def _norms_named(model: nn.Module, layers: Sequence[str] | None) -> dict[str, SwitchNorm]:
    """Name as given -> norm. A norm goes by its own name, or by that of the any-layer it follows."""
    norms = switch_norms(model)
    # A norm before the first any-layer is linked to that layer, but does not follow it.
    modules = list(model.modules())
    start = next((i for i, module in enumerate(modules) if isinstance(module, AnyLayer)), len(modules))
    later = {name: norm for name, norm in norms.items() if norm.follows is not None and norm in modules[start:]}
    follows: dict[str | None, SwitchNorm] = {}
    for norm in later.values():
        follows.setdefault(norm.follows, norm)
    if layers is None:
        if not later:
            raise UnknownLayer(f"no switched norm follows an any-layer in this {type(model).__name__}")
        return later
    if isinstance(layers, str):
        raise UnknownLayer(f"layers={layers!r} is one name; give a list of names")
    chosen = {}
    for name in layers:
        found = norms.get(name, follows.get(name))
        if found is None:
            near = get_close_matches(str(name), [*norms, *any_layers(model)], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its norms are {', '.join(list(norms)[:6])}, ..."
            raise UnknownLayer(f"{name!r} is no switched norm of this model, nor a layer with one after it; {hint}")
        chosen[name] = found
    if not chosen:
        raise UnknownLayer("layers is empty; name at least one, or leave it out")
    return chosen


def _watch(
    model: nn.Module, calls: Sequence[Any], norms: Mapping[str, SwitchNorm], widths: Iterable[int], note: Any
) -> None:
    """Run all calls at all widths, and give `note` what goes into each norm and what comes out."""
    now = 0

    def hook(name: str) -> Any:
        def seen(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            for place, y in zip(PLACES, (inputs[0], output), strict=True):
                note(name, place, now, y.detach().float().cpu().numpy())

        return seen

    handles = [norm.register_forward_hook(hook(name)) for name, norm in norms.items()]
    try:
        with preserve_state(model), torch.no_grad():
            for now in widths:
                set_bits(model, now)
                for args, kwargs in calls:
                    model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


# --- Counting -------------------------------------------------------------------------------------------------------


class _Moments:
    """Count, range, mean and deviation of values that come in parts (Chan et al.'s update, stable for large means)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self.low, self.high = np.inf, -np.inf

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> _Moments:
        moments = cls()
        moments.add(values)
        return moments

    def add(self, values: npt.NDArray[Any]) -> None:
        if values.size == 0:
            return
        part = values.astype(np.float64, copy=False)
        mean, total = float(part.mean()), self.count + part.size
        away = mean - self.mean
        self.squares += float(np.square(part - mean).sum()) + away * away * self.count * part.size / total
        self.mean += away * part.size / total
        self.count = total
        self.low, self.high = min(self.low, float(part.min())), max(self.high, float(part.max()))

    @property
    def std(self) -> float:
        return float(np.sqrt(self.squares / self.count)) if self.count else 0.0


class _HistogramCounts:
    def __init__(self, edges: npt.NDArray[np.float64], moments: Mapping[int, _Moments]) -> None:
        self.edges, self.moments = edges, dict(moments)
        self.counts = {bits: np.zeros(len(edges) - 1, np.int64) for bits in moments}
        self.outside = dict.fromkeys(moments, 0)

    def add(self, bits: int, values: npt.NDArray[Any]) -> None:
        counts, _ = np.histogram(values, self.edges)
        self.counts[bits] += counts
        self.outside[bits] += int(values.size - counts.sum())

    def histogram(self) -> Histogram:
        mean = {bits: m.mean for bits, m in self.moments.items()}
        std = {bits: m.std for bits, m in self.moments.items()}
        return Histogram(self.edges, self.counts, mean, std, self.outside)


def _reach(moments: Iterable[_Moments], bins: int) -> npt.NDArray[np.float64]:
    """Edges from the lowest mean - 4 deviations to the highest mean + 4, and no further than there are values."""
    found = list(moments)
    if any(not np.isfinite(m.mean) for m in found):
        raise AnyprecError("the activations hold NaN or infinity; check the data and the weights")
    low = min(max(m.mean - SPREAD * m.std, m.low) for m in found)
    high = max(min(m.mean + SPREAD * m.std, m.high) for m in found)
    return _edges(low, high, bins)


def _edges(low: float, high: float, bins: int) -> npt.NDArray[np.float64]:
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise AnyprecError(f"bins={bins!r} is not a number of bins; give 1 or more")
    if low == high:  # all values are one
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, bins + 1)


# --- (c) How weights truncate ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truncated:
    """One kernel at one width; all arrays have its shape."""

    codes: npt.NDArray[np.uint8]  # 0 .. 2^k - 1
    signed: npt.NDArray[
        np.int16
    ]  # the same as signed integers, -2^(k-1) .. 2^(k-1) - 1: shifting right is the same too
    bits: npt.NDArray[np.str_]  # the codes' bits, most significant first: "10110011", "1011", "10", "1"
    values: npt.NDArray[np.float32]  # in [-1, 1]
    weights: npt.NDArray[np.float32]  # values times the scale of the width
    shifted: bool  # whether these codes are the widest ones, shifted right: always so for `nested`


def truncate_weights(
    model: nn.Module,
    layer: str,
    kernel: tuple[int, ...] = (0, 0),
    widths: Iterable[int] = (1, 2, 4, 8),
) -> dict[int, Truncated]:
    """bits -> a part of an any-layer's weight at that width, widest first. `kernel` indexes the weight's first axes.

    Of a convolution (0, 0) is the kernel from input channel 0 to output channel 0; () is the whole weight.
    """
    layers = any_layers(model)
    if layer not in layers:
        near = get_close_matches(str(layer), layers, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"its layers are {', '.join(list(layers)[:6])}, ..."
        raise UnknownLayer(f"{layer!r} is not an any-precision layer of this model; {hint}")
    checked = check_widths(widths)
    if wrong := [k for k in checked if k not in INTEGER_WIDTHS]:
        raise UnsupportedBits(f"bits={wrong[0]} has no integer codes; choose among 1..8")
    found = layers[layer]
    shape = tuple(found.weight.shape)
    fits = len(kernel) <= len(shape) and all(
        isinstance(i, int) and 0 <= i < n for i, n in zip(kernel, shape, strict=False)
    )
    if not fits:
        raise AnyprecError(f"kernel={kernel!r} is not within the weight of {layer!r}, which is {shape}")
    widest = max(checked)
    quantizer, whole = found.quantizer, found.weight.detach()
    top = quantizer.codes(whole, widest)[kernel].cpu().numpy()
    result = {}
    for bits in sorted(checked, reverse=True):
        codes = quantizer.codes(whole, bits)[kernel].cpu()
        values = quantizer.values(codes, bits)
        scale = quantizer.scale(whole, bits).detach().float().cpu()
        weights = values * scale.expand(shape)[kernel]
        numbers = codes.numpy()
        result[bits] = Truncated(
            numbers,
            (numbers.astype(np.int16) - 2 ** (bits - 1)).astype(np.int16),
            np.vectorize(lambda code, k=bits: format(code, f"0{k}b"), otypes=[f"U{bits}"])(numbers),
            values.numpy(),
            weights.numpy(),
            bool((top >> (widest - bits) == numbers).all()),
        )
    return result
