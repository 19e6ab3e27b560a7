"""Widths side by side: the same as one after the other; networks that mix the images of a batch are refused."""

import pytest
import torch
from torch import nn

import anyprec
from anyprec.errors import UnsupportedOperation
from anyprec.nn.layers import AnyLayer
from anyprec.nn.switching import any_layers, switch_norms
from anyprec.post_training.lockstep import (
    LockstepVisitor,
    first_tensor,
    joined_calls,
    run_in_lockstep,
    split_calls,
    tensors_of,
)

WIDTHS = (2, 8)


class Net(nn.Module):
    def __init__(self, mixes=False):
        super().__init__()
        self.mixes = mixes
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, groups=2)
        self.hidden, self.fc = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.conv(torch.relu(self.norm(self.stem(x)))).mean((2, 3))
        x = x - x.mean(0) if self.mixes else x
        return self.fc(torch.relu(self.hidden(x)))


class Recorder(LockstepVisitor):
    def __init__(self):
        self.given, self.norms = {}, {}

    def layer(self, name, layer, given):
        assert isinstance(layer, AnyLayer) and name not in self.given
        self.given[name] = given

    def norm(self, name, norm, given):
        self.norms[name] = given


def converted(**options):
    torch.manual_seed(0)
    x = torch.randn(6, 3, 8, 8)
    return anyprec.convert(Net(**options), (*WIDTHS, 32), example=x).eval(), x


def test_every_width_sees_what_it_sees_alone():
    model, x = converted()
    anyprec.set_bits(model, 2)
    recorder = Recorder()
    run_in_lockstep(model, ((x,), {}), WIDTHS, recorder)
    assert list(recorder.given) == ["conv", "hidden"] and set(recorder.norms) == set(switch_norms(model))
    for i, bits in enumerate((32, *WIDTHS)):
        seen = {}
        hooks = [
            layer.register_forward_pre_hook(lambda _, given, name=name, seen=seen: seen.update({name: given[0]}))
            for name, layer in any_layers(model).items()
        ]
        with anyprec.bits(model, bits), torch.no_grad():
            model(x)
        for hook in hooks:
            hook.remove()
        for name, given in recorder.given.items():
            torch.testing.assert_close(given[i], seen[name])
    # All is as it was.
    assert all(layer.bits == 2 and "at_bits" not in vars(layer) for layer in any_layers(model).values())
    assert all(norm.key == "2" and "forward" not in vars(norm) for norm in switch_norms(model).values())


def test_a_correction_takes_the_place_of_an_output():
    class Silence(Recorder):
        def correct(self, name, layer, made):
            return [made[0], *(torch.zeros_like(y) for y in made[1:])] if name == "conv" else made

    model, x = converted()
    run_in_lockstep(model, ((x,), {}), WIDTHS, recorder := Silence())
    plain, *others = recorder.given["hidden"]
    assert plain.abs().max() > 0 and all(not y.any() for y in others)


def test_networks_that_mix_images_are_refused():
    model, x = converted(mixes=True)
    with pytest.raises(UnsupportedOperation, match=r"one by one.*'bc'"):
        run_in_lockstep(model, ((x,), {}), WIDTHS, LockstepVisitor())
    assert all("at_bits" not in vars(layer) for layer in any_layers(model).values())


def test_calls_joined_and_split():
    calls = [((torch.full((4, 2), float(i)),), {"m": torch.ones(4, 1)}) for i in range(3)]
    (x,), kwargs = joined_calls(calls, 3)
    assert x[:, 0].tolist() == [0] * 4 + [1] * 4 + [2] * 4 and kwargs["m"].shape == (12, 1)
    small = split_calls(calls, 3)
    assert [len(next(tensors_of(call))) for call in small] == [3, 1] * 3
    other = ((torch.zeros(4, 5),), {"m": torch.ones(4, 1)})  # of another size: left out
    assert len(joined_calls([*calls, other], 3)[0][0]) == 12
    assert first_tensor({"a": [torch.ones(1)]}).item() == 1
    with pytest.raises(UnsupportedOperation, match="no tensor"):
        first_tensor({"a": "text"})
