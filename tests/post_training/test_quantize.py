"""`quantize`: three lines from a float network and pictures to a file; kinds of images; the report; mistakes."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import anyprec
from anyprec.errors import AnyprecError, DataError, ModelFileError
from anyprec.post_training import GptqSettings
from anyprec.post_training.quantize import class_axis, few, preprocessing_of_timm, read_inputs, split_images

HOW = anyprec.Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), size=12, to=14)
QUICK = GptqSettings(tune_steps=3)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8),
        nn.ReLU6(), nn.Conv2d(8, 12, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4),
    ).eval()  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    image = pytest.importorskip("PIL.Image")
    dice = np.random.default_rng(0)
    for i in range(20):
        place = tmp_path / "photos" / f"class{i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.repeat(np.repeat(dice.integers(0, 256, (4, 5, 3), dtype=np.uint8), 4, 0), 4, 1)
        image.fromarray(pixels).save(place / f"{i}.png")
    return tmp_path / "photos"


def test_a_folder_of_pictures(net, folder, tmp_path):
    path = tmp_path / "net.apm"
    report = anyprec.quantize(net, folder, path, widths=(2, 8), preprocessing=HOW, labels=list("abcd"), gptq=QUICK)
    assert (report.images, report.held_out) == (16, 4)
    assert set(report.agreement) == {2, 8} and report.error[8] < report.error[2] and report.error[8] < 0.1
    assert report.pack.check is not None
    text = str(report)
    assert "compared with float on 4 held-out images" in text and "same answer" in text
    json.dumps(report.to_dict())

    # The file answers a picture as the float network does, with no more than what is in it.
    pytest.importorskip("anyprec._native")
    model = anyprec.load(path)
    assert model.preprocessing is not None and model.preprocessing.size == (12, 12)
    picture = next(folder.rglob("*.png"))
    (x,) = read_inputs([picture], HOW, 1, False)
    with torch.no_grad():
        wanted = net(x[None])[0]
    found = model(x[None].numpy(), bits=8)[0]
    assert np.abs(found - wanted.numpy()).max() < 0.1 * wanted.abs().max()
    assert len(model.predict(str(picture))) > 0


def test_the_network_is_not_changed_and_tensors_will_do(net, tmp_path):
    before = {k: v.clone() for k, v in net.state_dict().items()}
    x = torch.randn(8, 3, 12, 12)
    report = anyprec.quantize(net, x, tmp_path / "a.apm", widths=(8,), gptq=QUICK)
    assert (report.images, report.held_out) == (8, 0) and "too few to split" in str(report)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    report = anyprec.quantize(net, [x, x], tmp_path / "b.apm", widths=(8,), method="bs")
    assert (report.images, report.held_out) == (13, 3)


def test_images_in_every_form():
    x = torch.randn(6, 3, 4, 4)
    for given in (x, x.numpy(), [x[:2], x[2:]], [(x[:2], 0), (x[2:], 1)], list(x)):
        assert torch.equal(read_inputs(given, None, 100, False), x)
    assert len(read_inputs(x, None, 4, False)) == 4
    assert few(10, 3) == [0, 3, 6] and few(2, 3) == [0, 1]
    seen, held_out = split_images(torch.arange(20))
    assert held_out.tolist() == [4, 9, 14, 19] and len(seen) == 16


def test_mistakes(net, folder, tmp_path):
    path = tmp_path / "net.apm"
    with pytest.raises(AnyprecError, match="'aciq' cannot be packed"):
        anyprec.quantize(net, torch.zeros(2, 3, 12, 12), path, method="aciq")
    with pytest.raises(AnyprecError, match=r"nn\.Module"):
        anyprec.quantize(3, torch.zeros(2, 3, 12, 12), path)
    with pytest.raises(DataError, match=r"preprocessing=anyprec\.Preprocessing"):
        anyprec.quantize(net, folder, path)
    for images, message in (
        (tmp_path / "none", "there is no folder"),
        ([], "give a folder"),
        (["a.jpg", 3], "holds a str"),
        ([torch.zeros(1, 3, 4, 4), torch.zeros(1, 3, 5, 5)], "differ in shape"),
        (torch.zeros(0, 3, 4, 4), "no images"),
    ):
        with pytest.raises(DataError, match=message):
            read_inputs(images, HOW, 10, False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no pictures"):
        read_inputs(tmp_path / "empty", HOW, 10, False)
    (tmp_path / "empty" / "a.png").write_bytes(b"no picture")
    with pytest.raises(AnyprecError, match=r"a\.png"):
        read_inputs(tmp_path / "empty", HOW, 10, False)
    assert not path.exists()


def test_what_a_timm_network_says(net):
    assert preprocessing_of_timm(net) is None
    net.pretrained_cfg = {
        "input_size": (3, 224, 224), "mean": (0.5,) * 3, "std": (0.2,) * 3, "crop_pct": 0.875,
        "interpolation": "bicubic",
    }  # fmt: skip
    how = preprocessing_of_timm(net)
    assert how is not None and (how.size, how.to, how.filter) == ((224, 224), (256, 256), "bicubic")


def test_whole_numbers_and_outputs_of_each_token(tmp_path):
    """A text network takes tokens, and its classes are on the last axis."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(30, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)
    )
    tokens = torch.randint(0, 30, (20, 7))
    report = anyprec.quantize(net, tokens, tmp_path / "net.apm", widths=(8,), gptq=QUICK)
    assert report.error[8] < 0.1 and report.pictures == ""
    assert class_axis(torch.zeros(2, 7, 5)) == 2 and class_axis(torch.zeros(2, 5, 4, 4)) == 1


def test_mistakes_are_found_before_the_fitting(net, tmp_path, monkeypatch):
    monkeypatch.setattr("anyprec.post_training.quantize.ptq", None)
    x = torch.randn(4, 3, 12, 12)
    for path, message in ((tmp_path, "that is a folder"), (tmp_path / "a" / "b.apm", "make the folder first")):
        with pytest.raises(ModelFileError, match=message):
            anyprec.quantize(net, x, path)
    with pytest.raises(AnyprecError, match="5 labels for a network with 4 classes"):
        anyprec.quantize(net, x, tmp_path / "net.apm", labels=list("abcde"))
    with pytest.raises(DataError, match="does not run through Sequential"):
        anyprec.quantize(net, x[:, :2], tmp_path / "net.apm")
    with pytest.raises(AnyprecError, match="'gptx' is not known"):
        anyprec.quantize(net, x, tmp_path / "net.apm", method="gptx")
