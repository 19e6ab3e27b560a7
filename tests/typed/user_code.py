"""Every public name of anyprec, as a user with a type checker has it; tests/test_typed.py runs mypy --strict on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import anyprec
from anyprec import AnyprecError, CancelToken, ExportReport, PackedModel, PackReport, Preprocessing, Profile, Recipe


def train_a_network_of_the_zoo(folder: Path) -> dict[int | str, dict[str, float]]:
    recipe: Recipe = Recipe(net="resnet8", data="digits", epochs=1, widths=(1, 8, 32))
    recipe = recipe.override(["epochs=2"])
    return anyprec.train(recipe, folder, progress=False)


def convert_and_train(net: nn.Module, images: Tensor, labels: Tensor) -> nn.Module:
    model: nn.Module = anyprec.convert(net, widths=(1, 2, 4, 8, 32), example=images)
    losses: dict[int, tuple[Tensor, Tensor]] = anyprec.joint_step(model, images, labels, (1, 2, 4, 8, 32))
    assert set(losses) == {1, 2, 4, 8, 32}
    anyprec.calibrate(model, [images], widths=(3,))
    anyprec.set_bits(model, 4)
    with anyprec.bits(model, 2):
        y: Tensor = model(images)
    names: list[str] = [name for name, layer in anyprec.any_layers(model).items() if layer.weight_bits == 4]
    profile: Profile = Profile("mixed", {name: 2 for name in names})
    anyprec.set_bits(model, profile if y.isfinite().all() else 8)
    return model


def look_at_it(model: nn.Module) -> float:
    data = anyprec.data.load_data("digits", "test")
    accuracy: dict[int | str, dict[str, float]] = anyprec.evaluate(model, data, [8])
    robustness = anyprec.analysis.Attack("fgsm")
    assert isinstance(robustness.step, float)
    return accuracy[8]["accuracy"]


def quantize_without_training(images: Tensor) -> nn.Module:
    net: nn.Module = anyprec.zoo.build("resnet8", widths=(32,), num_classes=10)
    assert isinstance(net, anyprec.nn.SplitNetwork)
    model: nn.Module = anyprec.ptq(net, [images], widths=(4, 8))
    return model


def quantize_and_exchange(images: Tensor, path: Path) -> ExportReport:
    net: nn.Module = anyprec.import_onnx("net.onnx", input_shape=(3, 32, 32))
    print(anyprec.quantize(net, images, path, widths=(4, 8)))
    report: ExportReport = anyprec.export_onnx(path, "net-4bit.onnx", 4)
    return report


def pack_and_run(model: nn.Module, images: Tensor, path: Path) -> np.ndarray:
    image: Preprocessing = Preprocessing((0.5,), (0.25,))
    report: PackReport = anyprec.pack(model, path, example=images, image=image, first_last="float")
    print(report, report.to_dict())
    token: CancelToken = CancelToken(timeout_s=1.0)
    packed: PackedModel
    with anyprec.load(path, threads=1, layout="NCHW") as packed:
        widths: tuple[int, ...] = packed.widths
        packed.bits = widths[0]
        y = packed(images.numpy(), bits="random", cancel=token)
        best = packed.predict("photo.jpg", top=1)
        print(best)
    assert isinstance(y, np.ndarray)
    return y


def answer_many_pictures(photos: Path) -> None:
    answers = anyprec.ray.map_images(photos, "cifar10-vgg", bits=4, top=3)
    answers.write_parquet("answers")


def mistakes(model: nn.Module) -> str:
    try:
        anyprec.set_bits(model, 9)
    except anyprec.errors.UnsupportedBits as error:
        found: AnyprecError = error
        return str(found)
    return ""


if __name__ == "__main__":
    print(look_at_it(quantize_without_training(torch.zeros(1, 3, 32, 32))))
