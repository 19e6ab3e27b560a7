"""Jobs: order, failures, workers that end with their parent, and an ETA that counts core-seconds."""

import io
import json
import subprocess
import sys
import time

import pytest

from anyprec.errors import AnyprecError
from anyprec.progress import Progress
from anyprec.reproduce import pool
from anyprec.reproduce.job import training_of, training_record
from anyprec.reproduce.pool import DONE, FAILED, RUNNING, Task, TaskQueue, run_jobs
from anyprec.reproduce.store import Training, training


def task(name, seconds=10.0, needs=()):
    return Task(name, {"kind": "fake", "name": name}, seconds, tuple(needs))


def test_each_after_what_it_needs(monkeypatch):
    done = []
    monkeypatch.setattr(pool, "perform", lambda job, tell: done.append(job["name"]))
    ended = []
    tasks = [task("table1", needs=["a", "b", "not a task: done before"]), task("a"), task("b", needs=["a"])]
    assert run_jobs(tasks, 1, lambda t: ended.append(t.name)) == []
    assert done == ended == ["a", "b", "table1"]


def test_what_fails_takes_with_it_only_what_needs_it(monkeypatch):
    def perform(job, tell):
        if job["name"] == "a":
            raise AnyprecError("it diverged")

    monkeypatch.setattr(pool, "perform", perform)
    tasks = [task("a"), task("b"), task("table1", needs=["a"]), task("table2", needs=["b"])]
    failed = run_jobs(tasks, 1)
    assert [(t.name, t.error) for t in failed] == [("a", "it diverged"), ("table1", "a failed")]
    assert [t.state for t in tasks] == [FAILED, DONE, FAILED, DONE]


def test_the_bar_counts_core_seconds():
    tasks = [task("a", 30.0), task("b", 60.0), task("c", 10.0)]
    text = io.StringIO()
    with Progress("reproduce", 1, "core-s", text) as bar:
        board = TaskQueue(tasks, bar, lambda t: None)
        board.begin(tasks[0])
        board.end(tasks[0])
        board.begin(tasks[1])
        tasks[1].heard(0.5, "epoch 2")
        board.show()
        assert (bar.done, bar.total) == (60, 100)
        assert bar.fields["now"] == "b 50 % epoch 2"
        assert tasks[1].state == RUNNING
    assert "done: a (2 left)" in text.getvalue()


def test_trainings_travel_as_json():
    first = training("digits", "epochs=1")
    one = Training(training("digits", "widths=[2,8]").recipe, first, 4)
    there = training_of(json.loads(json.dumps(training_record(one))))
    assert there == one and there.observe == 4 and there.after == first and there.recipe == one.recipe


@pytest.fixture
def worker():
    process = subprocess.Popen(
        [sys.executable, "-m", "anyprec.reproduce.job"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        stream.close()


@pytest.mark.thorough
def test_a_worker_does_jobs_and_ends_with_its_parent(worker, tmp_path):
    one = training("digits", "limit=64", "batch_size=32", "epochs=1", "widths=[2,32]", "net_options.multiplier=0.25")
    shared = {"scale": "tiny", "seeds": 1, "out": str(tmp_path), "data": None, "device": None}
    job = {"kind": "train", "training": training_record(one), **shared}
    bad = {"kind": "train", "training": training_record(training("digits", "limit=99999")), **shared}
    for each in (bad, job):
        worker.stdin.write(json.dumps(each) + "\n")
    worker.stdin.flush()
    told = []
    while len(told) < 2:
        line = json.loads(worker.stdout.readline())
        if "share" not in line:
            told.append(line)
    assert "limit=99999 is not allowed" in told[0]["error"]
    assert told[1]["done"]["seconds"] > 0
    assert (tmp_path / "trainings" / one.name / "model.pt").exists()
    long = {**job, "training": training_record(training("digits", "epochs=4000"))}
    worker.stdin.write(json.dumps(long) + "\n")
    worker.stdin.flush()
    time.sleep(0.5)
    worker.stdin.close()  # as when the parent is killed
    assert worker.wait(timeout=60) == 0
