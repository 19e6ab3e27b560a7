"""Graphs with the shapes of the zoo's networks and random weights, for benchmarks and tests: no training, no torch.

resnet_graph, resnet20_graph and mobilenetv2_graph give the ops a packer makes of zoo/resnet.py and zoo/mobilenet.py:
a norm whose input nobody else reads is part of the table of the convolution before it, other norms are part of the
table of their quantize. Tables are chosen so that codes spread over their range at every width, as in a trained net.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anyprec.format.graph import INPUT, Graph, GraphProfile, Op, Weight
from anyprec.widths import FLOAT

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INPUT_RANGE = 2.64  # the whitest pixel of the last channel, (1 - 0.406) / 0.225
# What a quantized activation looks like, as a fraction of its levels; tables aim at it and sums are estimated from it.
CODE_MEAN, CODE_STD = 0.4, 0.37

Width = int | tuple[int, int]  # of weights and activations alike, or of each
Estimate = tuple[np.ndarray, np.ndarray]  # mean and standard deviation of each channel


class Net:
    """A Graph in the making. Beside each float value it keeps an estimate of its channels, one a profile."""

    def __init__(
        self, name: str, size: int | None, widths: Sequence[Width], seed: int, first_last: str = "float",
        deviation: float | None = None,
    ) -> None:  # fmt: skip
        self.name, self.size, self.first_last, self.deviation = name, size, first_last, deviation
        pairs = [(k, k) for k in sorted(k for k in widths if isinstance(k, int))]
        pairs += [k for k in widths if not isinstance(k, int)]
        self.widths, self.acts = zip(*pairs, strict=True)  # a profile each
        self.rng = np.random.default_rng(seed)
        self.ops: list[Op] = []
        self.weights: dict[str, Weight] = {}
        self.tables: dict[str, np.ndarray] = {}
        self.channels = {INPUT: 3}
        self.estimates: dict[str, list[Estimate]] = {INPUT: [(np.zeros(3), np.ones(3))] * len(self.widths)}

    def graph(self, output: str) -> Graph:
        integers = sorted(set(self.widths) - {FLOAT})
        pairs = zip(self.widths, self.acts, strict=True)
        profiles = tuple(GraphProfile(str(w) if w == a else f"w{w}a{a}", w, a) for w, a in pairs)
        scale = tuple(1 / (255 * s) for s in IMAGENET_STD)
        shift = tuple(-m / s for m, s in zip(IMAGENET_MEAN, IMAGENET_STD, strict=True))
        planes = {k: tuple(range(k)) for k in integers}
        shape = (self.size, self.size, 3)
        return Graph(
            self.name, shape, profiles, planes, self.weights, tuple(self.ops), (output,), self.tables, scale, shift
        )  # fmt: skip

    def op(self, name: str, kind: str, *inputs: str, channels: int | None = None, **attributes: object) -> str:
        self.ops.append(Op(name, kind, inputs, attributes))
        self.channels[name] = self.channels[inputs[0]] if channels is None else channels
        return name

    # --- Layers -----------------------------------------------------------------------------------------------------

    def quantize(self, name: str, x: str, affine: bool = True) -> str:
        """Norm and activation; without affine the norm is in the table of the convolution that made x."""
        if affine:
            self.tables[name] = self._table([self._to_codes(i, *self.estimates[x][i]) for i in self._rows()])
        return self.op(name, "quantize", x, signed=False, rectify=True, affine=affine)

    def conv(
        self, name: str, x: str, out: int, kernel: int, stride: int = 1, groups: int = 1, makes: str = "float"
    ) -> str:
        """Of codes. makes: "codes" (norm and activation follow), "norm" (a norm alone) or "float" (neither)."""
        shape = (out, kernel, kernel, self.channels[x] // groups)
        weight = self.weights[name] = self._quantized_weight(shape)
        rows, estimates = [], []
        for i in self._rows():
            mean, std = self._sums(weight, i)
            if makes == "codes":
                rows.append(self._to_codes(i, mean, std))
            else:
                factor = 0.5 / std if makes == "norm" else np.full(out, 0.5 / std.mean())
                rows.append((factor, -mean * factor if makes == "norm" else np.zeros(out)))
            estimates.append((mean * rows[i][0] + rows[i][1], std * np.abs(rows[i][0])))
        self.tables[name], self.estimates[name] = self._table(rows), estimates
        return self._conv(name, x, shape, stride, groups, affine=True)

    def float_conv(self, name: str, x: str, out: int, kernel: int, stride: int = 1, makes: str = "") -> str:
        """With a weight that is float in every profile, and a table if `makes` says what follows, as above."""
        shape = (out, kernel, kernel, self.channels[x])
        values = self.rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(np.prod(shape[1:])))
        first_last = self.first_last if x == INPUT else "float"
        source, steps = self._fixed_layer(name, x, values, INPUT_RANGE, True, first_last)
        by_channel = values.astype(np.float64).sum((1, 2)), np.square(values, dtype=np.float64).sum((1, 2))
        estimates = [(by_channel[0] @ m, np.sqrt(by_channel[1] @ s**2)) for m, s in self.estimates[x]]
        if makes:
            rows = [self._to_codes(i, m, s) if makes == "codes" else (0.5 / s, -m * 0.5 / s) for i, (m, s) in
                    enumerate(estimates)]  # fmt: skip
            self.tables[name] = self._table(rows)
            estimates = [(m * a + b, s * np.abs(a)) for (m, s), (a, b) in zip(estimates, rows, strict=True)]
        self.estimates[name] = estimates
        if first_last == "8bit":
            rows = rows if makes else [(np.ones(out), np.zeros(out)) for _ in self.widths]
            self.tables[name] = self._table([(a * step, b) for (a, b), step in zip(rows, steps, strict=True)])
        return self._conv(name, source, shape, stride, 1, name in self.tables, signed=first_last == "8bit")

    def max_pool(self, name: str, x: str) -> str:
        # The largest of nine normal numbers is 1.5 deviations above their mean, and has 0.6 of their deviation.
        self.estimates[name] = [(m + 1.5 * s, 0.6 * s) for m, s in self.estimates[x]]
        return self.op(
            name, "max_pool", x, kernel=[3, 3], stride=[2, 2], pad=[1, 1, 1, 1], dilation=[1, 1], ceil=False
        )  # fmt: skip

    def add(self, name: str, x: str, y: str) -> str:
        pairs = zip(self.estimates[x], self.estimates[y], strict=True)
        self.estimates[name] = [(m + n, np.hypot(s, t)) for (m, s), (n, t) in pairs]
        return self.op(name, "add", x, y)

    def dequantize(self, name: str, codes: str) -> str:
        self.tables[name] = np.array([[1 / self._levels(i), 0] for i in self._rows()], np.float32)
        each = np.full(self.channels[codes], CODE_MEAN), np.full(self.channels[codes], CODE_STD)
        self.estimates[name] = [each] * len(self.widths)
        return self.op(name, "dequantize", codes)

    def head(self, x: str, classes: int) -> str:
        """Global mean and the float layer with its bias."""
        pooled = self.op("pool", "adaptive_avg_pool", x, size=[1, 1])
        shape = (classes, 1, 1, self.channels[x])
        values = self.rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[3]))
        source, steps = self._fixed_layer("fc", pooled, values, 1.0, False, self.first_last)
        bias = 0.1 * self.rng.standard_normal(classes)
        self.tables["fc"] = self._table([(row, bias) for row in steps])
        return self.op("fc", "linear", source, channels=classes, weight="fc", signed=False, affine=True)

    def _fixed_layer(
        self, name: str, x: str, values: np.ndarray, reach: float, signed: bool, first_last: str
    ) -> tuple[str, np.ndarray]:
        """Makes a layer's weight. Gives what the layer reads and the steps its table needs, (P, out).

        At 8 bit the layer reads codes of x, which is in [-reach, reach], or [0, reach] if not signed.
        """
        ones = np.ones(len(values))
        if first_last == "float":
            self.weights[name] = Weight(values.shape, values)
            return x, np.tile(ones, (len(self.widths), 1))
        largest = np.abs(values).max(axis=(1, 2, 3), keepdims=True)
        codes = np.rint((values / largest + 1) * 127.5).astype(np.uint8)
        self.weights[name] = Weight(values.shape, values if FLOAT in self.widths else None, {8: codes}, bits=8)
        row = (127.5 / reach, 127.5) if signed else (255 / reach, 0.0)
        rows = [(1.0, 0.0) if k == FLOAT else row for k in self.widths]
        made = f"{name}.in"
        self.tables[made] = np.repeat(np.array(rows, np.float32)[:, :, None], self.channels[x], axis=2)  # (P, 2, C)
        self.op(made, "quantize", x, signed=signed, rectify=False, affine=True, bits=8)
        return made, np.stack([ones if k == FLOAT else largest.reshape(-1) / 255 * reach / 255 for k in self.widths])

    # --- Numbers ----------------------------------------------------------------------------------------------------

    def _rows(self) -> range:
        return range(len(self.widths))

    def _table(self, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        return np.array([np.stack(row) for row in rows], np.float32)  # (P, 2, C)

    def _levels(self, row: int) -> int:
        return 1 if self.acts[row] == FLOAT else 2 ** self.acts[row] - 1

    def _to_codes(self, row: int, mean: np.ndarray, std: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n = self._levels(row)
        scale = CODE_MEAN * n / std
        return scale, CODE_MEAN * n - mean * scale

    def _quantized_weight(self, shape: tuple[int, int, int, int]) -> Weight:
        w = self.rng.standard_normal(shape, np.float32)
        deviation = self.deviation or 1 / np.abs(w).max()
        wide = np.clip(np.floor(128 + 128 * deviation * w), 0, 255).astype(np.uint8)
        codes = {k: wide >> (8 - k) for k in self.widths if k != FLOAT}
        return Weight(shape, w / np.float32(np.sqrt(np.prod(shape[1:]))) if FLOAT in self.widths else None, codes)

    def _sums(self, weight: Weight, row: int) -> Estimate:
        """Mean and deviation of each output channel before its table, for inputs as CODE_MEAN and CODE_STD say."""
        bits, n = self.widths[row], self._levels(row)
        if bits == FLOAT:
            assert weight.values is not None
            w = weight.values
        else:
            assert weight.codes is not None
            w = 2 * weight.codes[bits].astype(np.float32) + (1 - 2**bits)
        mean = CODE_MEAN * n * w.sum((1, 2, 3), np.float64)
        return mean, CODE_STD * n * np.sqrt(np.square(w).sum((1, 2, 3), np.float64))

    def _conv(
        self,
        name: str,
        x: str,
        shape: tuple[int, int, int, int],
        stride: int,
        groups: int,
        affine: bool,
        signed: bool = False,
    ) -> str:
        kernel = shape[1]
        return self.op(
            name, "conv", x, channels=shape[0], weight=name, kernel=[kernel, kernel], stride=[stride, stride],
            pad=[kernel // 2] * 4, dilation=[1, 1], groups=groups, signed=signed, affine=affine,
        )  # fmt: skip


# --- Networks -------------------------------------------------------------------------------------------------------

Layer = tuple[int, int, int]  # out, kernel, stride


def residual_block(net: Net, name: str, x: str, layers: Sequence[Layer], skip: str) -> str:
    """zoo/resnet.py's blocks. skip: "quantized", "raw" (float, of x) or "activated" (float, of the quantized x)."""
    out, stride = layers[-1][0], max(layer[2] for layer in layers)
    a = first = net.quantize(f"{name}.act0", x)
    for i, (channels, kernel, step) in enumerate(layers):
        last = i == len(layers) - 1
        y = net.conv(f"{name}.conv{i}", a, channels, kernel, step, makes="float" if last else "codes")
        a = y if last else net.quantize(f"{name}.act{i + 1}", y, affine=False)
    if stride == 1 and net.channels[x] == out:
        shortcut = x
    elif skip == "quantized":
        shortcut = net.conv(f"{name}.skip_conv", first, out, 1, stride, makes="norm")
    else:
        source = x if skip == "raw" else net.dequantize(f"{name}.skip_in", first)
        shortcut = net.float_conv(f"{name}.skip_conv", source, out, 1, stride, makes="norm")
    return net.add(f"{name}.add", y, shortcut)


def resnet_graph(
    depth: int = 50,
    skip: str = "quantized",
    size: int | None = 224,
    widths: Sequence[Width] = (1, 2, 4, 8),
    classes: int = 1000,
    multiplier: float = 1,
    seed: int = 0,
    first_last: str = "float",
    deviation: float | None = None,
) -> Graph:
    """ResNet-18 or -50 of the zoo; skip is "quantized" or "float" (the raw input's). `multiplier` narrows it for tests.

    first_last: the first and the last layer, "float" or "8bit". deviation: of the weights, which lie between -1 and
    1; None: such that the largest of a layer is 1.
    """
    blocks = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[depth]
    net = Net(f"resnet{depth}", size, widths, seed, first_last, deviation)
    first = round(64 * multiplier)
    x = net.max_pool("maxpool", net.float_conv("conv0", INPUT, first, 7, 2))
    for stage, count in enumerate(blocks):
        channels = first << stage
        for i in range(count):
            stride = 2 if stage > 0 and i == 0 else 1
            if depth == 18:
                layers = [(channels, 3, stride), (channels, 3, 1)]
            else:
                layers = [(channels, 1, 1), (channels, 3, stride), (4 * channels, 1, 1)]
            name = f"blocks.{sum(blocks[:stage]) + i}"
            x = residual_block(net, name, x, layers, "raw" if skip == "float" else skip)
    x = net.dequantize("act.out", net.quantize("act", x))
    return net.graph(net.head(x, classes))


def resnet20_graph(
    multiplier: float = 1,
    skip: str = "float",
    size: int | None = 32,
    widths: Sequence[int] = (1, 2, 4, 8),
    classes: int = 10,
    seed: int = 0,
) -> Graph:
    """CIFAR ResNet-20; its float skip reads the quantized input, and its last norm has no activation."""
    net = Net("resnet20", size, widths, seed)
    x = net.float_conv("conv0", INPUT, round(16 * multiplier), 3)
    for stage in range(3):
        channels = round((16 << stage) * multiplier)
        for i in range(3):
            stride = 2 if stage > 0 and i == 0 else 1
            layers = [(channels, 3, stride), (channels, 3, 1)]
            x = residual_block(net, f"blocks.{3 * stage + i}", x, layers, "activated" if skip == "float" else skip)
    net.tables["norm"] = net._table([(1 / s, -m / s) for m, s in net.estimates[x]])
    return net.graph(net.head(net.op("norm", "affine", x), classes))


# (expansion, channels, blocks, stride), as zoo/mobilenet.py has them for small images
MOBILENET_STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
                    (6, 320, 1, 1))  # fmt: skip


def mobilenetv2_graph(
    group_size: int = 8,
    size: int | None = 32,
    widths: Sequence[int] = (1, 2, 4, 8),
    classes: int = 10,
    seed: int = 0,
    large: bool = False,
) -> Graph:
    """MobileNetV2 of the zoo with group convolutions; group_size=1 is depth-wise. large: for images of 224 x 224, as
    its authors have it: the first convolution and the second stage halve them too."""
    net = Net("mobilenetv2", size, widths, seed)
    blocks = [
        (expansion, channels, (2 if large and channels == 24 else stride) if i == 0 else 1)
        for expansion, channels, count, stride in MOBILENET_STAGES
        for i in range(count)
    ]
    x = net.float_conv("conv0", INPUT, 32, 3, 2 if large else 1, makes="codes")
    shared = False  # is x read by a sum too, so that its norm cannot be part of the convolution that made it?
    for number, (expansion, channels, stride) in enumerate(blocks):
        name, before = f"blocks.{number}", net.channels[x]
        identity = stride == 1 and before == channels
        # What the next block does with this one's output: its own sum reads it only where its channels stay.
        after = blocks[number + 1] if number + 1 < len(blocks) else (1, 0, 1)
        next_identity = after[2] == 1 and after[1] == channels
        inner = before * expansion
        a = net.quantize(f"{name}.act{0 if expansion > 1 else 1}", x, affine=shared)
        if expansion > 1:
            a = net.conv(f"{name}.conv0", a, inner, 1, makes="codes")
            a = net.quantize(f"{name}.act1", a, affine=False)
        y = net.conv(f"{name}.conv1", a, inner, 3, stride, inner // group_size, makes="codes")
        y = net.quantize(f"{name}.act2", y, affine=False)
        shared = identity or next_identity
        y = net.conv(f"{name}.conv2", y, channels, 1, makes="float" if shared else "codes")
        x = net.add(f"{name}.add", x, y) if identity else y
    x = net.conv("conv1", net.quantize("act0", x, affine=shared), 1280, 1, makes="codes")
    x = net.dequantize("act1.out", net.quantize("act1", x, affine=False))
    return net.graph(net.head(x, classes))
