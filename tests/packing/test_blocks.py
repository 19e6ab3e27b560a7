"""Blocks of well-known networks, as people write them: attention, windows, recurrent layers, several inputs."""

import pytest
import torch
import torch.nn.functional as F
from sampling import sampled
from torch import nn

from anyprec.format.record import version_of
from anyprec.nn.convert import convert
from anyprec.packing.packing import make_graph, pack

DICE = torch.Generator().manual_seed(0)
X = torch.randn(3, 3, 12, 12, generator=DICE)
SEQUENCE = torch.randn(3, 7, 6, generator=DICE)
INDICES = torch.randint(0, 30, (3, 12), generator=DICE)


class Attention(nn.Module):
    def __init__(self, width, heads, spelled=False, causal=False):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.spelled, self.causal = heads, spelled, causal

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.spelled:
            scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
            if self.causal:
                scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    def __init__(self, width=16, heads=2, **options):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, **options)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 10, 16) * 0.1)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Encoder(nn.Module):
    """nn.TransformerEncoderLayer, with the batch first or second."""

    def __init__(self, batch_first):
        super().__init__()
        self.first, self.last, self.batch_first = nn.Linear(6, 16), nn.Linear(16, 3), batch_first
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)

    def forward(self, x):
        x = self.first(x)
        x = self.layer(x) if self.batch_first else self.layer(x.transpose(0, 1)).transpose(0, 1)
        return self.last(x.mean(1))


def windows(x, side):
    n, height, width, channels = x.shape
    x = x.view(n, height // side, side, width // side, side, channels)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, side * side, channels)


def from_windows(x, side, height, width):
    n = x.shape[0] // (height * width // side // side)
    x = x.view(n, height // side, width // side, side, side, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(n, height, width, -1)


class Swin(nn.Module):
    """Shifted windows with a constant mask, a relative bias, and the merging of patches."""

    def __init__(self, width=8, heads=2, side=4, shift=2):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, width, 2, 2), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(heads, side * side, side * side) * 0.1)
        self.merge, self.head = nn.Linear(4 * width, 2 * width), nn.Linear(2 * width, 3)
        self.heads, self.side, self.shift = heads, side, shift
        regions = torch.zeros(1, 8, 8, 1)
        parts = (slice(0, -side), slice(-side, -shift), slice(-shift, None))
        for number, (rows, columns) in enumerate((a, b) for a in parts for b in parts):
            regions[:, rows, columns] = number
        found = windows(regions, side).view(-1, side * side)
        apart = found.unsqueeze(1) - found.unsqueeze(2)
        self.register_buffer("mask", apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0))

    def forward(self, x):
        x = self.patches(x).permute(0, 2, 3, 1)
        _, height, width, channels = x.shape
        y = windows(torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2)), self.side)
        n, length, _ = y.shape
        q, k, v = self.qkv(y).reshape(n, length, 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q * (channels // self.heads) ** -0.5) @ k.transpose(-2, -1) + self.bias.unsqueeze(0)
        count = len(self.mask)
        scores = scores.view(n // count, count, self.heads, length, length) + self.mask.unsqueeze(1).unsqueeze(0)
        y = scores.view(-1, self.heads, length, length).softmax(-1) @ v
        y = self.proj(y.transpose(1, 2).reshape(n, length, channels))
        x = x + torch.roll(from_windows(y, self.side, height, width), (self.shift, self.shift), (1, 2))
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.head(self.merge(x).mean((1, 2)))


class ConvNeXt(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, width, 2, 2), nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale, self.head = nn.Parameter(torch.rand(width)), nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x)
        y = self.scale * self.down(F.gelu(self.up(self.norm(self.deep(x).permute(0, 2, 3, 1)))))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((2, 3)))


class SqueezeExcite(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.stem, self.deep, self.gate = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8), gate
        self.down, self.up, self.head = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1), nn.Linear(8, 3)

    def forward(self, x):
        x = F.hardswish(self.deep(F.silu(self.stem(x))))
        x = x * self.gate(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.c, self.out = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = F.relu(self.a(x))
        y = self.up(F.relu(self.b(F.max_pool2d(x, 2))))
        return self.out(F.relu(self.c(torch.cat([x, y], 1))))


class SuperResolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 12, 3, padding=1),
        )
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x):
        y = self.c(self.norm(F.leaky_relu(self.b(F.leaky_relu(self.a(x), 0.2)), 0.2)))
        return F.pixel_shuffle(y, 2) + F.interpolate(x, scale_factor=2, mode="bilinear")


class GPT(nn.Module):
    """Indices, a causal mask, and (tied) a classifier that is the embedding."""

    def __init__(self, tied, **options):
        super().__init__()
        self.words, self.places = nn.Embedding(30, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(Block(causal=True, **options) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 30, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self, kind, batch_first=True, **options):
        super().__init__()
        self.first, self.layer = nn.Linear(6, 8), kind(8, 6, batch_first=batch_first, **options)
        self.middle, self.last = nn.Linear(12 if options.get("bidirectional") else 6, 7), nn.Linear(7, 3)
        self.batch_first = batch_first

    def forward(self, x):
        x = self.first(x)
        y, state = self.layer(x if self.batch_first else x.transpose(0, 1))
        state = state[0] if isinstance(state, tuple) else state
        return self.last(F.relu(self.middle(y)).mean(1 if self.batch_first else 0)), state[-1]


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv1d(2, 8, 5, 2, 2), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose1d(8, 8, 2, 2), nn.Conv1d(8, 3, 1)

    def forward(self, x):
        x = F.max_pool1d(F.relu(self.norm(self.a(x))), 2)
        return self.out(self.up(F.relu(self.b(x))))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.side = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3), nn.Linear(5, 8)
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, image, facts):
        return self.last(self.middle(self.b(self.a(image)).mean((2, 3)) * self.side(facts).sigmoid()))


class Vector(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.a, self.b, self.c, self.act = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3), act

    def forward(self, x):
        return self.c(self.act(self.b(self.act(self.a(x)))))


class Sequencer(nn.Module):
    """Lines and columns of an image as sequences of their own: https://arxiv.org/abs/2205.01972."""

    def __init__(self):
        super().__init__()
        self.patches, self.mix, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(16, 8), nn.Linear(8, 3)
        self.down = nn.LSTM(8, 4, batch_first=True, bidirectional=True)
        self.across = nn.GRU(8, 4, batch_first=True, bidirectional=True)

    def forward(self, x):
        x = self.patches(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        down, (last, _) = self.down(x.permute(0, 2, 1, 3).reshape(-1, h, c))
        across, _ = self.across(x.reshape(-1, w, c))
        down, across = down.view(n, w, h, c).permute(0, 2, 1, 3), across.view(n, h, w, c)
        x = x + self.mix(torch.cat([down, across], -1))
        return self.head(x.mean((1, 2)) + last.view(2, n, w, 4).mean(2).permute(1, 0, 2).flatten(1))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)
        self.tokens, self.channels, self.head = nn.Linear(9, 9), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + F.gelu(self.tokens(self.norm(x).transpose(1, 2))).transpose(1, 2)
        return self.head((x + F.gelu(self.channels(self.norm(x)))).mean(1))


NETWORKS = {
    "ViT": (ViT, X),
    "ViT, spelled out": (lambda: ViT(spelled=True), X),
    "encoder": (lambda: Encoder(True), SEQUENCE),
    "encoder, batch second": (lambda: Encoder(False), SEQUENCE),
    "Swin": (Swin, torch.randn(3, 3, 16, 16, generator=DICE)),
    "ConvNeXt": (ConvNeXt, X),
    "squeeze and excite": (lambda: SqueezeExcite(torch.sigmoid), X),
    "squeeze and excite, hard": (lambda: SqueezeExcite(F.hardsigmoid), X),
    "U-Net": (UNet, X),
    "super resolution": (SuperResolution, X),
    "GPT, tied": (lambda: GPT(True), INDICES),
    "GPT, spelled out": (lambda: GPT(False, spelled=True), INDICES),
    "LSTM": (lambda: Recurrent(nn.LSTM), SEQUENCE),
    "GRU": (lambda: Recurrent(nn.GRU), SEQUENCE),
    "LSTM, two layers, both ways": (
        lambda: Recurrent(nn.LSTM, False, num_layers=2, bidirectional=True),
        SEQUENCE,
    ),
    "GRU, both ways, no bias": (lambda: Recurrent(nn.GRU, bidirectional=True, bias=False), SEQUENCE),
    "LSTM and GRU of lines": (Sequencer, X),
    "1-d": (Line, torch.randn(3, 2, 40, generator=DICE)),
    "two inputs": (TwoInputs, X, torch.randn(3, 5, generator=DICE)),
    "vector": (lambda: Vector(F.gelu), torch.randn(3, 6, generator=DICE)),
    "mixer": (Mixer, X),
}


@pytest.mark.parametrize("name", sampled(NETWORKS))
def test_network(matches, name):
    make, *inputs = NETWORKS[name]
    torch.manual_seed(0)
    graph = matches(make(), *inputs)
    assert version_of(graph) == 3


@pytest.mark.parametrize(
    "name",
    [
        "ViT",
        "Swin",
        "GPT, tied",
        "two inputs",
        "LSTM",
        "LSTM and GRU of lines",
        "encoder, batch second",
        "vector",
        "1-d",
    ],
)
def test_the_check_of_pack(name, tmp_path):
    make, *inputs = NETWORKS[name]
    torch.manual_seed(0)
    example = tuple(inputs) if len(inputs) > 1 else inputs[0]
    model = convert(make().eval(), widths=(2, 8, 32), example=example)
    report = pack(model, tmp_path / "net.apm", example=example, keep_float=True)
    assert all(found.alive for found in report.check.profiles.values())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ViT", "GPT, tied", "vector", "1-d", "LSTM"])
def test_first_and_last_layers_at_8_bit(name, tmp_path):
    make, *inputs = NETWORKS[name]
    torch.manual_seed(0)
    model = convert(make().eval(), widths=(2, 8, 32), example=inputs[0])
    report = pack(model, tmp_path / "net.apm", example=inputs[0], keep_float=True, first_last="8bit")
    assert report.fixed_layers >= (name != "GPT, tied")


def test_a_longer_sequence(matches, against):
    torch.manual_seed(0)
    net = Encoder(True)
    graph = matches(net, SEQUENCE)
    assert graph.input_shape == (None, 6)
    model = convert(net.eval(), widths=(2, 8, 32), example=SEQUENCE)
    against(model, graph, torch.randn(2, 11, 6, generator=DICE))


def test_inputs_by_name():
    torch.manual_seed(0)
    example = {"facts": torch.randn(2, 5), "image": X[:2]}
    model = convert(TwoInputs().eval(), widths=(2, 8), example=example)
    graph = make_graph(model, example=example)
    assert graph.input_shape == (5,) and [op.name for op in graph.ops if op.kind == "input"] == ["image"]


def test_a_vector_network_of_an_older_format():
    model = convert(Vector(F.relu).eval(), widths=(2, 8), example=torch.rand(2, 6))
    graph = make_graph(model, example=torch.rand(2, 6))
    assert version_of(graph) == 1 and graph.input_shape == (1, 1, 6)


def test_embedding_and_classifier_share_one_weight():
    model = convert(GPT(True).eval(), widths=(2, 8), example=INDICES, keep=("head",))
    graph = make_graph(model, example=INDICES)
    assert graph.integer_input and sum(w.shape == (30, 1, 1, 16) for w in graph.weights.values()) == 1


def test_zeros_before_a_transposed_convolution_stay(matches, kinds):
    """They are no padding of it: its padding takes away."""

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.up, self.c = nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 3, 2), nn.Conv2d(8, 2, 1)

        def forward(self, x):
            return self.c(F.relu(self.up(F.pad(F.relu(self.a(x)), (1, 1, 1, 1)))))

    torch.manual_seed(0)
    assert kinds(matches(Padded(), X))["pad"] == 1


def test_an_output_size_of_a_transposed_convolution(matches):
    class Back(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
            self.up, self.c = nn.ConvTranspose2d(8, 8, 3, 2, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x):
            x = F.relu(self.a(x))
            return self.c(self.up(F.relu(self.b(x)), output_size=x.shape[2:]) + x)

    torch.manual_seed(0)
    matches(Back(), X)


def test_moves_that_cancel_are_gone():
    """Attention needs no more moves than one per operand."""
    torch.manual_seed(0)
    model = convert(ViT().eval(), widths=(2, 8), example=X)
    kinds = [op.kind for op in make_graph(model, example=X).ops]
    assert kinds.count("transpose") <= 2 * 4  # q, k or v, and back, in each of two blocks
