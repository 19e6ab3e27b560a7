"""3 x 3 convolutions of training by Winograd: torch's own results and gradients, up to rounding."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from anyprec import _native
from anyprec.errors import AnyprecError
from anyprec.nn import winograd
from anyprec.nn.layers import AnyConv2d, use_winograd
from anyprec.nn.switching import set_bits
from anyprec.zoo import build


def both(n, c, k, h, w, x_grad=True, w_grad=True, layout=torch.channels_last, seed=0):
    """Outputs and gradients, torch's in float64 and ours in float32."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(n, c, h, w, generator=draw)
    weight = torch.randn(k, c, 3, 3, generator=draw) / (3 * c**0.5)
    grad = torch.randn(n, k, h, w, generator=draw)
    found = []
    for kind, compute in (
        (torch.float64, lambda x, w: F.conv2d(x, w, padding=1)),
        (torch.float32, lambda x, w: winograd.convolve(x, w, None)),
    ):
        a = x.to(kind).contiguous(memory_format=layout).requires_grad_(x_grad)
        b = weight.to(kind).requires_grad_(w_grad)
        y = compute(a, b)
        y.backward(grad.to(kind))
        found.append((y.detach(), a.grad, b.grad))
    return found


def assert_close(exact, ours):
    for one, other in zip(exact, ours, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one - other).abs().max() <= 2e-5 * one.abs().max(), (one - other).abs().max() / one.abs().max()


@pytest.mark.parametrize(
    "n, c, k, h, w",
    [(2, 64, 64, 8, 8), (3, 5, 7, 1, 1), (1, 2, 3, 4, 9), (2, 3, 2, 15, 7), (5, 1, 1, 3, 6), (0, 4, 4, 8, 8)],
)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_as_torch(n, c, k, h, w, layout):
    if n == 0:
        assert winograd.convolve(torch.zeros(0, c, h, w), torch.zeros(k, c, 3, 3), None).shape == (0, k, h, w)
        return
    assert_close(*both(n, c, k, h, w, layout=layout))


@pytest.mark.parametrize("n, c, k, h, w", [(13, 8, 6, 8, 8), (150, 3, 130, 3, 4), (2, 130, 150, 9, 9)])
@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_in_blocks_and_on_threads(n, c, k, h, w, threads):
    """More tiles than a block has, more channels than a group; also more threads than there is work."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_close(*both(n, c, k, h, w))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "x, kernel, y, threads",
    [
        ((1, 4, 4, 2), (3, 3, 2, 3), (1, 4, 4, 2), 1),
        ((1, 4, 4, 2), (3, 3, 1, 3), (1, 4, 4, 3), 1),
        ((1, 4, 4, 2), (3, 2, 2, 3), (1, 4, 4, 3), 1),
        ((2, 4, 4, 2), (3, 3, 2, 3), (1, 4, 4, 3), 1),
        ((1, 4, 4, 2), (3, 3, 2, 3), (1, 4, 5, 3), 1),
        ((1, 4, 4, 2), (3, 3, 2, 3), (1, 4, 4, 3), 0),
    ],
)
def test_sizes_that_do_not_fit(x, kernel, y, threads):
    arrays = [np.zeros(shape, np.float32) for shape in (x, kernel, y)]
    with pytest.raises(ValueError, match="expected x"):
        _native.winograd_convolve(*arrays, threads)
    with pytest.raises(ValueError, match="expected x"):
        _native.winograd_kernel_gradient(arrays[0], arrays[2], arrays[1], threads)


@pytest.mark.thorough
@pytest.mark.parametrize("isa", _native.built_isas())
def test_every_instruction_set(isa):
    """In a process of its own, which has the instruction set from its start."""
    code = """
import numpy as np, torch
from anyprec import _native
from anyprec.nn import winograd
x = torch.rand(2, 19, 7, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
w = torch.rand(37, 19, 3, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
gradients = []
for compute in (lambda: winograd.convolve(x, w, None), lambda: torch.nn.functional.conv2d(x, w, padding=1)):
    y = compute()
    gradients.append((y.detach(), *torch.autograd.grad(y.square().sum(), (x, w))))
for ours, theirs in zip(*gradients):
    assert (ours - theirs).abs().max() <= 3e-5 * theirs.abs().max()
print(_native.isa())
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "ANYPREC_ISA": isa}, capture_output=True, text=True
    )
    if "UnsupportedIsa" in ran.stderr:
        pytest.skip(f"this CPU has no {isa}")
    assert ran.stdout.strip() == isa, ran.stderr


# --- Gradients by products of bfloat16 ---

B = torch.tensor([
    [4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0],
    [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1],
])  # fmt: skip
A = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]])
G = torch.tensor([
    [1 / 4, 0, 0], [-1 / 6, -1 / 6, -1 / 6], [-1 / 6, 1 / 6, -1 / 6],
    [1 / 24, 1 / 12, 1 / 6], [1 / 24, -1 / 12, 1 / 6], [0, 0, 1],
])  # fmt: skip


def rounded(t):
    """To the nearest bfloat16, from what float32 has: the engine rounds there."""
    return t.float().bfloat16().double()


def both_axes(t, x):
    return t.double() @ x @ t.double().T


def tiles(x, size, border):
    """(N, C, H, W) -> (N, C, tiles down, tiles across, size, size), four pixels from one to the next."""
    h, w = x.shape[2:]
    x = F.pad(x, (border, -w % 4 + border, border, -h % 4 + border))
    return x.unfold(2, size, 4).unfold(3, size, 4)


def reference(x, weight, grad):
    """Lavin and Gray's equations in float64, with both factors of every product rounded."""
    turned = rounded(both_axes(G, weight.double().flip(2, 3)))  # (K, C, 6, 6)
    m = torch.einsum("nkxyij,kcij->ncxyij", rounded(both_axes(B, tiles(grad.double(), 6, 1))), turned)
    y = both_axes(A, m).permute(0, 1, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)[..., : x.shape[2], : x.shape[3]]
    d = rounded(both_axes(A.T, tiles(grad.double(), 4, 0)))
    v = rounded(both_axes(B, tiles(x.double(), 6, 1)))
    return y, both_axes(G.T, torch.einsum("ncxyij,nkxyij->kcij", v, d))


@pytest.mark.skipif(not winograd.has_bf16(), reason="this CPU does not multiply bfloat16")
@pytest.mark.parametrize(
    "n, c, k, h, w",
    [(2, 64, 64, 8, 8), (3, 5, 7, 1, 1), (1, 1, 1, 4, 9), (2, 33, 17, 15, 7), (150, 3, 130, 3, 4), (2, 130, 65, 9, 9)],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_bf16_gradients(n, c, k, h, w, threads):
    draw = torch.Generator().manual_seed(n)
    x = torch.rand(n, c, h, w, generator=draw).requires_grad_()
    weight = torch.randn(k, c, 3, 3, generator=draw).requires_grad_()
    grad = torch.randn(n, k, h, w, generator=draw)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = winograd.convolve(x, weight, None, bf16=True)
        found = torch.autograd.grad(y, (x, weight), grad)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(y, winograd.convolve(x, weight, None))  # forward as ever
    exact = torch.autograd.grad(F.conv2d(x.double(), weight.double(), padding=1), (x, weight), grad.double())
    for ours, expected, right in zip(found, reference(x.detach(), weight.detach(), grad), exact, strict=True):
        # A transform whose float32 sum is rounded otherwise may end at the other bfloat16: few do, by 2^-8 of one term.
        assert (ours - expected).norm() <= 2e-3 * expected.norm()
        assert 1e-4 * right.norm() < (ours - right).norm() < 0.05 * right.norm()


def test_bf16_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(winograd, "has_bf16", lambda: False)
    with pytest.raises(AnyprecError, match="gradients='bf16' needs a CPU that multiplies bfloat16"):
        use_winograd(AnyConv2d(64, 64, 3, padding=1), "bf16")


def test_bf16_is_not_used_below_avx512():
    """Held to AVX2, the engine must not run AVX-512 instructions."""
    code = """
import numpy as np
from anyprec import _native
print(_native.winograd_has_bf16())
try:
    _native.winograd_convolve(np.zeros((1, 4, 4, 2), np.float32), np.zeros((3, 3, 2, 2), np.float32),
                              np.zeros((1, 4, 4, 2), np.float32), 1, True)
except ValueError as error:
    print(error)
"""
    environment = {**os.environ, "ANYPREC_ISA": "scalar"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    first, second = ran.stdout.splitlines()
    assert first == "False" and "does not multiply bfloat16" in second


@pytest.mark.parametrize("x_grad, w_grad", [(True, False), (False, True)])
def test_only_one_gradient_is_wanted(x_grad, w_grad):
    assert_close(*both(2, 4, 5, 6, 6, x_grad, w_grad))


def test_no_second_derivative():
    x = torch.rand(1, 2, 4, 4, requires_grad=True)
    y = winograd.convolve(x, torch.rand(2, 2, 3, 3, requires_grad=True), None)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    "options, fits",
    [
        ({}, True),
        ({"padding": "same"}, True),
        ({"bias": True}, True),
        ({"stride": 2}, False),
        ({"padding": 0}, False),
        ({"dilation": 2, "padding": 2}, False),
        ({"groups": 2}, False),
        ({"padding_mode": "reflect"}, False),
        ({"kernel_size": 1, "padding": 0}, False),
        ({"in_channels": 16}, True),
        ({"in_channels": 15}, False),
        ({"out_channels": 15}, False),
    ],
)
def test_which_convolutions(options, fits):
    given = {"in_channels": 64, "out_channels": 64, "kernel_size": 3, "padding": 1, "bias": False, **options}
    assert winograd.fits(AnyConv2d(**given)) == fits


def test_a_layer_uses_it_in_training_only(monkeypatch):
    calls = []
    plain = winograd.convolve
    monkeypatch.setattr(winograd, "convolve", lambda *given: calls.append(1) or plain(*given))
    layer = AnyConv2d(64, 64, 3, padding=1)
    x = torch.rand(2, 64, 6, 6)
    before = layer(x)
    assert use_winograd(layer) == 1 and not calls
    torch.testing.assert_close(layer(x), before, rtol=1e-4, atol=1e-5)  # with its bias
    assert calls == [1]
    layer.eval()(x)
    layer.train()(x.double().float())
    layer(x[0])  # without a batch
    assert calls == [1, 1]


def test_a_network_trains_the_same():
    torch.manual_seed(0)
    model = build("vgg-speed", channels=(64, 64, 64))
    x, grads = torch.rand(4, 3, 32, 32), []
    model.train()
    for use in (False, True):
        if use:
            assert use_winograd(model) == 6  # the learned part of the stem among them
        found = []
        for bits in (1, 4, 32):
            model.zero_grad()
            set_bits(model, bits)
            model(x).square().sum().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        grads.append(found)
    gaps = [float((a - b).norm() / a.norm().clamp_min(1e-6)) for a, b in zip(*grads, strict=True)]
    # Where rounding carries an activation across a code's border, gradients differ: a few in thousands do.
    assert sorted(gaps)[len(gaps) // 2] < 0.02, sorted(gaps)[-5:]
