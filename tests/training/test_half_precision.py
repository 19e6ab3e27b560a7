"""Half precision where it ends the process: found out in a process of its own, held or refused, never a crash."""

import os
import sys

import pytest

from anyprec.errors import RecipeError
from anyprec.training import half_precision
from anyprec.training.half_precision import LIMITS, VARIABLE, hold_onednn, probe, require_half_precision
from anyprec.training.recipe import Recipe
from anyprec.training.run import train

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
# As on a CPU with AMX behind a hypervisor that hides the tile palette: only without AMX it works.
DIES_WITH_AMX = f"import os\nif os.environ.get('{VARIABLE}') in (None, 'AVX512_CORE_AMX'): {DIES}"


@pytest.fixture
def program(monkeypatch):
    """Replaces what the probing process runs, and forgets earlier answers."""

    def use(text):
        monkeypatch.setattr(half_precision, "PROGRAM", text)
        probe.cache_clear()

    monkeypatch.setenv(VARIABLE, "")  # so that what a test sets is undone
    monkeypatch.delenv(VARIABLE)
    yield use
    monkeypatch.undo()
    probe.cache_clear()


def test_a_crash_is_an_answer(program):
    program(DIES)
    assert probe("bf16", "") == "it dies of SIGILL"
    program("import sys; sys.exit('no such kernel')")
    assert probe("bf16", "") == "no such kernel"
    program("")
    assert probe("fp16", "AVX2") == ""


def test_onednn_is_held_to_what_works(program):
    program(DIES_WITH_AMX)
    line = hold_onednn("bf16")
    assert os.environ[VARIABLE] == LIMITS[1]
    assert "SIGILL" in line and f"{VARIABLE}={LIMITS[1]}" in line
    require_half_precision("bf16")


def test_nothing_is_set_where_it_works_or_where_the_user_has_set_it(program, monkeypatch):
    program("")
    assert hold_onednn("bf16") == "" and VARIABLE not in os.environ
    program(DIES)
    monkeypatch.setenv(VARIABLE, "AVX512_CORE_AMX")
    assert hold_onednn("bf16") == "" and os.environ[VARIABLE] == "AVX512_CORE_AMX"


def test_training_refuses_what_would_end_the_process(program, tmp_path):
    program(DIES)
    assert hold_onednn("bf16") == "" and VARIABLE not in os.environ  # nothing helps: nothing is set
    recipe = Recipe(net="resnet8", data="digits", epochs=1, limit=64, batch_size=32, amp="bf16")
    with pytest.raises(RecipeError, match=r"amp='bf16' does not work on this CPU \(it dies of SIGILL\)"):
        train(recipe, tmp_path / "run", progress=False, device="cpu")
    assert not (tmp_path / "run").exists()


def test_the_command_line_holds_onednn_before_torch_is_there(program, tmp_path, monkeypatch, capsys):
    from anyprec.cli import main

    program(DIES_WITH_AMX)
    recipe = tmp_path / "small.toml"
    recipe.write_text('net = "resnet8"\ndata = "digits"\nepochs = 1\nlimit = 64\nbatch_size = 32\namp = "bf16"\n')
    seen = []
    monkeypatch.setattr("anyprec.training.run.train", lambda *a, **k: seen.append(os.environ.get(VARIABLE)) or {})
    assert main(["train", str(recipe), "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert seen == [LIMITS[1]]
    assert "SIGILL" in capsys.readouterr().err


def test_asking_needs_no_torch():
    code = "import sys, anyprec.training.half_precision, anyprec.cli.train; assert 'torch' not in sys.modules"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
