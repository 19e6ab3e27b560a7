"""Which kernels a rival really runs: an opened engine in, "jit_avx2 (7 of 9), gemm" out. Called by rivals.py.

What a library can do on a CPU and what it does differ: a layer may fall back, and VMs hide features. OpenVINO tells by
its execution graph, PyTorch's convolutions by oneDNN's verbose mode. ONNX Runtime does not tell.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

PRODUCTS = {"convolution", "deconvolution", "fullyconnected", "inner_product", "matmul", "groupconvolution"}
SHOWN = 3


def described(names: Iterable[str]) -> str | None:
    """The most frequent first: 'brgconv_avx512_core_amx (52 of 54), jit_gemm'."""
    counts = Counter(names)
    total = sum(counts.values())
    if len(counts) <= 1:
        return next(iter(counts), None)
    parts = [f"{name} ({count} of {total})" for name, count in counts.most_common(SHOWN)]
    return ", ".join(parts) + (f" and {len(counts) - SHOWN} others" if len(counts) > SHOWN else "")


def openvino_kernels(compiled: Any) -> str | None:
    """Of the layers that multiply: `primitiveType` is the kernel and the precision, as jit_avx2_I8."""
    names = []
    for op in compiled.get_runtime_model().get_ordered_ops():
        facts = op.get_rt_info()
        if "layerType" in facts and text(facts["layerType"]).lower() in PRODUCTS and "primitiveType" in facts:
            names.append(text(facts["primitiveType"]).rpartition("_")[0])
    return described(names)


def text(value: Any) -> str:
    """A value of OpenVINO's rt_info, which is a string or holds one."""
    return str(value.astype(str)) if hasattr(value, "astype") else str(value)


def onednn_kernels(run: Callable[[], Any]) -> str | None:
    """Of PyTorch, in one run: a line of oneDNN is ...,exec,cpu,convolution,jit:avx2,forward_inference,..."""
    mkldnn = importlib.import_module("torch").backends.mkldnn

    def run_telling() -> None:
        with mkldnn.verbose(mkldnn.VERBOSE_ON):
            run()

    said = output_of(run_telling).decode(errors="replace")
    found = re.findall(r"^onednn_verbose.*?,exec,cpu,(\w+),([^,]+),", said, re.MULTILINE)
    return described(kernel.replace(":", "_") for kind, kernel in found if kind in PRODUCTS)


def output_of(run: Callable[[], None]) -> bytes:
    """What this process writes to its standard output meanwhile, from C++ too."""
    flush = getattr(ctypes.CDLL(None), "fflush", None) if os.name == "posix" else None
    with tempfile.TemporaryFile() as said:
        kept = os.dup(1)
        os.dup2(said.fileno(), 1)
        try:
            run()
        finally:
            if flush is not None:
                flush(None)
            os.dup2(kept, 1)
            os.close(kept)
        said.seek(0)
        return said.read()
