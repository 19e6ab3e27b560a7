"""The load generator and the real server together: every answer accounted for, and right."""

import json

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
import serving

from anyprec.cli import main
from anyprec.loadtest.arrivals import gamma
from anyprec.loadtest.client import LoadPlan, send
from anyprec.loadtest.report import summarize
from anyprec.loadtest.target import find, fit_images, messages, noise
from anyprec.run.model import load
from anyprec.serve.models import Settings


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return serving.save(tmp_path_factory.mktemp("load") / "net.apm")


@pytest.fixture(scope="module")
def real(path):
    with serving.running({"net": path}) as found:
        yield found


def plan_for(running, count=16, **asked):
    target = find(f"http://127.0.0.1:{running.port}")
    images = fit_images(noise(target, count), target)
    return LoadPlan(target.host, target.port, messages(target, images, **asked), keep_outputs=True), images, target


def test_the_server_says_what_a_load_needs(real):
    target = find(f"http://127.0.0.1:{real.port}")
    assert (target.model, target.shape, target.datatypes) == ("net", (3, 8, 8), ("UINT8", "FP32"))
    assert target.accuracy == {"1": 81.0, "2": 82.0, "4": 84.0, "8": 88.0}


def test_every_answer_is_the_files_own(real, path):
    plan, images, target = plan_for(real, deadline_ms=30_000)
    outcome = send(plan, gamma(200, 4, 0.5, seed=1))
    assert (outcome.status == 200).all()
    model = load(path)
    own = {bits: np.asarray(model(images, bits=int(bits))).argmax(1) for bits in set(outcome.profile.tolist())}
    said = outcome.labels(np.dtype(np.float32))[:, 0]
    assert all(said[i] == own[outcome.profile[i]][outcome.image[i]] for i in range(len(outcome)))
    assert (outcome.batch >= 1).all() and (outcome.run_s > 0).all() and (outcome.queue_s >= 0).all()
    # What the server counts of a request lies within what its client saw.
    beyond = outcome.queue_s + outcome.run_s - (outcome.done - outcome.sent)
    assert beyond.max() < 0, beyond.max()
    assert summarize(outcome, 30.0, 0.5, expected=target.accuracy).accuracy_is == "expected"


def test_several_images_in_a_request(real, path):
    batch = 5
    plan, images, _ = plan_for(real, 23, batch=batch, deadline_ms=30_000)
    assert len(plan.messages) == 4  # three images do not fill another
    outcome = send(plan, gamma(100, 4, 0.3, seed=2))
    assert (outcome.status == 200).all() and (outcome.batch % batch == 0).all()
    model = load(path)
    own = {bits: np.asarray(model(images, bits=int(bits))).argmax(1) for bits in set(outcome.profile.tolist())}
    said = outcome.labels(np.dtype(np.float32), batch)
    for i in range(len(outcome)):
        first = batch * outcome.image[i]
        assert (said[i] == own[outcome.profile[i]][first : first + batch]).all()


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_bits_that_were_asked_for(real, bits):
    plan, _, _ = plan_for(real, deadline_ms=30_000, bits=bits)
    assert set(send(plan, np.linspace(0, 0.1, 20)).profile.tolist()) == {str(bits)}


def test_a_server_that_cannot_keep_up_says_so(path):
    settings = Settings(slo_s=0.2, warm_up_s=0.05, limits=serving.SMALL)
    with serving.running({"net": path}, settings=settings, slow_s=0.05) as running:
        plan, _, _ = plan_for(running, deadline_ms=200)
        outcome = send(plan, np.linspace(0, 0.5, 300))
    assert set(outcome.status.tolist()) <= {200, 429, 503, 504}
    assert (outcome.status == 200).any() and (outcome.status == 503).any()
    assert (outcome.retry_after_s[outcome.status == 503] >= 0).all()  # told, and no nan


def test_from_the_command_line(real, capsys):
    command = ["loadtest", f"http://127.0.0.1:{real.port}", "--arrivals", "poisson:100", "--seconds", "0.3", "--json"]
    assert main([*command, "--slo", "30s"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == "net" and report["attainment"] == 1.0
    assert 81.0 <= report["accuracy"] <= 88.0 and report["mean_batch"] >= 1
