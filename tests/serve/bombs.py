"""Payloads that cost a server far more than their sender: pictures and answers. Used by test_attack_payloads.py."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from anyprec.format import Graph, GraphProfile, Op, Weight, nested_planes, write


def segment(marker: int, data: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(data) + 2) + data


def scan_bomb(width: int, height: int, scans: int) -> bytes:
    """A gray progressive JPEG whose scans say "nothing in any block", each in some 30 bytes.

    A decoder still visits every block in every scan. One Huffman code of one bit stands for a run of 16,384 to 32,767
    blocks (symbol 0xE0, then 14 bits), so that 5,000 x 5,000 pixels are 12 runs of 15 bits.
    """
    blocks = ((width + 7) // 8) * ((height + 7) // 8)
    table = segment(0xC4, bytes([0x00, 1, *[0] * 15, 0x00])) + segment(0xC4, bytes([0x10, 1, *[0] * 15, 0xE0]))
    frame = segment(0xC2, struct.pack(">BHHB", 8, height, width, 1) + b"\x01\x11\x00")
    direct = segment(0xDA, b"\x01\x01\x00\x00\x00\x00") + stuffed("0" * blocks)
    runs = [32767] * (blocks // 32767)
    left = blocks - sum(runs)
    if left < 16384 and runs:  # two runs that both have 15 bits
        runs[-1:] = [32767 - 16384 + left, 16384] if left + 32767 - 16384 >= 16384 else [32767]
    elif left >= 16384:
        runs.append(left)
    one = segment(0xDA, b"\x01\x01\x00\x01\x3f\x00") + stuffed("".join(f"0{run - 16384:014b}" for run in runs))
    return b"\xff\xd8" + segment(0xDB, b"\x00" + b"\x01" * 64) + frame + table + direct + one * scans + b"\xff\xd9"


def stuffed(bits: str) -> bytes:
    """Entropy-coded data: padded with ones, and a zero byte behind every 0xFF."""
    bits += "1" * (-len(bits) % 8)
    return int("1" + bits, 2).to_bytes(len(bits) // 8 + 1, "big")[1:].replace(b"\xff", b"\xff\x00")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *between: bytes, data: bytes | None = None) -> bytes:
    """Black, RGB; `between`: chunks in front of the pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    if data is None:
        deflate = zlib.compressobj(9)
        data = b"".join(deflate.compress(bytes(1 + 3 * width)) for _ in range(height)) + deflate.flush()
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(between) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def photo(width: int, height: int, kind: str = "JPEG", **rest: Any) -> bytes:
    """An honest picture: noise over a gradient, as hard to decode as a photograph."""
    from PIL import Image

    draw = np.random.default_rng(0)
    ramp = np.linspace(0, 200, width)[None, :, None] + np.zeros((height, 1, 3))
    pixels = (ramp + draw.integers(0, 50, (height, width, 3))).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **rest)
    return buffer.getvalue()


def mask_graph(classes: int = 21, depth: int = 1) -> Graph:
    """Images of any size in, a map of `classes` scores out. `depth`: convolutions of 32 channels in between."""
    draw = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape).astype(np.float32)

    def conv(name: str, x: str) -> Op:
        rest = {"kernel": (3, 3), "stride": (1, 1), "pad": (1, 1, 1, 1), "dilation": (1, 1), "groups": 1}
        return Op(name, "conv", (x,), {"weight": name, **rest, "signed": False, "affine": True})

    names = [f"conv{number}" for number in range(depth)]
    channels = [3, *[32] * (depth - 1), classes]
    codes = [draw.integers(0, 256, (o, 3, 3, i), np.uint8) for i, o in itertools.pairwise(channels)]
    ops, x = [], "input"
    tables: dict[str, np.ndarray] = {}
    for name, code in zip(names, codes, strict=True):
        signed = {"signed": False, "rectify": True, "affine": True}
        ops += [Op(f"{name}.codes", "quantize", (x,), signed), conv(name, f"{name}.codes")]
        tables[f"{name}.codes"] = np.abs(values(2, 2, code.shape[3]))
        tables[name] = values(2, 2, code.shape[0])
        x = name
    return Graph(
        name="mask",
        input_shape=(None, None, 3),
        profiles=(GraphProfile("2", 2, 2, 80.0), GraphProfile("8", 8, 8, 90.0)),
        planes=nested_planes((2, 8)),
        weights={
            name: Weight(code.shape, None, {bits: code >> (8 - bits) for bits in (2, 8)})
            for name, code in zip(names, codes, strict=True)
        },
        ops=tuple(ops),
        outputs=(x,),
        tables=tables,
        image_scale=(1 / 255,) * 3,
        image_shift=(0.0,) * 3,
        labels=tuple(f"class {i}" for i in range(classes)),
        made_by="tests",
    )


def save_mask(path: Path, **rest: Any) -> Path:
    write(mask_graph(**rest), path)
    return path
