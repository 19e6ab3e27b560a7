"""Your photographs to a server: train a network on a folder of them, pack it, ask it, serve it.

    python examples/your_photos.py PHOTOS     # PHOTOS/train/<class>/*.jpg and PHOTOS/test/<class>/*.jpg
    python examples/your_photos.py            # draws circles, crosses and stripes instead; half a minute on one core

Every step is a command you could type: they are printed. The same as a notebook: your_photos.ipynb.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
from PIL import Image

RECIPE = """
net = "resnet8"
data = "folder"
augment = "none"
widths = [1, 2, 4, 8, 32]
epochs = 12
batch_size = 32
lr = 0.005
schedule = "cosine"
"""


def draw_photos(folder: Path, per_class: int = 90, side: int = 32) -> Path:
    """Three classes of shapes in random colors, so that there is something to train on."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:side, :side]
    for split, count in (("train", per_class), ("test", per_class // 3)):
        for name in ("circle", "cross", "stripes"):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                (cx, cy), r = rng.uniform(11, side - 11, 2), rng.uniform(5, 10)
                inside = {
                    "circle": (x - cx) ** 2 + (y - cy) ** 2 < r**2,
                    "cross": np.minimum(abs(x - cx), abs(y - cy)) < 2,
                    "stripes": (x + y + int(cx)) % 8 < 4,
                }[name]
                front, back = rng.integers(140, 256, 3), rng.integers(0, 116, 3)
                pixels = np.where(inside[..., None], front, back) + rng.normal(0, 8, (side, side, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / split / name / f"{i}.png")
    return folder


def anyprec(*words: str | Path) -> None:
    print("\n$ anyprec", *words, flush=True)
    subprocess.run([sys.executable, "-m", "anyprec", *map(str, words)], check=True)


def ask_server(model: Path, photo: Path) -> None:
    """Start `anyprec serve`, post a photograph to it as curl would, end it."""
    print("\n$ anyprec serve", model, "--slo 50ms &", flush=True)
    command = [sys.executable, "-m", "anyprec", "serve", str(model), "--slo", "50ms", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://[^ ,]+", server.stdout.readline())
            assert address is not None, "the server did not start"
            url = f"{address[0]}/v2/models/{model.stem}/classify"
            print("$ curl --data-binary", f"@{photo}", url, flush=True)
            with urllib.request.urlopen(urllib.request.Request(url, photo.read_bytes()), timeout=30) as answer:
                print(json.dumps(json.load(answer)["results"][0]["labels"], indent=2))
        finally:
            server.terminate()


def main() -> None:
    work = Path("runs/photos")
    work.mkdir(parents=True, exist_ok=True)
    photos = Path(sys.argv[1]) if len(sys.argv) > 1 else draw_photos(work / "drawn")
    (work / "recipe.toml").write_text(RECIPE)

    anyprec("train", work / "recipe.toml", "--data", photos, "--out", work / "run", "--overwrite")
    anyprec("calibrate", work / "run", "--data", photos, "--widths", "3,5-7")
    anyprec("pack", work / "run", "--out", work / "photos.apm")
    photo = next(path for path in sorted((photos / "test").rglob("*")) if path.is_file())
    anyprec("run", work / "photos.apm", photo, "--bits", "1-8")
    anyprec("run", work / "photos.apm", "--dataset", "folder", "--data", photos)
    ask_server(work / "photos.apm", photo)


if __name__ == "__main__":
    main()
