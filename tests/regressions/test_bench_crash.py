"""Finding 2: `anyprec bench` with a rival that crashes."""

import json

import pytest
from blackbox import anyprec
from fake_rivals import write_packages
from serving import save


@pytest.fixture
def bench(tmp_path):
    """Runs the command beside an ONNX Runtime that is well and an OpenVINO whose int8 dies of SIGILL."""
    packages = write_packages(tmp_path / "packages", input_shape=(1, 3, 8, 8))
    env = {"PYTHONPATH": str(packages), "FATE": "SIGILL@start"}
    (tmp_path / "float.onnx").touch()
    model = save(tmp_path / "net.apm")
    fixed = ["bench", model, "--rivals", "onnxruntime,openvino", "--rounds", "2", "--onnx", tmp_path / "float.onnx"]
    return lambda *more: anyprec(*fixed, *more, env=env)


@pytest.mark.slow
def test_a_rival_that_dies_is_named_in_the_table(bench):
    """The rival was left out, and the second best was called the best int8, with exit code 0."""
    done = bench()
    assert "OpenVINO fp32" in done.stdout and "ONNX Runtime int8" in done.stdout
    assert done.returncode != 0
    assert "OpenVINO int8" in done.stdout and "SIGILL" in done.stdout
    assert "OpenVINO int8" in done.stderr.splitlines()[-1] and "SIGILL" in done.stderr.splitlines()[-1]


@pytest.mark.thorough
def test_a_rival_that_dies_is_named_in_json(bench):
    """Its signal was nowhere in the JSON."""
    record = json.loads(bench("--json").stdout)
    assert "SIGILL" in json.dumps(record)
