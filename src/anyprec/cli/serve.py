"""`anyprec serve net.apm --slo 50ms`: serve model files over HTTP within a latency target. Called by anyprec.cli.

Reads the options, loads and measures the models, and starts the server. docs/cli/serve.md describes it all.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from anyprec.arguments import delay, duration, names, positive, size, whole
from anyprec.choices import LAYOUTS
from anyprec.errors import AnyprecError, ServeError
from anyprec.serve.monitoring.logs import LEVELS, log, set_up

if TYPE_CHECKING:
    from anyprec.serve.connections.cores import Cores
    from anyprec.serve.connections.server import Server
    from anyprec.serve.connections.table import Network
    from anyprec.serve.http.keys import Keys
    from anyprec.serve.models import ModelRepository

EXAMPLE = "anyprec serve digits.apm --slo 50ms --port 8000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="+", metavar="MODEL.apm", help="a model file (.apm), a name of `anyprec models`, or NAME=FILE"
    )
    parser.add_argument(
        "--slo", type=duration, default=0.05, metavar="TIME", help="the latency target, such as 50ms (the default)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: only this machine)"
    )
    parser.add_argument(
        "--port", type=whole(0, 65535), default=8000, metavar="N", help="port (default: 8000; 0: any free one)"
    )
    how = parser.add_argument_group("how it runs")
    how.add_argument(
        "--policy",
        choices=("adaptive", "accuracy"),
        default="adaptive",
        help="how the level is chosen (default: adaptive)",
    )
    how.add_argument("--bits", metavar="BITS", help="hold this level instead of adapting it")
    how.add_argument(
        "--levels",
        type=names,
        metavar="NAMES",
        help="levels to serve: widths, mixed profiles, auto for the cascade (default: all of the file)",
    )
    how.add_argument("--threads", type=whole(1, 1024), default=1, metavar="N", help="threads per batch (default: 1)")
    how.add_argument(
        "--engines", type=whole(1, 1024), default=1, metavar="N", help="batches that run in parallel (default: 1)"
    )
    how.add_argument(
        "--pin", action="store_true", help="reserve one core for HTTP; for a server with a machine to itself"
    )
    how.add_argument("--layout", choices=LAYOUTS, default="NCHW", help="layout of tensors in requests (default: NCHW)")
    how.add_argument("--memory-budget", type=size, metavar="BYTES", help="maximum bytes of prepared weights per model")
    how.add_argument(
        "--warm-up",
        type=duration,
        default=3.0,
        metavar="TIME",
        help="time spent on measuring each model at the start (default: 3s)",
    )
    how.add_argument("--no-watch", action="store_true", help="reload replaced files only on SIGHUP")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-batch", type=whole(1, 65536), metavar="N", help="images per batch, and per request (default: 32)"
    )
    limits.add_argument("--max-queue", type=positive, metavar="N", help="queued images (default: 1024)")
    limits.add_argument("--max-body", type=size, metavar="BYTES", help="bytes per request (default: 16MiB)")
    limits.add_argument("--max-json", type=size, metavar="BYTES", help="bytes of JSON per request (default: 4MiB)")
    limits.add_argument("--max-answer-json", type=size, metavar="BYTES", help="bytes per JSON answer (default: 64MiB)")
    limits.add_argument(
        "--max-held", type=size, metavar="BYTES", help="bytes of all request bodies in memory (default: 512MiB)"
    )
    limits.add_argument("--max-connections", type=positive, metavar="N", help="open connections (default: 1024)")
    limits.add_argument(
        "--max-connections-per-address",
        type=positive,
        metavar="N",
        help="open connections from one address (default: half)",
    )
    limits.add_argument(
        "--max-pixels",
        type=positive,
        metavar="N",
        help="pixels per image, where the network takes any size (default: 2^20)",
    )
    limits.add_argument("--max-image-pixels", type=positive, metavar="N", help="pixels per posted image file")
    limits.add_argument(
        "--image-timeout", type=duration, metavar="TIME", help="time to decode a posted image file (default: 5s)"
    )
    limits.add_argument(
        "--header-timeout", type=duration, metavar="TIME", help="time to receive the headers (default: 10s)"
    )
    limits.add_argument(
        "--body-timeout",
        type=duration,
        metavar="TIME",
        help="time to receive the body at less than 16 KiB/s (default: 30s)",
    )
    limits.add_argument(
        "--write-timeout", type=duration, metavar="TIME", help="longest time without the client reading (default: 30s)"
    )
    safety = parser.add_argument_group("who may call")
    safety.add_argument(
        "--api-key-file", metavar="FILE", help="one key per line; or ANYPREC_API_KEYS in the environment"
    )
    safety.add_argument("--control-key-file", metavar="FILE", help="keys that may set precision and load models")
    safety.add_argument("--control-socket", metavar="PATH", help="a Unix socket for control, open only to its owner")
    safety.add_argument(
        "--local-control", action="store_true", help="control without a key, from this machine; not behind a proxy"
    )
    safety.add_argument(
        "--trusted-proxy", type=proxy_network, action="append", default=[], metavar="ADDRESS",
        help="a proxy (or network of them): no limit per address, and its X-Forwarded-For names the client",
    )  # fmt: skip
    safety.add_argument("--tls-cert", metavar="FILE", help="PEM certificate chain: serve https")
    safety.add_argument("--tls-key", metavar="FILE", help="private key, if it is not in the certificate file")
    logs = parser.add_argument_group("logs and the end")
    logs.add_argument("--log", choices=("text", "json"), default="text", help="format of the log on stderr")
    logs.add_argument(
        "--log-level", choices=tuple(LEVELS), default="info", help="least severe messages to log (default: info)"
    )
    logs.add_argument("--log-requests", action="store_true", help="log every request")
    logs.add_argument(
        "--drain-delay",
        type=delay,
        default=0.0,
        metavar="TIME",
        help="after SIGTERM, report not ready but keep serving for this long (default: 0s)",
    )
    logs.add_argument(
        "--drain-timeout",
        type=delay,
        default=30.0,
        metavar="TIME",
        help="after that, longest wait for pending answers (default: 30s)",
    )


def proxy_network(text: str) -> Network:
    from anyprec.serve.connections.table import network_of

    try:
        return network_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no address; write for example 127.0.0.1 or 10.0.0.0/8") from None


def run(args: argparse.Namespace) -> int:
    from anyprec.serve.connections.cores import Cores, pin_thread, split_cores
    from anyprec.serve.connections.server import address_of, is_local, listen, listen_unix
    from anyprec.serve.connections.server import run as run_server
    from anyprec.serve.http.keys import read_keys
    from anyprec.serve.models import named_paths

    set_up(args.log, args.log_level)
    if args.tls_key and not args.tls_cert:
        raise ServeError("--tls-key goes with --tls-cert; give both")
    paths = named_paths(args.models)
    keys = read_keys(args.api_key_file, args.control_key_file)
    cores = split_cores() if args.pin else Cores()
    listener = listen(args.host, args.port)
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(listener)]
        check_control(args, keys, is_local(listener))
        if args.control_socket:
            listeners.append(stack.enter_context(listen_unix(args.control_socket)))
        server = build(args, paths, keys, cores)
        models = server.app.models
        address = address_of(listener, bool(args.tls_cert))
        warn(args, keys, address, is_local(listener))
        stack.callback(server.app.readers.close)
        server.app.readers.start()  # they come up while the models are opened
        models.load_all()
        if not args.no_watch:
            models.watch()
        server.on_ready = lambda: announce(models, address)
        pin_thread(cores.http)
        return run_server(server, *listeners)


def check_control(args: argparse.Namespace, keys: Keys, local: bool) -> None:
    """--local-control trusts the address of a request, which is the same for all clients of a proxy."""
    why = None
    if args.local_control and not local:
        why = f"--host {args.host} lets other machines in"
    elif args.local_control and (keys.api or keys.control):
        why = "there are keys, and control then needs one"
    elif args.local_control and args.trusted_proxy:
        why = "behind --trusted-proxy everybody seems to be on this machine"
    if why:
        raise ServeError(f"--local-control cannot be: {why}; give --control-key-file or --control-socket instead")


def build(args: argparse.Namespace, paths: dict[str, str], keys: Keys, cores: Cores) -> Server:
    from anyprec.serve.connections.connection import ConnectionLimits
    from anyprec.serve.connections.server import DrainTimes, Server, Tls
    from anyprec.serve.http.app import make_app
    from anyprec.serve.http.bodies import RequestLimits
    from anyprec.serve.models import Settings
    from anyprec.serve.scheduling.queue import QueueLimits

    settings = Settings(
        slo_s=args.slo,
        policy="fixed" if args.bits else args.policy,
        bits=int(args.bits) if args.bits and args.bits.isdigit() else args.bits,
        levels=args.levels,
        layout=args.layout,
        threads=args.threads,
        engine_threads=args.engines,
        cores=cores.engines,
        limits=QueueLimits(**given(max_batch=args.max_batch, max_queue=args.max_queue)),
        memory_budget=args.memory_budget,
        warm_up_s=args.warm_up,
        **given(max_pixels=args.max_pixels),
    )
    request_limits = RequestLimits(
        **given(
            body=args.max_body,
            json=args.max_json,
            held=args.max_held,
            image_pixels=args.max_image_pixels,
            image_s=args.image_timeout,
            answer_json=args.max_answer_json,
        )
    )
    connection_limits = ConnectionLimits(
        per_address=args.max_connections_per_address,
        message_bytes=4 * request_limits.body + (1 << 20),
        **given(
            header_s=args.header_timeout,
            body_s=args.body_timeout,
            write_s=args.write_timeout,
            connections=args.max_connections,
        ),
    )
    app = make_app(
        paths, settings, keys=keys, limits=request_limits, local=args.local_control, log_requests=args.log_requests
    )

    def read_anew() -> None:
        try:
            app.keys = app.keys.again()
        except AnyprecError as error:
            log.error("keys not read anew, the old ones stay", error=str(error))
        app.models.check(at_once=True)
        log.info("read anew after SIGHUP", api_keys=len(app.keys.api), control_keys=len(app.keys.control))

    tls = Tls(args.tls_cert, args.tls_key) if args.tls_cert else None
    drain_times = DrainTimes(args.drain_delay, args.drain_timeout)
    return Server(app, connection_limits, drain_times, tls, read_anew, trusted=tuple(args.trusted_proxy))


def given(**options: Any) -> dict[str, Any]:
    """Those the user gave. For the rest the server's own defaults hold, which --help cannot ask for quickly."""
    return {name: value for name, value in options.items() if value is not None}


def warn(args: argparse.Namespace, keys: Keys, address: str, local: bool) -> None:
    from anyprec.serve.http.keys import is_readable_by_all

    if not local and not keys.api:
        log.warning("everybody who can reach this address can use the server; --api-key-file asks for keys", at=address)
    if not local and not args.tls_cert:
        log.warning("keys and images cross the network unencrypted; --tls-cert and --tls-key encrypt", at=address)
    ways = {"key": keys.control, "socket": args.control_socket, "this machine, without a key": args.local_control}
    log.info("control", by=", ".join(way for way, is_open in ways.items() if is_open) or "nobody")
    for path in (args.api_key_file, args.control_key_file):
        if path and is_readable_by_all(path):
            log.warning("everybody on this machine can read the key file; chmod 600 it", file=path)


def announce(models: ModelRepository, address: str) -> None:
    """One line for people on stdout, once requests are answered; the log has the rest."""
    slo_ms = 1e3 * models.settings.slo_s
    for served in models:
        assert served.now is not None
        log.info(
            "model", name=served.name, path=served.path, levels=",".join(served.now.signature.levels),
            isa=served.now.model.isa,
        )  # fmt: skip
    listed = ", ".join(served.name for served in models)
    print(f"serving {listed} on {address}, target {slo_ms:g} ms; Ctrl-C ends", flush=True)
