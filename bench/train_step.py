"""Step time of joint training against a plain implementation of the same mathematics, in one interleaved run.

Plain: five separate quantise-forward-backward passes in eager mode, written with separate torch operations, every
width normalising the weights and running the stem anew. Both start from the same weights, and the gradients of one
step are compared first: a fast step that computes something else would be no result.

    python bench/train_step.py --net resnet20 --batch 128 [--json] [--compile] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from anyprec.train.joint import choose_widths, joint_step
from anyprec.zoo import build

WIDTHS = (1, 2, 4, 8, 32)


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        return torch.round(x * n) / n

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None


class Floor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        return (torch.clamp(torch.floor(x * n), max=n - 1) + 0.5) / n

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None


def plain_activation(x, bits):
    return F.relu(x) if bits == 32 else Round.apply(torch.clamp(x, 0, 1), float(2**bits - 1))


def plain_weight(w, bits):
    if bits == 32:
        return w
    t = torch.tanh(w)
    x = t / 2 / torch.max(torch.abs(t)) + 0.5
    return (2 * Floor.apply(x, float(2**bits)) - 1) * torch.mean(torch.abs(w)).detach()


def plain_forward(model: nn.Module, x, bits):
    """The pre-activation ResNet of the zoo, read straight from its modules."""
    out = model.conv0(x)
    for block in model.blocks:
        a = plain_activation(block.norm0.tables[str(bits)](out), bits)
        short = out if block.skip_conv is None else block.skip_norm(block.skip_conv(a))
        h = F.conv2d(a, plain_weight(block.conv0.weight, bits), None, block.conv0.stride, 1)
        h = plain_activation(block.norm1.tables[str(bits)](h), bits)
        out = F.conv2d(h, plain_weight(block.conv1.weight, bits), None, 1, 1) + short
    out = model.norm.tables[str(bits)](out)
    return model.fc(out.mean((2, 3)))


def plain_step(model, x, y, widths=WIDTHS):
    teacher = None
    for bits in sorted(widths, reverse=True):
        logits = plain_forward(model, x, bits)
        if teacher is None:
            loss = F.cross_entropy(logits, y)
        else:
            loss = -(teacher.softmax(1) * F.log_softmax(logits, 1)).sum(1).mean()
        loss.backward()
        teacher = logits.detach()


def make(args):
    torch.manual_seed(0)
    model = build(args.net, widths=WIDTHS, num_classes=10).train()
    return model


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def gradient_difference(args) -> float:
    """Largest relative difference of a gradient after one step of each, in float64, where rounding flips no code."""
    plain, ours = make(args).double(), make(args).double().to(memory_format=torch.channels_last)
    x, y = torch.randn(16, 3, 32, 32, dtype=torch.float64), torch.randint(0, 10, (16,))
    plain_step(plain, x, y)
    joint_step(ours, x.contiguous(memory_format=torch.channels_last), y, WIDTHS)
    a, b = gradients(plain), gradients(ours)
    assert a.keys() == b.keys()
    # The bias of a skip norm has no effect (a norm follows): its gradient is rounding noise around zero.
    floor = 1e-6 * max(g.norm() for g in a.values())
    return max(((a[n] - b[n]).norm() / a[n].norm().clamp_min(floor)).item() for n in a)


def measure(name, step, model, out):
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    step()
    out.setdefault(name, []).append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="resnet20")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--memory", choices=("plain", "ours"), help="run one of the two only and print peak memory")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    x = torch.randn(args.batch, 3, 32, 32)
    y = torch.randint(0, 10, (args.batch,))
    plain, ours = make(args), make(args).to(memory_format=torch.channels_last)
    fast_x = x.contiguous(memory_format=torch.channels_last)

    if args.memory:
        for _ in range(3):
            plain_step(plain, x, y) if args.memory == "plain" else joint_step(ours, fast_x, y, WIDTHS)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return

    worst = gradient_difference(args)

    sandwich = iter(range(10**9))
    contestants = {
        "plain": (lambda: plain_step(plain, x, y), plain),
        "ours": (lambda: joint_step(ours, fast_x, y, WIDTHS), ours),
        "ours, sandwich": (lambda: joint_step(ours, fast_x, y, choose_widths(WIDTHS, "sandwich", 1, 0, next(sandwich))), ours),
    }
    if args.compile:
        compiled = make(args).to(memory_format=torch.channels_last)
        compiled.body = torch.compile(compiled.body, dynamic=False)
        contestants["ours, compiled"] = (lambda: joint_step(compiled, fast_x, y, WIDTHS), compiled)
        start = time.perf_counter()
        joint_step(compiled, fast_x, y, WIDTHS)
        joint_step(compiled, fast_x, y, WIDTHS)
        print("compile seconds", time.perf_counter() - start)
    times: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name, (step, model) in contestants.items():
            measure(name, step, model, times)
    median = {name: statistics.median(t) for name, t in times.items()}
    result = {
        "net": args.net, "batch": args.batch, "threads": args.threads, "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(), "worst_relative_gradient_difference": worst,
        "median_ms": {n: round(1e3 * t, 1) for n, t in median.items()},
        "speedup_over_plain": {n: round(median["plain"] / t, 2) for n, t in median.items()},
    }  # fmt: skip
    if args.json:
        print(json.dumps(result))
        return
    for name in median:
        print(f"{name:16} {result['median_ms'][name]:9.1f} ms   {result['speedup_over_plain'][name]:5.2f} x")
    print(f"largest relative difference of a gradient: {worst:.1e}")


if __name__ == "__main__":
    main()
