"""The Ray Serve application: options in; replicas out, each with its own models and adaptive widths.

    serve run anyprec.serve.ray.app:build model=/models/net.apm slo=50ms max_replicas=4

A replica is the ASGI application of `anyprec serve` (http/app.py) behind Ray's proxies, with its own schedulers and
latency tables; scaling.py decides when another is needed. docs/guides/deploy.md describes it. Needs `anyprec[ray]`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.metrics import Gauge

from anyprec.errors import ServeError
from anyprec.serve.connections.server import SWITCH_S
from anyprec.serve.http.app import App, make_app
from anyprec.serve.http.exchange import Receive, Scope, Send
from anyprec.serve.http.keys import Keys, read_keys
from anyprec.serve.models import Settings, make_scheduler, named_paths
from anyprec.serve.monitoring.logs import log, set_up
from anyprec.serve.ray.options import Options, read_options
from anyprec.serve.ray.scaling import report_of
from anyprec.serve.scheduling.answer import Deliver
from anyprec.serve.scheduling.engine import ServedLevels
from anyprec.serve.scheduling.queue import QueueLimits
from anyprec.serve.scheduling.scheduler import Scheduler

POLICY = "anyprec.serve.ray.scaling:scale"
REPLICA_HEADER = b"x-anyprec-replica"
SPARE = 128  # requests beyond a full queue: running ones, and those without inference


def build(args: dict[str, Any]) -> serve.Application:
    """For `serve run anyprec.serve.ray.app:build ...` and `import_path` in a configuration file."""
    return application(read_options(args))


def application(options: Options, replica: type[Replica] | None = None) -> serve.Application:
    replica = replica or Replica
    deployment: Any = serve.deployment(
        serve.ingress(ingress_app)(replica),
        name="anyprec",
        # We queue requests ourselves, since our queue knows deadlines; Ray's queue would hide requests from it.
        max_ongoing_requests=options.max_queue * len(options.model) + SPARE,
        max_queued_requests=options.max_queue,  # at a proxy, while no replica can take them
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            upscale_delay_s=options.upscale_delay,
            downscale_delay_s=options.downscale_delay,
            look_back_period_s=options.look_back,
            policy=AutoscalingPolicy(policy_function=POLICY),
        ),
        health_check_period_s=3.0,  # a dead replica is replaced this soon
        graceful_shutdown_timeout_s=30.0,
        ray_actor_options={"num_cpus": options.num_cpus or options.threads * options.engines},
        user_config={"policy": options.policy} if options.bits is None else {"bits": options.bits},
    )
    bound: serve.Application = deployment.bind(options)
    return bound


def ingress_app() -> ReplicaApp:
    """Called by Ray in the replica's process, after the replica was made."""
    assert Replica.here is not None
    return Replica.here.ingress


class Replica:
    """One process of the application. `here` is the replica of this process."""

    here: ClassVar[Replica | None] = None

    def __init__(self, options: Options) -> None:
        set_up()
        sys.setswitchinterval(SWITCH_S)
        self.options = options
        self.name = serve.get_replica_context().replica_tag
        settings = Settings(
            slo_s=options.slo,
            levels=options.levels,
            layout=options.layout,
            threads=options.threads,
            engine_threads=options.engines,
            limits=QueueLimits(max_batch=options.max_batch, max_queue=options.max_queue),
            warm_up_s=options.warm_up,
        )
        # Control over HTTP would reach one replica of many: it stays closed, and `reconfigure` is for all.
        keys = Keys(api=read_keys(options.api_key_file).api)
        # Not `app`: Ray mixes a class with that name in.
        self.application = make_app(named_paths(options.model), settings, keys=keys, make=self.make_scheduler)
        self.application.readers.start()
        self.application.models.load_all()
        self.application.models.watch()
        self.ingress = ReplicaApp(self.application, self.name)
        self.gauges = RayGauges()
        gc.collect()
        gc.freeze()  # as in server.py: what is loaded by now stays
        Replica.here = self
        log.info("replica ready", replica=self.name, models=",".join(self.application.models.served))

    def make_scheduler(self, model: Any, levels: ServedLevels, settings: Settings, deliver: Deliver) -> Scheduler:
        scheduler = make_scheduler(model, levels, settings, deliver)
        scheduler.margin += self.options.transit
        return scheduler

    @property
    def schedulers(self) -> dict[str, Scheduler]:
        return {one.name: one.now.scheduler for one in self.application.models if one.now is not None}

    def reconfigure(self, given: Mapping[str, Any]) -> None:
        """Ray tells every replica the `user_config`, at its start and whenever it changes: {bits: 4}, {policy: ...}."""
        if set(given) not in ({"bits"}, {"policy"}):
            raise ServeError(f"user_config={dict(given)!r}: give bits or policy, one of the two")
        for scheduler in self.schedulers.values():
            if "bits" in given:
                scheduler.set_policy("fixed", given["bits"])
            else:
                scheduler.set_policy(given["policy"])

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray asks for it several times a minute and hands it to scaling.scale."""
        stats = {name: scheduler.stats() for name, scheduler in self.schedulers.items()}
        report = report_of(
            stats.values(), settle=self.options.settle, busy=self.options.busy, engines=self.options.engines
        )
        self.gauges.show(stats, report)
        return report


class ReplicaApp:
    """The application as Ray mounts it: strips the route prefix and adds a header that names the replica."""

    def __init__(self, app: App, name: str) -> None:
        self.app = app
        self.header = (REPLICA_HEADER, name.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        prefix = scope.get("root_path", "")
        if prefix and scope["path"].startswith(prefix):
            scope = {**scope, "path": scope["path"][len(prefix) :] or "/"}

        async def say_who(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [header for header in message["headers"] if header[0] != b"x-request-id"]  # Ray sends it
                message = {**message, "headers": [*headers, self.header]}
            await send(message)

        await self.app(scope, receive, say_who)


class RayGauges:
    """For Ray's own metrics: `/metrics` over HTTP shows only the replica that happens to answer."""

    def __init__(self) -> None:
        def gauge(name: str, what: str, *tags: Any) -> Gauge:
            return Gauge(f"anyprec_{name}", description=what, tag_keys=tags)

        self.least = gauge("least_replicas", "Replicas like this that its load needs at the narrowest width")
        self.most = gauge("most_replicas", "Replicas like this that its load needs at the widest width")
        self.rate = gauge("image_rate", "Images a second that arrive", "model")
        self.queue = gauge("queue_images", "Images that wait", "model")
        self.attainment = gauge("attainment_ratio", "Requests answered in time in the last 10 s", "model")
        self.bits = gauge("answers_by_bits", "Answers of the last 10 s at each width", "model", "bits")

    def show(self, stats: Mapping[str, Mapping[str, Any]], report: Mapping[str, float]) -> None:
        least, most, _ = report.values()
        self.least.set(least)
        self.most.set(most)
        for name, one in stats.items():
            model = {"model": name}
            self.rate.set(one["rate"], tags=model)
            self.queue.set(one["queue"]["images"], tags=model)
            self.attainment.set(one["window"]["attainment"], tags=model)
            for profile in one["table"]["ms"]:
                self.bits.set(one["window"]["bits_histogram"].get(profile, 0), tags={**model, "bits": profile})
