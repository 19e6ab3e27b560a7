"""Step time of joint training against a plain implementation of the same mathematics, in one interleaved run.

Plain: five separate quantize-forward-backward passes in eager mode, written with separate torch operations, every
width normalizing the weights and running the stem anew. Both start from the same weights, and the gradients of one
step are compared first: a fast step that computes something else would be no result. Peak memory is that of a process
of its own for each. With bf16 the step computes nearly the same: how far its losses are from float32's is shown, too.

    python bench/train_step.py [--net resnet20 | resnet20-he | vgg-speed-small] [--batch 128] \\
        [--threads 1] [--compile] [--only "ours, winograd"] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyprec.nn.calibrate import calibrate
from anyprec.nn.layers import use_winograd
from anyprec.nn.winograd import has_bf16
from anyprec.run.cpu import cpu_name
from anyprec.training.half_precision import VARIABLE, probe
from anyprec.training.joint import choose_widths, joint_step
from anyprec.zoo import build
from anyprec.zoo.resnet_he import HeResNet
from anyprec.zoo.vgg import SpeedVgg

WIDTHS = (1, 2, 4, 8, 32)


# --- The plain implementation: the paper's equations as one would first write them -----------------------------------


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        return torch.round(x * n) / n

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None


class Nest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        return (torch.clamp(torch.floor(x * n), max=n - 1) + 0.5) / n

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None


def plain_activation(x: Tensor, bits: int) -> Tensor:
    return F.relu(x) if bits == 32 else Round.apply(torch.clamp(x, 0, 1), float(2**bits - 1))


def plain_weight(layer: nn.Module, bits: int) -> Tensor:
    w = layer.weight
    if bits == 32:
        return w
    t = torch.tanh(w)
    x = t / 2 / torch.max(torch.abs(t)) + 0.5
    return (2 * Nest.apply(x, float(2**bits)) - 1) * layer.quantizer.scales[str(bits)]


def plain_forward(model: nn.Module, x: Tensor, bits: int) -> Tensor:
    """The pre-activation ResNet or the VGG of the zoo, read straight from its modules."""
    if isinstance(model, SpeedVgg):
        return plain_vgg(model, x, bits)
    if isinstance(model, HeResNet):
        return plain_he(model, x, bits)
    out = model.conv0(x)
    for block in model.blocks:
        a = plain_activation(block.norm0.tables[str(bits)](out), bits)
        short = out if block.skip_conv is None else block.skip_norm(block.skip_conv(a))
        h = F.conv2d(a, plain_weight(block.conv0, bits), None, block.conv0.stride, 1)
        h = plain_activation(block.norm1.tables[str(bits)](h), bits)
        out = F.conv2d(h, plain_weight(block.conv1, bits), None, 1, 1) + short
    return model.fc(model.norm.tables[str(bits)](out).mean((2, 3)))


def plain_vgg(model: SpeedVgg, x: Tensor, bits: int) -> Tensor:
    out = F.max_pool2d(model.conv0(F.relu(model.whiten(x))), 2)
    first, second = model.block1, model.block2
    for norm, conv, pool in (
        (model.norm0, model.conv1, 1), (model.norm1, first.conv0, 2), (first.norm0, first.conv1, 1),
        (first.norm1, second.conv0, 2), (second.norm0, second.conv1, 1),
    ):  # fmt: skip
        a = plain_activation(norm.tables[str(bits)](out), bits)
        out = F.max_pool2d(F.conv2d(a, plain_weight(conv, bits), None, 1, 1), pool)
    out = F.relu(second.norm1.tables[str(bits)](out))
    return model.fc(F.max_pool2d(out, out.shape[2:]).flatten(1))


def plain_he(model: HeResNet, x: Tensor, bits: int) -> Tensor:
    """The textbook ResNet: each convolution quantizes its own input, in a learned range."""

    def conv(layer: nn.Module, y: Tensor) -> Tensor:
        if bits != 32:
            r = layer.act.ranges[str(bits)].abs()
            y = r * Round.apply(torch.clamp(y / r, 0, 1), float(2**bits - 1))
        return F.conv2d(y, plain_weight(layer, bits), None, layer.stride, 1)

    out = F.relu(model.bn1.tables[str(bits)](model.conv1(x)))
    for block in (*model.layer1, *model.layer2, *model.layer3):
        h = F.relu(block.bn1.tables[str(bits)](conv(block.conv1, out)))
        h = block.bn2.tables[str(bits)](conv(block.conv2, h))
        if block.extra:
            half = block.extra // 2
            out = F.pad(out[:, :, :: block.stride, :: block.stride], (0, 0, 0, 0, half, half))
        out = F.relu(h + out)
    return model.linear(out.mean((2, 3)))


def plain_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    teacher = None
    for bits in sorted(WIDTHS, reverse=True):
        logits = plain_forward(model, x, bits)
        if teacher is None:
            loss = F.cross_entropy(logits, y)
        else:
            loss = -(teacher.softmax(1) * F.log_softmax(logits, 1)).sum(1).mean()
        loss.backward()
        teacher = logits.detach()


ours_step = partial(joint_step, loss="recursive")

# --- Comparing -------------------------------------------------------------------------------------------------------


def make(net: str, fast: bool) -> nn.Module:
    torch.manual_seed(0)
    model = build(net, widths=WIDTHS, num_classes=10).train()
    if isinstance(model, HeResNet):
        calibrate(model, [images(32, False)[0]], [k for k in WIDTHS if k != 32], ranges=True)
        torch.manual_seed(0)
    return model.to(memory_format=torch.channels_last) if fast else model


def images(count: int, fast: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,))
    return (x.contiguous(memory_format=torch.channels_last) if fast else x), y


def gradient_difference(net: str) -> float:
    """Largest relative difference of a gradient after one step of each, in float64, where rounding flips no code."""
    grads = []
    # In one memory layout: sums of codes tie, and which of two equal ones a max-pool takes depends on the layout.
    for step in (plain_step, lambda m, x, y: ours_step(m, x, y, WIDTHS)):
        model, (x, y) = make(net, False).double(), images(16, False)
        step(model, x.double(), y)
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    plain, ours = grads
    assert plain.keys() == ours.keys()
    # The bias of a skip norm has no effect (a norm follows): its gradient is rounding noise around zero.
    floor = 1e-6 * max(g.norm() for g in plain.values())
    return max(((plain[n] - ours[n]).norm() / plain[n].norm().clamp_min(floor)).item() for n in plain)


def contestants(args: argparse.Namespace) -> dict[str, tuple[nn.Module, Callable[[], object]]]:
    def wanted(name: str) -> bool:
        return not args.only or name == "plain" or any(name.startswith(part) for part in args.only)

    plain, (x, y) = make(args.net, False), images(args.batch, False)
    ours, (fast_x, _) = make(args.net, True), images(args.batch, True)
    steps = iter(range(10**9))
    found: dict[str, tuple[nn.Module, Callable[[], object]]] = {
        "plain": (plain, lambda: plain_step(plain, x, y)),
        "ours": (ours, lambda: ours_step(ours, fast_x, y, WIDTHS)),
        "ours, sandwich": (
            ours,
            lambda: ours_step(ours, fast_x, y, choose_widths(WIDTHS, "sandwich", 1, 0, next(steps))),
        ),
        "ours, lowest": (
            ours,
            lambda: ours_step(ours, fast_x, y, choose_widths(WIDTHS, "lowest", 1, 0, next(steps))),
        ),
    }
    fewer, (fewer_x, _) = make(args.net, True), images(args.batch, True)
    if use_winograd(fewer):
        found["ours, winograd"] = (fewer, lambda: ours_step(fewer, fewer_x, y, WIDTHS))
        found["ours, winograd, lowest"] = (
            fewer,
            lambda: ours_step(fewer, fewer_x, y, choose_widths(WIDTHS, "lowest", 1, 0, next(steps))),
        )
    if has_bf16():
        pairs, (pairs_x, _) = make(args.net, True), images(args.batch, True)
        use_winograd(pairs, "bf16")
        found["ours, winograd, lowest, bf16 gradients"] = (
            pairs,
            lambda: ours_step(pairs, pairs_x, y, choose_widths(WIDTHS, "lowest", 1, 0, next(steps))),
        )
    if wanted("ours, bf16") and not probe("bf16", os.environ.get(VARIABLE, "")):  # it works
        half, (half_x, _) = make(args.net, True), images(args.batch, True)
        found["ours, bf16"] = (half, lambda: ours_step(half, half_x, y, WIDTHS, autocast=bf16))
        found["ours, bf16, lowest"] = (
            half,
            lambda: ours_step(half, half_x, y, choose_widths(WIDTHS, "lowest", 1, 0, next(steps)), autocast=bf16),
        )
    if args.compile:
        compiled = make(args.net, True)
        compiled.body = torch.compile(compiled.body, dynamic=False)
        found["ours, compiled"] = (compiled, lambda: ours_step(compiled, fast_x, y, WIDTHS))
    return {name: one for name, one in found.items() if wanted(name)}


bf16 = partial(torch.autocast, "cpu", torch.bfloat16)


def bf16_difference(net: str) -> dict[int, float]:
    """bits -> how far the loss with bf16 is from that with float32, relative to it."""
    x, y = images(64, True)
    exact = ours_step(make(net, True), x, y, WIDTHS)
    near = ours_step(make(net, True), x, y, WIDTHS, autocast=bf16)
    return {k: abs(near[k][0] / exact[k][0] - 1).item() for k in WIDTHS}


def peak_memory(name: str, args: argparse.Namespace) -> float:
    """MiB at the peak of a process that does five steps of one contestant, less what it had before the first."""
    command = [sys.executable, __file__, "--net", args.net, "--batch", str(args.batch), "--memory-of", name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def high_water_kib() -> int:
    """Of this program alone: getrusage's figure also covers the process that started it."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def print_peak_memory(args: argparse.Namespace) -> None:
    model, step = contestants(args)[args.memory_of]
    before = high_water_kib()
    for _ in range(5):
        model.zero_grad(set_to_none=True)
        step()
    print((high_water_kib() - before) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="resnet20", help="a CIFAR ResNet of the zoo, or its VGG")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="also the compiled step (compiling takes minutes)")
    parser.add_argument("--only", metavar="NAME", action="append", help="beside plain, those whose names begin so")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        return print_peak_memory(args)

    difference = gradient_difference(args.net)
    memory = {} if args.only else {name: peak_memory(name, args) for name in ("plain", "ours")}
    runners = contestants(args)
    times: dict[str, list[float]] = {name: [] for name in runners}
    for round_number in range(args.rounds + 2):
        for name, (model, step) in runners.items():
            model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            step()
            if round_number >= 2:  # the first two warm up, and compile
                times[name].append(time.perf_counter() - start)
    # Ratios are taken round by round: what slows the machine down slows the neighbors in one round alike.
    ratio = {n: statistics.median(p / t for p, t in zip(times["plain"], times[n], strict=True)) for n in times}
    result = {
        "net": args.net, "batch": args.batch, "threads": args.threads, "torch": torch.__version__, "cpu": cpu_name(),
        "gradient_difference": difference, "peak_memory_mib": {n: round(m) for n, m in memory.items()},
        "median_ms": {n: round(1e3 * statistics.median(t), 1) for n, t in times.items()},
        "speedup": {n: round(r, 2) for n, r in ratio.items()},
    }  # fmt: skip
    if "ours, bf16" in times:
        result["bf16_loss_difference"] = bf16_difference(args.net)
    if args.json:
        print(json.dumps(result))
        return None
    print(f"{args.net}, batch {args.batch}, {args.threads} thread(s), {result['cpu']}, torch {torch.__version__}")
    for name in times:
        peak = f"{memory[name]:8.0f} MiB" if name in memory else ""
        print(f"{name:38} {result['median_ms'][name]:9.1f} ms   {ratio[name]:5.2f} x {peak}")
    print(f"largest relative difference of a gradient (float64): {difference:.1e}")
    if "ours, bf16" in times:
        apart = "  ".join(f"{k}: {100 * d:.2f} %" for k, d in result["bf16_loss_difference"].items())
        print(f"losses with bf16 against float32, by bits: {apart}")


if __name__ == "__main__":
    main()
