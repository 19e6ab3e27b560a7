"""A model file that is rewritten in place while it is served or loaded."""

import os

import numpy as np
import pytest
from blackbox import python
from bombs import save_mask
from serving import infer, process

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).integers(0, 256, (1, 3, 16, 16), np.uint8)


def outputs(port, bits):
    reply = infer(port, X, "mask", bits=bits)
    return reply.status, reply.json.get("outputs")


def spoil(path, how):
    if how == "cut":
        os.truncate(path, 1000)
    else:
        with open(path, "r+b") as file:
            file.write(bytes(os.path.getsize(path)))


@pytest.mark.parametrize("how", ["cut", "overwritten"])
def test_the_server_goes_on_with_the_old_model(tmp_path, how):
    """It ended by SIGBUS, or its answers changed without an error."""
    path = save_mask(tmp_path / "mask.apm", depth=2)
    with process(path, "--slo", "5s", "--memory-budget", "1") as (child, port):
        right = {bits: outputs(port, bits) for bits in (8, 2)}
        spoil(path, how)
        try:
            found = {bits: outputs(port, bits) for bits in (8, 2)}
        except OSError:
            raise AssertionError(f"the server ended with code {child.wait(10)}") from None
    assert found == right


LIBRARY = """
import os, sys
import numpy as np, anyprec
model = anyprec.load(sys.argv[1], memory_budget=1)
x = np.ones((1, 3, 16, 16), np.uint8)
right = {bits: model(x, bits) for bits in (8, 2)}
os.truncate(sys.argv[1], 1000)
assert all(np.array_equal(model(x, bits), right[bits]) for bits in (8, 2))
"""


def test_a_loaded_model_stays_what_it_was(tmp_path):
    """A model whose file was cut ended the process by SIGBUS."""
    done = python(LIBRARY, save_mask(tmp_path / "mask.apm", classes=64, depth=4))
    assert done.returncode == 0, (done.returncode, done.stderr)
