"""Batches too large for the cache: the last layers run for all images together, bit for bit as one by one."""

import numpy as np
import pytest
from engine_check import usable_isas

from anyprec.bench.random_networks import mobilenetv2_graph, resnet_graph
from anyprec.errors import Cancelled
from anyprec.format import write
from anyprec.run.model import CancelToken, load

VECTORS = [isa for isa in usable_isas() if isa != "scalar"]  # which would take minutes
NETS = {
    "resnet": lambda: resnet_graph(18, size=96, classes=10, widths=(1, 4, 8)),
    "float skips": lambda: resnet_graph(18, "float", size=96, classes=10, widths=(2, 8)),
    "depth-wise": lambda: mobilenetv2_graph(1, 96, classes=10, large=True),
}


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).standard_normal((9, 3, 96, 96)).astype(np.float32)


@pytest.mark.thorough
@pytest.mark.parametrize("net", NETS)
def test_a_large_batch_is_its_images_one_by_one(net, images, tmp_path):
    write(NETS[net](), tmp_path / "net.apm")
    for isa in VECTORS:
        model = load(tmp_path / "net.apm", isa=isa)
        for bits in model.profiles:
            wanted = np.concatenate([model(image[None], bits=bits) for image in images])
            for threads in (1, 2):
                assert np.array_equal(model(images, bits=bits, threads=threads), wanted)
            assert np.array_equal(model(images[:5], bits=bits), wanted[:5])  # another plan, the same cut


def test_a_cancelled_batch_gives_its_memory_back(images, tmp_path):
    write(NETS["resnet"](), tmp_path / "net.apm")
    model = load(tmp_path / "net.apm")
    wanted, held = model(images, bits=8), model._engine.arena_bytes
    token = CancelToken()
    token.cancel()
    for _ in range(3):
        with pytest.raises(Cancelled):
            model(images, bits=8, cancel=token)
    assert model._engine.arena_bytes == held
    assert np.array_equal(model(images, bits=8), wanted)
