"""Running a network to look at it: batches and examples in, what its activation quantizers are given out.

`preserve_state` leaves modes, buffers, bits and random numbers as they were; `observe` collects what `fit_range`
then fits signs and ranges to. Called by convert.py (one example) and calibrate.py (some batches).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from anyprec.errors import AnyprecError, DataError, UncalibratedBits
from anyprec.nn.act_quantizer import ActQuantizer, sample_values
from anyprec.nn.switching import _restore, bits_state
from anyprec.widths import FLOAT

MOST_CALLS = 16  # samples kept per quantizer: of 16,384 values each, 1 MB in all
SAMPLES = 16384  # values a range is fitted to

ModelCall = tuple[tuple[Any, ...], dict[str, Any]]  # args, kwargs of one forward pass


# --- Data -------------------------------------------------------------------------------------------------


def calls_from_loader(
    model: nn.Module, loader: Iterable[Any], batches: int | None, device: str | torch.device | None
) -> Iterator[ModelCall]:
    """One call per batch of the loader, read as it is needed and no further than `batches`."""
    if batches is not None and (isinstance(batches, bool) or not isinstance(batches, int) or batches < 1):
        raise DataError(f"batches={batches!r} is not a number of batches; give at least 1, or None for all")
    if isinstance(loader, (Tensor, np.ndarray, Mapping, str)) or not isinstance(loader, Iterable):
        kind = type(loader).__name__
        raise DataError(f"the loader is a {kind}; give a list or a loader of batches, such as [images]")
    return (
        move_to_device(_call_of(batch, number), model, f"batch {number}", device)
        for number, batch in enumerate(itertools.islice(loader, batches))
    )


def _call_of(batch: Any, number: int) -> ModelCall:
    inputs = batch
    while isinstance(inputs, (tuple, list)) and inputs:
        inputs = inputs[0]  # (images, labels, ...): labels play no part
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (Tensor, np.ndarray)):
        return (inputs,), {}
    kind = type(batch).__name__
    raise DataError(f"batch {number} is a {kind}; give tensors, arrays, (images, labels) or dicts of arguments")


def move_to_device(item: Any, model: nn.Module, what: str, device: str | torch.device | None = None) -> Any:
    """Tensors and arrays anywhere in `item`, on the model's device; NaN or infinity in them is an error."""
    if isinstance(item, Mapping):
        return {name: move_to_device(value, model, what, device) for name, value in item.items()}
    if isinstance(item, (tuple, list)):
        parts = [move_to_device(value, model, what, device) for value in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    home = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    if isinstance(item, np.ndarray):
        item = torch.from_numpy(item)
        item = item.to(home.dtype) if item.is_floating_point() else item  # numpy's float64 is seldom meant
    if not isinstance(item, Tensor):
        return item
    if (item.is_floating_point() or item.is_complex()) and not torch.isfinite(item).all():
        raise DataError(f"{what} has NaN or infinity in it; clean the data first")
    return item.to(home.device if device is None else device)


def run_call(model: nn.Module, call: ModelCall, what: str) -> Any:
    """One forward pass; input that does not fit is the user's mistake, and is said to be in one line."""
    args, kwargs = call
    try:
        return model(*args, **kwargs)
    except (AnyprecError, torch.cuda.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{what} does not run through {type(model).__name__}: {reason}") from error


# --- Leaving everything as it was -------------------------------------------------------------------------


@contextmanager
def restore_bits_after(model: nn.Module) -> Iterator[None]:
    """The bits of the model come back on leaving."""
    before = bits_state(model)
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def preserve_state(model: nn.Module, tables: Collection[nn.Module] = ()) -> Iterator[None]:
    """Inside, the whole model is in eval mode, but for `tables`. On leaving, modes, bits, random number
    generators and all buffers but those of `tables` are as they were, whatever the network did to them.
    """
    theirs = {id(buffer) for table in tables for buffer in table.buffers()}
    buffers = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not is_lazy(buffer) and id(buffer) not in theirs
    ]
    modes = [(module, module.training) for module in model.modules()]
    dice = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_dice = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    # The flag alone: `train()` and `eval()` reach all below, and some networks override them.
    for module in model.modules():
        module.training = module in tables
    try:
        with restore_bits_after(model):
            yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner[name] = buffer
                buffer.copy_(value)
        for module, mode in modes:
            module.training = mode
        random.setstate(dice[0])
        np.random.set_state(dice[1])
        torch.set_rng_state(dice[2])
        if cuda_dice:
            torch.cuda.set_rng_state_all(cuda_dice)


# --- Norms that have seen no data yet ---------------------------------------------------------------------


def untrained_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms whose statistics are still, by more than half, the numbers they were made with: mean 0, variance
    1. In eval mode they normalize nothing, so an untrained network's activations fade (or grow) from layer to layer:
    to 1e-19 in a MobileNetV2.

    Not by `num_batches_tracked` alone: weights that come from another framework leave it at 0.
    """
    return {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm) and _is_untrained(m)}


def _is_untrained(norm: _BatchNorm) -> bool:
    mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if mean is None or variance is None or is_lazy(mean) or mean.is_meta or mean.numel() == 0:
        return False
    if bool((mean == 0).all()) and bool((variance == 1).all()):
        return True
    # Run a few times before, but not trained: gamma and beta are still one number, and after n batches the variance is
    # (1 - momentum)^n and something positive.
    if any(p is not None and bool((p != p[0]).any()) for p in (norm.weight, norm.bias)):
        return False
    seen = 0 if count is None else int(count)
    initial = 0.0 if norm.momentum is None else (1 - norm.momentum) ** seen
    return seen > 0 and initial > 0.5 and bool((variance >= initial * (1 - 1e-5)).all())


@contextmanager
def batch_statistics(norms: Collection[_BatchNorm]) -> Iterator[set[_BatchNorm]]:
    """Inside `preserve_state`, these norms normalize each batch by its own statistics, as in training.

    Yields the norms that cannot, being given one value a channel (one image, one pixel); they use what they have.
    """
    single: set[_BatchNorm] = set()

    def choose(norm: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        x = given[0]
        norm.training = x.dim() > 1 and x.numel() > x.shape[1]
        if not norm.training:
            single.add(norm)

    hooks = [norm.register_forward_pre_hook(choose) for norm in norms]
    try:
        yield single
    finally:
        for hook in hooks:
            hook.remove()


# --- What activation quantizers are given -----------------------------------------------------------------


class InputQuantizer(ActQuantizer):
    """The quantizer of a converted layer's input: data decides its sign, which is saved beside its ranges."""

    def __init__(self, widths: Iterable[int], clip: str) -> None:
        super().__init__(widths, clip=clip, rectify=False)
        self.undecided = True

    def forward(self, y: Tensor, bits: int) -> Tensor:
        if self.undecided and bits != FLOAT:
            raise UncalibratedBits(
                f"bits={bits}: the sign and range of a layer's input are not known yet; give `convert` an "
                "example, or run `calibrate` first"
            )
        return super().forward(y, bits)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.undecided:
            destination[prefix + "signed"] = torch.tensor(self.signed)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        signed = state_dict.pop(prefix + "signed", None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if signed is not None:
            self.signed, self.undecided = bool(signed), False


class ObservedValues:
    """What one quantizer was given: a bounded sample over all calls, and whether any value was negative."""

    def __init__(self) -> None:
        self.negative = False
        self.samples: list[Tensor] = []
        self.calls, self.every = 0, 1

    def add(self, y: Tensor) -> None:
        self.negative = self.negative or bool((y < 0).any())
        if self.calls % self.every == 0:
            self.samples.append(sample_values(y))
        self.calls += 1
        if len(self.samples) > MOST_CALLS:
            # Drop every other sample and from now on look at half as many calls: all weigh the same.
            self.samples, self.every = self.samples[::2], 2 * self.every

    def values(self) -> Tensor:
        return sample_values(torch.cat(self.samples), SAMPLES)


@contextmanager
def observe(model: nn.Module) -> Iterator[dict[ActQuantizer, ObservedValues]]:
    """Inside, the input of every activation quantizer is seen, before it is quantized."""
    seen = {m: ObservedValues() for m in model.modules() if isinstance(m, ActQuantizer)}
    hooks = [act.register_forward_pre_hook(lambda m, given: seen[m].add(given[0])) for act in seen]
    for act in seen:
        act.observed = True
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        for act in seen:
            act.observed = False


def is_undecided(act: ActQuantizer) -> bool:
    return isinstance(act, InputQuantizer) and act.undecided


def fit_range(act: ActQuantizer, seen: ObservedValues, widths: Iterable[int]) -> None:
    """Ranges of least squared error for `widths`, and the sign if data decides it. Not called: no change."""
    if not seen.samples:
        return
    if isinstance(act, InputQuantizer) and act.undecided:
        act.signed, act.undecided = seen.negative, False
    widths = [k for k in widths if k != FLOAT]
    act.fit(seen.values(), widths)
    act.calibrated.update(widths)  # so that torch.export need not look at values
