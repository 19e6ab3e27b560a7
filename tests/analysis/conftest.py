"""A trained network that the tests of attacks and of their verb share."""

import pytest
import torch
from torch import nn

from anyprec.data import load_data
from anyprec.nn.switching import set_bits
from anyprec.zoo import build


@pytest.fixture(scope="session")
def trained():
    """A small network for digits, some steps into its training, so that there is something to attack."""
    torch.manual_seed(0)
    model = build("resnet8", widths=(1, 4, 32), in_channels=1, multiplier=0.5).train()
    data = load_data("digits", "train", limit=512)
    x = (torch.from_numpy(data.images).permute(0, 3, 1, 2).float() / 255 - data.mean[0]) / data.std[0]
    y = torch.from_numpy(data.labels)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(24):
        rows = slice(step % 4 * 128, step % 4 * 128 + 128)
        optimizer.zero_grad()
        for bits in (1, 4, 32):
            set_bits(model, bits)
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model.eval()
