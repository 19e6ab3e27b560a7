"""`anyprec export`: files, names, metadata, the check, and one line for each mistake."""

import json

import numpy as np
import pytest

import anyprec
from anyprec.cli import main
from anyprec.export import check, stock_engine

onnx = pytest.importorskip("onnx", reason="exports are ONNX models; pip install 'anyprec[onnx]'")
MODEL = "cifar10-vgg-small"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    report = anyprec.export_onnx(MODEL, folder / "net.onnx", [1, 8], check=False)
    return folder, report


def test_one_file_for_each_width(exported):
    folder, report = exported
    assert sorted(path.name for path in folder.iterdir()) == ["net-1bit.onnx", "net-8bit.onnx"]
    assert [file.profile for file in report.files] == ["1", "8"]
    assert report.files[0].int8_layers == 5 and report.files[1].int8_layers == 0
    assert report.unchecked == "told not to" and report.agrees


def test_one_width_has_the_name_given(tmp_path, capsys):
    assert main(["export", MODEL, "--bits", "2", "--out", str(tmp_path / "mine.onnx"), "--no-check", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["files"][0]["path"] == str(tmp_path / "mine.onnx")
    assert record["opset"] == 13 and (tmp_path / "mine.onnx").stat().st_size == record["files"][0]["bytes"]


def test_the_model_says_how_pixels_become_inputs(exported):
    folder, _ = exported
    model = onnx.load(folder / "net-1bit.onnx")
    facts = {prop.key: prop.value for prop in model.metadata_props}
    with anyprec.load(MODEL) as ours:
        assert json.loads(facts["anyprec.labels"]) == list(ours.labels)
        assert json.loads(facts["anyprec.preprocessing"]) == ours.preprocessing.to_dict()
        pixels = np.arange(3 * 32 * 32, dtype=np.uint8).reshape(1, 3, 32, 32)
        image = {key: np.array(v, np.float32).reshape(3, 1, 1) for key, v in json.loads(facts["anyprec.image"]).items()}
        x = pixels * image["scale"] + image["shift"]
        np.testing.assert_allclose(ours(x, bits=8), ours(pixels, bits=8), atol=0.1)
    assert facts["anyprec.profile"] == "1" and float(facts["anyprec.accuracy"]) > 80
    assert [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == ["N", 3, 32, 32]


def test_the_check_finds_agreement(tmp_path, capsys):
    pytest.importorskip("onnxruntime", reason="the check runs ONNX Runtime")
    assert main(["export", MODEL, "--bits", "1,4", "--out", str(tmp_path / "net.onnx")]) == 0
    out = capsys.readouterr().out
    assert out.count("same answer 32 of 32") == 2 and "not checked" not in out


def test_the_check_finds_a_wrong_model(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxruntime", reason="the check runs ONNX Runtime")
    from anyprec.export.qdq import QdqWriter

    real = QdqWriter.table
    monkeypatch.setattr(QdqWriter, "table", lambda self, op: (real(self, op)[0] * -1, real(self, op)[1]))
    assert main(["export", MODEL, "--bits", "2", "--out", str(tmp_path / "net.onnx")]) == 1
    assert "DISAGREES" in capsys.readouterr().out


def test_an_engine_that_dies_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stock_engine, "is_installed", lambda engine: True)
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -ILL $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(stock_engine.sys, "executable", str(script))
    assert main(["export", MODEL, "--bits", "1", "--out", str(tmp_path / "net.onnx")]) == 0
    assert "not checked: ONNX Runtime ended with SIGILL" in capsys.readouterr().out


def test_without_onnxruntime_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stock_engine, "is_installed", lambda engine: False)
    assert main(["export", MODEL, "--bits", "1", "--out", str(tmp_path / "net.onnx")]) == 0
    assert "not checked: ONNX Runtime is not installed: pip install onnxruntime" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bits", "32"], "bits='32' is not in"),
        (["--bits", "9"], "which has 1, 2, 3, 4, 5, 6, 7, 8"),
        (["--bits", ","], "names no width"),
        (["--bits", "1", "--opset", "12"], "opset=12 cannot be written; this network takes 13 to 21"),
        (["--bits", "1", "--size", "64,64"], "does not fit the model file, which takes 32 x 32"),
        (["--bits", "1", "--size", "big"], "is no size"),
    ],
)
def test_mistakes_in_one_line(tmp_path, capsys, arguments, said):
    assert main(["export", MODEL, "--out", str(tmp_path / "net.onnx"), *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not list(tmp_path.iterdir())


def test_without_onnx_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    assert main(["export", MODEL, "--out", str(tmp_path / "net.onnx")]) == 2
    assert "pip install 'anyprec[onnx]'" in capsys.readouterr().err


def test_disagreement_is_counted():
    ours = np.eye(4, dtype=np.float32)
    found = check.compare([ours], [ours[::-1].copy()])
    assert (found.same_answers, found.answers, found.agrees) == (0, 4, False)
    assert check.compare([ours], [ours]).difference == 0
