"""`anyprec ptq` from end to end, as a user types it."""

import json

import numpy as np
import pytest
import torch

from anyprec.cli import main
from anyprec.data import ArrayData, cifar10
from anyprec.data.sets import PHOTO_MEAN
from anyprec.training import run as run_module
from anyprec.training.checkpoint import load_state
from anyprec.zoo import build

TRAIN = [
    "train", "digits", "--json", "--set", "epochs=6", "--set", "batch_size=64", "--set", "widths=[32]",
    "--set", "net_options.multiplier=0.25",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def at_the_root(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(request.config.rootpath)
        yield


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, at_the_root):
    out = tmp_path_factory.mktemp("ptq") / "float"
    assert main([*TRAIN, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_all_methods(run_folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        main(
            [
                "ptq",
                str(run_folder),
                "--widths",
                "1,4,8",
                "--images",
                "200",
                "--tune-steps",
                "5",
                "--out",
                str(out),
                "--json",
            ]
        )
        == 0
    )
    text, log = capsys.readouterr()
    record = json.loads(text)
    assert log == ""
    assert list(record["methods"]) == ["bs", "bc", "aciq", "gptq"] and record["training_images"] == 200
    plain = record["float"]["accuracy"]
    assert plain > 60  # of ten classes: it has learned something that bits can cost
    for method, results in record["methods"].items():
        assert list(results) == ["1", "4", "8"]
        # Norms calibrated on 200 images are noisier than those of training.
        assert results["8"]["accuracy"] > plain - (8 if method == "bc" else 3)
    assert set(record["aciq_mean_bits"]) == {"1", "4", "8"} and record["aciq_mean_bits"]["8"] == [8, 8]
    assert json.loads((out / "ptq.json").read_text()) == record
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*.*")) == [
        "bc/model.pt",
        "bs/model.pt",
        "gptq/model.pt",
        "ptq.json",
    ]

    # What it wrote is a run like any other: the same accuracy by evaluate, and in the engine.
    for method in ("bs", "bc", "gptq"):
        assert main(["evaluate", str(out / method), "--json"]) == 0
        tested = json.loads(capsys.readouterr().out)["results"]
        assert {k: tested[k] for k in ("1", "4", "8")} == record["methods"][method] and tested["32"] == record["float"]
    pytest.importorskip("anyprec._native")
    model = str(tmp_path / "bc.apm")
    assert main(["pack", str(out / "bc"), "--out", model, "--json"]) == 0
    capsys.readouterr()
    assert main(["run", model, "--dataset", "digits", "--json"]) == 0
    # Values at the border between two codes may fall to the other side: an image or two of 360.
    found = {k: row["accuracy"] for k, row in json.loads(capsys.readouterr().out)["results"].items()}
    for k in ("1", "4", "8"):
        assert found[k] == pytest.approx(record["methods"]["bc"][k]["accuracy"], abs=0.6)


@pytest.mark.thorough
def test_the_table(run_folder, capsys):
    arguments = ["--method", "bs", "--method", "aciq,bs", "--widths", "2,8", "--images", "64", "--limit", "60"]
    assert main(["ptq", str(run_folder), *arguments]) == 0
    out, log = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("resnet8 on digits: accuracy in percent over 60 test images; 64 training images seen")
    assert lines[1].split() == ["method", "2", "8", "float"]
    assert [line.split()[0] for line in lines[2:4]] == ["bs", "aciq"]
    assert lines[2].split()[-1] == lines[3].split()[-1]  # float is one
    assert lines[4] == "aciq spent these bits on average, weights/inputs:" and lines[5].split()[1] == "8.0/8.0"
    assert "ptq: 3/3 network (100 %)" in log


def test_float_weights_of_a_file(tmp_path, capsys):
    torch.manual_seed(0)
    weights = tmp_path / "weights.pth"
    torch.save(build("resnet-he", depth=8, widths=(32,), in_channels=1).state_dict(), weights)
    state = torch.load(weights)
    plain = {name.replace(".tables.32", ""): value for name, value in state.items() if ".act." not in name}
    torch.save({"state_dict": plain}, weights)
    arguments = ["--method", "bs", "--widths", "8", "--images", "32", "--limit", "20", "--json"]
    assert main(["ptq", str(weights), "--dataset", "digits", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["network"] == "resnet-he"
    assert main(["ptq", str(weights), *arguments]) == 2
    assert "holds only weights; name the data set they are for with --dataset" in capsys.readouterr().err
    assert main(["ptq", str(weights), "--dataset", "digts", *arguments]) == 2
    assert "--dataset 'digts' is not known" in capsys.readouterr().err
    assert main(["ptq", str(weights), "--dataset", "digits", "--normalization", "imagenet", *arguments]) == 2
    assert "mean has 3 values for 1 channels" in capsys.readouterr().err


def test_the_normalization_that_weights_expect(tmp_path, monkeypatch, capsys):
    random = np.random.default_rng(0)
    data = ArrayData(random.integers(0, 256, (48, 32, 32, 3), np.uint8), np.arange(48) % 10, cifar10.CLASSES,
                     cifar10.MEAN, cifar10.STD, "cifar10")  # fmt: skip
    monkeypatch.setattr(run_module, "load_data", lambda *args, **rest: data)
    torch.manual_seed(0)
    state = build("resnet-he", depth=8, widths=(32,)).state_dict()
    plain = {name.replace(".tables.32", ""): value for name, value in state.items() if ".act." not in name}
    torch.save({"state_dict": plain}, tmp_path / "weights.pth")
    for name, mean in (("dataset", cifar10.MEAN), ("imagenet", PHOTO_MEAN)):
        arguments = ["--dataset", "cifar10", "--normalization", name, "--out", str(tmp_path / name), "--json"]
        assert main(["ptq", str(tmp_path / "weights.pth"), "--method", "bs", "--widths", "8", *arguments]) == 0
        kept = load_state(tmp_path / name / "bs" / "model.pt")["extra"]
        assert tuple(kept["preprocessing"]["mean"]) == mean and kept["recipe"]["normalization"] == name


def test_it_does_not_write_over_results(run_folder, tmp_path, capsys):
    arguments = ["ptq", str(run_folder), "--method", "bs", "--widths", "8", "--images", "16", "--limit", "10", "--json"]
    arguments += ["--out", str(tmp_path)]
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert "holds ptq.json already; add --overwrite" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--method", "best"], "method='best' is not known; choose one of bs, bc, aciq, gptq"),
        (["RUN", "--widths", "9"], "bits=9 is not a bit-width"),
        (["RUN", "--widths", "32"], "widths has only float"),
        (["RUN", "--images", "0"], "argument --images: '0' is not a whole number above 0"),
        (["RUN", "--net", "resnet8"], "--net is for files of float weights"),
        (["RUN", "--normalization", "imagenet"], "--normalization is for files of float weights"),
        (["RUN", "--dataset", "cifar10"], "cifar10"),
        (["RUN", "--dataset", "cifar10", "--data", "docs"], "docs has no CIFAR-10"),
        (["RUN", "--quantizer", "dorefa"], "invalid choice: 'dorefa'"),
        (["nowhere.pt"], "there is no checkpoint nowhere.pt"),
        (["docs"], "there is no checkpoint docs/model.pt"),
        (["pyproject.toml"], "pyproject.toml is truncated, damaged or not a torch file"),
        (
            ["RUN", "--out", "pyproject.toml"],
            "pyproject.toml: a file of that name is there",
        ),
    ],
)
def test_mistakes_end_with_one_line(run_folder, one_line_error, arguments, message):
    assert message in one_line_error("ptq", *(run_folder if a == "RUN" else a for a in arguments))


def test_a_run_without_float(tmp_path, run_folder, capsys):
    from anyprec.training.checkpoint import load_state, save_state

    record = load_state(run_folder / "model.pt")
    narrow = build("resnet8", widths=(1, 8), multiplier=0.25, in_channels=1)
    record |= {"net_options": narrow.zoo_options, "state_dict": narrow.state_dict(), "widths": [1, 8]}
    save_state(record, tmp_path / "narrow.pt")
    assert main(["ptq", str(tmp_path / "narrow.pt")]) == 2
    assert "has no float width, only (1, 8)" in capsys.readouterr().err


@pytest.mark.slow
def test_resnet20_on_cifar10(data_root, tmp_path, capsys):
    """Published behavior: ACIQ keeps most at 4 bit and collapses at 1; shifted bits do at 1 and 2."""
    weights = data_root / "weights" / "resnet20-12fca82f.th"
    if not weights.exists():
        pytest.skip(f"no {weights}")
    arguments = ["--dataset", "cifar10", "--data", str(data_root), "--widths", "1,2,4,8", "--limit", "500", "--json"]
    assert main(["ptq", str(weights), *arguments]) == 0
    record = json.loads(capsys.readouterr().out)
    plain = record["float"]["accuracy"]
    assert plain > 89
    accuracy = {m: {int(k): v["accuracy"] for k, v in r.items()} for m, r in record["methods"].items()}
    assert all(found[8] > plain - 2 and found[1] < 30 for found in accuracy.values())
    assert accuracy["aciq"][4] > plain - 4 and accuracy["aciq"][2] < 60
    assert accuracy["bs"][2] < 20 < accuracy["bc"][2] < 70
