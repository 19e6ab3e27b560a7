"""`anyprec inspect`: what it prints is what the file holds."""

import json
from pathlib import Path

import pytest

from anyprec import format as apm
from anyprec.cli import main


def inspect(capsys, *args):
    assert main(["inspect", *map(str, args)]) == 0
    return capsys.readouterr().out


def test_text(tiny, tmp_path, capsys):
    path = tmp_path / "net.apm"
    sizes = apm.write(tiny(keep_float=True), path)
    out = inspect(capsys, path, "--layers", "--verify")
    with apm.ModelFile(path) as file:
        rows = {line.split()[0]: line for line in out.splitlines() if line}
        assert f"({file.total:,} bytes, complete)" in rows["file"]
        for bits in (1, 2, 4, 8, 32):
            assert f" {file.bytes_for(bits):,} " in rows[str(bits)]
        assert "155 weights in 2 layers" in rows["quantized"]
        assert "66 weights in 2 layers" in out
        assert rows["fast"].split()[1:3] == ["1-2", "1-8"]
        assert " ".join(rows["conv_a"].split()) == "conv_a conv 6 x 6 x 5 5 x 3 x 3 x 3 135 quantized"
        assert rows["pool"].endswith("3 x 3 x 5 codes")
        assert f"{len(file.tensors)} tensors, all as written" in out
    assert out.count("plane 0") == 8
    assert f"{sizes.ratio:.3f} x" in out


def test_json(tiny_path, capsys):
    found = json.loads(inspect(capsys, tiny_path, "--json", "--verify"))
    total = tiny_path.stat().st_size
    assert found["bytes"] == {"here": total, "complete": total}
    parts = found["sizes"]
    assert parts["header"] + parts["tables"] + parts["floats"] + sum(parts["planes"]) + parts["tails"] == total
    assert found["widths"]["8"] == total and parts["planes"] == [20] * 8
    assert [profile["accuracy"] for profile in found["profiles"]] == [11, 12, 14, 18, None]
    assert found["verified"] == 22


def test_an_incomplete_file(tiny_path, tmp_path, capsys):
    apm.truncate(tiny_path, tmp_path / "cut.apm", 2)
    out = inspect(capsys, tmp_path / "cut.apm")
    assert "are here so far" in out and out.count("not yet here") == 2


def test_a_free_size(build, tmp_path, capsys):
    apm.write(build(lambda options: options[1 % len(options)], 0), tmp_path / "net.apm")
    out = inspect(capsys, tmp_path / "net.apm", "--layers")
    assert "? x ? x 2" in out


@pytest.mark.parametrize(
    ("change", "message"), [(lambda raw: raw[:-1] + b"\xfe", "checksum"), (lambda raw: b"", "0 bytes")]
)
def test_errors_are_one_line(tiny_path, capsys, change, message):
    tiny_path.write_bytes(change(tiny_path.read_bytes()))
    assert main(["inspect", str(tiny_path), "--verify"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"anyprec: error: {tiny_path}: ") and message in err and err.count("\n") == 1


def test_inputs_that_are_no_images(capsys):
    path = Path(__file__).with_name("corpus") / "opens-format-3.apm"
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "input: N x ?  (whole numbers)" in out and "mask: N x ? x 8" in out
