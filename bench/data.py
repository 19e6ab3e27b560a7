"""Time of preparing batches: each augmentation on made-up images and photographs, and on CIFAR-10.

    python bench/data.py [--json] [--batch 128] [--batches 100] [--data FOLDER]

One thread prepares each batch when it is asked for (prefetch=0). CIFAR-10 comes from --data or $ANYPREC_DATA.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from anyprec.data import ArrayData, FileData, batches, load_data
from anyprec.errors import AnyprecError

PHOTOS = 32  # JPEG files of 500 x 375 pixels, the usual size in ImageNet


def made_arrays(n: int) -> ArrayData:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    return ArrayData(images, np.arange(n) % 10, tuple("0123456789"), (0.5,) * 3, (0.25,) * 3, "made")


def made_photos(folder: Path, threads: int) -> FileData:
    """Smooth noise: it compresses to about 50 KB a file, as photographs do."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(PHOTOS):
        small = Image.fromarray(rng.integers(0, 256, (94, 125, 3), dtype=np.uint8))
        small.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{i}.jpg", quality=85)
    paths = [f"{i}.jpg" for i in range(PHOTOS)]
    return FileData(folder, paths, np.zeros(PHOTOS, np.int64), ("photo",), name="photos", threads=threads)


def time_batches(data: ArrayData | FileData, augment: str, train: bool, batch: int, wanted: int) -> dict[str, Any]:
    """Median and quickest of `wanted` batches, after one to warm up."""
    times: list[float] = []
    for epoch in count():
        epoch_batches = batches(data, batch, augment=augment, train=train, epoch=epoch, drop_last=True, prefetch=0)
        while True:
            began = time.perf_counter()
            if next(epoch_batches, None) is None:
                break
            times.append(time.perf_counter() - began)
            if len(times) > wanted:
                median, least = statistics.median(times[1:]), min(times[1:])
                return {
                    "data": data.name,
                    "augment": augment,
                    "split": "train" if train else "test",
                    "batch": batch,
                    "ms": round(median * 1e3, 3),
                    "least_ms": round(least * 1e3, 3),
                    "images_per_s": round(batch / median),
                }
    raise AssertionError("epochs do not run out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--batches", type=int, default=100, help="to time of each kind (photographs: a tenth)")
    parser.add_argument("--data", default=os.environ.get("ANYPREC_DATA"), help="folder with CIFAR-10")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()

    sets: list[ArrayData | FileData] = [made_arrays(20_000)]
    skipped = ""
    try:
        sets.append(load_data("cifar10", "train", options.data))
    except AnyprecError as error:
        skipped = f"no cifar10: {error}"
    rows = []
    for data in sets:
        for augment in ("none", "crop", "crop-flip", "svhn"):
            rows.append(time_batches(data, augment, True, options.batch, options.batches))
    fewer = max(1, options.batches // 10)
    with tempfile.TemporaryDirectory() as folder:
        for threads in sorted({1, os.cpu_count() or 1}):
            photos = made_photos(Path(folder), threads)
            photos.name = f"photos, {threads} thread{'s' * (threads > 1)}"
            for train in (True, False):
                rows.append(time_batches(photos, "imagenet", train, min(PHOTOS, options.batch), fewer))

    if skipped:
        print(skipped, file=sys.stderr)
    if options.json:
        for row in rows:
            print(json.dumps(row | {"machine": platform.machine(), "numpy": np.__version__}))
        return
    print(f"{'data':18} {'augment':10} {'split':6} {'batch':>5} {'ms/batch':>9} {'least':>8} {'images/s':>9}")
    for row in rows:
        print(
            f"{row['data']:18} {row['augment']:10} {row['split']:6} {row['batch']:5d} {row['ms']:9.2f} "
            f"{row['least_ms']:8.2f} {row['images_per_s']:9,d}"
        )


if __name__ == "__main__":
    main()
