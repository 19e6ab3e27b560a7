"""When a request's last byte reached this machine, not when we came to read it.

A busy event loop reads late, and what waited in the kernel would be missing from every latency and deadline. Linux
knows how long ago a socket's last data came (TCP_INFO), in ticks of its clock. Called by connection.py.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from typing import Any

TCP_INFO = getattr(socket, "TCP_INFO", 0)
LAST_DATA_RECV = struct.Struct("=52xI")  # struct tcp_info: milliseconds since data came, a multiple of the tick
COARSE = 6  # CLOCK_MONOTONIC_COARSE, for which Python has no name: the monotonic clock as of the last tick


def tick_s() -> float | None:
    """Seconds between two ticks of the kernel's clock; None where this is not Linux."""
    return time.clock_getres(COARSE) if sys.platform == "linux" else None


TICK_S = tick_s()


def arrival_time(sock: Any) -> float:
    """On time.monotonic; at most two ticks later than the truth, never earlier. Where the kernel cannot tell: now.

    Ticks are counted, and both ends may lie anywhere in theirs: n ticks ago is more than n - 1 ticks of time. The
    coarse clock cannot say where a tick begins: its ticks and those that are counted need not coincide.
    """
    now = time.monotonic()
    if TICK_S is None or sock is None:
        return now
    try:
        # The event loop's own object would duplicate its descriptor for this, and close it again.
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, sock.fileno())
        try:
            (ago_ms,) = LAST_DATA_RECV.unpack(borrowed.getsockopt(socket.IPPROTO_TCP, TCP_INFO, LAST_DATA_RECV.size))
        finally:
            borrowed.detach()
        ticks: int = round(1e-3 * ago_ms / TICK_S)
        return now - max(0, ticks - 1) * TICK_S
    except (OSError, struct.error):  # a Unix socket, or one that was closed meanwhile
        return now
