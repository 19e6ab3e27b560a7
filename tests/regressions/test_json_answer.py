"""One large JSON answer of the server."""

import numpy as np
import pytest
from attacks import Probe
from bombs import save_mask
from serving import infer_binary, memory_mb, process

pytestmark = pytest.mark.slow

X = np.zeros((1, 3, 640, 640), np.uint8)


def test_a_large_answer_does_not_silence_the_server(tmp_path):
    """The JSON of a mask was made on the event loop, of any size: the health probe got no answer for seconds."""
    with process(save_mask(tmp_path / "mask.apm")) as (child, port):
        with Probe(port) as probe:
            infer_binary(port, X, "mask", deadline_ms=60_000)
        slowest = probe.found[-1]
        assert slowest.took_s < 1.5, f"the server was silent for {slowest.took_s:.1f} s"
        assert memory_mb(child.pid) < 500


def test_a_huge_answer_is_refused_before_the_run(tmp_path):
    """8.6 million numbers as JSON were computed and sent, where binary would have been advised."""
    with process(save_mask(tmp_path / "mask.apm")) as (_, port):
        reply = infer_binary(port, X, "mask", deadline_ms=60_000)
    assert reply.status == 413 and b"binary" in reply.body
