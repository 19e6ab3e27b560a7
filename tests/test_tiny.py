"""The whole story in seconds: build, train jointly, switch bits, calibrate what was not trained, save, load."""

import numpy as np
import torch

import anyprec
from anyprec.data import batches, load_data
from anyprec.training.checkpoint import load_model, save_model
from anyprec.training.evaluate import evaluate, to_tensor
from anyprec.training.joint import joint_step


def test_tiny(tmp_path):
    torch.manual_seed(0)
    train, test = load_data("digits", "train"), load_data("digits", "test")
    model = anyprec.zoo.build("resnet8", widths=(1, 8, 32), in_channels=1, multiplier=0.5).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(4):
        for images, labels in batches(train, 64, train=True, epoch=epoch):
            optimizer.zero_grad()
            joint_step(model, to_tensor(images), torch.from_numpy(labels), (1, 8, 32))
            optimizer.step()
    # After 4 epochs the running statistics of 1 bit lag behind its weights: 38 to 94 % by seed and CPU. Estimated anew,
    # 1 bit has above 90 % with each of 12 seeds, the others above 95 %.
    loader = [to_tensor(images) for images, _ in batches(train, 256)]
    anyprec.calibrate(model, loader, widths=(1,))
    trained = evaluate(model, test)
    assert min(result["accuracy"] for result in trained.values()) > 80

    anyprec.calibrate(model, loader, widths=(4,))
    assert evaluate(model, test, [1, 8, 32]) == trained  # calibrating 4 bit changed nothing else
    assert abs(evaluate(model, test, [4])[4]["accuracy"] - trained[8]["accuracy"]) < 10

    save_model(model, tmp_path / "model.pt")
    again = load_model(tmp_path / "model.pt").eval()
    x = loader[0][:5]
    model.eval()
    for bits in (1, 4, 8, 32):
        with torch.no_grad(), anyprec.bits(model, bits), anyprec.bits(again, bits):
            np.testing.assert_array_equal(model(x).numpy(), again(x).numpy())
