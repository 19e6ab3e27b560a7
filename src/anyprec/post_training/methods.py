"""`ptq`: a float network, some batches and a method in, a network that switches widths out. No training.

"bs": weights as nested 8-bit codes, cut to k bits; norms as they are. "bc": the same, and batch-norm statistics made
anew for each width. "aciq": see aciq.py; "gptq": see gptq.py. Called by users, quantize.py, cli/ptq.py and the
experiment of the paper's Table 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from anyprec.choices import NESTING_QUANTIZERS, PTQ_METHODS
from anyprec.errors import AnyprecError, DataError, UnsupportedBits
from anyprec.nn.calibrate import calibrate
from anyprec.nn.candidates import torch_kind
from anyprec.nn.convert import ConversionReport, convert
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.observe import (
    InputQuantizer,
    ModelCall,
    calls_from_loader,
    fit_range,
    observe,
    preserve_state,
    run_call,
)
from anyprec.nn.own_forward import has_plain_weight
from anyprec.nn.plain import to_float_network
from anyprec.nn.quantizers import Lsq, WeightQuantizer
from anyprec.nn.switching import any_layers, set_bits
from anyprec.post_training.aciq import AciqSettings, install_aciq
from anyprec.post_training.fragile import fragile_layers
from anyprec.post_training.gptq import GptqSettings, GptqVisitor
from anyprec.post_training.lockstep import joined_calls, run_in_lockstep, split_calls
from anyprec.post_training.tune import tune
from anyprec.progress import Progress
from anyprec.widths import FLOAT, INTEGER_WIDTHS, check_widths

METHODS = PTQ_METHODS
TUNED_AT_ONCE = 64  # images of a tuning step
FRAGILE_IMAGES = 16  # that fragile layers are found with


def ptq(
    net: nn.Module,
    loader: Iterable[Any],
    method: str = "bc",
    widths: Iterable[int] = INTEGER_WIDTHS,
    *,
    example: Any = None,
    keep: Iterable[str] = ("first", "last"),
    batches: int | None = None,
    device: str | torch.device | None = None,
    quantizer: str = "lsq",
    aciq: AciqSettings | None = None,
    gptq: GptqSettings | None = None,
    progress: bool = False,
) -> nn.Module:
    """A copy of `net` that runs at any of `widths`, and at 32 as before; it is set to the widest of them.

    net: any float network, or an any-precision one, whose float half is taken.
    loader: gives unlabeled training batches as for `calibrate`. "bc" needs them augmented as in training: norms
        calibrated on anything else cost points.
    method: "bs" shifts bits, "bc" also calibrates norms, "aciq" clips and gives bits channel by channel, "gptq" chooses
        codes by the error over all widths and fits each width to float.
    widths: of 1..8; 32 is always there.
    example, keep: those of `convert`; the default example is the first batch.
    batches: reads no more of the loader than this; all are kept in memory.
    device: where batches are sent; by default the network's.
    quantizer: the grid of "bs" and "bc": "lsq", linear over all weights of a layer, or "nested", with tanh, as in
        training.
    aciq, gptq: choose among the parts of those methods.
    progress: shows a progress line.
    """
    check_method(method)
    wanted = integer_widths(widths)
    if not isinstance(net, nn.Module):
        raise AnyprecError(f"ptq was given a {type(net).__name__}; give it an nn.Module")
    if quantizer not in NESTING_QUANTIZERS:
        raise AnyprecError(
            f"quantizer={quantizer!r} has no codes that can be shifted; choose one of {', '.join(NESTING_QUANTIZERS)}"
        )
    calls = list(calls_from_loader(net, loader, batches, device))
    if not calls:
        raise DataError("the loader gave no batch; ranges and statistics need at least one of training data")
    options: dict[str, Any] = {"widths": [*wanted, FLOAT], "quantizer": quantizer, "clip": "calibrated"}
    example = as_example(calls[0]) if example is None else example
    model = convert(to_float_network(net), example=example, keep=keep, inplace=True, **options)
    if method == "gptq" and (fragile := fragile_layers(model, few_images(calls))):
        kept = (keep,) if isinstance(keep, str) else tuple(keep)
        model = convert(to_float_network(net), example=example, keep=(*kept, *fragile), inplace=True, **options)
        report: ConversionReport = model.conversion  # type: ignore[assignment]
        report.kept |= dict.fromkeys(fragile, "rounding its input costs too much at 8 bit")
    same_norms(model)
    with torch.no_grad():
        if method == "aciq":
            quantize_channels(model, calls, aciq or AciqSettings(), progress)
        elif method == "gptq":
            choose_and_tune(model, wanted, calls, gptq or GptqSettings(), progress)
        else:
            shift_bits(model, wanted, calls, progress)
    if method == "bc":
        calibrate(model, [as_batch(call) for call in calls], wanted, batches=len(calls), progress=progress)
    if method != "aciq":  # which has parts that a saved model does not know
        note_zoo_conversion(model, net, options)
    set_bits(model, wanted[-1])
    return model.eval()


def few_images(calls: Sequence[ModelCall]) -> ModelCall:
    """Enough to tell a layer that loses most from the others."""
    return split_calls([joined_calls(calls, 1)], FRAGILE_IMAGES)[0]


def same_norms(model: nn.Module) -> None:
    """All widths start with the norms of float, whose answers they are to give, in an untrained network too."""
    for norm in [module for module in model.modules() if isinstance(module, SwitchNorm)]:
        state = norm.table(str(FLOAT)).state_dict()
        for table in norm.tables.values():
            table.load_state_dict(state)


def check_method(method: str) -> None:
    if method not in METHODS:
        raise AnyprecError(f"method={method!r} is not known; choose one of {', '.join(METHODS)}")


def integer_widths(widths: Iterable[int]) -> tuple[int, ...]:
    """32 is always there, and need not be named."""
    wanted = tuple(k for k in check_widths(widths) if k != FLOAT)
    if not wanted:
        raise UnsupportedBits("widths has only float; give at least one of 1..8 to quantize to")
    return wanted


def as_example(call: ModelCall) -> Any:
    args, kwargs = call
    return kwargs if kwargs else args


def as_batch(call: ModelCall) -> Any:
    args, kwargs = call
    return kwargs if kwargs else args[0]


def shift_bits(model: nn.Module, widths: Sequence[int], calls: Sequence[ModelCall], progress: bool) -> None:
    """Scales of least squared error for the weights; signs and ranges of all inputs as they are in float."""
    for layer in any_layers(model).values():
        if isinstance(layer.quantizer, Lsq):
            # The whole range. Training may clip, since weights adapt; here 8 bit should be float but for rounding.
            weight = layer.full_weight()
            layer.quantizer.range.copy_(weight.abs().max().clamp_min(torch.finfo(weight.dtype).tiny))
            WeightQuantizer.fit(layer.quantizer, weight, widths)
        if isinstance(layer.act, InputQuantizer):
            layer.act.undecided = True  # the example alone does not decide
    with observe(model) as seen:
        observe_float_run(model, calls, progress)
    for act, given in seen.items():
        fit_range(act, given, widths)


def quantize_channels(model: nn.Module, calls: Sequence[ModelCall], settings: AciqSettings, progress: bool) -> None:
    layers = any_layers(model)
    computed = [name for name, layer in layers.items() if not has_plain_weight(layer)]
    if computed:
        raise AnyprecError(
            f"method='aciq' takes layers whose weight is a parameter; that of {computed[0]!r} is computed; leave it "
            f"float (keep=({computed[0]!r}, ...)), or choose another method"
        )
    inputs = install_aciq(layers.values(), settings)
    show: Callable[..., None] = lambda act, given: act.see(given[0])  # noqa: E731
    hooks = [act.register_forward_pre_hook(show) for act in inputs]
    try:
        observe_float_run(model, calls, progress)
    finally:
        for hook in hooks:
            hook.remove()
    for act in inputs:
        act.fit_channels()


def choose_and_tune(
    model: nn.Module, widths: Sequence[int], calls: Sequence[ModelCall], settings: GptqSettings, progress: bool
) -> None:
    shift_bits(model, widths, calls, False)  # for layers that gptq.py does not know, and those that never run
    with Progress("codes", len(any_layers(model)), "layer") if progress else nullcontext() as bar:
        call = joined_calls(calls, len(widths) + 1)
        run_in_lockstep(model, call, widths, GptqVisitor(widths, settings, bar))
    if settings.tune_steps:
        small = split_calls(calls, TUNED_AT_ONCE)
        with Progress("tune", settings.tune_steps * len(widths), "step") if progress else nullcontext() as bar:
            tune(model, small, widths, settings.tune_steps, settings.tune_rate, bar)


def observe_float_run(model: nn.Module, calls: Sequence[ModelCall], progress: bool) -> None:
    with preserve_state(model), Progress("observe", len(calls), "batch") if progress else nullcontext() as bar:
        set_bits(model, FLOAT)
        for number, call in enumerate(calls):
            run_call(model, call, f"batch {number}")
            if bar is not None:
                bar.update()


def note_zoo_conversion(model: nn.Module, net: nn.Module, options: dict[str, Any]) -> None:
    """A network of the zoo is saved with all that `load_model` needs to make its like: built, made float, converted."""
    if getattr(net, "zoo_name", None) is None:
        return
    changed = any_layers(model)
    kept = [name for name, module in model.named_modules() if torch_kind(module) and name not in changed]
    model.zoo_name = net.zoo_name
    model.zoo_options = {**net.zoo_options, "widths": options["widths"]}  # type: ignore[assignment, dict-item]
    # By name, since the first and last layers to run are not known without an example.
    model.zoo_conversion = {**options, "keep": kept}  # type: ignore[assignment]
