"""Modules that do more than their type says: packed as they run, or refused with a line. Never lost."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import anyprec
from anyprec.errors import AnyprecError, UnsupportedOperation, VerificationFailed
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.convert import convert
from anyprec.nn.layers import AnyActivation, AnyConv2d
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.plain import to_float_network
from anyprec.nn.quantizers import Nested
from anyprec.nn.switching import any_layers, bits
from anyprec.packing.packing import make_graph, pack

WIDTHS = (2, 8, 32)
X = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class NormAct(nn.BatchNorm2d):
    def forward(self, x):
        return torch.relu(super().forward(x))


class NormActPool(nn.BatchNorm2d):
    """Children, parameters and a buffer of its own, and F.batch_norm instead of super()."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act, self.pool = nn.Hardtanh(-0.5, 1.5), nn.AvgPool2d(3, 1, 1)
        self.gain = nn.Parameter(torch.rand(channels) + 0.5)
        self.register_buffer("offset", torch.rand(channels))

    def forward(self, x):
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        return self.pool(self.act(x)) * self.gain[:, None, None] + self.offset[:, None, None]


class SamePad(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (0, 1, 0, 1)))


class LinearTwice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(nn.ReLU):
    def forward(self, x):
        return super().forward(x) - 0.2


class Half(nn.Dropout):
    """Weighs in eval mode what it drops in training."""

    def forward(self, x):
        return F.dropout(x, self.p, True) if self.training else x * (1 - self.p)


class CeilPool(nn.MaxPool2d):
    def forward(self, x):
        return F.max_pool2d(x, self.kernel_size, self.stride, ceil_mode=True) + 0.1


def build(norm=None, conv=None, act=None, between=None, head=None):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        norm or nn.BatchNorm2d(6),
        act or nn.ReLU(),
        conv or nn.Conv2d(6, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        act or nn.ReLU(),
        nn.Conv2d(6, 6, 1),
        between or nn.Identity(),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        head or nn.Linear(6, 5),
    )
    with torch.no_grad():
        for _ in range(3):
            net.train()(torch.randn(16, 3, 12, 12))
    return net.eval()


def converted(**parts):
    model = convert(build(**parts), widths=WIDTHS, example=X)
    for number, module in enumerate(m for m in model.modules() if isinstance(m, SwitchNorm)):
        for key, table in module.tables.items():  # each width with numbers of its own
            with torch.no_grad():
                if table.weight is not None:
                    table.weight.mul_(1 + 0.02 * int(key) / 8 + 0.1 * number)
                table.running_mean.add_(0.01 * int(key))
    return model


def hooked(model, module, pre=False):
    if pre:
        model.get_submodule(module).register_forward_pre_hook(lambda m, given: (given[0] * 1.5 + 0.1,))
    else:
        model.get_submodule(module).register_forward_hook(lambda m, given, out: out * 1.5 + 0.1)
    return model


def own_forward(model, module):
    layer = model.get_submodule(module)
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 1.5 + 0.1
    return model


def subclassed(model):
    class Louder(AnyConv2d):
        def forward(self, x):
            return 1.5 * super().forward(x + 0.1)

    model[3].__class__ = Louder
    return model


def weight_normed(model):
    parametrizations.weight_norm(model[3])
    return model


def used_twice(model):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            for module in list(self.net)[:4]:
                x = module(x)
            for module in list(self.net)[3:]:
                x = module(x)
            return x

    return Twice()


class WithConstant(nn.Module):
    """A constant that any-layers and norms make, so it is another one at every width."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 2, 1)
        self.norm = nn.BatchNorm2d(6)
        self.query = nn.Parameter(torch.rand(1, 6, 1, 1))

    def forward(self, x):
        return self.last(torch.relu(self.conv(torch.relu(self.stem(x))) + self.norm(self.conv(self.query))))


PACKED = {
    "norm and activation": lambda: converted(norm=NormAct(6)),
    "norm with children": lambda: converted(norm=NormActPool(6)),
    "norm without affine": lambda: converted(norm=nn.BatchNorm2d(6, affine=False)),
    "norm without bias": lambda: converted(norm=nn.BatchNorm2d(6, bias=False)),
    "norm of all batches": lambda: converted(norm=nn.BatchNorm2d(6, momentum=None)),
    "padding in forward": lambda: converted(conv=SamePad(6, 6, 2)),
    "weight norm": lambda: converted(conv=parametrizations.weight_norm(nn.Conv2d(6, 6, 3))),
    "spectral norm": lambda: converted(conv=parametrizations.spectral_norm(nn.Conv2d(6, 6, 3))),
    "linear subclass": lambda: converted(head=LinearTwice(6, 5)),
    "activation subclass": lambda: converted(act=Shifted()),
    "dropout subclass": lambda: converted(between=Half(0.25)),
    "pool subclass": lambda: converted(between=CeilPool(3, 2)),
    "hook on an any-layer": lambda: hooked(converted(), "3"),
    "hook before an any-layer": lambda: hooked(converted(), "3", pre=True),
    "hook on a norm": lambda: hooked(converted(), "4"),
    "hook before a norm": lambda: hooked(converted(), "4", pre=True),
    "hooks on the tables": lambda: hooked(hooked(hooked(converted(), "4.tables.2"), "4.tables.8"), "4.tables.32"),
    "hook before convert": lambda: convert(hooked(hooked(build(), "1"), "3"), widths=WIDTHS, example=X),
    "forward of an any-layer replaced": lambda: own_forward(converted(), "3"),
    "forward of a norm replaced": lambda: own_forward(converted(), "4"),
    "subclass of an any-layer": lambda: subclassed(converted()),
    "weight norm on an any-layer": lambda: weight_normed(converted()),
    "used twice": lambda: used_twice(converted()),
    "constant of an any-layer": lambda: convert(WithConstant().eval(), widths=WIDTHS, example=X),
}


@pytest.mark.parametrize("what", PACKED)
def test_packed_as_it_runs(what, tmp_path):
    model = PACKED[what]()
    report = pack(model, tmp_path / "net.apm", example=X, keep_float=True)
    packed = anyprec.load(tmp_path / "net.apm")
    outputs = []
    for width in WIDTHS:
        with torch.no_grad(), bits(model, width):
            wanted = model(X).numpy()
        gap = np.abs(packed(X.numpy(), bits=width) - wanted)
        # Single codes may move, and a map has many numbers that see one.
        assert np.median(gap) < 1e-5 * wanted.std() and gap.max() < 0.1 * wanted.std(), (width, gap.max(), wanted.std())
        assert report.check.profiles[str(width)].alive
        outputs.append(wanted)
    assert not np.allclose(outputs[0], outputs[1])  # or this tests one width only


# --- Refused ---


class NoisyInEval(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.noise = noise

    def forward(self, x):
        return self.noise(x)


class OwnWeight(AnyConv2d):
    def quantized_weight(self):
        return super().quantized_weight() * 2


class OwnGrid(Nested):
    def _value(self, code, bits):
        return super()._value(code, bits) * 0.9


class OwnAct(ActQuantizer):
    def forward(self, y, bits):
        return super().forward(y, bits) * 0.9


class ByWidth(nn.Module):
    """Other operations at other widths."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        x = self.layer(x)
        return torch.relu(x) if self.layer.weight_bits > 4 else x


def by_width():
    model = converted()
    model[3] = ByWidth(model[3])
    return model


def with_class(kind):
    model = converted()
    model[3].__class__ = kind
    return model


def with_part(name, part):
    model = converted()
    old = getattr(model[3], name)
    old.__class__ = part
    return model


REFUSED = {
    "dropout": (lambda: converted(between=NoisyInEval(F.dropout)), "draws random numbers"),
    "noise": (lambda: converted(between=NoisyInEval(lambda x: x + torch.randn_like(x))), "draws random numbers"),
    "a random factor": (lambda: converted(between=NoisyInEval(lambda x: x * torch.rand(1))), "draws random numbers"),
    "a random gate": (lambda: converted(between=NoisyInEval(lambda x: x * random.random())), "change from run to run"),
    "by the batch": (lambda: converted(between=NoisyInEval(lambda x: x / len(x))), "the number of images in a batch"),
    "no statistics": (
        lambda: convert(build(norm=nn.BatchNorm2d(6, track_running_stats=False)), widths=WIDTHS, example=X),
        "without running statistics",
    ),
    "weight of its own": (lambda: with_class(OwnWeight), "OwnWeight in module '3' has a quantized_weight of its own"),
    "grid of its own": (lambda: with_part("quantizer", OwnGrid), "weight quantizer OwnGrid is not one"),
    "rounding of its own": (lambda: with_part("act", OwnAct), "activation quantizer OwnAct is not one"),
    "other operations": (by_width, "runs other operations at 8 bit than at 2 bit"),
    "hook on a quantizer": (lambda: hooked_act(), "does not compute what the module does at 2 bit"),
}


def hooked_act():
    model = converted()
    model[3].act.register_forward_hook(lambda m, given, out: out * 1.5)
    return model


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_a_line(what, tmp_path):
    make, words = REFUSED[what]
    model = make()
    with pytest.raises(AnyprecError, match=words) as error:
        pack(model, tmp_path / "net.apm", example=X, keep_float=True)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
    assert isinstance(error.value, VerificationFailed) == ("does not compute" in words)


# --- Back to plain torch ---


@pytest.mark.parametrize("where", ["3", "4"])
@pytest.mark.parametrize("pre", [False, True])
def test_hooks_survive_as_float(where, pre):
    model = hooked(converted(), where, pre)
    anyprec.set_bits(model, 32)
    with torch.no_grad():
        assert torch.equal(to_float_network(model)(X), model(X))


def test_hooks_on_a_shared_activation_survive_as_float():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), AnyActivation(), AnyConv2d(4, 4, 3)).eval()
    hooked(net, "1")
    with torch.no_grad():
        assert torch.equal(to_float_network(net)(X), net(X))


def loud_norm(model):
    class Loud(type(model[4])):
        def forward(self, x):
            return 2 * super().forward(x)

    model[4].__class__ = Loud
    return model


@pytest.mark.parametrize(
    "make", [lambda: subclassed(converted()), lambda: own_forward(converted(), "3"),
             lambda: own_forward(converted(), "4"), lambda: loud_norm(converted())],
)  # fmt: skip
def test_as_float_refuses_what_it_would_lose(make):
    with pytest.raises(UnsupportedOperation, match=r"in module '[34]' has a forward or parametrization of its own"):
        to_float_network(make())


def test_as_float_of_a_subclass_without_a_forward():
    class Named(nn.Conv2d):
        pass

    model = converted(conv=Named(6, 6, 3))
    assert type(model[3]).__name__ == "AnyNamed" and len(any_layers(model)) == 2
    plain = to_float_network(model)
    assert type(plain[3]) is Named
    with torch.no_grad(), bits(model, 32):
        assert torch.equal(plain(X), model(X))


def test_a_norm_inside_gets_the_name_of_the_norm():
    graph = make_graph(converted(norm=NormActPool(6)), example=X)
    assert not any("tables" in op.name for op in graph.ops) and "1.pool" in {op.name for op in graph.ops}
