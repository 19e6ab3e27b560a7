"""Posted images: the pixels of `anyprec run`, sizes refused before decoding, broken files refused."""

import contextlib
import io
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from anyprec.errors import InputError
from anyprec.run.images import image_file
from anyprec.run.model import load
from anyprec.serve.http.images import read_image
from anyprec.serve.http.protocol import HttpError, ModelSignature, TensorMetadata


def signature(height=8, width=8, channels=3, layout="NCHW", **rest):
    shape = (-1, channels, height, width) if layout == "NCHW" else (-1, height, width, channels)
    return ModelSignature(TensorMetadata("input", "UINT8", shape), True, (), (), ("8",), layout, **rest)


def encoded(size=(8, 8), kind="PNG", mode="RGB", seed=0):
    draw = np.random.default_rng(seed)
    pixels = draw.integers(0, 256, (size[1], size[0], 4), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels, "RGBA").convert(mode).save(buffer, kind)
    return buffer.getvalue()


def png_of_size(width, height):
    """A header that promises, and next to no data."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode, kind", [("RGB", "PNG"), ("RGB", "JPEG"), ("L", "PNG"), ("P", "PNG"), ("RGBA", "PNG")])
@pytest.mark.parametrize("size", [(8, 8), (20, 11)])
def test_pixels_are_those_of_run(mode, kind, size, model_path, tmp_path):
    raw = encoded(size, kind, mode)
    path = tmp_path / f"x.{kind.lower()}"
    path.write_bytes(raw)
    there = image_file(path, load(model_path), None)
    np.testing.assert_array_equal(read_image(raw, signature(layout="NHWC")), there, strict=True)
    np.testing.assert_array_equal(read_image(raw, signature()), there.transpose(0, 3, 1, 2), strict=True)


def test_gray_models_and_free_sizes():
    assert read_image(encoded(), signature(channels=1)).shape == (1, 1, 8, 8)
    assert read_image(encoded((30, 20)), signature(-1, -1)).shape == (1, 3, 20, 30)
    assert read_image(encoded((30, 20)), signature(-1, -1, max_pixels=150)).shape == (1, 3, 10, 15)
    assert read_image(encoded((30, 20)), signature(-1, 8)).shape == (1, 3, 20, 8)
    assert read_image(encoded((30, 20)), signature(-1, -1, image_size=(6, 5))).shape == (1, 3, 6, 5)


@pytest.mark.parametrize("raw", [b"", b"GIF89a", b"RIFF....WEBP", b"\x00" * 100, b"<svg/>", b"BM"])
def test_other_files_are_415(raw):
    with pytest.raises(HttpError, match="neither a JPEG nor a PNG") as error:
        read_image(raw, signature())
    assert error.value.status == 415


@pytest.mark.parametrize("size", [(50_000, 50_000), (2**31 - 1, 2**31 - 1), (10_000, 10_000), (1001, 1000)])
def test_bombs_are_refused_by_their_header(size):
    with pytest.raises(HttpError, match="pixels") as error:
        read_image(png_of_size(*size), signature(), max_pixels=1_000_000)
    assert error.value.status == 413


def test_text_bombs_are_refused():
    raw = encoded()
    bomb = b"key\0\0" + zlib.compress(bytes(70_000_000), 9)
    chunk = struct.pack(">I", len(bomb)) + b"zTXt" + bomb + struct.pack(">I", zlib.crc32(b"zTXt" + bomb))
    with pytest.raises(InputError):
        read_image(raw[:33] + chunk + raw[33:], signature())


def test_broken_files():
    for raw in (encoded()[:90], encoded(kind="JPEG")[:200], png_of_size(0, 5), png_of_size(8, 8), b"\xff\xd8\xff"):
        with pytest.raises(InputError):
            read_image(raw, signature())


@given(st.sampled_from(["PNG", "JPEG"]), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=8))
def test_damaged_files_are_read_or_refused(kind, damage):
    raw = bytearray(encoded(kind=kind))
    for place, value in damage:
        raw[place % len(raw)] = value
    with contextlib.suppress(InputError):
        assert read_image(bytes(raw), signature(), 10_000).shape == (1, 3, 8, 8)


def test_models_that_take_no_image_files():
    with pytest.raises(InputError, match="how pixels become"):
        read_image(encoded(), ModelSignature(TensorMetadata("input", "FP32", (-1, 3, 8, 8)), False, (), (), ("8",)))
    with pytest.raises(InputError, match="4 channels"):
        read_image(encoded(), signature(channels=4))
    with pytest.raises(InputError, match="vectors"):
        read_image(encoded(), ModelSignature(TensorMetadata("input", "UINT8", (-1, 30)), True, (), (), ("8",)))


def test_a_classifier_of_unknown_size_refuses_pictures():
    unknown = replace(signature(-1, -1), outputs=(TensorMetadata("y", "FP32", (-1, 4)),))
    with pytest.raises(InputError, match="does not say at which size it was trained"):
        read_image(encoded(), unknown)
    assert read_image(encoded(), replace(unknown, image_size=(5, 6))).shape == (1, 3, 5, 6)
