"""A picture of some kilobytes that takes minutes to decode."""

import contextlib
import http.client
import signal
import subprocess
import threading
import time

import pytest
from bombs import png, scan_bomb
from serving import ask, process, save

pytestmark = pytest.mark.slow


def post(port, body, found=None):
    with contextlib.suppress(OSError, http.client.HTTPException):
        reply = ask(port, "POST", "/v2/models/net/classify?deadline_ms=2000", body, timeout_s=50)
        if found is not None:
            found.append(reply.status)


def attack(port):
    """As many as there may be threads that decode, each with a picture that takes one of them half a minute."""
    body = scan_bomb(5000, 5000, 8000)
    threads = [threading.Thread(target=post, args=(port, body)) for _ in range(4)]
    for thread in threads:
        thread.start()
    return threads


def test_a_progressive_picture_holds_up_nobody(tmp_path):
    """JPEGs of 8,000 scans in 430 kB blocked decoding for everyone, and deadlines were not kept."""
    with process(save(tmp_path / "net.apm")) as (_, port):
        attackers = attack(port)
        time.sleep(0.5)
        began, found = time.monotonic(), []
        post(port, png(8, 8), found)
        took = time.monotonic() - began
        assert took < 10, f"an honest picture with a deadline of 2 s was answered after {took:.0f} s: {found}"
        assert found == [200]
        for thread in attackers:
            thread.join()


def test_sigterm_ends_the_server_while_a_picture_is_decoded(tmp_path):
    """After SIGTERM the process lived on for as long as the decoder did."""
    with process(save(tmp_path / "net.apm"), "--drain-timeout", "1s") as (child, port):
        attackers = attack(port)
        time.sleep(1)
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            raise AssertionError("20 s after SIGTERM the server still runs, with 1 s to drain") from None
        finally:
            child.kill()
            for thread in attackers:
                thread.join()
