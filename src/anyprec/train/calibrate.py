"""Calibration: norm tables, learned scales and activation ranges for widths and profiles that were not trained.

A model and a few unlabelled training batches come in; afterwards the model runs at `widths` and `profiles` as well,
and its outputs at every other width are what they were, bit for bit. Paper: "Post-training Quantization".
Called by users, run.py and cli_calibrate.py; convert.py starts its ranges with `observe` and `fit_range`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyprec.bits import FLOAT, Profile, check_widths, split_bits
from anyprec.errors import AnyprecError, DataError, UnsupportedBits
from anyprec.progress import Progress
from anyprec.train.layers import AnyActivation, AnyLayer, quantise_once
from anyprec.train.norms import SwitchNorm
from anyprec.train.quantizers import ActQuantizer, WeightQuantizer, best_range, nearest_width, sample
from anyprec.train.switch import (
    _check_plan,
    _restore,
    any_layers,
    apply_plan,
    set_bits,
    state_of,
    switch_norms,
    widths_of,
)

RANGE_BATCHES = 8  # ranges are fitted on the first few batches, which are kept; statistics use all of them
MOST_CALLS = 16  # samples kept per quantizer: with 16,384 values each, 1 MB
SAMPLES = 16384  # values a range is fitted on

Call = tuple[tuple[Any, ...], dict[str, Any]]  # args, kwargs of one forward pass


def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    widths: Iterable[int] = (3, 5, 6, 7),
    *,
    profiles: Iterable[Profile] = (),
    batches: int | None = None,
    device: str | torch.device | None = None,
    ranges: bool | None = None,
    progress: bool = False,
) -> None:
    """Make (or renew) what `widths` and `profiles` need to run: norm tables, learned scales, activation ranges.

    `loader` gives unlabelled training batches: tensors, arrays, (images, labels) or dicts of arguments; it is read
    once, so a generator will do, and no further than `batches`. `ranges=True` renews ranges that are there already.
    The model's bits and modes stay as they are; if anything fails, so does everything else in it.
    """
    targets = _targets(model, widths, profiles)
    stream = _calls(model, loader, batches, device)
    undo = _Undo(model)
    total = batches if batches is not None else len(loader) if hasattr(loader, "__len__") else None
    try:
        with torch.no_grad(), Progress("calibrate", total, "batch") if progress else nullcontext() as bar:
            first = list(itertools.islice(stream, RANGE_BATCHES))
            if not first:
                raise DataError("the loader gave no batch; calibration needs at least one batch of training data")
            with undisturbed(model):
                _fit_ranges(model, targets, first, bool(ranges))
            for target in targets:
                _add_scales(model, target)
                _add_tables(model, target)
            _estimate(model, targets, itertools.chain(first, stream), bar)
    except BaseException:
        undo()
        raise


# --- What to calibrate -----------------------------------------------------------------------------------------------


@dataclass
class _Target:
    """One width, or one profile, to calibrate."""

    key: str  # of its norm tables: '3', or the profile's name
    setting: int | Profile
    trained: tuple[int, ...]  # integer widths to start from

    def apply(self, model: nn.Module) -> None:
        if isinstance(self.setting, Profile):
            apply_plan(model, self.setting.bits)
        else:
            apply_plan(model, dict.fromkeys(any_layers(model), self.setting))
            for module in model.modules():
                if isinstance(module, AnyActivation):
                    module.act_bits = self.setting
        for norm in switch_norms(model).values():
            norm.key = self.key if self.key in norm.tables else norm.key


def _targets(model: nn.Module, widths: Iterable[int], profiles: Iterable[Profile]) -> list[_Target]:
    layers = any_layers(model)
    if not layers:
        raise AnyprecError(f"{type(model).__name__} has no any-precision layer; make it one with anyprec.convert")
    profiles = [profiles] if isinstance(profiles, Profile) else list(profiles)
    widths = widths if isinstance(widths, (int, str)) else tuple(widths)  # check_widths explains the first two
    checked = () if widths == () and profiles else check_widths(widths)
    if FLOAT in checked and all(str(FLOAT) in norm.tables for norm in switch_norms(model).values()):
        raise UnsupportedBits("bits=32 needs no calibration: float has its own norms here already; leave 32 out")
    known = trained_widths(model)
    for profile in profiles:
        if not isinstance(profile, Profile):
            raise AnyprecError(f"profiles holds {profile!r}; give anyprec.Profile objects, or widths as `widths`")
        _check_plan(layers, dict.fromkeys(profile.bits, FLOAT))  # the names; tables are made below
    return [_Target(str(k), k, known) for k in checked] + [_Target(p.name, p, known) for p in profiles]


def trained_widths(model: nn.Module) -> tuple[int, ...]:
    """The integer widths to start others from: those the model was built for, not those calibrated since.

    Else a model calibrated once, trained further and calibrated again would keep what it took from old neighbours.
    """
    built = getattr(model, "zoo_options", {}).get("widths") or getattr(
        getattr(model, "conversion", None), "widths", None
    )
    known = [k for k in widths_of(model) if k != FLOAT]
    return tuple(k for k in known if built is None or k in built)


# --- Data ------------------------------------------------------------------------------------------------------------


def _calls(
    model: nn.Module, loader: Iterable[Any], batches: int | None, device: str | torch.device | None
) -> Iterator[Call]:
    if batches is not None and (isinstance(batches, bool) or not isinstance(batches, int) or batches < 1):
        raise DataError(f"batches={batches!r} is not a number of batches; give at least 1, or None for all")
    if isinstance(loader, (Tensor, np.ndarray, Mapping, str)) or not isinstance(loader, Iterable):
        raise DataError(f"the loader is a {type(loader).__name__}; give a list or loader of batches, such as [images]")
    return (
        move(_call_of(batch, number), model, f"batch {number}", device)
        for number, batch in enumerate(itertools.islice(loader, batches))
    )


def _call_of(batch: Any, number: int) -> Call:
    inputs = batch
    while isinstance(inputs, (tuple, list)) and inputs:
        inputs = inputs[0]  # (images, labels, ...): labels play no part
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (Tensor, np.ndarray)):
        return (inputs,), {}
    raise DataError(
        f"batch {number} is a {type(batch).__name__}; give tensors, arrays, (images, labels) or dicts of arguments"
    )


def move(item: Any, model: nn.Module, what: str, device: str | torch.device | None = None) -> Any:
    """Tensors and arrays anywhere in `item` on the model's device; NaN or infinity in them is an error."""
    if isinstance(item, Mapping):
        return {name: move(value, model, what, device) for name, value in item.items()}
    if isinstance(item, (tuple, list)):
        parts = [move(value, model, what, device) for value in item]
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


def run(model: nn.Module, call: Call, what: str) -> Any:
    """One forward pass; input that does not fit is the user's mistake, and said so in one line."""
    args, kwargs = call
    try:
        return model(*args, **kwargs)
    except (AnyprecError, torch.cuda.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{what} does not run through {type(model).__name__}: {reason}") from error


# --- Leaving everything else alone -----------------------------------------------------------------------------------


@contextmanager
def undisturbed(model: nn.Module, tables: Collection[nn.Module] = ()) -> Iterator[None]:
    """Inside, the whole model is in eval mode (`tables` excepted). On leaving, modes, bits, random number generators
    and every buffer that is not one of `tables`' are as they were, whatever the network did to them.
    """
    theirs = {id(buffer) for table in tables for buffer in table.buffers()}
    buffers = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and id(buffer) not in theirs
    ]
    modes = [(module, module.training) for module in model.modules()]
    switched = state_of(model)
    dice = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_dice = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    # The flag alone: `train()` and `eval()` reach submodules, and networks override them with acts of their own.
    for module in model.modules():
        module.training = module in tables
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner[name] = buffer
                buffer.copy_(value)
        for module, mode in modes:
            module.training = mode
        _restore(switched)
        random.setstate(dice[0])
        np.random.set_state(dice[1])
        torch.set_rng_state(dice[2])
        if cuda_dice:
            torch.cuda.set_rng_state_all(cuda_dice)


class _Undo:
    """All that calibration makes or changes; called, it puts the model back as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.acts = [(m, m.signed) for m in model.modules() if isinstance(m, ActQuantizer)]
        self.dicts: list[tuple[nn.ModuleDict | nn.ParameterDict, dict[str, Any]]] = []
        for module in model.modules():
            if isinstance(module, SwitchNorm):
                self.dicts.append((module.tables, dict(module.tables.items())))
            elif isinstance(module, WeightQuantizer):
                self.dicts.append((module.scales, dict(module.scales.items())))
            elif isinstance(module, ActQuantizer):
                self.dicts.append((module.ranges, dict(module.ranges.items())))
        tensors = [t for d, _ in self.dicts for t in (*d.parameters(), *d.buffers())]
        self.tensors = [(t, t.detach().clone()) for t in tensors]

    def __call__(self) -> None:
        for table, entries in self.dicts:
            for key in [k for k in table if k not in entries]:
                del table[key]
            for key, value in entries.items():
                table[key] = value
        with torch.no_grad():
            for tensor, value in self.tensors:
                tensor.copy_(value)
        for act, signed in self.acts:
            act.signed = signed
            act.calibrated.clear()


# --- Activation ranges -----------------------------------------------------------------------------------------------


class Seen:
    """What one activation quantizer was given: a bounded sample over all calls, and whether any value was negative."""

    def __init__(self) -> None:
        self.negative = False
        self.samples: list[Tensor] = []
        self.calls, self.every = 0, 1

    def add(self, y: Tensor) -> None:
        self.negative = self.negative or bool((y < 0).any())
        if self.calls % self.every == 0:
            self.samples.append(sample(y))
        self.calls += 1
        if len(self.samples) > MOST_CALLS:  # drop every other one, then look at half as many calls: all weigh the same
            self.samples, self.every = self.samples[::2], 2 * self.every

    def values(self) -> Tensor:
        return sample(torch.cat(self.samples), SAMPLES)


@contextmanager
def observe(model: nn.Module) -> Iterator[dict[ActQuantizer, Seen]]:
    """Inside, every activation quantizer's input is seen, before it is quantised."""
    seen = {m: Seen() for m in model.modules() if isinstance(m, ActQuantizer)}
    hooks = [act.register_forward_pre_hook(lambda m, given: seen[m].add(given[0])) for act in seen]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def fit_range(act: ActQuantizer, seen: Seen, widths: Iterable[int]) -> None:
    """Ranges of least squared error for `widths`, and the sign where data is to decide it. Unseen: nothing."""
    if not seen.samples:
        return
    if act.signed is None:
        act.signed = seen.negative
    act.fit(seen.values(), widths)


def _fit_ranges(model: nn.Module, targets: Sequence[_Target], calls: Sequence[Call], renew: bool) -> None:
    """Fit the ranges the targets lack on what each layer is given while the model runs at the nearest trained width.

    At the new width itself the norms are not estimated yet, and with nothing to normalise by, every layer would be
    fitted on the error of those before it. Where no width has ranges yet the model runs in float.
    """
    acts = [m for m in model.modules() if isinstance(m, ActQuantizer)]
    wanted: dict[tuple[ActQuantizer, int], None] = {}
    for target in targets:
        target.apply(model)
        fresh = renew or not (isinstance(target.setting, Profile) or target.setting in target.trained)
        for module in model.modules():
            if isinstance(module, (AnyLayer, AnyActivation)) and module.act is not None and module.act_bits != FLOAT:
                if fresh or not _has_range(module.act, module.act_bits):
                    wanted[module.act, module.act_bits] = None
    # A network converted without an example: whatever it lacks is fitted now, so that all its widths can run.
    wanted.update({(act, int(k)): None for act in acts for k in act.ranges if not _has_range(act, int(k))})
    wanted.update({(act, FLOAT): None for act in acts if act.signed is None})
    if all(act.clip == "fixed" and act.signed is not None for act, _ in wanted):
        return

    ready = [k for k in targets[0].trained if all(_has_range(act, k) for act in acts)]
    source = {k: nearest_width(k, ready) if ready and k != FLOAT else FLOAT for _, k in wanted}
    seen: dict[int, dict[ActQuantizer, Seen]] = {}
    for at in set(source.values()):
        _run_at(model, at)
        with observe(model) as seen[at]:
            for number, call in enumerate(calls):
                run(model, call, f"batch {number}")
    shares = {
        (act, k): _learned_share(act, seen[source[k]][act], source[k]) for act, k in wanted if source[k] != k
    }
    for act, k in wanted:
        fit_range(act, seen[source[k]][act], [k])
        if shares.get((act, k), 1.0) != 1.0:
            act.ranges[str(k)].mul_(shares[act, k])


def _has_range(act: ActQuantizer, bits: int) -> bool:
    if act.signed is None:
        return False
    return act.clip == "fixed" or (str(bits) in act.ranges and float(act.ranges[str(bits)].detach()) != 0)


def _learned_share(act: ActQuantizer, seen: Seen, trained: int) -> float:
    """How far training moved the range of a trained width from the fitted one: the new width's moves as far."""
    if act.clip != "learned" or trained == FLOAT or not seen.samples:
        return 1.0
    return abs(float(act.ranges[str(trained)])) / float(best_range(seen.values(), trained, bool(act.signed)))


def _run_at(model: nn.Module, bits: int) -> None:
    if bits in widths_of(model):
        set_bits(model, bits)
        return
    for module in model.modules():  # float, in a model that has no float norms: those of its widest width
        if isinstance(module, AnyLayer):
            module.bits = bits
        elif isinstance(module, AnyActivation):
            module.act_bits = bits
        elif isinstance(module, SwitchNorm):
            module.key = max((k for k in module.tables if k.isdigit()), key=int)


# --- Scales and norms ------------------------------------------------------------------------------------------------


def _add_scales(model: nn.Module, target: _Target) -> None:
    """A learned scale for each layer's width: the nearest trained one's, times the ratio of their least-squares fits.

    Narrow grids have smaller scales (of Gaussian weights: 0.91 at 3 bit, 0.98 at 4); a norm would hide that, but not
    every network has one behind each layer.
    """
    with undisturbed(model):
        target.apply(model)
        bits_of = {layer: layer.weight_bits for layer in any_layers(model).values()}
    for layer, bits in bits_of.items():
        quantizer = layer.quantizer
        known = [k for k in target.trained if str(k) in quantizer.scales]
        if not quantizer.learned or bits == FLOAT or bits in known:
            continue
        fitted = _least_squares(layer, bits)
        if known:
            near = nearest_width(bits, known)
            fitted = quantizer.scales[str(near)] * fitted / _least_squares(layer, near)
        quantizer._set_scale(bits, fitted.to(layer.weight).clone())


def _least_squares(layer: AnyLayer, bits: int) -> Tensor:
    values = layer.quantizer.values(layer.codes(bits), bits).to(layer.weight.device)
    return ((layer.weight * values).sum() / values.square().sum()).clamp_min(torch.finfo(torch.float32).tiny)


def _add_tables(model: nn.Module, target: _Target) -> None:
    """New norm tables start as copies of the nearest trained width's; those of a trained width stay."""
    with undisturbed(model):
        target.apply(model)
        bits_of = {name: split_bits(layer.bits)[0] for name, layer in any_layers(model).items()}
    for norm in switch_norms(model).values():
        if target.setting in target.trained and target.key in norm.tables:
            continue
        bits = bits_of.get(norm.follows or "", max(bits_of.values()))
        bits = target.setting if isinstance(target.setting, int) else bits
        known = [k for k in target.trained if str(k) in norm.tables]
        like = str(nearest_width(bits, known)) if known and bits != FLOAT else str(FLOAT)
        if like not in norm.tables:
            like = str(nearest_width(bits, known or [int(k) for k in norm.tables if k.isdigit()]))
        norm.add_table(target.key, like)


def _estimate(
    model: nn.Module, targets: Sequence[_Target], calls: Iterable[Call], bar: Progress | None
) -> None:
    """Batch statistics of the targets' tables: the mean over all batches of each batch's mean and variance."""
    tables = {
        norm.tables[target.key]: name
        for target in targets
        for name, norm in switch_norms(model).items()
        if isinstance(norm.tables[target.key], nn.modules.batchnorm._BatchNorm)
        and norm.tables[target.key].track_running_stats
    }
    if not tables:
        return
    momenta = [(table, table.momentum) for table in tables]
    for table in tables:
        table.reset_running_stats()
        table.momentum = None  # torch's way to say: the average of all batches
    try:
        with undisturbed(model, tables), quantise_once(model):
            for number, call in enumerate(calls):
                for target in targets:
                    target.apply(model)
                    run(model, call, f"batch {number}")
                if bar is not None:
                    bar.update()
    finally:
        for table, momentum in momenta:
            table.momentum = momentum
    for table, name in tables.items():
        if not all(torch.isfinite(b).all() for b in table.buffers()):
            raise DataError(f"the statistics of norm {name!r} came out as NaN or infinity; check the data and weights")
