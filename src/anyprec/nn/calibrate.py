"""Calibration: norm tables, learned scales and activation ranges for widths and profiles not trained.

A model and a few unlabeled training batches come in; then the model runs at `widths` and `profiles` too, and
its outputs at every other width are what they were, bit for bit. The paper fills in 3, 5, 6 and 7 bit so.
Called by users, run.py and cli/calibrate.py. Why each part is done as it is: docs/cli/calibrate.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from anyprec.errors import AnyprecError, DataError, UnsupportedBits
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.layers import AnyActivation, AnyLayer, normalize_weights_once
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.observe import (
    InputQuantizer,
    ModelCall,
    ObservedValues,
    batch_statistics,
    calls_from_loader,
    fit_range,
    is_undecided,
    observe,
    preserve_state,
    restore_bits_after,
    run_call,
    untrained_norms,
)
from anyprec.nn.quantizers import WeightQuantizer
from anyprec.nn.switching import _check_plan, any_layers, apply_layer_bits, set_bits, switch_norms, widths_of
from anyprec.nn.width_tables import nearest_width
from anyprec.progress import Progress
from anyprec.widths import FLOAT, Profile, check_widths

RANGE_BATCHES = 8  # ranges are fitted to the first batches, which are kept; statistics use all of them


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
    """Make (or renew) what `widths` and `profiles` need to run: norm tables, learned scales, ranges.

    model: any-precision; its bits and modes stay as they are. If anything fails, the model does not change.
    loader: gives unlabeled training batches: tensors, arrays, (images, labels) or dicts of arguments. It is read once,
        so a generator works.
    widths, profiles: what to calibrate, uniform and mixed.
    batches: reads no more of the loader than this; None reads all.
    device: where batches are sent; by default the model's.
    ranges: True also fits activation ranges that exist already.
    progress: shows a progress line.
    """
    targets = _targets(model, widths, profiles)
    stream = calls_from_loader(model, loader, batches, device)
    undo = _Undo(model)
    try:
        with torch.no_grad(), Progress("calibrate", batches, "batch") if progress else nullcontext() as bar:
            first = list(itertools.islice(stream, RANGE_BATCHES))
            if not first:
                raise DataError("the loader gave no batch; calibration needs at least one of training data")
            with preserve_state(model):
                _make_ranges(model, targets, first, bool(ranges))
            for target in targets:
                _add_scales(model, target)
                _add_tables(model, target)
            _estimate(model, targets, itertools.chain(first, stream), bar)
    except BaseException:
        undo()
        raise


@torch.no_grad()
def estimate_norms(model: nn.Module, widths: Iterable[int], loader: Iterable[Any]) -> None:
    """Measure the statistics of the norms of `widths` anew, float's too; nothing else of the model changes."""
    _estimate(model, [_Target(str(k), k, ()) for k in widths], calls_from_loader(model, loader, None, None), None)


@torch.no_grad()
def start_norms(model: nn.Module, norms: Collection[_BatchNorm], widths: Iterable[int], call: ModelCall) -> None:
    """First statistics of the tables of `widths`, of those among `norms`: of a network that was not trained yet.

    They count no batch, so that training goes on from them as from any start.
    """
    _estimate(model, [_Target(str(k), k, ()) for k in widths], [call], None, norms)
    for norm in norms:
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.zero_()


# --- What to calibrate ------------------------------------------------------------------------------------


@dataclass
class _Target:
    """One width, or one profile, to calibrate."""

    key: str  # of its norm tables: '3', or the profile's name
    setting: int | Profile
    trained: tuple[int, ...]  # integer widths to start from

    def apply(self, model: nn.Module) -> None:
        """Set the model to it, norms as far as they have its tables; `set_bits` would ask for all of them."""
        if isinstance(self.setting, Profile):
            apply_layer_bits(model, self.setting.bits)
        else:
            _set_all(model, self.setting)
        for norm in switch_norms(model).values():
            norm.key = self.key if self.key in norm.tables else norm.key

    def bits_of(self, model: nn.Module) -> dict[str, int]:
        """Layer name -> weight bits."""
        with restore_bits_after(model):
            self.apply(model)
            return {name: layer.weight_bits for name, layer in any_layers(model).items()}


def _targets(model: nn.Module, widths: Iterable[int], profiles: Iterable[Profile]) -> list[_Target]:
    layers = any_layers(model)
    if not layers:
        raise AnyprecError(f"{type(model).__name__} has no any-precision layer; make it one with anyprec.convert")
    profiles = [profiles] if isinstance(profiles, Profile) else list(profiles)
    if not isinstance(widths, (int, str)):  # check_widths says what is wrong with those
        widths = tuple(widths)
    checked = () if widths == () and profiles else check_widths(widths)
    if FLOAT in checked and all(str(FLOAT) in norm.tables for norm in switch_norms(model).values()):
        raise UnsupportedBits("bits=32 needs no calibration, as float has its own norms here; leave 32 out")
    known = trained_widths(model)
    for profile in profiles:
        if not isinstance(profile, Profile):
            raise AnyprecError(f"profiles holds {profile!r}; give anyprec.Profile objects")
        _check_plan(layers, dict.fromkeys(profile.bits, FLOAT))  # the names alone; tables are made later
    return [_Target(str(k), k, known) for k in checked] + [_Target(p.name, p, known) for p in profiles]


def trained_widths(model: nn.Module) -> tuple[int, ...]:
    """The integer widths others start from: those the model was built for, not those calibrated since.

    Else a model that is calibrated, trained further and calibrated again would keep what its neighbors were.
    """
    built = getattr(model, "zoo_options", {}).get("widths")
    if built is None:
        built = getattr(getattr(model, "conversion", None), "widths", None)
    return tuple(k for k in widths_of(model) if k != FLOAT and (built is None or k in built))


def _set_all(model: nn.Module, bits: int) -> None:
    for module in model.modules():
        if isinstance(module, AnyLayer):
            module.bits = bits
        elif isinstance(module, AnyActivation):
            module.act_bits = bits


class _Undo:
    """All that calibration makes or changes; called, it puts the model back as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.acts = [(m, m.signed, is_undecided(m)) for m in model.modules() if isinstance(m, ActQuantizer)]
        self.dicts: list[tuple[Any, dict[str, Any]]] = []
        for module in model.modules():
            if isinstance(module, SwitchNorm):
                self.dicts.append((module.tables, dict(module.tables.items())))
            elif isinstance(module, WeightQuantizer):
                self.dicts.append((module.scales, dict(module.scales.items())))
            elif isinstance(module, ActQuantizer):
                self.dicts.append((module.ranges, dict(module.ranges.items())))
        tensors = [t for table, _ in self.dicts for t in (*table.parameters(), *table.buffers())]
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
        for act, signed, undecided in self.acts:
            act.signed = signed
            act.calibrated.clear()
            if isinstance(act, InputQuantizer):
                act.undecided = undecided


# --- Activation ranges ------------------------------------------------------------------------------------


def _make_ranges(model: nn.Module, targets: Sequence[_Target], calls: Sequence[ModelCall], renew: bool) -> None:
    """Ranges the targets lack: the nearest trained width's where they are learned, else fitted to data.

    Training moves a learned range far from the fitted one, and the layers behind it with it: on small digit
    networks a fitted range cost up to 15 points, the neighbor's none. Ranges are fitted to what the layer is
    given while the model runs at the nearest trained width, since the new width's norms are not known yet; in
    float where no width has ranges.
    """
    acts = [m for m in model.modules() if isinstance(m, ActQuantizer)]
    lacking = _lacking(model, targets, acts, renew)
    ready = [k for k in targets[0].trained if all(_has_range(act, k) for act in acts)]
    source = {k: nearest_width(k, ready) if ready and k != FLOAT else FLOAT for _, k in lacking}
    copied = {(act, k) for act, k in lacking if act.clip == "learned" and ready and not renew}
    seen: dict[int, dict[ActQuantizer, ObservedValues]] = {}
    for at in {source[k] for act, k in lacking if (act, k) not in copied}:
        _run_at(model, at)
        with observe(model) as seen[at], batch_statistics(list(untrained_norms(model).values())):
            for number, call in enumerate(calls):
                run_call(model, call, f"batch {number}")
    for act, k in lacking:
        if (act, k) in copied:
            near = act.ranges[str(source[k])].detach().clone()
            act.ranges[str(k)] = nn.Parameter(near)
            act.calibrated.add(k)
        else:
            fit_range(act, seen[source[k]][act], [k])


def _lacking(
    model: nn.Module, targets: Sequence[_Target], acts: Sequence[ActQuantizer], renew: bool
) -> list[tuple[ActQuantizer, int]]:
    """(quantizer, bits) whose range is to be made; (quantizer, 32) is one whose sign is not known yet."""
    pairs: dict[tuple[ActQuantizer, int], None] = {}  # a set that keeps its order
    for target in targets:
        target.apply(model)
        fresh = renew or (isinstance(target.setting, int) and target.setting not in target.trained)
        for module in model.modules():
            if not isinstance(module, (AnyLayer, AnyActivation)) or module.act is None:
                continue
            bits = module.act_bits
            if bits != FLOAT and (fresh or not _has_range(module.act, bits)):
                pairs[module.act, bits] = None
    # Converted without an example: all that the network lacks is made now, so that its own widths run too.
    pairs.update({(act, int(k)): None for act in acts for k in act.ranges if not _has_range(act, int(k))})
    pairs.update({(act, FLOAT): None for act in acts if is_undecided(act)})
    return [(act, k) for act, k in pairs if act.clip != "fixed" or is_undecided(act)]


def _has_range(act: ActQuantizer, bits: int) -> bool:
    if is_undecided(act):
        return False
    return act.clip == "fixed" or (str(bits) in act.ranges and float(act.ranges[str(bits)].detach()) != 0)


def _run_at(model: nn.Module, bits: int) -> None:
    if bits in widths_of(model):
        set_bits(model, bits)
        return
    _set_all(model, bits)  # float, in a model without float norms: those of its widest width do
    for norm in switch_norms(model).values():
        norm.key = max(filter(str.isdigit, norm.tables), key=int)


# --- Scales and norms -------------------------------------------------------------------------------------


def _add_scales(model: nn.Module, target: _Target) -> None:
    """Learned scales for widths without: the nearest trained one's, times the ratio of their least-squares
    fits.

    Narrow grids have smaller scales (Gaussian weights, against 8 bit: 0.91 at 3 bit, 0.98 at 4). A norm after
    the layer would hide that, but not every layer has one.
    """
    layers = any_layers(model)
    for name, bits in target.bits_of(model).items():
        layer, quantizer = layers[name], layers[name].quantizer
        known = [k for k in target.trained if str(k) in quantizer.scales]
        if not quantizer.learned or bits == FLOAT or bits in known:
            continue
        scale = _least_squares(layer, bits)
        if known:
            near = nearest_width(bits, known)
            scale = quantizer.scales[str(near)] * scale / _least_squares(layer, near)
        quantizer._set_scale(bits, scale.to(layer.weight).clone())


def _least_squares(layer: AnyLayer, bits: int) -> Tensor:
    values = layer.quantizer.values(layer.codes(bits), bits)
    fitted = (layer.full_weight() * values).sum() / values.square().sum()
    return fitted.clamp_min(torch.finfo(torch.float32).tiny)


def _add_tables(model: nn.Module, target: _Target) -> None:
    """New norm tables start as copies of the nearest trained width's; a trained width keeps its own."""
    bits_of = target.bits_of(model)
    for norm in switch_norms(model).values():
        if target.setting in target.trained and target.key in norm.tables:
            continue
        bits = bits_of.get(norm.follows or "", max(bits_of.values()))
        known = [k for k in target.trained if str(k) in norm.tables]
        if str(FLOAT) in norm.tables and (bits == FLOAT or not known):
            known = [FLOAT]
        known = known or [int(k) for k in norm.tables if k.isdigit()]
        norm.add_table(target.key, like=str(nearest_width(bits, known)))


def _estimate(
    model: nn.Module,
    targets: Sequence[_Target],
    calls: Iterable[ModelCall],
    bar: Progress | None,
    among: Collection[_BatchNorm] | None = None,
) -> None:
    """Statistics of the targets' tables (those `among` some): the average over all batches of each one's mean and
    variance.

    Those tables alone are in training mode. Each batch is normalized by its own statistics, so one pass is
    enough: no layer sees what comes of another layer's first guess.
    """
    tables: dict[_BatchNorm, str] = {}
    for name, norm in switch_norms(model).items():
        for table in (norm.tables[target.key] for target in targets):
            if isinstance(table, _BatchNorm) and table.track_running_stats and (among is None or table in among):
                tables[table] = name
    if not tables:
        return
    before = [(table, table.momentum, [b.clone() for b in table.buffers()]) for table in tables]
    for table in tables:
        table.reset_running_stats()
        table.momentum = None  # torch's way to say: the average of all batches
    try:
        with preserve_state(model, tables), normalize_weights_once(model):
            for number, call in enumerate(calls):
                for target in targets:
                    target.apply(model)
                    run_call(model, call, f"batch {number}")
                if bar is not None:
                    bar.update()
    finally:
        for table, momentum, copies in before:
            table.momentum = momentum
            if table.num_batches_tracked == 0:  # a norm that never runs (a training-time head) keeps its copy
                for buffer, value in zip(table.buffers(), copies, strict=True):
                    buffer.copy_(value)
    for table, name in tables.items():
        if not all(torch.isfinite(buffer).all() for buffer in table.buffers()):
            raise DataError(f"norm {name!r} came out with NaN or infinity; check the data and the weights")
