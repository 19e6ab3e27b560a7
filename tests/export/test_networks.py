"""Whole networks of format 3 through convert, pack and export: outputs as those of the engine, in ONNX Runtime."""

import numpy as np
import pytest
import torch
from torch import nn

import anyprec

pytest.importorskip("onnx", reason="exports are ONNX models; pip install 'anyprec[onnx]'")
pytest.importorskip("onnxruntime", reason="an engine to compare with")


def exported(net, example, folder, **options):
    """The report; files net.apm and net-4bit.onnx, net-float.onnx"""
    torch.manual_seed(0)
    model = anyprec.convert(net.eval(), (4, 32), example, keep=options.pop("keep", ("first", "last")))
    anyprec.pack(model, folder / "net.apm", example=example, keep_float=True)
    return anyprec.export_onnx(folder / "net.apm", folder / "net.onnx", **options)


def assert_equal(report, int8_layers):
    by_profile = {file.profile: file for file in report.files}
    assert by_profile["32"].agreement.difference < 1e-4, report
    assert by_profile["4"].agreement.typical < 1e-4, report
    assert by_profile["4"].int8_layers == int8_layers and report.agrees


class Attention(nn.Module):
    def __init__(self, width=24, heads=3):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.more, self.less = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * (width / self.heads) ** -0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(n, length, width))
        return x + self.less(nn.functional.gelu(self.more(x)))


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 24))
        self.places = nn.Parameter(torch.randn(1, 17, 24))
        self.blocks = nn.Sequential(Attention(), Attention())
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.kinds = nn.Embedding(50, 24), nn.Embedding(2, 24)
        self.lstm, self.gru = nn.LSTM(24, 12, batch_first=True, bidirectional=True), nn.GRU(24, 24, batch_first=True)
        self.block, self.head = Attention(), nn.Linear(24, 5)

    def forward(self, words, kinds):
        x = self.words(words) + self.kinds(kinds)
        return self.head(self.block(self.gru(self.lstm(x)[0])[0]))


class Upscale(nn.Module):
    """A decoder: transposed convolutions, a norm over the channels, a gate."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.up, self.last = nn.ConvTranspose2d(8, 8, 3, 2, 1, output_padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        x = nn.functional.silu(self.norm(self.first(x)))
        x = self.up(x)
        return self.last(x * x.mean((2, 3), keepdim=True).sigmoid())


def test_a_vision_transformer(tmp_path):
    report = exported(Vision(), torch.randn(4, 3, 16, 16), tmp_path)
    assert report.inputs == {"input": (3, 16, 16)} and report.opset == 18
    assert_equal(report, 8)


def test_texts_of_whole_numbers(tmp_path):
    example = {"words": torch.randint(0, 50, (3, 7)), "kinds": torch.randint(0, 2, (3, 7))}
    report = exported(Text(), example, tmp_path)
    assert set(report.inputs.values()) == {(7,)} and len(report.whole_numbers) == 2
    assert "int64" in str(report)
    assert_equal(report, 3)
    model = __import__("onnx").load(tmp_path / "net-4bit.onnx")
    assert [value.type.tensor_type.elem_type for value in model.graph.input] == [7, 7]  # INT64


def test_maps(tmp_path):
    report = exported(Upscale(), torch.randn(4, 3, 8, 8), tmp_path)
    assert_equal(report, 0)
    with anyprec.load(tmp_path / "net.apm") as engine:
        assert engine(np.zeros((1, 3, 8, 8), np.float32)).shape == (1, 4, 16, 16)


class Words(nn.Module):
    """Takes texts of any length."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 8, batch_first=True)
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.middle(self.lstm(self.words(x))[0][:, -1]).relu())


def test_free_sizes_must_be_given(tmp_path):
    with pytest.raises(anyprec.errors.InputError, match=r"takes inputs of any size \(N, any\).*--size 128"):
        exported(Words(), torch.randint(0, 50, (3, 7)), tmp_path, keep=())
    with pytest.raises(anyprec.errors.InputError, match="whose input has 1 free sizes"):
        anyprec.export_onnx(tmp_path / "net.apm", tmp_path / "net.onnx", size=(7, 7))
    report = anyprec.export_onnx(tmp_path / "net.apm", tmp_path / "net.onnx", size=(9,))
    assert report.inputs == {"input": (9,)}
    assert_equal(report, 2)


@pytest.mark.parametrize(
    ("name", "size", "layers"), [("test_vit", 160, 24), ("test_convnext", 64, 21), ("test_mambaout", 64, None)]
)
def test_networks_of_timm(name, size, layers, tmp_path):
    pytest.importorskip("torchvision_operators").declare()
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    report = exported(timm.create_model(name, num_classes=10), torch.randn(4, 3, size, size), tmp_path)
    by_profile = {file.profile: file for file in report.files}
    assert by_profile["32"].agreement.difference < 1e-4, report
    assert by_profile["4"].agreement.same_answers >= 30, report
    assert layers is None or by_profile["4"].int8_layers == layers


def test_bert(tmp_path):
    pytest.importorskip("torchvision_operators").declare()  # transformers imports torchvision where it is installed
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=90, num_labels=3
    )
    torch.manual_seed(0)
    net = transformers.BertForSequenceClassification(config)
    report = exported(net, {"input_ids": torch.randint(0, 90, (4, 12))}, tmp_path)
    assert report.whole_numbers == ("input",)
    assert_equal(report, 12)
