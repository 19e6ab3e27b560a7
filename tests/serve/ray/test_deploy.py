"""The files of deploy/: what they say about the server is true of it. Nothing is built or started here."""

import argparse
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from serving import has_ray

from anyprec.cli.serve import add_arguments
from anyprec.serve.connections.connection import ConnectionLimits
from anyprec.serve.ray.options import read_options

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"


def options(arguments):
    """What `anyprec serve` makes of them; ends the test where it would refuse them."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return parser.parse_args(arguments)


def instructions():
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Containerfile").read_text())
    return [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]


def said(name):
    return [rest for word, rest in instructions() if word == name]


def documents(name):
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / name).read_text())}


@pytest.fixture
def pod():
    return documents("kubernetes.yaml")["Deployment"]["spec"]["template"]["spec"]


# --- Containerfile ---


def test_what_is_copied_is_there_and_not_ignored():
    kept = {line[1:] for line in (DEPLOY / "Containerfile.dockerignore").read_text().split() if line.startswith("!")}
    copied = {name for rest in said("COPY") if "--from" not in rest for name in rest.split()[:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    named = set(re.findall(r"(?:readme|license-files) = \[?\"([\w.]+)\"", (ROOT / "pyproject.toml").read_text()))
    assert named <= copied  # or the wheel cannot be built


def test_the_container_serves_to_others_and_nobody_is_root():
    entry, command = json.loads(said("ENTRYPOINT")[0]), json.loads(said("CMD")[0])
    assert entry[:2] == ["anyprec", "serve"]
    found = options(entry[2:] + command)
    assert found.host == "0.0.0.0" and str(found.port) == said("EXPOSE")[0] and found.models == ["/models/net.apm"]
    assert said("USER") == ["10001"] and json.loads(said("VOLUME")[0]) == ["/models"]
    health = re.search(r"CMD (\[.*\])", said("HEALTHCHECK")[0])
    assert health and f":{found.port}/v2/health/live" in json.loads(health[1])[-1]
    compile(json.loads(health[1])[-1], "healthcheck", "exec")


def test_both_stages_have_one_python():
    assert {rest.split()[0] for rest in said("FROM")} == {"python:${PYTHON}-slim-bookworm"}


# --- Kubernetes ---


def test_probes_and_arguments(pod):
    (container,) = pod["containers"]
    found = options(json.loads(said("ENTRYPOINT")[0])[2:] + container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == found.port
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {
        "startupProbe": "/v2/health/ready",
        "readinessProbe": "/v2/health/ready",
        "livenessProbe": "/v2/health/live",
    }
    assert all(container[name]["httpGet"]["port"] == "http" for name in paths)
    # Off the list before it stops taking connections, and done before it is killed.
    probe = container["readinessProbe"]
    assert found.drain_delay >= probe["periodSeconds"] * probe["failureThreshold"]
    assert pod["terminationGracePeriodSeconds"] >= found.drain_delay + found.drain_timeout + 5
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 10 * found.warm_up
    memory = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert found.max_held <= memory // 4


def test_a_pod_can_do_little(pod):
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    assert str(pod["securityContext"]["runAsUser"]) == said("USER")[0]
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    (mount,) = container["volumeMounts"]
    assert mount["readOnly"] and container["args"][0].startswith(mount["mountPath"] + "/")


def test_everything_points_at_the_same_pods():
    found = documents("kubernetes.yaml")
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        found["Deployment"]["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector == labels for selector in selectors)
    scaler = documents("kubernetes-autoscale.yaml")["HorizontalPodAutoscaler"]["spec"]
    target = scaler["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", found["Deployment"]["metadata"]["name"])
    assert scaler["metrics"][0]["pods"]["metric"]["name"] in (DEPLOY / "kubernetes-autoscale.yaml").read_text()


def test_the_metric_to_scale_by_is_one_of_ours():
    source = (ROOT / "src/anyprec/serve/monitoring/metrics.py").read_text()
    assert 'Counter("answers"' in source and '["model", "bits"]' in source
    assert "anyprec_answers_total" in (DEPLOY / "kubernetes-autoscale.yaml").read_text()


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes-autoscale.yaml"])
def test_kubernetes_would_take_it(name):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate, with the schemas")
    for one in yaml.safe_load_all((DEPLOY / name).read_text()):
        validate.validate(one, validate.latest_version(), strict=True)


# --- systemd, Ray ---


def test_systemd_waits_for_the_drain():
    text = (DEPLOY / "anyprec.service").read_text()
    said = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    program, verb, *arguments = shlex.split(said["ExecStart"])
    assert (Path(program).name, verb) == ("anyprec", "serve")
    found = options(arguments)
    assert float(said["TimeoutStopSec"].removesuffix("s")) >= found.drain_delay + found.drain_timeout + 5
    assert (
        int(said["LimitNOFILE"]) >= (found.max_connections or ConnectionLimits().connections) + 256
        and "HUP" in said["ExecReload"]
    )


def test_the_ray_configuration():
    found = yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text())
    (app,) = found["applications"]
    assert read_options(app["args"]).slo == 0.05 and found["http_options"]["host"] == "127.0.0.1"
    module, _, name = app["import_path"].partition(":")
    assert importlib.util.find_spec(module) is not None and name == "build"


@pytest.mark.slow
@pytest.mark.skipif(not has_ray(), reason="no Ray here: pip install anyprec[ray]")
def test_ray_would_take_it():
    """The schema, and the application that the builder makes of it. Apart: Ray warns when it is imported."""
    script = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
from anyprec.serve.ray.app import build
config = ServeDeploySchema.model_validate(yaml.safe_load(open(sys.argv[1])))
(app,) = config.applications
print(type(build(app.args)).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(DEPLOY / "ray-serve.yaml")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.split()[-1] == "Application", done.stderr
