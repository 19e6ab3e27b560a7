"""Products of two values with quantized operands: which are found, what they compute, what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anyprec
from anyprec.errors import AnyprecError, UncalibratedBits, UnsupportedOperation
from anyprec.nn.layers import ProductOperand
from anyprec.nn.plain import to_float_network
from anyprec.nn.products import OwnProducts

WIDTHS = (1, 2, 4, 8, 32)


class Attention(nn.Module):
    """Written out, with `way` of multiplying."""

    def __init__(self, way: str = "@", dim: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.way, self.heads = way, heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.way == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v)
        elif self.way == "bmm":
            q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
            mixed = torch.bmm(torch.bmm(q * 0.5, mat2=k.transpose(1, 2)).softmax(-1), v)
            mixed = mixed.view(batch, self.heads, length, -1)
        else:
            weights = F.dropout((q * 0.5 @ k.transpose(-2, -1)).softmax(-1), 0.1, self.training)
            mixed = torch.matmul(weights, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class Network(nn.Module):
    """A product with a constant, which is none of two values, comes before the attention."""

    def __init__(self, way: str = "@") -> None:
        super().__init__()
        self.first, self.attention, self.last = nn.Linear(12, 12), Attention(way), nn.Linear(12, 4)
        self.register_buffer("turn", torch.eye(12))

    def forward(self, x):
        return self.last(self.attention(self.first(x) @ self.turn))


@pytest.fixture
def x():
    return torch.randn(6, 5, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("way", ["@", "bmm", "sdpa"])
@pytest.mark.parametrize("choice, numbers", [("integer", ["0", "1"]), ("scores", ["0"])])
def test_products_are_found(way, choice, numbers, x):
    net = Network(way).eval()
    model = anyprec.convert(net, WIDTHS, example=x, attention=choice)
    assert isinstance(model.attention, OwnProducts) and isinstance(model.attention, Attention)
    assert not isinstance(model, OwnProducts)  # it multiplies by a constant
    assert list(model.attention.any_products) == numbers
    left, right = (getattr(model.attention.any_products["0"], side).act for side in ("left", "right"))
    assert left.signed and right.signed
    if choice == "integer":
        assert not model.attention.any_products["1"].left.act.signed  # softmax
    assert list(model.conversion.products) == ["attention"]
    assert torch.equal(model(x), net(x))  # at 32 bits, bit for bit


def test_float_is_the_default_and_changes_nothing(x):
    model = anyprec.convert(Network("sdpa").eval(), WIDTHS, example=x)
    assert type(model.attention) is Attention and not model.conversion.products


@pytest.mark.parametrize("way", ["@", "bmm", "sdpa"])
def test_operands_are_rounded(way, x):
    """Every operand has at most 2^k values, and 8 bit is near float."""
    net = Network(way).eval()
    model = anyprec.convert(net, WIDTHS, example=x, attention="integer")
    seen = []
    operands = [m for m in model.modules() if isinstance(m, ProductOperand)]
    assert len(operands) == 4
    for operand in operands:
        operand.register_forward_hook(lambda module, given, made: seen.append(made))
    for bits in (1, 2, 4):
        seen.clear()
        with anyprec.bits(model, bits):
            model(x)
        assert len(seen) == 4 and all(len(made.unique()) <= 2**bits for made in seen)
    with anyprec.bits(model, 8):
        assert (model(x) - net(x)).abs().max() < 0.05 * net(x).abs().max()


def test_ranges_are_trained(x):
    model = anyprec.convert(Network(), WIDTHS, example=x, attention="integer").train()
    anyprec.joint_step(model, x[:, :, :], torch.zeros(6, 5, dtype=torch.long), WIDTHS,
                       loss=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()))  # fmt: skip
    ranges = [p for m in model.modules() if isinstance(m, ProductOperand) for p in m.act.ranges.values()]
    assert len(ranges) == 16 and all(p.grad is not None for p in ranges)


def test_state_dict_round_trip(x):
    model = anyprec.convert(Network().eval(), WIDTHS, example=x, attention="integer")
    other = anyprec.convert(Network().eval(), WIDTHS, example=torch.ones_like(x), attention="integer")
    other.load_state_dict(model.state_dict())
    for bits in WIDTHS:
        anyprec.set_bits(model, bits)
        anyprec.set_bits(other, bits)
        assert torch.equal(model(x), other(x))
    again = copy.deepcopy(model)
    assert torch.equal(again(x), model(x))


def test_calibrated_widths(x):
    model = anyprec.convert(Network().eval(), WIDTHS, example=x, attention="integer")
    anyprec.calibrate(model, [x], widths=(3,))
    anyprec.set_bits(model, 3)
    assert torch.isfinite(model(x)).all()


def test_operands_take_the_bits_of_their_module_in_a_mixed_setting(x):
    model = anyprec.convert(Network().eval(), WIDTHS, example=x, attention="integer")
    anyprec.set_bits(model, {"attention.qkv": 8, "attention.out": 4})
    assert {m.act_bits for m in model.modules() if isinstance(m, ProductOperand)} == {4}


def test_kept_by_name(x):
    model = anyprec.convert(
        Network().eval(), WIDTHS, example=x, attention="integer", keep=("attention.out", "attention")
    )
    assert type(model.attention) is Attention
    assert "stay float" in model.conversion.kept["attention"]


def test_wrong_choice(x):
    with pytest.raises(AnyprecError, match="attention='int8' is not known; choose 'float', 'scores', 'integer'"):
        anyprec.convert(Network(), WIDTHS, example=x, attention="int8")


def test_fewer_products_than_on_the_example(x):
    model = anyprec.convert(Network("@").eval(), WIDTHS, example=x, attention="integer")
    model.attention.way = "none"
    model.attention.own = type("Other", (Attention,), {"forward": lambda self, x: x})
    with pytest.raises(UnsupportedOperation, match="made 0 products here"):
        model(x)


def test_back_to_float(x):
    model = anyprec.convert(Network("sdpa").eval(), WIDTHS, example=x, attention="integer")
    plain = to_float_network(model)
    assert type(plain.attention) is Attention and not any(isinstance(m, ProductOperand) for m in plain.modules())
    assert torch.equal(plain(x), model(x))


# --- nn.MultiheadAttention --------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.first, self.last, self.need_weights = nn.Linear(12, 12), nn.Linear(12, 4), need_weights
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.attention(x, x, x, need_weights=self.need_weights)[0])


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(need_weights, x):
    net = Encoder(need_weights).eval()
    model = anyprec.convert(net, WIDTHS, example=x, attention="integer")
    assert torch.equal(model(x), net(x))
    assert model.attention.scores.left.act.signed and not model.attention.values.left.act.signed
    with anyprec.bits(model, 8):
        assert (model(x) - net(x)).abs().max() < 0.05 * net(x).abs().max()
    with anyprec.bits(model, 1):
        assert torch.isfinite(model(x)).all()
    plain = to_float_network(model)
    assert type(plain.attention) is nn.MultiheadAttention and torch.equal(plain(x), net(x))


def test_multihead_attention_both_ways_agree(x):
    """The same operands are rounded, whether the weights are asked for or not."""
    torch.manual_seed(0)
    model = anyprec.convert(Encoder(True).eval(), WIDTHS, example=x, attention="integer")
    for bits in (2, 8):
        with anyprec.bits(model, bits):
            model.need_weights = True
            with_weights = model(x)
            model.need_weights = False
            assert (model(x) - with_weights).abs().max() < 1e-5


def test_without_an_example(x):
    model = anyprec.convert(Encoder(True).eval(), WIDTHS, attention="integer")
    anyprec.set_bits(model, 4)
    with pytest.raises(UncalibratedBits):
        model(x)
    anyprec.calibrate(model, [x], widths=(1, 2, 4, 8))
    anyprec.set_bits(model, 4)
    assert torch.isfinite(model(x)).all()
