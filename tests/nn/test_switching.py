"""set_bits and the bits context manager: ints, dicts, profiles; what is refused, with which words, and that a
refused setting changes nothing.
"""

import pytest
import torch
from torch import Tensor, nn

import anyprec
from anyprec.errors import AnyprecError, ProfileError, UncalibratedBits, UnknownLayer, UnsupportedBits
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.layers import AnyActivation, AnyConv2d, AnyLinear
from anyprec.nn.norms import SwitchBatchNorm2d
from anyprec.nn.quantizers import make_quantizer
from anyprec.nn.switching import (
    any_layers,
    apply_layer_bits,
    bits,
    bits_state,
    link_norms,
    set_bits,
    switch_norms,
    widths_of,
)
from anyprec.widths import Profile

WIDTHS = (1, 2, 4, 8, 32)


class Block(nn.Module):
    """Pre-activation: one quantized input is read by the main branch and by the skip convolution."""

    def __init__(self, channels: int, quantized_skip: bool) -> None:
        super().__init__()
        self.norm = SwitchBatchNorm2d(channels, WIDTHS)
        self.act = AnyActivation()
        self.conv1 = AnyConv2d(channels, channels, 3, padding=1)
        self.norm2 = SwitchBatchNorm2d(channels, WIDTHS)
        self.act2 = AnyActivation()
        self.conv2 = AnyConv2d(channels, channels, 3, padding=1)
        self.skip = (AnyConv2d if quantized_skip else nn.Conv2d)(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.act(self.norm(x))
        return self.skip(a) + self.conv2(self.act2(self.norm2(self.conv1(a))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.block1 = Block(4, quantized_skip=True)
        self.block2 = Block(4, quantized_skip=False)
        self.last_norm = SwitchBatchNorm2d(4, WIDTHS)
        self.last_act = AnyActivation()
        self.classifier = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.block1(self.stem(x)))
        return self.classifier(self.last_act(self.last_norm(x)).mean((2, 3)))


LAYERS = ["block1.conv1", "block1.conv2", "block1.skip", "block2.conv1", "block2.conv2"]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    link_norms(model)
    for k in WIDTHS:
        set_bits(model, k)
        model(torch.randn(8, 3, 7, 7))  # each width its own statistics
    return model.eval()


def settings(model: nn.Module) -> list[dict[str, object]]:
    return [attributes for _, attributes in bits_state(model)]


# --- One width ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", WIDTHS)
def test_one_width_for_all(net, k):
    set_bits(net, k)
    assert {layer.bits for layer in any_layers(net).values()} == {k}
    assert {norm.key for norm in switch_norms(net).values()} == {str(k)}
    assert {m.act_bits for m in net.modules() if isinstance(m, AnyActivation)} == {k}


def test_widths_give_different_outputs(net):
    x = torch.randn(2, 3, 7, 7)
    outputs = []
    for k in WIDTHS:
        with bits(net, k):
            outputs.append(net(x))
    assert all(not torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])


def test_names_in_order(net):
    assert list(any_layers(net)) == LAYERS
    assert list(switch_norms(net))[-1] == "last_norm"


def test_widths_of(net):
    assert widths_of(net) == WIDTHS
    net.last_norm.add_table("3", like="4")
    assert widths_of(net) == WIDTHS  # one norm is not all of them
    for norm in switch_norms(net).values():
        norm.add_table("3", like="4")
        norm.add_table("mixed", like="4")
    assert widths_of(net) == (1, 2, 3, 4, 8, 32)


def test_widths_of_other_parts():
    assert widths_of(AnyLinear(3, 2)) == (1, 2, 3, 4, 5, 6, 7, 8, 32)
    assert widths_of(AnyLinear(3, 2, quantizer=make_quantizer("nested", (2, 8, 32), "learned"))) == (2, 8, 32)
    assert widths_of(AnyLinear(3, 2, act=ActQuantizer((1, 4), clip="calibrated"))) == (1, 4, 32)
    assert widths_of(AnyLinear(3, 2, act=ActQuantizer((1, 4)))) == (1, 2, 3, 4, 5, 6, 7, 8, 32)


# --- Some layers --------------------------------------------------------------------------------------------


def test_a_dict_sets_what_it_names_and_no_more(net):
    set_bits(net, 8)
    set_bits(net, {"block1.conv1": 2, "block2.conv2": 1})
    assert [layer.bits for layer in any_layers(net).values()] == [2, 8, 8, 8, 1]
    # a norm takes the width of the layer run before it; the first of all, of the first layer after
    assert {name: norm.key for name, norm in switch_norms(net).items()} == {
        "block1.norm": "2", "block1.norm2": "2", "block2.norm": "8", "block2.norm2": "8", "last_norm": "1",
    }  # fmt: skip


def test_shared_activations_follow_the_layer_that_reads_them(net):
    set_bits(net, 8)
    set_bits(net, {"block1.conv1": 2, "block1.skip": 4, "block1.conv2": 1, "block2.conv2": 4})
    assert net.block1.act.act_bits == 2  # read by conv1 and skip: the first of them decides
    assert net.block1.act2.act_bits == 1
    assert net.block2.act.act_bits == 8
    assert net.block2.act2.act_bits == 4
    assert net.last_act.act_bits == 4  # only the float classifier reads it: as the any-layer before it


def test_pairs(net):
    set_bits(net, 8)
    set_bits(net, {"block1.conv1": (8, 4), "block1.conv2": [4, 4]})
    conv1, conv2 = net.block1.conv1, net.block1.conv2
    assert conv1.bits == (8, 4) and (conv1.weight_bits, conv1.act_bits) == (8, 4)
    assert conv2.bits == 4
    assert net.block1.act.act_bits == 4
    assert net.block1.norm2.key == "8"  # norms follow the weights
    set_bits(net, {"block1.conv1": (8, 7)})  # 7 bit has no norm table, and needs none
    assert net.block1.act.act_bits == 7


def test_a_dict_with_all_layers_is_the_uniform_setting(net):
    x = torch.randn(2, 3, 7, 7)
    for k in WIDTHS:
        set_bits(net, k)
        expected, uniform = net(x), settings(net)
        set_bits(net, 8 if k != 8 else 1)
        set_bits(net, dict.fromkeys(LAYERS, k))
        assert settings(net) == uniform
        assert torch.equal(net(x), expected)


def test_a_network_put_together_by_hand_needs_no_link():
    model = nn.Sequential(AnyConv2d(3, 4, 1), SwitchBatchNorm2d(4, WIDTHS))
    set_bits(model, {"0": 2})
    assert model[1].key == "2"


def test_link_norms_in_the_order_they_run(net):
    link_norms(net, order=["block2.conv1", "last_norm", "block1.norm", "block1.conv1", "block2.norm", "stem"])
    assert net.last_norm.follows == "block2.conv1"
    assert net.block2.norm.follows == "block1.conv1"


# --- Profiles -----------------------------------------------------------------------------------------------


@pytest.fixture
def profile(net) -> Profile:
    """A mixed profile with norm tables of its own in `net`."""
    made = Profile("mixed", {"block1.conv1": 2, "block1.conv2": (8, 4), "block2.conv2": 1})
    for norm in switch_norms(net).values():
        norm.add_table("mixed", like="2")
        with torch.no_grad():
            norm.tables["mixed"].bias.fill_(0.3)
    return made


def test_a_profile_sets_everything(net, profile):
    x = torch.randn(2, 3, 7, 7)
    outputs, states = [], []
    for before in (1, 32, {"block1.skip": 2}):  # whatever was set before
        set_bits(net, before)
        set_bits(net, profile)
        outputs.append(net(x))
        states.append(settings(net))
    assert [layer.bits for layer in any_layers(net).values()] == [2, (8, 4), 8, 8, 1]
    assert {norm.key for norm in switch_norms(net).values()} == {"mixed"}
    assert net.last_act.act_bits == 1
    assert all(torch.equal(y, outputs[0]) for y in outputs) and all(s == states[0] for s in states)


def test_a_profile_from_its_file(net, profile, tmp_path):
    x = torch.randn(2, 3, 7, 7)
    set_bits(net, profile)
    expected = net(x)
    profile.save(tmp_path / "mixed.json")
    set_bits(net, 1)
    loaded = Profile.load(tmp_path / "mixed.json")
    assert loaded == profile
    with bits(net, loaded):
        assert torch.equal(net(x), expected)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"name": "m"}', '{"name": "m", "bits": {}}', '{"name": "8", "bits": {"a": 1}}']
)
def test_broken_profile_files(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ProfileError) as caught:
        Profile.load(tmp_path / "p.json")
    assert "\n" not in str(caught.value)


def test_a_plan_without_norms(net):
    """What calibrate sets while it makes the norms of a profile."""
    set_bits(net, 1)
    apply_layer_bits(net, {"block1.conv1": 2})
    assert [layer.bits for layer in any_layers(net).values()] == [2, 8, 8, 8, 8]
    assert {norm.key for norm in switch_norms(net).values()} == {"1"}


# --- The context manager ------------------------------------------------------------------------------------


def test_what_was_set_comes_back(net, profile):
    set_bits(net, {"block1.conv1": 2, "block1.conv2": (8, 4)})
    before = settings(net)
    with bits(net, 4) as inside:
        assert inside is net and widths_in_use(net) == {4}
        with bits(net, profile):
            assert widths_in_use(net) == {2, (8, 4), 8, 1}
            with bits(net, {"block1.conv1": 8}):
                assert net.block1.conv1.bits == 8
            assert net.block1.conv1.bits == 2
        assert widths_in_use(net) == {4}
    assert settings(net) == before


def widths_in_use(model: nn.Module) -> set:
    return {layer.bits for layer in any_layers(model).values()}


def test_what_was_set_comes_back_after_an_error(net):
    set_bits(net, 8)
    before = settings(net)
    with pytest.raises(ZeroDivisionError), bits(net, 4), bits(net, {"block1.conv1": 1}):
        raise ZeroDivisionError
    assert settings(net) == before


def test_a_refused_setting_never_enters(net):
    set_bits(net, 8)
    before = settings(net)
    with pytest.raises(UncalibratedBits), bits(net, 3):
        raise AssertionError("must not get here")
    assert settings(net) == before


def test_the_public_names(net):
    anyprec.set_bits(net, 4)
    with anyprec.bits(net, 2):
        assert widths_in_use(net) == {2}
    assert widths_in_use(net) == {4}
    assert list(anyprec.any_layers(net)) == LAYERS


# --- Refused settings ---------------------------------------------------------------------------------------

NO_WIDTH = "is not a bit-width; choose 1..8, or 32 for float"
NO_LAYER = "is not an any-precision layer of this model"
ALL_LAYERS = f"its layers are {', '.join(LAYERS)}"
CALIBRATE = "calibrate it first: anyprec.calibrate(model, loader,"
KNOWN = "1, 2, 4, 8, 32"

REFUSED = [
    (
        3,
        UncalibratedBits,
        f"bits=3 is not one of this model's widths ({KNOWN}); choose one, or {CALIBRATE} widths=(3,))",
    ),
    (0, UnsupportedBits, f"bits=0 {NO_WIDTH}"),
    (9, UnsupportedBits, f"bits=9 {NO_WIDTH}"),
    (-1, UnsupportedBits, f"bits=-1 {NO_WIDTH}"),
    (True, UnsupportedBits, f"bits=True {NO_WIDTH}"),
    ("4", UnsupportedBits, f"bits='4' {NO_WIDTH}"),
    (4.0, UnsupportedBits, f"bits=4.0 {NO_WIDTH}"),
    (None, UnsupportedBits, f"bits=None {NO_WIDTH}"),
    (
        {"block1.conv1": 2, "block1.covn2": 2},
        UnknownLayer,
        f"'block1.covn2' {NO_LAYER}; did you mean 'block1.conv2'?",
    ),
    ({"zzz": 2}, UnknownLayer, f"'zzz' {NO_LAYER}; {ALL_LAYERS}"),
    ({"stem": 2}, UnknownLayer, f"'stem' {NO_LAYER}; {ALL_LAYERS}"),
    ({"block1.conv1": 2, "block1.conv2": 9}, UnsupportedBits, f"bits=9 {NO_WIDTH}"),
    ({"block1.conv1": 2, "block1.conv2": "2"}, UnsupportedBits, f"bits='2' {NO_WIDTH}"),
    (
        {"block1.conv1": (8, 7, 6)},
        UnsupportedBits,
        "bits=(8, 7, 6) is not a pair (weight_bits, act_bits), for example (8, 7)",
    ),
    (
        {"block1.conv2": 2, "block1.conv1": 3},
        UncalibratedBits,
        f"bits=3 for layer 'block1.conv1': its norm 'block1.norm' has tables for {KNOWN} only; "
        "choose one of them, or calibrate it first",
    ),
    (
        Profile("mixed", {"block1.conv1": 2}),
        UncalibratedBits,
        f"profile 'mixed' has no norm tables yet; {CALIBRATE} profiles=(profile,))",
    ),
    (
        Profile("typo", {"block1.konv1": 2}),
        UnknownLayer,
        f"'block1.konv1' {NO_LAYER}; did you mean 'block1.conv1'?",
    ),
]


@pytest.mark.parametrize(("setting", "error", "words"), REFUSED, ids=lambda v: str(v)[:40])
def test_refused_with_one_line_and_nothing_changed(net, setting, error, words):
    set_bits(net, {"block1.conv1": 2, "block2.conv1": (8, 4)})
    before = settings(net)
    with pytest.raises(error) as caught:
        set_bits(net, setting)
    assert str(caught.value) == words
    assert isinstance(caught.value, AnyprecError) and isinstance(caught.value, ValueError)
    assert settings(net) == before


def test_a_model_without_any_layers():
    with pytest.raises(AnyprecError, match=r"Linear has no any-precision layer; make it one with anyprec\.convert"):
        set_bits(nn.Linear(3, 2), 4)


def test_layers_without_a_learned_scale_or_range_for_the_bits():
    scaled = AnyLinear(3, 3, quantizer=make_quantizer("lsq", (2, 8)))
    ranged = AnyLinear(3, 3, act=ActQuantizer((2, 8), clip="calibrated"))
    model = nn.Sequential(scaled, ranged)
    for name, what in (("0", "learned scales"), ("1", "activation ranges")):
        with pytest.raises(UncalibratedBits, match=f"bits=4 for layer '{name}': it has {what} for 2, 8 only"):
            set_bits(model, {name: 4})
        with pytest.raises(UncalibratedBits, match="has"):
            set_bits(model, Profile("mixed", {name: 4}))
    set_bits(model, {"0": (2, 4), "1": (4, 2)})  # each pair asks only for what its layer has
    with pytest.raises(UncalibratedBits, match=r"this model's widths \(2, 8, 32\)"):
        set_bits(model, 4)
    set_bits(model, 32)
