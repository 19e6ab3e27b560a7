"""One large JSON answer of the server."""

import json

import numpy as np
import pytest
from blackbox import Probe, ask, resident_mb, save_mask, serve

pytestmark = pytest.mark.slow


def test_a_large_answer_does_not_silence_the_server(tmp_path):
    """The JSON of a mask was made on the event loop, of any size: the health probe got no answer for seconds."""
    x = np.zeros((1, 3, 640, 640), np.uint8)
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "UINT8"}
    tensor["parameters"] = {"binary_data_size": x.nbytes}
    head = json.dumps({"inputs": [tensor], "parameters": {"deadline_ms": 60_000}}).encode()
    with serve(save_mask(tmp_path / "mask.apm")) as (child, port):
        with Probe(port) as probe:
            ask(port, "POST", "/v2/models/mask/infer", head + x.tobytes(),
                inference_header_content_length=str(len(head)))  # fmt: skip
        assert probe.worst < 1.5, f"the server was silent for {probe.worst:.1f} s"
        assert resident_mb(child.pid) < 500


def test_a_huge_answer_is_refused_before_the_run(tmp_path):
    """8.6 million numbers as JSON were computed and sent, where binary would have been advised."""
    x = np.zeros((1, 3, 640, 640), np.uint8)
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "UINT8"}
    tensor["parameters"] = {"binary_data_size": x.nbytes}
    head = json.dumps({"inputs": [tensor], "parameters": {"deadline_ms": 60_000}}).encode()
    with serve(save_mask(tmp_path / "mask.apm")) as (_, port):
        status, body = ask(port, "POST", "/v2/models/mask/infer", head + x.tobytes(),
                           inference_header_content_length=str(len(head)))  # fmt: skip
    assert status == 413 and b"binary" in body
