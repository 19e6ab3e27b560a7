"""What techniques for few bits give the textbook ResNet-20, each tried alone: docs/results.md.

    python bench/low_bits.py --data DIR --out runs/low-bits --init runs/resnet20/model.pt [--only plain,offset]

All start from the same trained network, `--init`, and train on for the same short time, on the same images; accuracy is
that of 5,000 images held out from this training. What `init` was trained on, they were part of: compare rows with each
other. Where a technique adds parameters, they start where they change nothing. Its parameters are this script's: only
what wins becomes an option of recipes. A run that is done is not repeated. Writes bench/results/low_bits.csv.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.gradients import scale_gradient
from anyprec.nn.quantizers import Lsq
from anyprec.nn.switching import any_layers
from anyprec.training import joint, run
from anyprec.training.build import build_network
from anyprec.training.recipe import Recipe
from anyprec.zoo.resnet_he import HeBlock, rectified

RESULTS = Path(__file__).parent / "results" / "low_bits.csv"
BASE = "cifar10-resnet20-he"
SETTINGS = ("validation=5000", "limit=15000", "epochs=3", "lr=5e-4", "eval_every=0", "average=0.99")
LOW = (1, 2)  # widths that get parameters of their own
TAIL = 0.05  # of the weights, at each end, that "clamp" moves to where the rest begins


class OffsetLsq(Lsq):
    """Lsq with an offset of the weights for each output channel, at 1 and 2 bit."""

    def weight(self, x: Tensor, w: Tensor, bits: int, magnitude: Tensor | None = None) -> Tensor:
        made = super().weight(x, w, bits, magnitude)
        return made + self.offsets[str(bits)] if bits in LOW else made


class ShiftedAct(ActQuantizer):
    """Its input moved by a learned shift for each channel, at 1 and 2 bit (ReActNet's RSign)."""

    def forward(self, y: Tensor, bits: int) -> Tensor:
        return super().forward(y + self.shifts[str(bits)] if bits in LOW else y, bits)


class SharpAct(ActQuantizer):
    """At 1 bit the gradient is largest at the threshold and falls to zero at both ends (Bi-Real Net)."""

    def forward(self, y: Tensor, bits: int) -> Tensor:
        if bits == 1 and y.requires_grad:
            distance = (2 * y.detach() / self.range(1).detach() - 1).abs()
            y = scale_gradient(y, 2 * (1 - distance).clamp_(min=0))
        return super().forward(y, bits)


class RPReLU(nn.Module):
    """In place of the ReLU behind a sum: a slope below zero and two shifts for each channel, at 1 and 2 bit (ReActNet).

    Starts as ReLU.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.slope, self.before, self.after = (per_channel(channels) for _ in range(3))

    def forward(self, y: Tensor, bits: int) -> Tensor:
        if bits not in LOW:
            return rectified(y)
        k = str(bits)
        y = y - self.before[k]
        return torch.where(y > 0, y, self.slope[k] * y) + self.after[k]


class RPReLUBlock(HeBlock):
    """HeBlock with an RPReLU at its end."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(rectified(self.bn1(self.conv1(x)))))
        if self.extra:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra // 2, self.extra // 2))
        return self.last(y + x, self.conv1.act_bits)


def per_channel(channels: int) -> nn.ParameterDict:
    return nn.ParameterDict({str(k): nn.Parameter(torch.zeros(channels, 1, 1)) for k in LOW})


def add_offsets(model: nn.Module) -> None:
    for layer in any_layers(model).values():
        layer.quantizer.__class__ = OffsetLsq
        layer.quantizer.offsets = nn.ParameterDict(
            {str(k): nn.Parameter(torch.zeros(layer.weight.shape[0], 1, 1, 1)) for k in LOW}
        )


def add_shifts(model: nn.Module) -> None:
    for layer in any_layers(model).values():
        layer.act.__class__ = ShiftedAct
        layer.act.shifts = per_channel(layer.weight.shape[1])


def sharpen(model: nn.Module) -> None:
    for layer in any_layers(model).values():
        layer.act.__class__ = SharpAct


def add_rprelus(model: nn.Module) -> None:
    for block in [m for m in model.modules() if isinstance(m, HeBlock)]:
        block.last = RPReLU(block.conv2.out_channels)
        block.__class__ = RPReLUBlock


class Clamped(run.TrainingRun):
    """After each step the tails of every layer's weights are moved in (ReCU)."""

    def _step(self, *given: Any) -> dict[int, float]:
        made = super()._step(*given)
        with torch.no_grad():
            for layer in any_layers(self.model).values():
                w = layer.weight
                ends = torch.quantile(w.flatten(), torch.tensor([TAIL, 1 - TAIL]))
                w.clamp_(ends[0], ends[1])
        return made


class TwoSteps(run.TrainingRun):
    """In the first half of the run the pass at 1 bit has 8-bit weights."""

    def _step(self, *given: Any) -> dict[int, float]:
        kept = joint.set_bits
        early = self.epoch * self.steps + self.step < self.recipe.epochs * self.steps / 2

        def with_wide_weights(model: nn.Module, bits: int) -> None:
            kept(model, bits)
            for layer in any_layers(model).values() if bits == 1 else ():
                layer.weight_bits = 8

        if early:
            joint.set_bits = with_wide_weights
        try:
            return super()._step(*given)
        finally:
            joint.set_bits = kept


TECHNIQUES: dict[str, tuple[Callable[[nn.Module], None] | None, type[run.TrainingRun], tuple[str, ...]]] = {
    "plain": (None, run.TrainingRun, ()),
    "shift": (add_shifts, run.TrainingRun, ()),
    "offset": (add_offsets, run.TrainingRun, ()),
    "rprelu": (add_rprelus, run.TrainingRun, ()),
    "sharp-gradient": (sharpen, run.TrainingRun, ()),
    "clamp": (None, Clamped, ()),
    "two-steps": (None, TwoSteps, ()),
    "narrowing-window": (None, run.TrainingRun, ("sign_window=0.3", "sign_window_end=0.05")),
    "no-window": (None, run.TrainingRun, ("sign_window=0",)),
    "kurtosis": (None, run.TrainingRun, ("kurtosis=1e-3",)),
    "scale-rate-1": (None, run.TrainingRun, ("scale_lr=1",)),
    "scale-rate-0.01": (None, run.TrainingRun, ("scale_lr=0.01",)),
}


def tried(name: str, seed: int, args: argparse.Namespace) -> dict[str, object]:
    change, kind, options = TECHNIQUES[name]
    recipe = Recipe.load(BASE).override([*SETTINGS, f"init={args.init}", f"seed={seed}", *options, *args.set])
    data, _ = run.load_splits(recipe, args.data)
    torch.manual_seed(seed)
    model, _ = build_network(recipe, data)
    if change is not None:
        change(model)
    run.TrainingRun, kept = kind, run.TrainingRun
    began = time.process_time()
    try:
        found = run.train(recipe, args.out / f"{name}-{seed}", data_root=args.data, model=model, overwrite=True)
    finally:
        run.TrainingRun = kept
    return {
        "technique": name, "seed": seed, **{str(k): round(found[k]["accuracy"], 2) for k in sorted(recipe.widths)},
        "minutes": round((time.process_time() - began) / 60, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder that holds CIFAR-10")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="runs")
    parser.add_argument("--init", required=True, help="model.pt of a trained resnet20-he")
    parser.add_argument("--only", default=",".join(TECHNIQUES), help=f"of {', '.join(TECHNIQUES)}")
    parser.add_argument("--seeds", default="0", help="default: 0")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of the recipe")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    if args.results.exists():
        with args.results.open(newline="") as file:
            rows = list(csv.DictReader(file))
    known = {(str(row["technique"]), int(str(row["seed"]))) for row in rows}
    for seed in map(int, args.seeds.split(",")):
        for name in args.only.split(","):
            if (name, seed) in known:
                continue
            rows.append(tried(name, seed, args))
            print(rows[-1], flush=True)
            with args.results.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
