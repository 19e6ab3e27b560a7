"""Which kernels a rival runs, as it tells itself."""

import json
import os
import subprocess
import sys

import pytest
from fake_rivals import write_packages

from anyprec.bench.kernels_used import described, output_of


@pytest.mark.parametrize(
    "names, line",
    [
        ([], None),
        (["jit_avx2"] * 3, "jit_avx2"),
        (["a", "b", "a"], "a (2 of 3), b (1 of 3)"),
        ([*"aabbcdef"], "a (2 of 8), b (2 of 8), c (1 of 8) and 3 others"),
    ],
)
def test_the_most_frequent_first(names, line):
    assert described(names) == line


def test_what_the_process_prints_from_anywhere():
    script = (
        "import os, ctypes, sys\n"
        "from anyprec.bench.kernels_used import output_of\n"
        "def run():\n"
        "    os.write(1, b'direct ')\n"
        "    ctypes.CDLL(None).printf(b'by C')\n"
        "print('before', flush=True)\n"
        "found = output_of(run)\n"
        "print('after', found, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "before\nafter b'direct by C'\n"


def test_standard_output_is_back_after_an_error():
    def broken():
        raise ValueError("no")

    with pytest.raises(ValueError):
        output_of(broken)
    os.fstat(1)


def test_openvino_tells_by_its_execution_graph(tmp_path):
    path = write_packages(tmp_path, (3, 8, 8))
    script = (
        "import openvino, json\n"
        "from anyprec.bench.kernels_used import openvino_kernels\n"
        "print(json.dumps(openvino_kernels(openvino.Core().compile_model(openvino.Model('x')))))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(path), "FATE": "none@none"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    assert json.loads(done.stdout) == "jit_avx2 (3 of 4), jit_gemm (1 of 4)"


@pytest.mark.slow
def test_pytorch_tells_by_the_words_of_onednn():
    torch = pytest.importorskip("torch")
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    script = (
        "import torch\n"
        "from anyprec.bench.kernels_used import onednn_kernels\n"
        "net, x = torch.nn.Conv2d(64, 64, 3), torch.rand(16, 64, 32, 32)\n"
        "with torch.inference_mode():\n"
        "    print(onednn_kernels(lambda: net(x)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert line != "None" and " " not in line.split(" (")[0]
