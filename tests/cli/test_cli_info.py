"""`anyprec info`: as JSON, as a table, and where a part is missing."""

import argparse
import json
import os
import subprocess
import sys

import anyprec
from anyprec import _native
from anyprec.cli import dispatch as cli


def command(*args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "anyprec", *args], capture_output=True, text=True, timeout=60, **options
    )


def test_info_as_json_and_as_a_table():
    done = command("info", "--json")
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["anyprec"] == anyprec.__version__
    assert found["isa"] in found["isas"] and found["isas"][0] == "scalar"
    assert set(found["isas"]) <= set(_native.built_isas())
    assert found["bits"].startswith("fewer bits save ")
    table = command("info").stdout
    for name in found:
        assert f"\n{name} " in "\n" + table


def test_what_bits_buy_is_told_of_known_instruction_sets():
    from anyprec.run import machine

    assert set(machine.SAVINGS) <= set(_native.known_isas())


def test_info_refuses_a_wrong_isa():
    done = command("info", env={**os.environ, "ANYPREC_ISA": "mmx"})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("anyprec: error: ANYPREC_ISA=mmx is no instruction set")


def test_info_reports_an_engine_that_does_not_load(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "anyprec.run.cpu", None)  # import of it now raises ImportError
    monkeypatch.delattr("anyprec.run.cpu", raising=False)
    assert cli.main(["info"]) == 0
    assert "engine    cannot be loaded: " in capsys.readouterr().out


def test_info_reports_a_missing_torch(monkeypatch, capsys):
    from anyprec.cli import info as cli_info
    from anyprec.run import machine

    monkeypatch.setattr(machine, "installed", lambda package: None)
    cli_info.run(argparse.Namespace(json=False))
    out = capsys.readouterr().out
    assert "torch     not installed (needed for training: pip install 'anyprec[train]')\n" in out
