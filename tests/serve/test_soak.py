"""Some seconds of the soak, and whether it would notice."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soak
from serving import Reply, running


@pytest.mark.slow
def test_the_soak_passes():
    command = [sys.executable, str(Path(__file__).with_name("soak.py")), "--minutes", "0.2", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = json.loads(run.stdout)
    assert run.returncode == 0 and found["passed"], run.stdout
    assert found["wrong"] == 0 and found["compared"] > 50 and found["files_replaced"] >= 1
    assert set(found["memory_mb"]) == {"start", "peak", "end", "growth_an_hour"}
    assert found["probe_ms"]["worst"] >= found["probe_ms"]["p50"] > 0


def test_the_soak_knows_a_wrong_answer_and_a_wrong_status(model_path):
    with running({"net": model_path}) as server:
        run = soak.Soak(server.port, [model_path])
        right = run.right[0, 4][0]

        def reply(y: np.ndarray, bits: int = 4) -> Reply:
            output = {"data": y.ravel().tolist(), "shape": list(y.shape)}
            return Reply(200, {}, json.dumps({"outputs": [output], "parameters": {"bits": bits}}).encode())

        run.check("JSON", reply(right), 0, 4)
        assert (run.answers, run.wrong) == (1, 0)
        run.check("JSON", reply(np.nextafter(right, np.inf, dtype=np.float32)), 0, 4)  # by a single bit
        run.check("JSON", reply(right, bits=8), 0, 4)
        assert (run.answers, run.wrong) == (3, 2)
        run.check("JSON", Reply(500, {}, b"{}"), 0, 4)
        run.check("JSON", Reply(503, {}, b"{}"), 0, 4)
        assert run.errors == {"JSON 500": 1} and run.refusals == {"JSON 503": 1}
