"""Server: serves an application on a socket until a signal comes, then drains and ends.

SIGTERM and SIGINT: accept no new connections, answer all accepted requests, exit with 0. SIGHUP: reload keys,
certificate and replaced model files. Called by cli/serve.py; uvicorn does HTTP (connection.py), uvloop the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from anyprec.errors import ServeError
from anyprec.files import raise_file_limit
from anyprec.serve.connections.acceptor import HELD, WAITING, Acceptor
from anyprec.serve.connections.connection import Connection, ConnectionLimits
from anyprec.serve.connections.handshake import TlsAcceptor
from anyprec.serve.connections.table import ConnectionTable, Network
from anyprec.serve.http.app import App
from anyprec.serve.http.exchange import CLOSE
from anyprec.serve.monitoring.logs import log

BACKLOG = 2048  # connections queued by the kernel: a thousand may arrive at once
SWITCH_S = 2e-4  # the engine's thread gives up the GIL this soon: at most 0.2 ms per answer
GRACE_S = 0.25  # at the end, for requests sent before clients could know
CLOSE_S = 7.0  # after the drain timeout, until the process ends whatever still runs
SWEEP = 5  # ticks of 0.1 s
# Full garbage collections stop the event loop, for 50 ms where a thousand connections are open. Requests leave no
# cycles behind, so there is little to find: we look when few are open, and now and then in any case.
FEW = 32  # connections
COLLECT_S = 60.0  # between two collections, with few connections
COLLECT_ANYWAY_S = 600.0


@dataclass(frozen=True)
class DrainTimes:
    delay_s: float = 0.0  # still serving, but not ready, so that a balancer notices
    timeout_s: float = 30.0


@dataclass(frozen=True)
class Tls:
    certificate: str
    key: str | None = None


class Server(uvicorn.Server):
    def __init__(
        self,
        app: App,
        limits: ConnectionLimits | None = None,
        drain_times: DrainTimes | None = None,
        tls: Tls | None = None,
        on_hangup: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
        trusted: tuple[Network, ...] = (),
    ) -> None:
        limits = limits or ConnectionLimits()
        self.table = ConnectionTable(limits.connections, limits.per_address or max(1, limits.connections // 2), trusted)
        app.bodies.make_room = self.table.make_room
        own = {
            "limits": limits,
            "table": self.table,
            "quick": app.quick,
            "on_refused": staticmethod(app.metrics.turn_away),
            "answer": staticmethod(self.answer_probe),
            "look_if_late": staticmethod(self.look_if_late),
        }
        self.kind: Any = type("Connection", (Connection,), own)
        self.control_kind: Any = type("ControlConnection", (self.kind,), {"control": True})
        super().__init__(make_config(app, self.kind, tls))
        self.app = app
        self.drain_times = drain_times or DrainTimes()
        self.on_hangup, self.on_ready = on_hangup, on_ready
        self.servers: list[Any] = []
        self.unanswered = 0  # requests dropped at the end
        self.exit_within: Callable[[float], None] = lambda seconds: None  # `run` ends the process
        self.collected = time.monotonic()
        self._wake: asyncio.Event | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.app.start()
        tls = self.config.ssl

        def connect(kind: Any = self.kind) -> Connection:
            made: Connection = kind(config=self.config, server_state=self.server_state, app_state={}, _loop=loop)
            return made

        for listener in sockets or ():
            if is_unix(listener):
                server: Any = await loop.create_unix_server(lambda: connect(self.control_kind), sock=listener)
            elif tls is not None:
                server = TlsAcceptor(listener, tls, self.table, connect)
            else:
                try:
                    server = Acceptor(listener, connect, self.table.per_address, self.answer_probe, self.table.has_room)
                except NotImplementedError:  # Windows
                    server = await loop.create_server(connect, sock=listener, backlog=BACKLOG)
            self.servers.append(server)
        self.started = True
        await self.on_tick(0)  # the Date header, before the first request
        self.on_ready()

    def answer_probe(self, path: str, host: str) -> bytes | None:
        """The whole answer to a health probe; None: it is not 200, and takes the ordinary way."""
        found = self.app.probe(path, host)
        if found is None:
            return None
        fields, body = found
        lines = (b"%b: %b\r\n" % field for field in (*self.server_state.default_headers, *fields, CLOSE))
        return STATUS_LINE[200] + b"".join(lines) + b"\r\n" + body

    def look_if_late(self) -> None:
        for server in self.servers:
            if isinstance(server, Acceptor):
                server.look_if_late()

    async def main_loop(self) -> None:
        self._wake = asyncio.Event()
        counter = 0
        while not self.should_exit:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), 0.1)
            counter += 1
            await self.on_tick(counter)
            if counter % SWEEP == 0:
                self.sweep()
                self.collect_garbage()

    def sweep(self) -> None:
        now = time.monotonic()
        for connection in list(self.server_state.connections):
            connection.sweep(now)  # type: ignore[union-attr]
        self.app.metrics.connections.set(len(self.server_state.connections))
        self.app.look()

    def collect_garbage(self) -> None:
        few = len(self.server_state.connections) <= FEW
        if time.monotonic() - self.collected > (COLLECT_S if few else COLLECT_ANYWAY_S):
            gc.collect()
            self.collected = time.monotonic()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        self.app.draining = True
        log.info("stopping", connections=len(state.connections), requests=len(state.tasks))
        end = time.monotonic() + self.drain_times.delay_s + self.drain_times.timeout_s
        await self._wait(lambda: False, min(end, time.monotonic() + self.drain_times.delay_s))
        await asyncio.sleep(0)  # accept what the kernel has
        for server in self.servers:
            server.close()
        self.kind.closing = True  # of the control socket's, too
        opening = [server for server in self.servers if isinstance(server, Acceptor)]
        await self._wait(
            lambda: not state.connections and not any(server.pending for server in opening),
            min(end, time.monotonic() + GRACE_S),
        )
        for connection in list(state.connections):
            connection.shutdown()
        await self._wait(lambda: not state.connections and not state.tasks, end)
        for server in self.servers:
            if isinstance(server, TlsAcceptor):
                await server.end()
        self.unanswered = len(state.tasks) + sum(
            connection.has_quick  # type: ignore[union-attr]
            for connection in state.connections
        )
        if self.unanswered:
            log.error("requests given up at the end", requests=self.unanswered)
        for connection in list(state.connections):
            connection.transport.abort()
        for task in list(state.tasks):
            task.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self.app.close, 5.0)
        log.info("stopped", unanswered=self.unanswered)

    async def _wait(self, done: Callable[[], bool], until: float) -> None:
        while not done() and time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(0.02)
            self.sweep()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours, not uvicorn's: that one ends the process by the same signal again, and a drained end is exit code 0."""
        loop = asyncio.get_running_loop()
        handled = [signal.SIGTERM, signal.SIGINT]
        installed: list[int] = []
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # no main thread, or Windows
            for one in handled:
                loop.add_signal_handler(one, self.stop)
                installed.append(one)
            if hasattr(signal, "SIGHUP"):
                loop.add_signal_handler(signal.SIGHUP, self.hang_up)
                installed.append(signal.SIGHUP)
        try:
            yield
        finally:
            for number in installed:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Drain and end; at the second call, end at once."""
        if self.should_exit:
            self.force_exit = True
        drain_s = 0.0 if self.force_exit else self.drain_times.delay_s + self.drain_times.timeout_s + GRACE_S
        self.exit_within(drain_s + CLOSE_S)
        self.should_exit = True
        if self._wake is not None:
            self._wake.set()

    def hang_up(self) -> None:
        asyncio.get_running_loop().run_in_executor(None, self._read_anew)

    def _read_anew(self) -> None:
        try:
            if self.config.ssl is not None:  # new connections get the new certificate
                self.config.ssl.load_cert_chain(str(self.config.ssl_certfile), self.config.ssl_keyfile)
            self.on_hangup()
        except Exception as error:
            log.error("SIGHUP: something could not be read anew, the old one stays", error=str(error))


def make_config(app: App, kind: type[Connection], tls: Tls | None) -> uvicorn.Config:
    try:
        config = uvicorn.Config(
            app,
            http=kind,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            interface="asgi3",
            timeout_keep_alive=75,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
        )
        config.load()
    except OSError as error:
        raise ServeError(f"the TLS certificate or key cannot be used: {error.strerror or error}") from error
    return config


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one."""
    if not 0 <= port < 1 << 16:
        raise ServeError(f"cannot listen on port {port}; give 1 to 65535, or 0 for any free one")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, proto)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(BACKLOG)
        except BaseException:
            found.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        raise ServeError(f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}") from error
    found.setblocking(False)
    return found


@contextlib.contextmanager
def listen_unix(path: str) -> Iterator[socket.socket]:
    """A listening Unix socket that only its owner, and root, can reach; its file goes with it."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with found:
        try:
            remove_stale(path)
            mask = os.umask(0o177)
            try:
                found.bind(path)
            finally:
                os.umask(mask)
            found.listen(BACKLOG)
            inode = os.stat(path).st_ino
        except OSError as error:
            raise ServeError(f"cannot listen on --control-socket {path}: {error.strerror or error}") from error
        found.setblocking(False)
        try:
            yield found
        finally:
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == inode:  # not that of a server that has taken its place
                    os.unlink(path)


def remove_stale(path: str) -> None:
    """A server that was killed leaves its socket behind; one that lives answers."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ServeError(f"--control-socket {path} is there already, and no socket; choose another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ServeError(f"another server listens on --control-socket {path}; choose another path")


def is_unix(listener: socket.socket) -> bool:
    return listener.family == getattr(socket, "AF_UNIX", None)


def is_local(listener: socket.socket) -> bool:
    return listener.getsockname()[0] in ("::1",) or listener.getsockname()[0].startswith("127.")


def address_of(listener: socket.socket, tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def run(server: Server, *listeners: socket.socket) -> int:
    """Serve until a signal; 0 if every accepted request was answered."""
    raise_file_limit(server.kind.limits.connections + WAITING + HELD)
    sys.setswitchinterval(SWITCH_S)
    # What is loaded by now stays for good: looking through it again and again would stop the loop for 10 ms each time.
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], 1_000_000)  # full ones only by Server.collect_garbage
    server.exit_within = exit_within
    loop = new_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(server.serve([*listeners]))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()
        gc.set_threshold(*thresholds)
        gc.unfreeze()  # or what it holds counts as leaked when the interpreter ends
    return 1 if server.unanswered else 0


def exit_within(seconds: float) -> None:
    """The process ends then, with code 1 and a line for each thread, should one of them still be busy.

    By a thread that needs no interpreter: whatever holds that up cannot hold up the end.
    """
    try:
        faulthandler.dump_traceback_later(seconds, exit=True)
    except (OSError, RuntimeError, ValueError):  # no stderr to write to
        timer = threading.Timer(seconds, os._exit, (1,))
        timer.daemon = True
        timer.start()


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it is installed; it halves the time of a request."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
