"""Networks as users write them: the file answers new images, in other batches, as the module does, or is refused.

In-place operations, aliases, constants of the input's size, state that outlives a call, values read outside torch.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anyprec
from anyprec.errors import DataError, Diverged, UnsupportedOperation
from anyprec.packing.packing import make_graph

X = torch.randn(3, 3, 10, 10, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two convolutions, what `between` does with their map of 8 channels, a convolution and a linear layer."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1)
        self.cell = nn.LSTMCell(8, 8)
        self.last, self.between, self.calls = nn.Linear(8, 5), between, 0
        self.register_buffer("count", torch.tensor(1.0))

    def forward(self, x):
        return self.end(self.between(self, self.second(self.first(x))))

    def end(self, y):
        return self.last(self.third(y).mean((2, 3)))


def filled(net, y):
    ones = torch.ones_like(y[:1]) * torch.full_like(y, 0.5)
    return y + ones - y.new_ones(8, 1, 1) + y.new_full((1,), 2.0) * y.new_zeros(y.shape) + torch.zeros(y.shape)


def emptied(net, y):
    copy = torch.empty_like(y)
    copy.copy_(y)
    copy.mul_(0.5)
    return copy + torch.empty_like(y).fill_(0.25) + y.clone().zero_()


def summed(net, y):
    total = torch.zeros_like(y)
    total += y
    total += net.third(y)
    return total


def constant_changed_later(net, y):
    matrix, row = torch.linspace(0, 1, 36).view(6, 6).clone(), torch.linspace(-1, 0, 6).clone()
    y = torch.maximum(y @ matrix, row)
    matrix.mul_(3.0)
    row.sub_(1.0)
    return y + matrix + row


def halves(net, y):
    a, b = y.chunk(2, 1)
    a.relu_()
    return torch.cat([b, a], 1)


def cell(net, y):
    hidden = memory = torch.zeros(len(y), 8)
    for row in y.mean(3).unbind(2):
        hidden, memory = net.cell(row, (hidden, memory))
    return y * hidden[:, :, None, None]


def alias(net, y):
    other = y
    other += 1
    return y


EQUAL = {
    "filled": filled,
    "emptied": emptied,
    "summed in place": summed,
    "a constant changed later": constant_changed_later,
    "halves in place": halves,
    "LSTMCell": cell,
    "alias": alias,
    "images in the batch": lambda net, y: (y.reshape(-1, 4, 6, 6) * torch.arange(1, 5).view(4, 1, 1)).view(y.shape),
    "called twice": lambda net, y: net.second(F.pad(net.second(F.pad(y, (1, 1, 1, 1))), (1, 1, 1, 1))),
    "coordinates": lambda net, y: y + torch.linspace(-1, 1, y.shape[3]).expand(len(y), 1, y.shape[2], -1),
    "dropout": lambda net, y: F.dropout(y, 0.5, net.training),
    "own weight": lambda net, y: F.conv2d(y, net.third.weight / net.third.weight.norm()),
}


@pytest.fixture
def equal(tmp_path):
    def check(net, inputs=lambda n: torch.randn(n, 3, 10, 10)):
        torch.manual_seed(1)
        model = anyprec.convert(net.eval(), (2, 8, 32), example=inputs(3))
        anyprec.pack(model, tmp_path / "net.apm", example=inputs(3), keep_float=True)
        packed = anyprec.load(tmp_path / "net.apm")
        for number in (1, 2, 5):
            x = inputs(number)
            for bits, most in ((32, 1e-4), (8, 0.03)):
                anyprec.set_bits(model, bits)
                with torch.no_grad():
                    wanted = model(x.clone())
                wanted = wanted if isinstance(wanted, tuple) else (wanted,)
                found = packed(x.numpy(), bits=bits)
                for ours, theirs in zip(found if isinstance(found, tuple) else (found,), wanted, strict=True):
                    largest = float(theirs.abs().max())
                    np.testing.assert_allclose(ours.reshape(theirs.shape), theirs.numpy(), rtol=0, atol=most * largest)

    return check


@pytest.mark.thorough
@pytest.mark.parametrize("name", EQUAL)
def test_equal(equal, name):
    torch.manual_seed(0)
    equal(Net(EQUAL[name]))


def test_an_input_changed_in_place(equal):
    class Normalized(Net):
        def forward(self, x):
            x.sub_(0.5).div_(2.0)
            return super().forward(x)

    example = X.clone()
    torch.manual_seed(0)
    model = anyprec.convert(Normalized(lambda net, y: y).eval(), (2, 8), example=example.clone())
    make_graph(model, example=example)
    assert torch.equal(example, X)
    equal(Normalized(lambda net, y: y))


def test_outputs_that_are_one_value(equal):
    """The same tensor twice, the input itself, and one number per image."""

    class Outputs(Net):
        def forward(self, x):
            y = super().forward(x)
            return y, y, x, y[:, 0]

    torch.manual_seed(0)
    equal(Outputs(lambda net, y: y))


def counted(net, y):
    net.count += 1
    return y * net.count


def averaged(net, y):
    net.count = net.count * 0.9
    return y * net.count


def calls(net, y):
    net.calls += 1
    return y * net.calls


def alone(net, y):
    return y * 2 if len(y) == 1 else y


def listed(net, y):
    return y * 2 if y[0, 0, 0, 0].tolist() > 0 else y


def through_numpy(net, y):
    return y * float(np.asarray(y.detach())[0].mean())


def refilled(net, y):
    copy = y.clone()
    row = copy.view(len(y), -1)
    copy.fill_(0.5)
    row.mul_(y.flatten(1))
    return copy


def part_filled(net, y):
    part = y[:, :4]
    part.zero_()
    return torch.cat([part, y[:, 4:]], 1)


def half(net, y):
    with torch.autocast("cpu", torch.bfloat16):
        return net.third(y).float()


REFUSED = {
    "change from run to run": counted,
    "affine in .* change from run to run": averaged,
    "its numbers .* change from run to run": calls,
    "one image by itself otherwise than in a batch": alone,
    r"decides by the values of its input \(tolist in .*test_users_networks.py": listed,
    r"decides by the values of its input \(__array__ in .*test_users_networks.py": through_numpy,
    "empty_like in .*never set": lambda net, y: y + torch.empty_like(y),
    "mul in .* writes a value into a part of a constant": refilled,
    "zero in .* fills a part of a value": part_filled,
    "normal in .* draws random numbers": lambda net, y: y + torch.empty_like(y).normal_(),
    r"AnyConv2d in module 'third': autocast rounds values": half,
    "rounds values to float16": lambda net, y: y.half().float(),
    "view in .* bits of numbers as another type": lambda net, y: y.view(torch.int32) * 1e-9,
    "softplus in .* threshold of 0.1": lambda net, y: F.softplus(y, 1.0, 0.1),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words, tmp_path):
    torch.manual_seed(0)
    model = anyprec.convert(Net(REFUSED[words]).eval(), (2, 8, 32), example=X)
    with pytest.raises(UnsupportedOperation, match=words) as error:
        anyprec.pack(model, tmp_path / "net.apm", example=X)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_images_of_whole_numbers(tmp_path):
    class Bytes(Net):
        def forward(self, x):
            return super().forward(x.float() / 255)

    x = torch.randint(0, 256, (3, 3, 10, 10), dtype=torch.uint8)
    model = anyprec.convert(Bytes(lambda net, y: y).eval(), (2, 8), example=x)
    with pytest.raises(DataError, match=r"\(3, 3, 10, 10\) uint8; images are float numbers"):
        anyprec.pack(model, tmp_path / "net.apm", example=x)


@pytest.mark.parametrize("scale, reach", [(1e30, 1e20), (float("nan"), 1.0)])
def test_numbers_that_no_file_can_hold(tmp_path, scale, reach):
    """A training that diverged: the line names layer, place and width."""
    torch.manual_seed(0)
    model = anyprec.convert(Net(lambda net, y: y).eval(), (2, 8), example=X)
    with torch.no_grad():
        model.second.quantizer.scales["2"].fill_(scale)
        model.second.act.ranges["2"].fill_(reach)
    line = r"conv in module 'second' \(AnyConv2d\), test_users_networks.py:\d+: at 2 bit \S+ is among its numbers"
    with pytest.raises(Diverged, match=line):
        anyprec.pack(model, tmp_path / "net.apm", example=X)
    assert not list(tmp_path.iterdir())
