"""Posted image files, JPEG or PNG, as bytes in; the uint8 tensor a model takes out; and scores into labels.

Sizes are read from the file's header and refused before anything is decoded. Called by app.py, in a thread of its own.
Pixels are made as `anyprec run` makes them, so that both give the same answer for a file.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from anyprec.errors import InputError
from anyprec.run.images import fit
from anyprec.serve.protocol import Refusal, Signature

MAGIC = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n\x1a\n": "PNG"}
MAX_PIXELS = 40_000_000  # of a posted file; a telephone's photograph has 12 to 50 million


def read_image(body: bytes, signature: Signature, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """(1, C, H, W) or (1, H, W, C) uint8, as the model's layout says."""
    image = open_image(body, max_pixels)
    height, width, channels = target(signature)
    if signature.image_size is not None:
        height, width = signature.image_size
    try:
        image = upright_rgb(image, channels)
    except Exception as error:  # Pillow's decoders raise whatever they meet in broken data
        raise InputError(f"the image cannot be decoded: {error}") from error
    height, width = free_size(image, height, width, signature.max_pixels)
    pixels = np.asarray(fit(image, height, width))  # (H, W) or (H, W, 3) uint8
    pixels = pixels.reshape(1, height, width, channels)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)) if signature.layout == "NCHW" else pixels


def open_image(body: bytes, max_pixels: int) -> Any:
    """Reads the header alone."""
    from PIL import Image

    kind = next((kind for magic, kind in MAGIC.items() if body.startswith(magic)), None)
    if kind is None:
        raise Refusal(415, "the body is neither a JPEG nor a PNG file")
    try:
        image = Image.open(io.BytesIO(body), formats=[kind])
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Refusal(413, f"the image has more than {max_pixels:,} pixels; send a smaller one") from error
    except Exception as error:
        raise InputError(f"the {kind} file cannot be read: {error or type(error).__name__}") from error
    if image.width * image.height > max_pixels:
        size = f"{image.width} x {image.height}"
        raise Refusal(413, f"the image has {size} pixels; at most {max_pixels:,} are decoded, send a smaller one")
    return image


def upright_rgb(image: Any, channels: int) -> Any:
    """Decoded: RGB, or grey for a model of one channel; transparency is dropped."""
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # straight to RGB, Pillow warns
    if image.mode != "RGB":
        image = image.convert("RGB")
    image.load()
    return image.convert("L") if channels == 1 else image


def target(signature: Signature) -> tuple[int, int, int]:
    """H, W, C; -1 where the model leaves it free."""
    if not signature.takes_uint8:
        raise InputError("this model's file does not say how pixels become its input; send float tensors to /infer")
    shape = signature.input.shape
    if len(shape) != 4:
        raise InputError("this model takes vectors, not images")
    height, width, channels = (shape[2], shape[3], shape[1]) if signature.layout == "NCHW" else shape[1:]
    if channels not in (1, 3):
        raise InputError(f"this model takes images of {channels} channels, files have 1 or 3; send tensors to /infer")
    return height, width, channels


def free_size(image: Any, height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """The size the model was made for; -1: the image's own, made smaller in proportion if it has too many pixels."""
    scale = min(1.0, (max_pixels / (image.width * image.height)) ** 0.5)
    free_height, free_width = max(1, int(image.height * scale)), max(1, int(image.width * scale))
    return (free_height if height == -1 else height), (free_width if width == -1 else width)


def labelled(y: np.ndarray, labels: Sequence[str], top: int, layout: str) -> list[dict[str, Any]]:
    """Of one image's output: the `top` classes with score and probability, best first; of a map, with their share.

    The score is the network's own output. The probability is its softmax, unless the network has made it already.
    """
    if y.ndim == 1:
        likely = probabilities(y)
        order = np.argsort(-y, kind="stable")[:top]
        return [
            {"class": int(i), "label": name_of(labels, i), "score": number(y[i]), "probability": number(likely[i])}
            for i in order
        ]
    axis = 0 if layout == "NCHW" else 2
    count = y.shape[axis]
    shares = np.bincount(np.argmax(y, axis=axis).ravel(), minlength=count) / (y.size // count)
    most = [int(i) for i in np.argsort(-shares, kind="stable")[:top] if shares[i] > 0]
    return [{"class": i, "label": name_of(labels, i), "share": round(float(shares[i]), 6)} for i in most]


def name_of(labels: Sequence[str], i: int) -> str | None:
    return labels[i] if i < len(labels) else None


def probabilities(y: np.ndarray) -> np.ndarray:
    finite = np.nan_to_num(y.astype(np.float64), nan=-np.inf, posinf=1e30)
    if finite.min() >= 0 and abs(finite.sum() - 1) < 1e-3:
        return finite
    if not np.isfinite(finite).any():
        return np.full(len(y), 1 / len(y))
    powers = np.exp(finite - finite.max())
    return np.asarray(powers / powers.sum())


def number(value: float) -> float | None:
    """None for NaN and infinity, which JSON does not have. 7 digits are all that float32 holds."""
    return float(f"{value:.7g}") if np.isfinite(value) else None
