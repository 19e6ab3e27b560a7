"""Whether an image file may be decoded: its bytes, or an open Pillow image, in; InputError or nothing out.

A file of some kB can keep a decoder busy for minutes: 4,000 scans of a progressive JPEG, a million empty chunks of a
PNG, a header that promises 2^31 x 2^31 pixels. Its structure is looked at first; nothing is decoded here. The same
limits hold for files that are posted to a server (serve/images.py) and for those of `anyprec run` (images.py).
"""

from __future__ import annotations

import re
import struct
import warnings
from pathlib import Path
from typing import Any

from anyprec.errors import InputError
from anyprec.preprocessing import MAX_PIXELS

MAX_SCANS = 64  # of a JPEG: encoders write 1 to 13; 64 empty ones of 40 million pixels take 0.3 s
MAX_SEGMENTS = 4096  # of a JPEG; 16 MB of metadata are 256
MAX_CHUNKS = 1 << 16  # of a PNG with pixels in them: 4 kB each make 256 MB
MAX_OTHER_CHUNKS = 256  # of a PNG; each may hold a MB of compressed text

JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # in the data of a scan: not a stuffed zero, a restart or a filler
PIXEL_CHUNKS = (b"IDAT", b"fdAT")


class ImageTooLarge(InputError):
    """An image that would take too long, or too much memory, to decode."""


def check_bytes(data: bytes, max_pixels: int = MAX_PIXELS) -> None:
    """Refuse a JPEG or PNG whose structure is made to keep decoders busy. Broken files pass: decoding refuses them."""
    if data.startswith(JPEG):
        check_jpeg(data, max_pixels)
    elif data.startswith(PNG):
        check_png(data)


def check_pixels(width: int, height: int, max_pixels: int = MAX_PIXELS) -> None:
    if width * height > max_pixels:
        raise ImageTooLarge(
            f"the image has {width} x {height} pixels; at most {max_pixels:,} are decoded, make it smaller first"
        )


def check_jpeg(data: bytes, max_pixels: int) -> None:
    scans = segments = 0
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xD9:  # the end
            return
        if marker in (0xFF, 0x01) or 0xD0 <= marker <= 0xD8:  # filler, or no length behind it
            at += 1 if marker == 0xFF else 2
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC) and at + 9 <= len(data):
            height, width = struct.unpack_from(">HH", data, at + 5)
            check_pixels(width, height, max_pixels)
        at += 2 + length
        segments += 1
        if segments > MAX_SEGMENTS:
            raise ImageTooLarge(f"the JPEG has over {MAX_SEGMENTS:,} segments, more than are read; save it anew")
        if marker != 0xDA:
            continue
        scans += 1
        if scans > MAX_SCANS:
            raise ImageTooLarge(
                f"the JPEG has over {MAX_SCANS} scans, more than are decoded; save it as a baseline JPEG"
            )
        found = MARKER.search(data, at)
        if found is None:
            return
        at = found.start()


def check_png(data: bytes) -> None:
    at, pixels, others = len(PNG), 0, 0
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            return
        pixels += kind in PIXEL_CHUNKS
        others += kind not in PIXEL_CHUNKS
        if pixels > MAX_CHUNKS or others > MAX_OTHER_CHUNKS:
            raise ImageTooLarge(
                f"the PNG has over {MAX_CHUNKS:,} chunks of pixels, or {MAX_OTHER_CHUNKS} of others, more than are "
                "read; save it anew"
            )
        at += 12 + length


def check_open(image: Any, max_pixels: int = MAX_PIXELS) -> None:
    """An image that Pillow has opened and not yet decoded, of any format."""
    check_pixels(image.width, image.height, max_pixels)


def check_file(path: Path, max_pixels: int = MAX_PIXELS) -> None:
    """The same for a file. What cannot be read at all passes: whoever decodes it says why."""
    try:
        from PIL import Image

        with open(path, "rb") as file:
            first = file.read(len(PNG))
            if first.startswith((JPEG, PNG)):
                check_bytes(first + file.read(), max_pixels)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit comes next
            with Image.open(path) as image:
                check_open(image, max_pixels)
    except ImageTooLarge as error:
        raise ImageTooLarge(f"{path}: {error}") from error
    except Exception:  # Pillow's decoders raise whatever they meet in broken data
        return
