"""The embedded data set: 1,797 handwritten digits, 8 x 8 pixels, in `digits.npz` beside this file (46 KB).

Source: the test part of E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository, doi 10.24432/C50P49, license CC BY 4.0, as in scikit-learn's `load_digits`, unchanged:
`images` (1797, 8, 8) with values 0..16, `labels` (1797,), and `test`, the 400 indices we hold out.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from anyprec.data.sets import ArrayData
from anyprec.errors import DataError

FILE = Path(__file__).with_name("digits.npz")
CLASSES = tuple("0123456789")
# Mean and deviation of x/255 over the 1,397 training images.
MEAN, STD = (0.3051,), (0.3759,)


def read_digits(root: Path | None, split: str) -> ArrayData:
    """1,397 images to train, 400 to test (40 of each digit), the same for ever. `root` is not looked at.

    The held-out ones were drawn once: the first 40 of each class in the order of Philox(key=0) words. A value
    v of 0..16 becomes the pixel (255 v + 8) // 16: 0 -> 0, 8 -> 128, 16 -> 255.
    """
    try:
        with open(FILE, "rb") as file, np.load(file, allow_pickle=False) as stored:
            images, labels, test = stored["images"], stored["labels"], stored["test"]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"the embedded digits in {FILE} cannot be read ({error}); reinstall anyprec") from error
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[test] = True
    mine = held_out if split == "test" else ~held_out
    pixels = ((images[mine].astype(np.int32) * 255 + 8) // 16).astype(np.uint8)
    return ArrayData(pixels[..., None], labels[mine].astype(np.int64), CLASSES, MEAN, STD, "digits")
