"""A picture of some kilobytes that takes minutes to decode."""

import contextlib
import http.client
import io
import signal
import struct
import subprocess
import threading
import time

import numpy as np
import pytest
from blackbox import ask, save_classifier, serve
from PIL import Image

pytestmark = pytest.mark.slow


def segment(marker, data):
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(data) + 2) + data


def stuffed(bits):
    bits += "1" * (-len(bits) % 8)
    return int("1" + bits, 2).to_bytes(len(bits) // 8 + 1, "big")[1:].replace(b"\xff", b"\xff\x00")


def scan_bomb(side, scans):
    """A grey progressive JPEG whose scans say "nothing in any block", each in some 30 bytes."""
    blocks = ((side + 7) // 8) ** 2
    table = segment(0xC4, bytes([0x00, 1, *[0] * 15, 0x00])) + segment(0xC4, bytes([0x10, 1, *[0] * 15, 0xE0]))
    frame = segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + b"\x01\x11\x00")
    direct = segment(0xDA, b"\x01\x01\x00\x00\x00\x00") + stuffed("0" * blocks)
    runs = [32767] * (blocks // 32767) + [blocks % 32767]
    assert runs[-1] >= 16384
    one = segment(0xDA, b"\x01\x01\x00\x01\x3f\x00") + stuffed("".join(f"0{run - 16384:014b}" for run in runs))
    return b"\xff\xd8" + segment(0xDB, b"\x00" + b"\x01" * 64) + frame + table + direct + one * scans + b"\xff\xd9"


def honest():
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def post(port, body, found=None):
    with contextlib.suppress(OSError, http.client.HTTPException):
        status, _ = ask(port, "POST", "/v2/models/net/classify?deadline_ms=2000", body, timeout=50)
        if found is not None:
            found.append(status)


def attack(port):
    """As many as there may be threads that decode, each with a picture that takes one of them half a minute."""
    body = scan_bomb(5000, 8000)
    threads = [threading.Thread(target=post, args=(port, body)) for _ in range(4)]
    for thread in threads:
        thread.start()
    return threads


def test_a_progressive_picture_holds_up_nobody(tmp_path):
    """JPEGs of 8,000 scans in 430 kB blocked decoding for everyone, and deadlines were not kept."""
    with serve(save_classifier(tmp_path / "net.apm")) as (_, port):
        attackers = attack(port)
        time.sleep(0.5)
        began, found = time.monotonic(), []
        post(port, honest(), found)
        took = time.monotonic() - began
        assert took < 10, f"an honest picture with a deadline of 2 s was answered after {took:.0f} s: {found}"
        assert found == [200]
        for thread in attackers:
            thread.join()


def test_sigterm_ends_the_server_while_a_picture_is_decoded(tmp_path):
    """After SIGTERM the process lived on for as long as the decoder did."""
    with serve(save_classifier(tmp_path / "net.apm"), "--drain-timeout", "1s") as (child, port):
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
