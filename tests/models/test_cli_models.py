"""`anyprec models`: the list, a card, JSON, downloads."""

import json
from dataclasses import replace

from anyprec.cli import main


def run(capsys, *args):
    assert main(["models", *args]) == 0
    return capsys.readouterr().out


def test_list(models, capsys):
    heads, large, tiny, empty, hint = run(capsys).splitlines()
    assert heads.split() == ["name", "data", "network", "bytes", "bits", "1", "8"]
    size = f"{models.path.stat().st_size:,}"
    assert tiny.split() == ["tiny-net", "cifar10", "resnet20", size, "accuracy", "%", "81.00", "88.00"]
    assert large.split()[0] == "large-net" and empty == "" and "anyprec models NAME" in hint


def test_list_with_times(models, capsys):
    card = models.cards["tiny-net"]
    profiles = {"1": replace(card.profiles["1"], ms=0.1234), "8": card.profiles["8"]}
    timing = {"cpu": "A CPU", "isa": "avx2", "rounds": 9}
    timed = replace(card, profiles=profiles, timing=timing)
    (models.folder / "tiny-net.json").write_text(json.dumps(timed.to_dict()))
    assert [line.split() for line in run(capsys).splitlines()][3] == ["ms", "0.123"]
    text = run(capsys, "tiny-net")
    assert "A CPU, avx2; batch 1, one thread, median of 9 rounds" in text


def test_an_empty_catalog(models, capsys):
    for path in models.folder.iterdir():
        path.unlink()
    assert run(capsys) == "this anyprec comes without models\n"
    assert json.loads(run(capsys, "--json")) == {"models": []}


def test_card(models, capsys):
    text = run(capsys, "tiny-net")
    card = models.cards["tiny-net"]
    facts = (str(models.path), card.sha256, "Apache-2.0", "seed 3, 1.5 core-hours", "net resnet20, widths 1/8", "abc")
    for fact in (*facts, "10,000 test images", "1,234 weights", "not measured"):
        assert fact in text
    rows = [line.split() for line in text.splitlines()[-2:]]
    assert [row[:5] for row in rows] == [["1", "81.00", "%", "99.95", "%"], ["8", "88.00", "%", "99.95", "%"]]
    assert rows[1][-1] == f"{card.profiles['8'].bytes:,}"
    assert "not downloaded; anyprec models --fetch large-net" in run(capsys, "large-net")


def test_json(models, capsys):
    large, tiny = json.loads(run(capsys, "--json"))["models"]
    assert tiny == {**models.cards["tiny-net"].to_dict(), "path": str(models.path)} | {"input": [32, 32, 3]}
    assert large["path"] is None and large["url"].startswith("http://127.0.0.1:")
    assert json.loads(run(capsys, "tiny-net", "--json")) == tiny


def test_fetch(models, capsys):
    out = run(capsys, "--fetch", "large-net")
    assert out.strip().endswith("large-net.apm") and out.startswith(str(models.cache))
    assert json.loads(run(capsys, "large-net", "--fetch", "--json")) == {"name": "large-net", "path": out.strip()}
    assert models.server.asked == 1
    assert run(capsys, "--fetch", "tiny-net").strip() == str(models.path)


def test_mistakes(models, capsys):
    for args, message in (
        (["tiny"], "no model is called 'tiny'; did you mean tiny-net?"),
        (["--fetch"], "--fetch downloads one model; give its name"),
        (["../tiny-net"], "no model is called '../tiny-net'"),
    ):
        assert main(["models", *args]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and message in err
