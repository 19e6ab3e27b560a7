"""anyprec.ray.map_images on a cluster of this machine: the answers of `predict`, broken pictures, a worker killed.

Slow: a cluster takes half a minute to start (tests/ray_pictures.py is its process). `make extras-test` runs them. What
needs no cluster is refused before one is asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import has_ray

import anyprec
from anyprec.errors import DataError, InputError, MissingExtra, UnsupportedBits

Image = pytest.importorskip("PIL.Image")
needs_ray = pytest.mark.skipif(not has_ray(), reason="Ray is not installed: pip install anyprec[ray]")
MODEL = "cifar10-vgg-small"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for i in range(24):
        pixels = draw.integers(0, 256, (32 + i, 40, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.{'jpg' if i % 2 else 'png'}")
    (folder / "sub").mkdir()
    Image.fromarray(draw.integers(0, 256, (9, 9), np.uint8)).save(folder / "sub" / "gray.png")
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff not a picture")
    return folder


def run(tmp_path: Path, **given: Any) -> dict[str, Any]:
    notes = tmp_path / "notes"
    notes.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "NOTES": str(notes),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # 15 by Ray's own choice: behind whatever else runs on the machine
        "PYTHONPATH": str(Path(__file__).parent),
    }
    script = Path(__file__).with_name("ray_pictures.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(given)], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@needs_ray
def test_the_answers_of_predict_although_a_worker_is_killed(photos, tmp_path):
    found = run(tmp_path, source=str(photos), model=MODEL, bits=2, top=2, batch_size=2, workers=2, kill=True)
    assert len(found["pids"]) >= 3  # two workers, and the one that took the place of the killed
    rows = {Path(row["path"]).relative_to(photos): row for row in found["rows"]}
    assert len(found["rows"]) == len(rows) == 26  # each picture once
    broken = rows.pop(Path("broken.jpg"))
    assert broken["error"] and broken["label"] is None and broken["probabilities"] is None
    m = anyprec.load(MODEL)
    for name, row in rows.items():
        wanted = m.predict(photos / name, bits=2, top=2)
        assert row["error"] is None and "bytes" not in row
        assert (row["label"], row["class_index"]) == (wanted[0].label, wanted[0].class_index)
        assert row["labels"] == [one.label for one in wanted]
        assert row["probabilities"] == [one.probability for one in wanted]


@pytest.mark.slow
@needs_ray
def test_parquet_files_and_their_other_columns(photos, tmp_path):
    import pyarrow
    import pyarrow.parquet

    files = sorted(photos.glob("*.png"))
    pictures = [{"bytes": path.read_bytes(), "path": path.name} for path in files]
    table = pyarrow.table({"id": list(range(len(files))), "picture": pictures})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = run(tmp_path, source=str(tmp_path / "a.parquet"), model=MODEL, column="picture")
    m = anyprec.load(MODEL)
    assert sorted(row["id"] for row in found["rows"]) == list(range(len(files)))
    for row in found["rows"]:
        assert set(row) == {"id", "label", "class_index", "probability", "error"}
        assert row["label"] == m.predict(files[row["id"]])[0].label


@pytest.mark.slow
@needs_ray
def test_refused_on_the_cluster(tmp_path, photos):
    """What can only be known there: its size, and columns."""
    few = run(tmp_path, source=str(photos), model=MODEL, workers=3)
    assert "workers=3" in few["error"] and "has 3" in few["error"]
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "picture": [b""]}), tmp_path / "a.parquet")
    wrong = run(tmp_path, source=str(tmp_path / "a.parquet"), model=MODEL)
    assert "id, picture" in wrong["error"] and "column=" in wrong["error"]


@needs_ray
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"workers": 0}, InputError, "workers=0"),
        ({"top": 0}, InputError, "top=0"),
        ({"bits": 9}, UnsupportedBits, "9"),
        ({"source": "no/such/folder"}, DataError, "no/such/folder"),
        ({"source": []}, DataError, "empty"),
    ],
)
def test_refused_before_anything_runs(photos, change, error, words):
    with pytest.raises(error, match=words):
        anyprec.ray.map_images(**{"source": photos, "model": MODEL, **change})


def test_without_ray_it_says_what_to_install(photos, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(MissingExtra, match=r"anyprec\[ray\]"):
        anyprec.ray.map_images(photos, MODEL)
