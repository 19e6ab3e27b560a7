"""Connections that wait in the kernel: who is served first, and who not at all."""

import asyncio
import contextlib
import socket
import sys
import time

import pytest

from anyprec.serve.connections import acceptor as module
from anyprec.serve.connections.acceptor import Acceptor, is_abandoned
from anyprec.serve.connections.probes import may_be_probe, peek
from anyprec.serve.connections.server import listen, new_loop

HEALTH = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"
OTHER = b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def listener():
    with listen("127.0.0.1", 0) as found:
        yield found


@pytest.fixture
def dial(listener):
    """Connections to the listener, each with what it sends."""
    with contextlib.ExitStack() as stack:

        def connect(raw=b""):
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            client.sendall(raw)
            return client

        yield connect


class ServedModel(asyncio.Protocol):
    """Notes the client's port when it is connected, and what it sends."""

    order: list[int]
    received: dict[int, bytes]
    transports: list[asyncio.BaseTransport]

    def connection_made(self, transport):
        self.port = transport.get_extra_info("peername")[1]
        self.transports.append(transport)
        self.order.append(self.port)

    def data_received(self, data):
        self.received[self.port] = self.received.get(self.port, b"") + data


def serve(listener, until, per_address=512, close=False, loop=None):
    """The ports of clients in the order in which they were served, and what they sent, until `until(received)`."""
    kind = type("Kind", (ServedModel,), {"order": [], "received": {}, "transports": []})

    async def main():
        found = Acceptor(listener, kind, per_address)
        if close:
            found.close()
        end = time.monotonic() + 10
        while not until(kind.received) and time.monotonic() < end:
            await asyncio.sleep(0.001)
        if not close:
            found.close()
        while found.pending and time.monotonic() < end:
            await asyncio.sleep(0.001)
        for transport in kind.transports:
            transport.abort()
        await asyncio.sleep(0.05)  # they are closed a turn later

    loop = loop or new_loop()
    loop.run_until_complete(main())
    loop.close()
    return kind.order, kind.received


def port_of(client):
    return client.getsockname()[1]


@pytest.mark.parametrize("make_loop", [new_loop, asyncio.SelectorEventLoop])
def test_a_probe_is_served_before_those_that_came_earlier(listener, dial, make_loop):
    clients = [dial(OTHER) for _ in range(200)]
    probe = dial(HEALTH)
    order, received = serve(listener, lambda received: len(received) == 201, loop=make_loop())
    assert order[0] == port_of(probe) and received[port_of(probe)] == HEALTH
    assert order[1:] == [port_of(client) for client in clients]
    assert all(received[port_of(client)] == OTHER for client in clients)


def test_a_small_table_is_not_filled_in_one_turn(listener, dial):
    """With 5 places, nobody is connected before the one before him has been read from."""
    clients = [dial(OTHER) for _ in range(20)]
    order, _ = serve(listener, lambda received: len(received) == 20, per_address=5)
    assert order == [port_of(client) for client in clients]


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a connection is asked for on Linux only")
def test_in_a_rush_those_that_gave_up_are_not_served(listener, dial):
    for _ in range(100):
        dial(b"GET /v2 HTTP/1.1\r\nhost").close()
    half_closed = [dial(OTHER) for _ in range(10)]
    for client in half_closed:
        client.shutdown(socket.SHUT_WR)
    last = [dial(OTHER) for _ in range(module.CALM)]
    order, _ = serve(listener, lambda received: port_of(last[-1]) in received)
    assert order == [port_of(client) for client in half_closed + last]


def test_those_that_wait_at_the_end_are_served(listener, dial):
    address = listener.getsockname()
    clients = [dial(OTHER) for _ in range(100)]
    order, received = serve(listener, lambda received: len(received) == 100, close=True)
    assert order == [port_of(client) for client in clients] and len(received) == 100
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_where_no_file_can_be_opened_it_tries_again(listener, dial):
    class Full:
        """A listener that fails once."""

        failed = False

        def __getattr__(self, name):
            return getattr(listener, name)

        def accept(self):
            if not self.failed:
                self.failed = True
                raise OSError(24, "Too many open files")
            return listener.accept()

    client = dial(OTHER)
    order, _ = serve(Full(), lambda received: received)
    assert order == [port_of(client)]


@pytest.mark.parametrize(
    "raw, close, probe, given_up",
    [
        (b"", False, True, False),
        (HEALTH, False, True, False),
        (b"GET /v2/he", False, True, False),
        (b"", True, False, True),
        (HEALTH, True, True, False),
        (OTHER, False, False, False),
        (OTHER, True, False, False),
        (b"GET /v2 HTTP/1.1\r\nhost", True, False, True),
        (b"GET /v2 HTTP/1.1\r\nhost", False, False, False),
        (b"POST / HTTP/1.1\r\nhost: x\r\nlong: " + b"x" * 9000, True, False, False),
    ],
)
def test_what_is_seen_of_a_connection(listener, dial, raw, close, probe, given_up):
    client = dial(raw)
    if close:
        client.close()
    listener.setblocking(True)
    taken, _ = listener.accept()
    with taken:
        time.sleep(0.05)
        head = peek(taken)
        assert (head is not None and may_be_probe(head)) == probe
        assert is_abandoned(taken) == (given_up and sys.platform == "linux")


def test_who_is_silent_is_held_while_no_slot_is_free(listener, dial, monkeypatch):
    """And served as soon as it sends something, or after a while."""
    monkeypatch.setattr(module, "HOLD_S", 0.3)
    silent, speaks = dial(), dial()
    order, times, transports = [], {}, []

    class Noted(asyncio.Protocol):
        def connection_made(self, transport):
            transports.append(transport)
            port = transport.get_extra_info("peername")[1]
            order.append(port)
            times[port] = time.monotonic() - start

    async def main():
        found = Acceptor(listener, Noted, 512, has_room=lambda host: False)
        await asyncio.sleep(0.05)
        assert order == [] and found.pending and len(found.held) == 2
        speaks.sendall(OTHER)
        while len(order) < 2:
            await asyncio.sleep(0.01)
        found.close()
        for transport in transports:
            transport.close()

    start = time.monotonic()
    asyncio.run(asyncio.wait_for(main(), 10))
    assert order == [port_of(speaks), port_of(silent)] and times[port_of(silent)] >= 0.3


def test_a_limited_number_is_held(listener, dial, monkeypatch):
    monkeypatch.setattr(module, "HELD", 3)
    clients = [dial() for _ in range(8)]
    kind = type("Kind", (ServedModel,), {"order": [], "received": {}, "transports": []})

    async def main():
        found = Acceptor(listener, kind, 512, has_room=lambda host: False)
        while len(kind.order) < 5:
            await asyncio.sleep(0.01)
        assert len(found.held) == 3
        found.close()  # the others are served
        while len(kind.order) < 8:
            await asyncio.sleep(0.01)
        for transport in kind.transports:
            transport.close()

    asyncio.run(asyncio.wait_for(main(), 10))
    assert set(kind.order) == {port_of(client) for client in clients}


@pytest.mark.skipif(sys.platform != "linux", reason="a packet filter of Linux")
def test_nobody_is_connected_once_the_listener_keeps_out(listener, dial):
    """A connection made just before the listener is closed would be reset, with a request on its way."""
    before = dial(OTHER)
    module.drop_new_packets(listener)
    with pytest.raises(TimeoutError):
        socket.create_connection(listener.getsockname(), timeout=0.3)
    listener.setblocking(False)
    taken, _ = listener.accept()  # those before are still there
    with taken:
        assert taken.recv(100) == OTHER and before.getsockname() == taken.getpeername()
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_more_than_are_taken_in_a_turn_are_served_at_the_end(listener, dial, monkeypatch):
    monkeypatch.setattr(module, "TAKEN", 4)
    clients = [dial(OTHER) for _ in range(30)]
    ports = {client.getsockname()[1] for client in clients}
    order, received = serve(listener, lambda found: len(found) == 30, close=True)
    assert set(order) == ports and all(raw == OTHER for raw in received.values())
