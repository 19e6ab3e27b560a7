"""`calibrate`: statistics as a plain computation gives them, nothing else touched, nothing left behind by a failure."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sampling import sampled
from torch import nn

from anyprec.data import batches as batches_of
from anyprec.data import load_data
from anyprec.errors import AnyprecError, DataError, UncalibratedBits, UnknownLayer, UnsupportedBits
from anyprec.nn.act_quantizer import ActQuantizer, best_range
from anyprec.nn.calibrate import calibrate, trained_widths
from anyprec.nn.convert import convert
from anyprec.nn.layers import AnyActivation, AnyConv2d, AnyLinear
from anyprec.nn.norms import SwitchBatchNorm2d
from anyprec.nn.quantizers import Nested
from anyprec.nn.switching import any_layers, bits, bits_state, set_bits, switch_norms, widths_of
from anyprec.training.joint import joint_step
from anyprec.widths import Profile

WIDTHS = (1, 2, 4, 8, 32)


class Plain(nn.Module):
    """To be converted: convolutions, batch norms, functional ReLU."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm0 = nn.BatchNorm2d(8)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2)
        self.norm2 = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        x = F.relu(self.norm0(self.stem(x)))
        x = F.relu(self.norm1(self.conv1(x)))
        return self.fc(F.relu(self.norm2(self.conv2(x))).mean((2, 3)))


class Paper(nn.Module):
    """As the authors build theirs: shared activations clipped to [0, 1], a float skip with one plain norm for all
    widths; and a dropout and a counter that runs in eval mode too, which calibration must not disturb either."""

    def __init__(self, widths=WIDTHS, scale="mean"):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = SwitchBatchNorm2d(8, widths)
        self.act = AnyActivation()
        self.conv = AnyConv2d(8, 12, 3, stride=2, padding=1, quantizer=Nested(widths, scale))
        self.skip = nn.Conv2d(8, 12, 1, stride=2)
        self.skip_norm = nn.BatchNorm2d(12)
        self.last_norm = SwitchBatchNorm2d(12, widths)
        self.last_act = AnyActivation()
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(12, 5)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x):
        self.runs += 1
        a = self.act(self.norm(self.stem(x)))
        z = self.last_norm(self.conv(a)) + self.skip_norm(self.skip(a))
        return self.fc(self.drop(self.last_act(z).mean((2, 3))))


def data(count=3, size=16):
    return [torch.randn(size, 3, 8, 8) * 1.5 + 0.3 for _ in range(count)]


def trained(model, steps=4):
    """A few joint steps: tables, scales and ranges of the widths grow apart."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for x in data(steps):
        optimizer.zero_grad()
        joint_step(model, x, torch.arange(16) % 5, WIDTHS)
        optimizer.step()
    set_bits(model, 32)
    return model.eval()


def outputs(model, x, settings=WIDTHS):
    result = {}
    with torch.no_grad():
        for setting in settings:
            with bits(model, setting):
                result[str(setting)] = model(x)
    return result


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# --- The statistics themselves --------------------------------------------------------------------------------


def plain_statistics(model, loader, key):
    """What norm0, norm1, norm2 should hold for `key`: written out with F.conv2d and means over batches."""
    totals = {name: [0.0, 0.0] for name in ("norm0", "norm1", "norm2")}

    def normalize(name, x):
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        totals[name][0] += mean / len(loader)
        totals[name][1] += x.var((0, 2, 3), unbiased=True) / len(loader)
        table = getattr(model, name).tables[key]
        x = (x - mean[:, None, None]) / (var[:, None, None] + table.eps).sqrt()
        return F.relu(x * table.weight[:, None, None] + table.bias[:, None, None])

    k = int(key)
    with torch.no_grad():
        for x in loader:
            x = normalize("norm0", F.conv2d(x, model.stem.weight, padding=1))
            for layer, name in ((model.conv1, "norm1"), (model.conv2, "norm2")):
                r = layer.act.ranges[key]
                levels = 2**k - 1
                x = (x / r).clamp(0, 1).mul(levels).round() / levels * r
                weight = layer.quantizer.scales[key] * layer.quantizer.values(layer.codes(k), k).double()
                x = normalize(name, F.conv2d(x, weight, layer.bias, layer.stride, layer.padding))
    return totals


@pytest.mark.parametrize("clip", ["learned", "calibrated"])
def test_statistics_are_those_of_a_plain_computation(clip):
    model = trained(convert(Plain(), example=data(1)[0], clip=clip))
    # In double precision: with single, a value at a rounding boundary now and then gets the other code.
    model, loader = model.double(), [x.double() for x in data()]
    calibrate(model, loader)
    assert widths_of(model) == (1, 2, 3, 4, 5, 6, 7, 8, 32)
    for key in ("3", "5", "6", "7"):
        for name, (mean, var) in plain_statistics(model, loader, key).items():
            table = getattr(model, name).tables[key]
            assert torch.allclose(table.running_mean, mean, atol=1e-9), (key, name)
            assert torch.allclose(table.running_var, var, rtol=1e-9), (key, name)
            assert table.num_batches_tracked == len(loader) and table.momentum == 0.1


def test_new_tables_start_from_the_nearest_trained_width():
    model = trained(convert(Plain(), example=data(1)[0]))
    calibrate(model, data())
    for key, near in {"3": "4", "5": "4", "6": "8", "7": "8"}.items():  # the wider one of two as near
        for norm in switch_norms(model).values():
            assert torch.equal(norm.tables[key].weight, norm.tables[near].weight)
            assert norm.tables[key].weight is not norm.tables[near].weight
        for layer in any_layers(model).values():
            assert layer.act.ranges[key] == layer.act.ranges[near]  # learned ranges are taken over
            # The scale too, but for what a coarser grid takes off every least-squares fit.
            fits = {}
            for k in (key, near):
                values = layer.quantizer.values(layer.codes(int(k)), int(k))
                fits[k] = (layer.weight * values).sum() / values.square().sum()
            expected = layer.quantizer.scales[near] * fits[key] / fits[near]
            assert torch.allclose(layer.quantizer.scales[key], expected)


def test_ranges_that_are_not_learned_are_fitted_at_the_nearest_width():
    model = trained(convert(Plain(), example=data(1)[0], clip="calibrated"))
    loader = data(2)
    given = []
    model.conv2.act.register_forward_pre_hook(lambda m, args: given.append(args[0].flatten()))
    with bits(model, 4), torch.no_grad():
        for x in loader:
            model(x)
    values = torch.cat(given)  # 2 * 16 * 8 * 8 * 8 = 16,384: all of them fit in the sample
    given.clear()
    calibrate(model, loader, (3,))
    expected = best_range(values, 3, signed=False)
    assert torch.allclose(model.conv2.act.ranges["3"], expected, rtol=1e-4)
    assert not model.conv2.act.ranges["3"].requires_grad


# --- Everything else stays --------------------------------------------------------------------------------------


def test_outputs_at_other_widths_do_not_change_bit_for_bit():
    model = trained(Paper())
    x, plain = data(1)[0], copy.deepcopy(model.skip_norm.state_dict())
    before, runs = outputs(model, x), model.runs.clone()
    model.train()
    model.drop.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    set_bits(model, {"conv": 2})
    settings = [values for _, values in bits_state(model)]
    calibrate(model, data(), (3, 5, 6, 7), profiles=[Profile("mixed", {"conv": (4, 2)})])
    assert {name: m.training for name, m in model.named_modules() if name in modes} == modes
    assert model.norm.tables["3"].training and model.norm.tables["3"].momentum == 0.1
    assert [values for _, values in bits_state(model)] == settings
    assert same(model.skip_norm.state_dict(), plain)  # one norm for all widths: it must not drift
    assert model.runs == runs
    model.eval()
    assert same(outputs(model, x), before)
    assert not same(outputs(model, x, [3, 5]), outputs(model, x, [6, 7]))


def test_random_numbers_are_not_used_up():
    model = trained(Paper())
    model.drop.train()
    state = torch.get_rng_state()
    calibrate(model, [torch.ones(4, 3, 8, 8)])
    assert torch.equal(torch.get_rng_state(), state)


def test_trained_widths_can_be_renewed():
    model = trained(convert(Plain(), example=data(1)[0]))
    table, scale, spread = model.norm1.tables["4"], model.conv1.quantizer.scales["4"], model.conv1.act.ranges["4"]
    kept = {name: value.clone() for name, value in table.state_dict().items()}
    values = scale.clone(), spread.clone()
    x = data(1)[0]
    before = outputs(model, x)
    calibrate(model, [3 * b for b in data()], (4,))
    assert model.norm1.tables["4"] is table and table.weight is model.norm1.tables["4"].weight
    assert torch.equal(table.weight, kept["weight"]) and not torch.equal(table.running_mean, kept["running_mean"])
    assert (scale, spread) == values  # its own, not a neighbor's
    after = outputs(model, x)
    assert not torch.equal(after.pop("4"), before.pop("4")) and same(after, before)
    calibrate(model, [3 * b for b in data()], (4,), ranges=True)
    assert model.conv1.act.ranges["4"] is spread and spread != values[1]


def test_calibrating_again_after_more_training_starts_afresh():
    model = trained(convert(Plain(), example=data(1)[0]))
    calibrate(model, data(), (3,))
    trained(model)
    assert trained_widths(model) == (1, 2, 4, 8)
    calibrate(model, data(), (3,))
    assert torch.equal(model.norm1.tables["3"].weight, model.norm1.tables["4"].weight)
    assert model.conv1.act.ranges["3"] == model.conv1.act.ranges["4"]


# --- Profiles -------------------------------------------------------------------------------------------------------


def test_profiles_get_tables_of_their_own():
    model = trained(convert(Plain(), example=data(1)[0]))
    x = data(1)[0]
    before = outputs(model, x)
    profile = Profile("fast", {"conv1": (3, 2), "conv2": 1})
    with pytest.raises(UncalibratedBits):
        set_bits(model, profile)
    loader = data()
    calibrate(model, loader, (), profiles=profile)
    assert same(outputs(model, x), before)
    set_bits(model, profile)
    assert (model.conv1.bits, model.conv2.bits, model.norm2.key) == ((3, 2), 1, "fast")
    assert torch.isfinite(model(x)).all()
    # Affine parameters come from the width of the layer each norm follows (3 bit: from its neighbor 4).
    assert torch.equal(model.norm1.tables["fast"].weight, model.norm1.tables["4"].weight)
    assert torch.equal(model.norm2.tables["fast"].weight, model.norm2.tables["1"].weight)
    # Statistics of the first norm depend on no layer before it, and so agree with those of any width.
    calibrate(model, loader, (3,))
    assert torch.equal(model.norm0.tables["fast"].running_mean, model.norm0.tables["3"].running_mean)
    assert not torch.equal(model.norm2.tables["fast"].running_mean, model.norm2.tables["3"].running_mean)


# --- Kinds of models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", ["learned", "calibrated", "fixed"])
def test_a_network_converted_without_an_example(clip):
    model = convert(Plain().eval(), clip=clip)
    calibrate(model, data())  # the default widths: those of its own are made able to run on the way
    assert widths_of(model) == (1, 2, 3, 4, 5, 6, 7, 8, 32)
    assert all(torch.isfinite(y).all() for y in outputs(model, data(1)[0], range(1, 9)).values())
    assert not model.conv1.act.signed and not model.conv1.act.undecided
    # The ranges are those that the same data gives as an example.
    loader, net = data(1), Plain().eval()
    one, two = convert(net, clip=clip), convert(net, example=loader[0], clip=clip)
    calibrate(one, loader, (1, 2, 4, 8))
    assert list(one.conv2.act.ranges) == list(two.conv2.act.ranges)
    for key in two.conv2.act.ranges:
        assert torch.equal(one.conv2.act.ranges[key], two.conv2.act.ranges[key])


def test_signs_are_found_in_all_batches():
    net = nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.LayerNorm(4))
    model = convert(net, keep=())
    loader = [torch.rand(8, 4), torch.rand(8, 4), torch.rand(8, 4)]
    loader[2][3, 1] = -1e-6
    calibrate(model, loader, (2,))
    assert model[1].act.signed


def test_layer_norm_networks_need_no_statistics():
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).eval()
    x = torch.randn(16, 4)
    model = convert(net, example=x)
    calibrate(model, [x], (3, 6))
    assert list(model[1].tables) == ["1", "2", "4", "8", "32", "3", "6"]
    errors = {k: (y - net(x)).norm().item() for k, y in outputs(model, x, (2, 3, 4, 6, 8)).items()}
    assert errors["2"] > errors["3"] > errors["4"] > errors["6"] > errors["8"]


def test_networks_without_norms():
    model = nn.Sequential(AnyLinear(4, 4, quantizer=Nested(WIDTHS, "learned"), act=ActQuantizer()))
    calibrate(model, [torch.rand(2, 4)], (3,))
    assert "3" in model[0].quantizer.scales


def test_float_tables_where_there_are_none():
    model = Paper((2, 4))
    assert widths_of(model) == (2, 4)
    calibrate(model, data(), (32, 3))
    assert widths_of(model) == (2, 3, 4, 32)
    assert torch.isfinite(outputs(model, data(1)[0], [32])["32"]).all()


def test_only_float_trained():
    model = convert(Plain().eval(), (32,), example=data(1)[0])
    calibrate(model, data(), (2, 8))
    assert widths_of(model) == (2, 8, 32)
    assert torch.isfinite(outputs(model, data(1)[0], [2])["2"]).all()


def test_norms_that_never_run_keep_their_copy():
    class Head(Plain):
        def __init__(self):
            super().__init__()
            self.unused = nn.BatchNorm2d(4)

    net = Head()
    net.unused.running_mean.fill_(7)
    model = convert(net)
    calibrate(model, data(), (3,))
    assert (model.unused.tables["3"].running_mean == 7).all()


def test_checkpoints_hold_calibrated_widths():
    model = trained(convert(Plain(), example=data(1)[0]))
    profile = Profile("fast", {"conv1": 2})
    calibrate(model, data(), profiles=[profile])
    other = convert(Plain(), example=data(1)[0])
    other.load_state_dict(model.state_dict())
    x = data(1)[0]
    settings = [*range(1, 9), profile]
    assert same(outputs(other.eval(), x, settings), outputs(model.eval(), x, settings))


# --- Loaders --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    "wrap",
    sampled(
        [
            lambda batches: iter(batches),
            lambda batches: ((x, torch.zeros(16), "extra") for x in batches),
            lambda batches: [[x] for x in batches],
            lambda batches: [x.double().numpy() for x in batches],
            lambda batches: [{"x": x} for x in batches],
            lambda batches: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat(batches)), 16),
            lambda batches: [*batches, "never reached"],
        ]
    ),
)
def test_any_loader_will_do(wrap):
    model = trained(convert(Plain(), example=data(1)[0], clip="calibrated"))
    batches = data(10)  # more than ranges are fitted to: the rest is read as it goes
    expected = copy.deepcopy(model)
    calibrate(expected, batches)
    calibrate(model, wrap(batches), batches=10)
    assert same(model.state_dict(), expected.state_dict())


def test_endless_loaders_stop_at_batches():
    def endless():
        while True:
            yield data(1)[0]

    model = trained(Paper())
    calibrate(model, endless(), batches=2)
    assert model.norm.tables["3"].num_batches_tracked == 2


def test_progress_goes_to_stderr(capsys):
    calibrate(trained(Paper()), data(), progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "calibrate: 3 batch" in shown.err


# --- Mistakes -------------------------------------------------------------------------------------------------------


def broken_loader():
    yield data(1)[0]
    raise OSError("disk gone")


def with_bad(value, at):
    loader = data(12)
    loader[at][0, 0, 0, 0] = value
    return loader


MISTAKES = {
    "empty loader": ({"loader": []}, DataError, "gave no batch"),
    "empty generator": ({"loader": iter(())}, DataError, "gave no batch"),
    "a tensor": ({"loader": torch.ones(2, 3, 8, 8)}, DataError, r"such as \[images\]"),
    "a number": ({"loader": 3}, DataError, "the loader is a int"),
    "text batches": ({"loader": ["a"]}, DataError, "batch 0 is a str"),
    "NaN": ({"loader": with_bad(float("nan"), 1)}, DataError, "batch 1 has NaN or infinity"),
    "infinity, late": ({"loader": with_bad(float("inf"), 11)}, DataError, "batch 11 has NaN or infinity"),
    "wrong shape": ({"loader": [*data(), torch.ones(2, 4, 8, 8)]}, DataError, "batch 3 does not run through"),
    "one value a channel": ({"loader": [torch.ones(1, 3, 3, 3)]}, DataError, "more than 1 value per channel"),
    "loader fails": ({"loader": broken_loader}, OSError, "disk gone"),
    "width 32": ({"widths": (3, 32)}, UnsupportedBits, "bits=32 needs no calibration"),
    "width 9": ({"widths": (9,)}, UnsupportedBits, "bits=9 is not a bit-width"),
    "width 0": ({"widths": (0,)}, UnsupportedBits, "bits=0"),
    "a plain int": ({"widths": 3}, UnsupportedBits, "is not a list of bit-widths"),
    "no width": ({"widths": ()}, UnsupportedBits, "widths is empty"),
    "batches": ({"batches": 0}, DataError, "batches=0"),
    "unknown layer": ({"profiles": [Profile("p", {"conv3": 2})]}, UnknownLayer, "did you mean 'conv2'"),
    "not a profile": ({"profiles": [{"conv1": 2}]}, AnyprecError, "give anyprec.Profile objects"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_leave_the_model_as_it_was(case):
    options, error, message = MISTAKES[case]
    options = {"loader": data(), **options}
    if options["loader"] is broken_loader:
        options["loader"] = broken_loader()
    model = trained(convert(Plain(), example=data(1)[0], clip="calibrated"))
    calibrate(model, data(), (5,))
    model.train()
    set_bits(model, 2)
    before = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    options = {"widths": (4, 5, 6), **options}  # a trained width, one calibrated before, a new one
    with pytest.raises(error, match=message) as caught:
        calibrate(model, options.pop("loader"), options.pop("widths"), ranges=True, **options)
    assert "\n" not in str(caught.value)
    assert same(model.state_dict(), before.state_dict())
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert [v for _, v in bits_state(model)] == [v for _, v in bits_state(before)]
    assert all(m.momentum == 0.1 for m in model.modules() if isinstance(m, nn.BatchNorm2d))


def test_a_failure_leaves_an_uncalibrated_network_uncalibrated():
    model = convert(Plain())
    with pytest.raises(DataError):
        calibrate(model, [*data(9), torch.ones(2, 4, 8, 8)])
    set_bits(model, 2)
    with pytest.raises(UncalibratedBits):
        model(data(1)[0])
    assert model.conv1.act.undecided and all(r == 0 for r in model.conv1.act.ranges.values())


def test_models_that_are_not_any_precision():
    with pytest.raises(AnyprecError, match=r"Plain has no any-precision layer; .*anyprec.convert"):
        calibrate(Plain(), data())


# --- What it is for -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_widths_between_those_trained_are_as_good():
    def arrays(split):
        parts = list(batches_of(load_data("digits", split), 400, augment="none", train=False))
        images = np.concatenate([images for images, _ in parts])
        return torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(np.concatenate([y for _, y in parts]))

    x, y = arrays("train")
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    model = convert(net, example=x[:200]).train()
    # A norm takes a scale out again, so Adam would walk it through zero: it gets a rate of its own, as recipes give it.
    scales = [p for layer in any_layers(model).values() for p in layer.quantizer.scales.values()]
    rest = [p for p in model.parameters() if all(p is not scale for scale in scales)]
    optimizer = torch.optim.Adam([{"params": rest}, {"params": scales, "lr": 2e-4}], 1e-2)
    for _ in range(5):
        for rows in torch.randperm(len(x)).split(100)[:-1]:
            optimizer.zero_grad()
            joint_step(model, x[rows], y[rows], WIDTHS)
            optimizer.step()
    model.eval()
    calibrate(model, x.split(200)[:-1])
    images, labels = arrays("test")
    right = {
        k: (out.argmax(1) == labels).float().mean().item() * 100
        for k, out in outputs(model, images, range(1, 9)).items()
    }
    assert right["8"] > 85  # it has learned something
    for k, (low, high) in {"3": "24", "5": "48", "6": "48", "7": "48"}.items():
        assert right[k] >= min(right[low], right[high]) - 2  # 8 of the 400 images
