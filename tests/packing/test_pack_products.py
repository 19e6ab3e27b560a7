"""`pack` of networks whose products of two values have quantized operands: integer products, checked against the module
in every profile by the engine."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import anyprec
from anyprec import format as apm
from anyprec.errors import AnyprecError
from anyprec.widths import Profile

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
from test_products import Encoder, Network

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 32)


def packed(model: nn.Module, x, tmp_path, **more):
    report = anyprec.pack(model, tmp_path / "net.apm", example=x, keep_float=True, **more)
    return report, apm.read(tmp_path / "net.apm")


def integer_products(graph) -> list[bool]:
    return [op.name in graph.tables for op in graph.ops if op.kind == "matmul"]


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["@", "bmm", "sdpa"])
@pytest.mark.parametrize("choice, integers", [("integer", [True, True]), ("scores", [True, False])])
def test_written_attention(way, choice, integers, tmp_path):
    torch.manual_seed(1)
    x = torch.randn(6, 5, 12)
    model = anyprec.convert(Network(way).eval(), WIDTHS, example=x, attention=choice)
    report, graph = packed(model, x, tmp_path)
    assert report.check is not None and not report.check.dead
    assert integer_products(graph) == integers
    kinds = {op.name: op for op in graph.ops}
    for op in graph.ops:
        if op.kind == "matmul" and op.name in graph.tables:
            sources = []
            for value in op.inputs:
                while kinds[value].kind != "quantize":
                    value = kinds[value].inputs[0]
                sources.append(kinds[value])
            assert len(sources) == 2 and sources[1].attributes["signed"]


@pytest.mark.thorough
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_of_any_length(need_weights, tmp_path):
    """Softmax of a free length has no table by channel: its scale comes as a value."""
    torch.manual_seed(2)
    x = torch.randn(6, 5, 12)
    model = anyprec.convert(Encoder(need_weights).eval(), WIDTHS, example=x, attention="integer")
    report, graph = packed(model, x, tmp_path)
    assert graph.input_shape == (None, 12) and integer_products(graph) == [True, True]
    assert report.check is not None and report.check.other_size is not None
    longer = torch.randn(3, 23, 12)
    file = anyprec.load(tmp_path / "net.apm")
    for bits in (1, 4, 8, 32):
        with torch.no_grad(), anyprec.bits(model, bits):
            wanted = model(longer).numpy()
        off = np.abs(file(longer.numpy(), bits=bits) - wanted)
        assert np.mean(off > 1e-4 * np.abs(wanted).max()) < 0.1  # a code at a border moves some numbers


@pytest.mark.thorough
def test_mixed_profile(tmp_path):
    torch.manual_seed(3)
    x = torch.randn(6, 5, 12)
    model = anyprec.convert(Network().eval(), WIDTHS, example=x, attention="integer")
    profile = Profile("fast", {"attention.qkv": 8, "attention.out": 2})
    anyprec.calibrate(model, [x], widths=(), profiles=(profile,))
    _, graph = packed(model, x, tmp_path, profiles=(profile,))
    acts = next(p for p in graph.profiles if p.name == "fast").acts
    assert {bits for name, bits in acts.items() if "any_products" in name} == {2}


def test_products_that_do_not_fit(tmp_path):
    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            y = self.b(self.a(x))
            return self.c(y.transpose(1, 2) @ y)

    x = torch.randn(2, 16384, 4)
    model = anyprec.convert(Long().eval(), (4, 8), example=x, attention="integer")
    with pytest.raises(AnyprecError, match="sums 16384 terms, which at 8 x 8 bits can leave 32-bit integers; leave 8"):
        anyprec.pack(model, tmp_path / "net.apm", example=x)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_timm(name, tmp_path):
    pytest.importorskip("torchvision_operators").declare()
    timm = pytest.importorskip("timm")
    torch.manual_seed(4)
    options = {"depth": 2, "embed_dim": 32, "num_heads": 2} if name.startswith("vit") else {
        "depths": (1, 1), "embed_dim": 16, "num_heads": (2, 2), "window_size": 4
    }  # fmt: skip
    patch = {"patch_size": 8} if name.startswith("vit") else {"patch_size": 2}
    net = timm.create_model(name, img_size=32, num_classes=5, **patch, **options).eval()
    x = torch.randn(4, 3, 32, 32)
    model = anyprec.convert(net, (1, 4, 8, 32), example=x, attention="integer", quantizer="lsq")
    _, graph = packed(model, x, tmp_path)
    assert all(integer_products(graph)) and len(integer_products(graph)) == 4


@pytest.mark.thorough
@pytest.mark.parametrize("way", [pytest.param("eager", marks=pytest.mark.slow), "sdpa"])
def test_transformers(way, tmp_path):
    pytest.importorskip("torchvision_operators").declare()  # transformers imports torchvision where it is installed
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=3, attn_implementation=way,
    )  # fmt: skip
    net = transformers.BertForSequenceClassification(config).eval()
    ids = torch.randint(0, 40, (4, 9))
    model = anyprec.convert(net, (1, 4, 8, 32), example=ids, attention="integer", quantizer="lsq")
    _, graph = packed(model, ids, tmp_path)
    assert all(integer_products(graph)) and len(integer_products(graph)) == 4
