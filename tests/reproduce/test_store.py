"""The store of trainings: names by content, done once, resumed where they were cut off."""

import json
import os

import pytest
import torch

from anyprec.analysis.compliance import Compliance
from anyprec.reproduce.scales import PaperNetwork, default_net
from anyprec.reproduce.store import Training, TrainingStore, made_up, seeded, training
from anyprec.training.checkpoint import load_state
from anyprec.training.recipe import Recipe
from anyprec.training.run import TrainingRun

QUICK = (
    "limit=64",
    "batch_size=32",
    "epochs=1",
    "eval_every=0",
    "warmup_epochs=0",
    "widths=[2,32]",
    "net_options.multiplier=0.25",
)


def test_names_are_readable_and_by_content():
    one = training("digits", "widths=[2]")
    assert one.name == f"digits-resnet8-2-{one.key}"
    joint = training("digits", "loss=hard")
    assert joint.name == f"digits-resnet8-1.2.4.8.32-hard-{joint.key}"
    assert training("digits", "epochs=3").key != training("digits").key
    assert training("digits", "seed=1").key != training("digits").key


def test_how_a_training_is_watched_makes_no_other_training():
    plain = training("digits")
    assert training("digits", "save_minutes=9.0", "eval_every=2") == plain
    assert Training(plain.recipe, observe=3) == plain and hash(Training(plain.recipe, observe=3)) == hash(plain)


def test_a_field_at_its_default_is_not_in_the_key():
    """So that fields of later versions leave trainings that are done where they are."""
    record = Recipe(net="resnet8", data="digits").to_dict()
    assert (
        Training(Recipe.from_dict({"net": "resnet8", "data": "digits"})).key == Training(Recipe.from_dict(record)).key
    )


def test_what_it_starts_from_is_in_the_key():
    first, other = training("digits"), training("digits", "seed=1")
    assert len({Training(first.recipe, t).key for t in (None, first, other)}) == 3


@pytest.mark.thorough
def test_trainings_begin_with_a_float_stage_and_have_seeds(tmp_path):
    """Dedicated models of a width that the float stage does not have, and lists without float, start from it too."""
    float_stage = PaperNetwork("float", "digits", (*QUICK, "widths=[32]"))
    net = PaperNetwork("net", "digits", (*QUICK, "quantizer=lsq"), start=float_stage)
    store = TrainingStore(tmp_path, None)
    for one in (float_stage.joint(), net.joint("widths=[1,8]"), net.dedicated(1)):
        store.train(seeded(one, 1))
    assert net.dedicated(1).after == float_stage.joint()
    other = store.at_seed(1)
    assert set(other.test(net.dedicated(1))) == {1} and set(other.test(net.joint("widths=[1,8]"))) == {1, 8}
    assert other.done(float_stage.joint()) and not store.done(float_stage.joint())
    with pytest.raises(AssertionError, match="is for reading"):
        other.train(float_stage.joint())


def test_done_once(tmp_path, monkeypatch):
    store, one = TrainingStore(tmp_path, None), training("digits", *QUICK)
    assert not store.done(one) and store.seconds(one) == 0
    store.train(one)
    assert store.done(one) and store.seconds(one) > 0
    assert set(store.test(one)) == {2, 32} and 0 <= store.test(one)[2]["accuracy"] <= 100
    assert len(store.log(one)) == 1
    monkeypatch.setattr(TrainingRun, "go", lambda self: pytest.fail("it is done"))
    store.train(one)


@pytest.mark.thorough
def test_cut_off_and_resumed_it_is_the_same_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("anyprec.reproduce.store.SAVE_MINUTES", 0.0)  # after every step
    one = Training(training("digits", *QUICK, "epochs=2").recipe, observe=1)
    whole, cut = TrainingStore(tmp_path / "whole", None), TrainingStore(tmp_path / "cut", None)
    whole.train(one)
    real, left = TrainingRun._step, [3]

    def step(self, images, labels):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(self, images, labels)

    monkeypatch.setattr(TrainingRun, "_step", step)
    with pytest.raises(KeyboardInterrupt):
        cut.train(one)
    assert not cut.done(one)
    monkeypatch.setattr(TrainingRun, "_step", real)
    cut.train(one)
    a, b = (load_state(store.folder(one) / "model.pt")["state_dict"] for store in (whole, cut))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert Compliance.load(whole.folder(one)).table() == Compliance.load(cut.folder(one)).table()


def test_a_training_starts_from_another(tmp_path):
    store = TrainingStore(tmp_path, None)
    first = training("digits", *QUICK)
    second = training("digits", *QUICK, "lr=1e-9", after=first)
    store.train(first)
    store.train(second)
    before, after = (load_state(store.folder(t) / "model.pt")["state_dict"]["conv0.weight"] for t in (first, second))
    assert torch.allclose(before, after, atol=1e-6)


def test_progress_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("anyprec.reproduce.store.TELL_S", 0.01)
    told = []
    TrainingStore(tmp_path, None).train(training("digits", *QUICK), lambda step, steps: told.append((step, steps)))
    assert told and all(0 <= step <= steps == 2 for step, steps in told)


def test_folders_of_data_sets(tmp_path):
    (tmp_path / "cifar10").mkdir()
    store = TrainingStore(tmp_path, tmp_path)
    assert store.data_folder("cifar10") == tmp_path / "cifar10" and store.data_folder("svhn") == tmp_path
    assert TrainingStore(tmp_path, None).data_folder("digits") is None


def test_made_up_data_is_made_once_and_whole(tmp_path):
    place = made_up("camvid", tmp_path)
    assert place is not None
    first = sorted(place.rglob("*.png"))
    stamp = first[0].stat().st_mtime_ns
    assert made_up("camvid", tmp_path) == place and first[0].stat().st_mtime_ns == stamp
    (tmp_path / ".camvid-ready").unlink()  # as if it had been cut off
    os.remove(first[0])
    assert made_up("camvid", tmp_path) == place and sorted(place.rglob("*.png")) == first
    assert made_up("digits", tmp_path) is None


def test_the_tiny_default_is_quick():
    recipe = default_net("tiny").joint().recipe
    assert recipe.epochs * recipe.limit <= 1000, json.dumps(recipe.to_dict())
