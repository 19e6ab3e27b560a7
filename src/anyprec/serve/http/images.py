"""Posted images: bytes of a JPEG or PNG file in; the uint8 tensor of a model's input out.

Images that would take too long to decode are refused first (run/image_limits.py). Called by worker_main.py, in a
process that can be killed. Preprocessing is that of `anyprec run`, so both give the same answer for a file.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from anyprec.errors import InputError
from anyprec.preprocessing import MAX_PIXELS, Preprocessing, upright
from anyprec.run.image_limits import ImageTooLarge, check_bytes, check_open
from anyprec.serve.http.protocol import HttpError, ModelSignature

MAGIC = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n\x1a\n": "PNG"}


def read_image(body: bytes, signature: ModelSignature, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """(1, C, H, W) or (1, H, W, C) uint8, as the model's layout says."""
    image = open_image(body, max_pixels)
    how = preprocessing_for(signature)
    try:
        if how.size is None:  # a map: the picture as it is, made smaller in proportion if it has too many pixels
            image = upright(image, how.channels)
            how = how.at(free_size(image, *target(signature)[:2], signature.max_pixels))
        pixels = how.pixels(image)[None]
    except (InputError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise whatever they meet in broken data
        raise InputError(f"the image cannot be decoded: {error}") from error
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)) if signature.layout == "NCHW" else pixels


def preprocessing_for(signature: ModelSignature) -> Preprocessing:
    """What the model's training did; of a file that does not say, the picture covers the size it was made for."""
    height, width, channels = target(signature)
    if signature.preprocessing is not None:
        return signature.preprocessing
    size = signature.image_size or ((height, width) if -1 not in (height, width) else None)
    if size is None and any(len(output.shape) == 2 for output in signature.outputs):
        raise InputError(
            "this model's file does not say at which size it was trained, so no picture can be answered; send tensors "
            "of that size to /infer, or pack the model again from its checkpoint"
        )
    return Preprocessing((0.0,) * channels, (1.0,) * channels, size)


def open_image(body: bytes, max_pixels: int) -> Any:
    """Reads only the header."""
    from PIL import Image

    kind = next((kind for magic, kind in MAGIC.items() if body.startswith(magic)), None)
    if kind is None:
        raise HttpError(
            415,
            "the body is neither a JPEG nor a PNG file; send the file itself, as curl --data-binary @photo.jpg does",
        )
    try:
        check_bytes(body, max_pixels)
        image = Image.open(io.BytesIO(body), formats=[kind])
        check_open(image, max_pixels)
    except ImageTooLarge as error:
        raise HttpError(413, str(error)) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise HttpError(413, f"the image has more than {max_pixels:,} pixels; send a smaller one") from error
    except Exception as error:
        raise InputError(f"the {kind} file cannot be read: {error or type(error).__name__}") from error
    return image


def target(signature: ModelSignature) -> tuple[int, int, int]:
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
