"""Names of models without a key, runs nobody waits for, working memory after a huge image."""

import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from blackbox import python
from bombs import save_mask
from serving import ask, binary_request, process, save

pytestmark = pytest.mark.slow

KEYS = {"ANYPREC_API_KEYS": "a-long-enough-api-key", "ANYPREC_CONTROL_KEYS": "another-long-enough-key"}


@pytest.mark.parametrize("path", ["/openapi.json", "/v2/models/other/ready"])
def test_no_name_of_a_model_without_a_key(tmp_path, path):
    """The description of the server, and its 404, told the names of all models to anyone."""
    with process(f"hush-4711={save(tmp_path / 'net.apm')}", env=KEYS) as (_, port):
        assert b"hush-4711" not in ask(port, "GET", path).body


def cpu_s(pid):
    """Of the process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_run_whose_client_is_gone_stops(tmp_path):
    """It ran to its end, for nobody."""
    x = np.zeros((1, 3, 1000, 1000), np.uint8)
    body, length = binary_request(x, bits=8, deadline_ms=60_000, binary_data_output=True)
    head = b"POST /v2/models/mask/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(body)
    head += b"inference-header-content-length: %d\r\n\r\n" % length
    with process(save_mask(tmp_path / "mask.apm", depth=40), "--max-held", "2GiB") as (child, port):
        before = cpu_s(child.pid)
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(head + body)
            while cpu_s(child.pid) < before + 0.3:
                time.sleep(0.02)
        time.sleep(1)  # a step may come to its end
        before = cpu_s(child.pid)
        time.sleep(1.5)
        assert cpu_s(child.pid) - before < 0.3, "the run goes on without its client"


MEMORY = """
import re, sys
import numpy as np, anyprec
def resident_mb():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
model = anyprec.load(sys.argv[1])
model(np.zeros((1, 3, 32, 32), np.uint8), 8)
before = resident_mb()
model(np.zeros((1, 3, 1100, 1100), np.uint8), 8)
model(np.zeros((1, 3, 32, 32), np.uint8), 8)
print(resident_mb() - before)
"""


def test_working_memory_goes_back_after_a_huge_image(tmp_path):
    """It stayed for as long as the model did."""
    done = python(MEMORY, save_mask(tmp_path / "mask.apm", depth=3))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 80, f"{float(done.stdout):.0f} MB stayed"
