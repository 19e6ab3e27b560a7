"""Images that `pack` runs the module and the file on: an example in, a few of its images and seeded noise out.

Called by packing.py, verify.py and cli/pack.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from anyprec.packing.first_last import Image
from anyprec.packing.steps import Example

IMAGES = 3
SEED = 1


def noise(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED))


def image_noise(count: int, size: Sequence[int], image: Image | None) -> Tensor:
    """(count, C, ...) seeded images: of uint8 pixels, if it is known how they become inputs; else of deviation 1.

    Half of it is coarse, as in photographs: white noise alone is a gray wall to what averages over a region.
    """
    channels, *places = size
    if len(places) > 3:
        return noise((count, *size))
    patches = noise((count, channels, *(-(-n // 8) for n in places)))
    coarse = F.interpolate(patches, size=places) if places else patches
    made = (coarse + noise((count, channels, *places))) / 2**0.5
    if image is None:
        return made
    pixels = (made * 64 + 128).clamp(0, 255).round()
    scale, shift = (torch.tensor([float(n) for n in numbers]).reshape(-1, *(1,) * len(places)) for numbers in image)
    return pixels * scale + shift


def check_example(example: Example, image: Image | None) -> Example:
    """The example with three rows of every input."""
    tensors = [
        check_images(t, None if i else image) if t.is_floating_point() else check_indices(t)
        for i, t in enumerate(example.tensors)
    ]
    return replace(example, tensors=tuple(tensors))


def check_indices(x: Tensor) -> Tensor:
    """(3, ...) the first rows of the example, and its numbers in another order: nobody else knows which are allowed."""
    rows = [x[: IMAGES - 1]]
    dice = torch.Generator().manual_seed(SEED)
    for _ in range(IMAGES - len(rows[0])):
        drawn = torch.randint(x.numel(), x.shape[1:], generator=dice)
        rows.append(x.reshape(-1)[drawn.to(x.device)][None])
    return torch.cat(rows)


def check_images(x: Tensor, image: Image | None) -> Tensor:
    """(3, C, ...) the first images of the example, the last one noise; of a constant example, which shows nothing, one.

    The noise is twice as strong as the example, so that clips are reached.
    """
    first = x[: IMAGES - 1]
    if bool((first == first.flatten(1)[:, :1].reshape(-1, *(1,) * (x.dim() - 1))).all()):
        return torch.cat([x[:1], image_noise(IMAGES - 1, x.shape[1:], image).to(x)])
    mean, deviation = (n.to(x.dtype) for n in (x.double().mean(), x.double().std()))
    more = image_noise(IMAGES - len(first), x.shape[1:], None).to(x)
    return torch.cat([first, more * 2 * deviation + mean])
