"""bench/ptq_variants.py: what a variant means, which images are held out, and what is written."""

import csv

import numpy as np
import ptq_variants
import pytest
import torch

from anyprec.post_training import GptqSettings


@pytest.mark.parametrize(
    "text, settings, images",
    [
        ("default", GptqSettings(), 1024),
        ("importance=3,images=4096", GptqSettings(importance=3.0), 4096),
        ("search_ranges=False,tune_steps=0", GptqSettings(search_ranges=False, tune_steps=0), 1024),
    ],
)
def test_parse(text, settings, images):
    assert ptq_variants.parse(text) == (settings, images)


def test_an_unknown_setting():
    with pytest.raises(SystemExit, match="'speed' is no setting; choose from importance"):
        ptq_variants.parse("speed=3")


def test_rows(monkeypatch, tmp_path):
    """Ten images, of which the last four are held out; at 2 bit one answer of four is wrong."""

    class Data:
        labels = np.arange(10)

        def __len__(self):
            return 10

        def read(self, at):
            return at

    data, seen = Data(), []

    def outputs(model, x, bits):
        logits = torch.eye(10)[torch.from_numpy(x)]
        return torch.cat([logits[:3], logits[:1]]) if bits == 2 else logits

    monkeypatch.setattr(ptq_variants, "OUT", tmp_path / "rows.csv")
    monkeypatch.setattr(ptq_variants, "read_state_dict", lambda path: None)
    monkeypatch.setattr(ptq_variants, "from_float", lambda *args: None)
    monkeypatch.setattr(ptq_variants, "load_data", lambda *args, limit=None: data if limit is None else limit)
    monkeypatch.setattr(ptq_variants, "inputs", lambda pixels: pixels)
    monkeypatch.setattr(ptq_variants, "training_images", lambda limit: seen.append(limit))
    monkeypatch.setattr(ptq_variants, "ptq", lambda *args, **options: None)
    monkeypatch.setattr(ptq_variants, "outputs", outputs)
    arguments = ["x", "--weights", "w", "--data", "d", "--widths", "2,8", "--held-out", "4"]
    monkeypatch.setattr("sys.argv", [*arguments, "--variants", "images=6", "images=5"])
    ptq_variants.main()
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    found = [(row["variant"], row["bits"], row["accuracy"], row["agreement"], row["held_out"]) for row in rows]
    assert found[:2] == [("images=6", "2", "75.00", "75.00", "4"), ("images=6", "8", "100.00", "100.00", "4")]
    assert seen == [6, 5] and len(rows) == 4 and float(rows[1]["divergence"]) == 0
    monkeypatch.setattr("sys.argv", [*arguments, "--variants", "images=7"])
    with pytest.raises(SystemExit, match="images=7 and 4 held out are more than the 10 of the training set"):
        ptq_variants.main()
