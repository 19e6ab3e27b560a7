"""A short run of `anyprec train` that the tests of several verbs read."""

import pytest

SMALL = ["--set", "epochs=1", "--set", "limit=256", "--set", "net_options.multiplier=0.25"]


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    from anyprec.cli import main

    out = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "digits", *SMALL, "--out", str(out), "--json"]) == 0
    return out
