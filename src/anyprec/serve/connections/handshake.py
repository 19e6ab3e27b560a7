"""TLS: connections are accepted here, and have a slot in the table before their handshake is through.

asyncio's own server tells of a connection after its handshake only: any number that never finish it would each hold an
open file, unseen. Called by server.py where there is a certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

from anyprec.serve.connections.connection import Connection
from anyprec.serve.connections.table import ConnectionTable, address_group
from anyprec.serve.monitoring.logs import log

HANDSHAKE_S = 10.0
PAUSE_S = 0.1  # where no file can be opened any more


class Handshake:
    """One connection until TLS is agreed on. It counts as idle: others that come may have its slot."""

    until = 0.0

    def __init__(self, host: str, trusted: bool, taken: socket.socket) -> None:
        self.address, self.trusted = address_group(host), trusted
        self.taken: socket.socket | None = taken  # until the task has begun, and given it to a transport
        self.task: asyncio.Task[None] | None = None

    def is_slow(self, now: float) -> bool:
        return False

    def unfinished_bytes(self) -> int:
        return 0

    def evict(self) -> None:
        if self.taken is not None:
            self.taken.close()
        if self.task is not None:
            self.task.cancel()


class TlsAcceptor:
    """Takes connections from a listening socket until it is closed."""

    def __init__(
        self, listener: socket.socket, tls: ssl.SSLContext, table: ConnectionTable, connect: Callable[[], Connection]
    ) -> None:
        self.listener, self.tls, self.table, self.connect = listener, tls, table, connect
        self.handshakes: set[asyncio.Task[None]] = set()
        self.task = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """No more are taken; those whose handshake is under way go on."""
        self.task.cancel()

    async def end(self) -> None:
        """The rest is given up."""
        rest = [self.task, *self.handshakes]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0)  # their transports are closed a turn later

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                taken, peer = await loop.sock_accept(self.listener)
            except OSError as error:  # too many open files, or a client that is gone already
                log.warning("a connection could not be taken", error=str(error))
                await asyncio.sleep(PAUSE_S)
                continue
            handshake = Handshake(peer[0], self.table.is_trusted(peer[0]), taken)
            handshake.task = loop.create_task(self._agree(handshake))
            self.handshakes.add(handshake.task)
            handshake.task.add_done_callback(self.handshakes.discard)
            self.table.admit(handshake)
            await asyncio.sleep(0)  # others have their turn, however many wait to be taken

    async def _agree(self, handshake: Handshake) -> None:
        def agreed() -> Connection:
            found = self.connect()
            found.handshake = handshake  # whose slot it takes
            return found

        loop: Any = asyncio.get_running_loop()
        taken, handshake.taken = handshake.taken, None
        try:
            with contextlib.suppress(OSError, asyncio.TimeoutError):  # no TLS, gone, or too slow
                await loop.connect_accepted_socket(agreed, taken, ssl=self.tls, ssl_handshake_timeout=HANDSHAKE_S)
        finally:
            self.table.remove(handshake)
