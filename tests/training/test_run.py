"""Training runs: they learn, log, resume bit for bit, stop on NaN, and refuse bad input with one line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from sampling import sampled

from anyprec.data import load_data
from anyprec.errors import CheckpointError, DataError, Diverged, RecipeError
from anyprec.nn.switching import widths_of
from anyprec.training import run as run_module
from anyprec.training.checkpoint import load_model, load_state
from anyprec.training.evaluate import evaluate
from anyprec.training.optimizers import learning_rate, parameter_groups
from anyprec.training.recipe import Recipe
from anyprec.training.run import train
from anyprec.zoo import build

SMALL = Recipe(net="resnet8", data="digits", net_options={"multiplier": 0.25}, epochs=2, batch_size=64, limit=256,
               augment="crop", widths=(1, 2, 8, 32), lr=0.01)  # fmt: skip


def weights(path):
    return load_state(path / "model.pt")["state_dict"]


def assert_identical(a, b):
    assert a.keys() == b.keys()
    different = [n for n in a if not torch.equal(a[n], b[n])]
    assert not different


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    return out, train(SMALL, out, progress=False)


def test_folder(finished):
    out, results = finished
    assert Recipe.load(out / "recipe.toml") == SMALL
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert set(lines[0]["train"]) == set(lines[0]["test"]) == {"1", "2", "8", "32"}
    assert lines[-1]["train"]["32"]["loss"] < lines[0]["train"]["32"]["loss"]
    assert {str(k): v for k, v in results.items()} == lines[-1]["test"]
    assert list((out / "tensorboard").iterdir())


def test_model_file_holds_what_was_measured(finished):
    out, results = finished
    model = load_model(out / "model.pt")
    assert widths_of(model) == (1, 2, 8, 32)
    again = evaluate(model, load_data("digits", "test"), [1, 8])
    for k in (1, 8):  # equal but for rounding: the run kept its weights channels-last
        assert again[k]["accuracy"] == results[k]["accuracy"]
        assert again[k]["loss"] == pytest.approx(results[k]["loss"], rel=1e-5)


@pytest.mark.thorough
def test_repeats_bit_for_bit(finished, tmp_path):
    train(SMALL, tmp_path / "again", progress=False)
    assert_identical(weights(finished[0]), weights(tmp_path / "again"))


@pytest.mark.thorough
def test_seed_matters(finished, tmp_path):
    train(SMALL.override(["seed=1"]), tmp_path / "other", progress=False)
    assert any(not torch.equal(a, b) for a, b in zip(weights(finished[0]).values(),
               weights(tmp_path / "other").values(), strict=True))  # fmt: skip


def train_in_two_parts(recipe, out, monkeypatch, stop_at):
    """Interrupted before step number `stop_at`, then resumed."""
    step, count = run_module.TrainingRun._step, iter(range(100))

    def stopping(self, *args):
        if next(count) == stop_at:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(run_module.TrainingRun, "_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, out, progress=False)
    monkeypatch.undo()
    train(recipe, out, progress=False, resume=True)


@pytest.mark.thorough
@pytest.mark.parametrize("stop_at", sampled([5, 1]))  # inside the first epoch; inside the second (4 steps each)
def test_interrupted_run_resumes_bit_for_bit(finished, tmp_path, monkeypatch, stop_at):
    recipe = SMALL.override(["save_minutes=0"])
    train(recipe, tmp_path / "whole", progress=False)
    assert_identical(weights(finished[0]), weights(tmp_path / "whole"))  # saving more often changes nothing

    train_in_two_parts(recipe, tmp_path / "cut", monkeypatch, stop_at)
    assert_identical(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert (tmp_path / "cut" / "log.jsonl").read_text() == (tmp_path / "whole" / "log.jsonl").read_text()


ROOT = Path(__file__).parents[2]
LAUNCHERS = {"one": [], "two": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]}


def start(recipe, out, *, launcher="one", resume=False):
    """`anyprec train` in a process (or two) of its own."""
    recipe.save(out.with_suffix(".toml"))
    command = [sys.executable, *LAUNCHERS[launcher], "-m", "anyprec", "train", str(out.with_suffix(".toml"))]
    command += ["--out", str(out), "--json"] + ["--resume"] * resume
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


@pytest.mark.thorough
def test_killed_process_resumes_bit_for_bit(tmp_path):
    """SIGKILL in the middle of the second epoch, whatever the run is doing then: saving, mostly."""
    recipe = SMALL.override(["save_minutes=0", "limit=320", "eval_every=0"])
    process = start(recipe, tmp_path / "cut")
    last = tmp_path / "cut" / "last.pt"
    while process.poll() is None and not (last.exists() and load_state(last)["epoch"] == 1):
        time.sleep(0.02)
    assert process.poll() is None, "finished before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "cut" / "model.pt").exists()
    train(recipe, tmp_path / "cut", progress=False, resume=True)
    train(recipe, tmp_path / "whole", progress=False)
    assert_identical(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    """Under torchrun, half the batch each: the same weights to float tolerance.

    SGD, since Adam divides rounding noise by its own size where a gradient is zero in theory; 8 bit and float at a low
    rate, since a rounding error that crosses a code border moves the step by 1/255 of a range, at 1 bit by all of it.
    """
    recipe = SMALL.override(["optimizer=sgd", "lr=0.005", "epochs=1", "eval_every=0", "widths=[8,32]"])
    assert start(recipe, tmp_path / "two", launcher="two").wait() == 0
    train(recipe, tmp_path / "one", progress=False)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    torch.manual_seed(recipe.seed)
    before = build("resnet8", widths=(8, 32), multiplier=0.25, in_channels=1).state_dict()
    assert one.keys() == two.keys()
    moved = 0
    for name in one:
        if one[name].is_floating_point():
            torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-4, msg=name)
            moved += not torch.allclose(one[name], before[name], rtol=1e-3, atol=1e-4)
    assert moved > len(one) / 3  # the comparison is of trained weights, not of the start


@pytest.mark.slow
def test_two_processes_with_statistics_of_their_own(tmp_path):
    """What they report is the accuracy of the model that is saved: the first one's."""
    recipe = SMALL.override(["sync_norm=false", "epochs=1", "eval_every=1", "limit=64", "batch_size=16"])
    assert start(recipe, tmp_path / "two", launcher="two").wait() == 0
    extra = load_state(tmp_path / "two" / "model.pt")["extra"]
    reported = {int(bits): values["loss"] for bits, values in extra["test"].items()}
    model = load_model(tmp_path / "two" / "model.pt")
    found = evaluate(model, load_data("digits", "test"), recipe.widths)
    assert {bits: values["loss"] for bits, values in found.items()} == pytest.approx(reported, rel=1e-4)


def test_divergence_stops_and_keeps_the_checkpoint(tmp_path):
    recipe = SMALL.override(["optimizer=sgd", "lr=1e30", "save_minutes=0", "warmup_epochs=0"])
    with pytest.raises(Diverged) as caught:
        train(recipe, tmp_path, progress=False)
    assert "lower lr" in str(caught.value) or "last good checkpoint" in str(caught.value)
    assert "\n" not in str(caught.value)
    if (tmp_path / "last.pt").exists():
        state = load_state(tmp_path / "last.pt")["model"]
        assert all(torch.isfinite(v).all() for v in state.values())


def test_nan_data(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        yield np.full((64, 8, 8, 1), np.nan, np.float32), np.zeros(64, np.int64)

    monkeypatch.setattr(run_module, "batches", broken)
    with pytest.raises(Diverged, match="the loss at 32 bit is nan in epoch 1, step 1; no checkpoint had been written"):
        train(SMALL, tmp_path, progress=False)


def test_refusals(finished, tmp_path):
    out, _ = finished
    with pytest.raises(RecipeError, match=r"holds a run already; add --resume"):
        train(SMALL, out, progress=False)
    with pytest.raises(RecipeError, match=r"was started with lr=0.01, not 0.5; resume with the same recipe"):
        train(SMALL.override(["lr=0.5"]), out, progress=False, resume=True)
    with pytest.raises(DataError, match="batch_size=4096 is more than the 256 images of digits"):
        train(SMALL.override(["batch_size=4096"]), tmp_path / "a", progress=False)
    with pytest.raises(RecipeError, match="device='abacus' cannot be used here"):
        train(SMALL, tmp_path / "b", progress=False, device="abacus")


def test_truncated_checkpoint(finished, tmp_path):
    whole = (finished[0] / "last.pt").read_bytes()
    for share in (0, 0.3, 0.9):
        (tmp_path / "last.pt").write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(CheckpointError, match=r"truncated or damaged|nothing was executed"):
            train(SMALL, tmp_path, progress=False, resume=True)


@pytest.mark.thorough
def test_overwrite_begins_anew(finished, tmp_path):
    short = SMALL.override(["epochs=1"])
    train(short, tmp_path, progress=False)
    (tmp_path / "notes.txt").write_text("mine")
    train(SMALL, tmp_path, progress=False, overwrite=True)
    assert_identical(weights(finished[0]), weights(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_finished_run_resumes_to_its_result(finished):
    out, results = finished
    assert train(SMALL, out, progress=False, resume=True) == results


def test_dedicated_model_and_start_from_checkpoint(finished, tmp_path):
    results = train(SMALL.override(["widths=[2]"]), tmp_path / "dedicated", progress=False)
    assert list(results) == [2]
    recipe = SMALL.override([f"init='{finished[0] / 'model.pt'}'", "lr=1e-9", "epochs=1"])
    again = train(recipe, tmp_path / "tuned", progress=False)
    assert abs(again[32]["accuracy"] - finished[1][32]["accuracy"]) < 5


def test_a_sign_window_is_for_networks_of_several_widths(tmp_path):
    short = SMALL.override(["epochs=1", "limit=128"])
    for widths, differs in (("widths=[1]", False), ("widths=[1,8]", True)):
        found = []
        for window in (0.0, 0.1):
            out = tmp_path / f"{widths}-{window}"
            train(short.override([widths, f"sign_window={window}"]), out, progress=False)
            found.append(weights(out))
        same = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
        assert same != differs


def test_a_sign_window_narrows_over_the_run(tmp_path, monkeypatch):
    windows = []
    monkeypatch.setattr(run_module, "set_sign_window", lambda model, window: windows.append(window))
    train(SMALL.override(["sign_window=0.9", "sign_window_end=0.2"]), tmp_path, progress=False)
    assert windows == pytest.approx([0.9, *np.linspace(0.9, 0.2, 8)])  # as it is built, then 2 x 4 steps


def test_start_from_a_narrower_network(finished, tmp_path):
    wider = f"net_options.multiplier={2 * SMALL.net_options['multiplier']}"
    recipe = SMALL.override([f"init='{finished[0] / 'model.pt'}'", wider, "widths=[1,8]", "lr=1e-9", "epochs=1"])
    wide = train(recipe, tmp_path, progress=False)
    assert abs(wide[8]["accuracy"] - finished[1][8]["accuracy"]) < 15
    with pytest.raises(CheckpointError, match="set widths without 32"):
        train(recipe.override(["widths=[1,32]"]), tmp_path / "float", progress=False)


OPTIONS = [
    ["amp=bf16"], ["sampling=sandwich"], ["quantizer=lsq"], ["quantizer=dorefa"], ["scale=learned", "scale_lr=0.1"],
    ["channels_last=false"], ["loss=recursive+label", "label_smoothing=0.1"], ["optimizer=adamw", "schedule=cosine"],
    ["sampling=lowest", "average=0.9", "kurtosis=0.01"],
    ["optimizer=sgd", "nesterov=true", "schedule=triangle", "norm_lr=2"],
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("settings", sampled(OPTIONS))
def test_options_train(tmp_path, settings):
    results = train(SMALL.override([*settings, "epochs=1", "limit=128"]), tmp_path, progress=False)
    assert set(results) == {1, 2, 8, 32} and all(np.isfinite(r["loss"]) for r in results.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does it, not we
def test_compile_trains(tmp_path):
    results = train(SMALL.override(["compile=true", "epochs=1", "limit=128"]), tmp_path, progress=False)
    plain = train(SMALL.override(["epochs=1", "limit=128"]), tmp_path / "plain", progress=False)
    assert abs(results[32]["loss"] - plain[32]["loss"]) < 0.2


def test_learning_rate():
    steps = Recipe(net="a", data="b", lr=1.0, milestones=(2, 3), epochs=4)
    assert [learning_rate(steps, s, 10) for s in (0, 19, 20, 30)] == pytest.approx([1, 1, 0.1, 0.01])
    cosine = Recipe(net="a", data="b", lr=1.0, schedule="cosine", warmup_epochs=1, epochs=3)
    assert [learning_rate(cosine, s, 10) for s in (0, 4, 9, 10, 20)] == pytest.approx([0.1, 0.5, 1, 1, 0.5])


def test_learning_rate_that_rises_and_falls():
    triangle = Recipe(net="a", data="b", lr=2.0, schedule="triangle", epochs=3, peak_at=0.25, start_lr=0.2, end_lr=0.1)
    last = 3 * 7 - 1
    rates = [learning_rate(triangle, step, 7) for step in (0, 5, 20)]
    assert rates == pytest.approx([0.4, 2.0, 0.2])
    assert learning_rate(triangle, 10, 7) == pytest.approx(2.0 - 1.8 * (10 / last - 0.25) / 0.75)
    cycle = triangle.override(["schedule=one-cycle", "peak_at=0.5"])
    assert [learning_rate(cycle, step, 7) for step in (0, 5, 10, 15, 20)] == pytest.approx([0.4, 1.2, 2, 1.1, 0.2])
    at_once = triangle.override(["peak_at=0"])
    assert [learning_rate(at_once, step, 7) for step in (0, last)] == pytest.approx([2.0, 0.2])


def test_norms_and_biases_may_have_a_rate_of_their_own():
    model = build("vgg-speed", channels=(4, 4, 4))
    groups = parameter_groups(model, SMALL.override(["weight_decay=0.1", "norm_lr=4", "decay_norms=false"]))
    factors = [(g["rate_factor"], g.get("weight_decay")) for g in groups]
    assert factors == [(1, None), (4, 0), (1, 0)]
    assert all(p.dim() == 1 for p in groups[1]["params"]) and all(p.dim() > 1 for p in groups[0]["params"])
    assert sum(len(g["params"]) for g in groups) == len([p for p in model.parameters() if p.requires_grad])


def test_scales_are_not_decayed():
    model = build("resnet8", multiplier=0.25, scale="learned")
    groups = parameter_groups(model, SMALL.override(["weight_decay=0.1", "scale_lr=0.5"]))
    assert len(groups) == 2 and groups[1]["weight_decay"] == 0 and groups[1]["rate_factor"] == 0.5
    assert all(p.numel() == 1 for p in groups[1]["params"])
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


# --- Validation, stages, averages -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def float_stage(tmp_path_factory):
    out = tmp_path_factory.mktemp("float")
    settled = ["widths=[32]", "validation=200", "quantizer=lsq", "epochs=6", "limit=1024", "schedule=cosine",
               "net_options.skip=quantized"]  # fmt: skip
    return out, train(SMALL.override(settled), out, progress=False)


@pytest.mark.thorough
def test_validation_leaves_the_test_set_alone(float_stage):
    out, results = float_stage
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert all("test" not in line for line in lines)
    assert lines[-1]["validation"] == {str(k): v for k, v in results.items()}
    extra = load_state(out / "model.pt")["extra"]
    assert "test" not in extra and extra["validation"]["32"] == results[32]
    assert results[32]["accuracy"] * 2 == pytest.approx(round(results[32]["accuracy"] * 2))  # of 200 images


def test_all_widths_start_from_a_float_stage(float_stage, tmp_path):
    recipe = SMALL.override(["validation=200", "quantizer=lsq", "epochs=1", "lr=1e-9", "net_options.skip=quantized"])
    chained = train(recipe.override([f"init='{float_stage[0] / 'model.pt'}'"]), tmp_path / "b", progress=False)
    assert chained[32]["accuracy"] == pytest.approx(float_stage[1][32]["accuracy"], abs=3)
    assert chained[8]["accuracy"] > chained[32]["accuracy"] - 5
    assert chained[2]["accuracy"] > 0.5 * chained[32]["accuracy"]


@pytest.mark.thorough
def test_averaged_weights_are_evaluated_kept_and_resumed(tmp_path, monkeypatch):
    recipe = SMALL.override(["average=0.8", "sampling=lowest", "save_minutes=0", "widths=[1,2,4,8,32]"])
    results = train(recipe, tmp_path / "whole", progress=False)
    averaged, last = weights(tmp_path / "whole"), load_state(tmp_path / "whole" / "last.pt")
    assert torch.equal(averaged["fc.weight"], last["average"]["fc.weight"])
    assert not torch.equal(averaged["fc.weight"], last["model"]["fc.weight"])
    statistics = "blocks.0.norm1.tables.1.running_mean"  # measured anew with the averaged weights
    assert not torch.equal(averaged[statistics], last["model"][statistics])
    again = evaluate(load_model(tmp_path / "whole" / "model.pt"), load_data("digits", "test"), [1, 32])
    assert all(again[k]["accuracy"] == results[k]["accuracy"] for k in (1, 32))

    train_in_two_parts(recipe, tmp_path / "cut", monkeypatch, 5)
    assert_identical(averaged, weights(tmp_path / "cut"))
