"""A Ray cluster of this machine with Ray applications on it, in a process of its own, for test_ray.py.

    python ray_cluster.py PORT

Every line on stdin is an application, {"name": "main", "args": {"model": ...}}, to deploy at /main (or anew); a line
on stdout says that it is done. Ends when stdin does. Ray warns too much to live in a process of pytest's.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from serving import SlowModel

from anyprec.serve.models import Deliver, Settings
from anyprec.serve.ray.app import Replica, application, read_options
from anyprec.serve.scheduling.scheduler import Scheduler

SECONDS = 0.08  # an image, at 8 bit; an eighth of it at 1 bit


class WidthModel(SlowModel):
    """Takes as long as its width says, asleep: like a large network, whatever else the machine does."""

    def __call__(self, x: np.ndarray, bits: Any = None, **rest: Any) -> Any:
        time.sleep(self.seconds * len(x) * int(bits) / 8)
        return self.model(x, bits, **rest)


class SlowReplica(Replica):
    def make_scheduler(self, model: Any, levels: Any, settings: Settings, deliver: Deliver) -> Scheduler:
        return super().make_scheduler(WidthModel(model, SECONDS), levels, settings, deliver)


def build(args: dict[str, Any]) -> serve.Application:
    """As anyprec.serve.ray.app:build, with slow networks."""
    return application(read_options(args), SlowReplica)


def deploy(config: dict[str, Any]) -> None:
    """What `serve deploy` does, which would need the dashboard's port: it asks Ray for this."""
    began = time.time()
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
    for name in (app["name"] for app in config["applications"]):
        while True:
            status = serve.status().applications[name]
            if status.status == "DEPLOY_FAILED":
                raise RuntimeError(status.message)
            if status.status == "RUNNING" and status.last_deployed_time_s >= began - 1:
                break
            time.sleep(0.2)


def main(port: str) -> None:
    say, sys.stdout = sys.stdout, sys.stderr  # Ray prints
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": int(port)})
    apps: dict[str, dict[str, Any]] = {}
    for line in sys.stdin:
        given = json.loads(line)
        name = given["name"]
        apps[name] = {"route_prefix": f"/{name}", "import_path": "ray_cluster:build", **given}
        deploy({"applications": list(apps.values())})
        print(json.dumps({"deployed": name}), file=say, flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
