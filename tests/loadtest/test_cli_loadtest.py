"""`anyprec loadtest` as a user types it."""

import json

import numpy as np
import pytest

from anyprec.cli import main
from anyprec.errors import LoadTestError
from anyprec.loadtest.target import find, fit_images, noise


def test_the_whole_story(server, answer, tmp_path, capsys):
    server.script = lambda i: answer(bits=8 if i % 2 else 1)
    out = tmp_path / "out"
    command = [
        "loadtest",
        server.url,
        "--arrivals",
        "gamma:100:2",
        "--seconds",
        "0.5",
        "--slo",
        "10s",
        "--out",
        str(out),
    ]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "in time    100.000 %" in text and "expected from the widths used" in text
    report = json.loads((out / "report.json").read_text())
    assert report["answered"] == report["requests"] == len(server.got)
    assert set(report["bits"]) == {"1", "8"}
    assert (out / "requests.csv").read_text().count("\n") == report["requests"] + 1
    assert server.got[0]["parameters"] == {"deadline_ms": 10000.0}
    pytest.importorskip("matplotlib")
    assert (out / "load.png").stat().st_size > 1000


def test_json_bits_and_headers(server, capsys):
    options = ["--bits", "4", "--min-bits", "2", "--deadline", "5ms", "--slo", "2m", "--header", "X-Api-Key: abc"]
    assert (
        main(["loadtest", server.url, "--model", "net", "--arrivals", "steps:100@0.1,50@0.1", "--json", *options]) == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["seconds"] == pytest.approx(0.2) and report["arrivals"] == "steps:100@0.1,50@0.1"
    assert server.got[0]["parameters"] == {"deadline_ms": 5.0, "bits": 4, "min_bits": 2}
    assert "X-Api-Key: abc" in server.got[0]["head"]


def test_images_of_a_file(server, tmp_path, capsys):
    x = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), np.uint8)
    np.save(tmp_path / "x.npy", x)
    assert (
        main(
            [
                "loadtest",
                server.url,
                "--images",
                str(tmp_path / "x.npy"),
                "--arrivals",
                "uniform:100",
                "--seconds",
                "0.1",
            ]
        )
        == 0
    )
    assert {body for body in server.bodies} <= {image.transpose(2, 0, 1).tobytes() for image in x}
    assert len(set(server.bodies)) == 5


def test_several_images_in_a_request(server, tmp_path, capsys):
    x = np.random.default_rng(0).integers(0, 256, (7, 4, 4, 3), np.uint8)
    np.save(tmp_path / "x.npy", x)
    load = ["loadtest", server.url, "--images", str(tmp_path / "x.npy"), "--arrivals", "uniform:100", "--seconds"]
    assert main([*load, "0.1", "--batch", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 3
    sent = x.transpose(0, 3, 1, 2)
    assert set(server.bodies) == {sent[:3].tobytes(), sent[3:6].tobytes()}
    assert server.got[0]["inputs"][0]["shape"] == [3, 3, 4, 4]
    assert main([*load, "0.1", "--batch", "8"]) == 2
    assert "--batch 8 with 7 images; give at least 8" in capsys.readouterr().err


def test_labels_of_a_data_set(server, answer, capsys):
    # The digits' images are 8 x 8 x 1; the scripted server says "3" to all of them.
    server.about["inputs"] = [{"name": "input", "datatype": "UINT8", "shape": [-1, 8, 8, 1]}]
    server.script = lambda i: answer(label=3)
    assert (
        main(["loadtest", server.url, "--dataset", "digits", "--arrivals", "poisson:200", "--seconds", "0.5", "--json"])
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    from anyprec.data import load_data

    labels = load_data("digits", "test", None).labels[: report["requests"]]
    assert report["accuracy_is"] == "measured"
    assert report["accuracy"] == pytest.approx(100 * np.mean(labels == 3))


def test_nothing_but_rejections_is_a_failure(server, answer, capsys):
    server.script = lambda i: answer(status=503, headers="Retry-After: 1\r\n")
    assert main(["loadtest", server.url, "--arrivals", "uniform:50", "--seconds", "0.1"]) == 1
    assert "5 rejected" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--slo", "soon"], "write for example 50ms"),
        (["--slo", "0ms"], "write for example 50ms"),
        (["--arrivals", "bursts"], "write poisson:200"),
        (["--arrivals", "steps:10@1", "--seconds", "5"], "--seconds is not for steps"),
        (["--arrivals", "poisson:0", "--seconds", "1"], "no request at all"),
        (["--header", "nonsense"], "is not a header"),
        (["--processes", "0"], "whole number from 1 to 1024"),
        (["--images", "a.npy", "--dataset", "digits"], "give one of them"),
        (["--images", "none.npy"], "cannot be read as an array"),
        (["--model", "other"], "answers 404"),
        (["--dataset", "digits"], "takes [3, 4, 4]"),
    ],
)
def test_mistakes(server, one_line_error, options, text):
    assert text in one_line_error("loadtest", server.url, *options)


def test_a_server_that_is_not_there(capsys):
    assert main(["loadtest", "http://127.0.0.1:9"]) == 2
    assert "is `anyprec serve` running?" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["https://127.0.0.1", "ftp://x", "http://", "http://127.0.0.1:99999"])
def test_addresses(url):
    with pytest.raises(LoadTestError, match="write for example http"):
        find(url, "net")


def test_models_are_found(server):
    assert find(server.url).model == "net"
    assert find(server.url.removeprefix("http://")).accuracy == {"8": 93.0, "1": 85.0}
    server.index = [{"name": "a"}, {"name": "b"}]
    with pytest.raises(LoadTestError, match="it has a, b; add --model NAME"):
        find(server.url)
    server.index = None
    with pytest.raises(LoadTestError, match="add --model NAME"):
        find(server.url)


def test_odd_metadata(server):
    server.about["inputs"] = [{"name": "x", "datatype": "BYTES", "shape": [1]}]
    server.about["parameters"] = None
    with pytest.raises(LoadTestError, match="takes BYTES"):
        find(server.url, "net")
    server.about["inputs"] = [{"name": "x", "datatype": "BYTES", "shape": [1]}]
    server.about["parameters"] = 3
    with pytest.raises(LoadTestError, match="metadata cannot be read"):
        find(server.url, "net")
    server.about["inputs"] = []
    with pytest.raises(LoadTestError, match="metadata cannot be read"):
        find(server.url, "net")


def test_images_that_do_not_fit(server):
    target = find(server.url, "net")
    with pytest.raises(LoadTestError, match="images are float64"):
        fit_images(np.zeros((1, 3, 4, 4)), target)
    with pytest.raises(LoadTestError, match=r"takes \[3, 4, 4\]"):
        fit_images(np.zeros((1, 3, 5, 5), np.uint8), target)
    assert noise(target, 3).shape == (3, 3, 4, 4)
    server.about["inputs"] = [{"name": "input", "datatype": "FP32", "shape": [-1, 3, -1, -1]}]
    with pytest.raises(LoadTestError, match="--images"):
        noise(find(server.url, "net"), 1)
    server.about["parameters"] = {"image_size": [5, 7]}
    assert noise(find(server.url, "net"), 2).shape == (2, 3, 5, 7)
    server.about["parameters"] = {"image_size": "large"}
    with pytest.raises(LoadTestError, match="--images"):
        noise(find(server.url, "net"), 1)
