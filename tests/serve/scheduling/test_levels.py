"""Levels: widths, plans and cascades of a file; what they cost; and that each answers as the oracle does."""

import time
from dataclasses import replace

import numpy as np
import pytest
from serving import images, level_graph, save

from anyprec.errors import CascadeError, ServeError, UnsupportedBits
from anyprec.format import write
from anyprec.run.model import load
from anyprec.run.oracle import run_graph
from anyprec.serve.scheduling.core import SchedulerCore
from anyprec.serve.scheduling.engine import cascade_accuracy, measure_latency, served_levels
from anyprec.serve.scheduling.latency import SHARE_MEMORY, GoesOn, LatencyTable
from anyprec.serve.scheduling.queue import Request
from anyprec.serve.scheduling.scheduler import Scheduler

TIMES = {"1": {1: 1.0, 4: 4.0}, "8": {1: 3.0, 4: 12.0}, "auto": {1: 3.5, 4: 14.0}}  # 2.5 s more for each that goes on
WAY = {"auto": GoesOn("1", 0.2)}


@pytest.fixture
def model(tmp_path):
    write(level_graph(), tmp_path / "net.apm")
    with load(tmp_path / "net.apm") as made:
        yield made


# --- Cost -----------------------------------------------------------------------------------------------------------


def test_a_cascade_costs_its_first_stage_and_a_share_of_the_rest():
    table = LatencyTable(TIMES, 4, WAY)
    for n in range(1, 5):
        assert table.typical("auto", n) == pytest.approx(n * (1.0 + 0.2 * 2.5))
    assert table.share("auto") == 0.2 and table.share("8") is None


def test_the_upper_quantile_is_that_of_how_many_go_on():
    table = LatencyTable(TIMES, 4, {"auto": GoesOn("1", 0.1)})
    tail = table.tail
    # P(0 of 1 go on) = 0.9 < 0.98: one; of 4, P(at most 1) = 0.948, P(at most 2) = 0.996: two
    assert table.high("auto", 1) == pytest.approx((1 + 2.5) * tail)
    assert table.high("auto", 4) == pytest.approx((4 + 2 * 2.5) * tail)
    never = LatencyTable(TIMES, 4, {"auto": GoesOn("1", 0.0)})
    assert never.high("auto", 4) == pytest.approx(4 * tail)


def test_the_share_is_learned_and_the_times_stay():
    table = LatencyTable(TIMES, 4, WAY)
    draw = np.random.default_rng(0)
    for i in range(1500):
        went_on = int((draw.random(4) < 0.6).sum())
        table.observe("auto", 4, 4.0 + 2.5 * went_on, 0.01 * i, went_on)
    assert table.share("auto") == pytest.approx(0.6, abs=0.08)
    assert table.typical("auto", 4) == pytest.approx(4 + 4 * table.share("auto") * 2.5, rel=0.03)
    assert table.typical("1", 1) == pytest.approx(1.0, rel=0.02) and table.drift == pytest.approx(1.0, abs=0.01)


def test_a_slower_machine_is_drift_and_not_a_share():
    table = LatencyTable(TIMES, 4, WAY)
    for i in range(200):
        went_on = 1 if i % 5 == 0 else 0
        table.observe("auto", 1, 2 * (1.0 + 2.5 * went_on), 0.01 * i, went_on)
    assert table.typical("8", 1) == pytest.approx(6.0, rel=0.1)
    assert table.share("auto") == pytest.approx(0.2, abs=0.03)


def test_probes_and_unknown_counts_do_not_change_the_share():
    table = LatencyTable(TIMES, 4, WAY)
    table.observe("auto", 4, 14.0, 0.0, 4, typical_input=False)
    table.observe("auto", 4, 1000.0, 0.0, None)
    assert table.share("auto") == 0.2 and table.runs == 1
    assert SHARE_MEMORY > 100


@pytest.mark.parametrize(
    "way", [GoesOn("2", 0.2), GoesOn("auto", 0.2), GoesOn("1", -0.1), GoesOn("1", 1.1), GoesOn("1", float("nan"))]
)
def test_cascades_that_cannot_be(way):
    with pytest.raises(ServeError) as error:
        LatencyTable(TIMES, 4, {"auto": way})
    assert "\n" not in str(error.value)


# --- Which levels ----------------------------------------------------------------------------------------------------


def test_all_levels_of_a_file(model):
    levels = served_levels(model)
    assert levels.accuracies == {"1": 81.0, "2": 82.0, "4": 84.0, "8": 88.0, "fast": 81.5, "auto": 87.0}
    assert levels.cascades == {"auto": GoesOn("1", 0.5)}


def test_chosen_levels(model):
    levels = served_levels(model, ("8", "auto"))
    assert levels.names == ("8", "auto") and levels.timed == ("8", "auto", "1")
    table = measure_latency(model, slo=0.05, max_batch=2, seconds=0.01, levels=levels)
    core = SchedulerCore(levels.accuracies, table, slo=10.0, levels=levels.names)
    assert {level.name for level in core.levels} <= {"8", "auto"}
    with pytest.raises(UnsupportedBits, match="bits=1 is not served; choose one of"):
        core.find_level(1)


@pytest.mark.parametrize("name", ["3", "32", "slow", "", "auto "])
def test_unknown_levels_are_refused_in_one_line(model, name):
    with pytest.raises(ServeError, match="is not in this model, which has 1, 2, 4, 8, fast, auto") as error:
        served_levels(model, (name,))
    assert "\n" not in str(error.value)


def test_a_cascade_that_saves_no_time_is_not_on_the_front(model):
    levels = served_levels(model)
    times = {name: {1: 1.0} for name in levels.names} | {"8": {1: 1.1}, "auto": {1: 2.1}}
    core = SchedulerCore(levels.accuracies, LatencyTable(times, 4, levels.cascades), slo=10.0, levels=levels.names)
    assert "auto" in core.all_levels and "auto" not in {level.name for level in core.levels}


def test_without_labels_its_accuracy_is_a_lower_bound(model, tmp_path):
    write(level_graph(accuracy=None), tmp_path / "other.apm")
    with load(tmp_path / "other.apm") as other:
        assert cascade_accuracy(other) == 88.0 - (100 - 97.0)


def test_hostile_cascades_are_refused(tmp_path):
    graph = level_graph()
    for bad in ('"share": 0.5', '"threshold": 0.5', '"profile": "8"'):
        key = bad.split(":")[0]
        write(replace(graph, cascade=graph.cascade.replace(bad, f"{key}: -3")), tmp_path / "bad.apm")
        with load(tmp_path / "bad.apm") as other, pytest.raises(CascadeError) as error:
            served_levels(other)
        assert "\n" not in str(error.value)


def test_a_file_without_one_has_no_cascade(tmp_path):
    with load(save(tmp_path / "net.apm")) as plain:
        levels = served_levels(plain)
    assert levels.names == ("1", "2", "4", "8") and not levels.cascades


# --- Answers ----------------------------------------------------------------------------------------------------------


def test_every_level_answers_as_the_oracle(model):
    graph = level_graph()
    x = images(12, seed=3)
    wanted = {
        name: run_graph(graph, x.transpose(0, 2, 3, 1), name)["head"].reshape(12, -1)
        for name in ("1", "2", "4", "8", "fast")
    }
    levels = served_levels(model)
    table = measure_latency(model, slo=5.0, max_batch=4, seconds=0.05, levels=levels)
    with Scheduler(model, table, slo=5.0, levels=levels) as scheduler:
        seen = set()
        for name in levels.names:
            bits = int(name) if name.isdigit() else name
            futures = [
                scheduler.submit(Request(x[at : at + 3], deadline=time.monotonic() + 5, bits=bits))
                for at in range(0, 12, 3)
            ]
            for at, future in zip(range(0, 12, 3), futures, strict=True):
                answer = future.result(10)
                assert answer.bits == bits
                stages = (bits,) * 3 if answer.stages is None else answer.stages
                assert (answer.stages is None) == (name != "auto")
                seen.update(stages if name == "auto" else ())
                for i, stage in enumerate(stages):
                    assert np.array_equal(answer.outputs[0][i], wanted[str(stage)][at + i])
                if name == "auto":
                    assert answer.went_on == sum(stage != 1 for stage in stages)
        assert seen == {1, 8}, "both stages must be used, else this tests little"
        assert scheduler.stats()["table"]["cascades"]["auto"]["first"] == "1"


def test_adaptive_chooses_among_the_front(model):
    """By the table: the plan and the cascade are on the front, 2 and 4 bit are not."""
    times = {"1": {1: 1.0}, "fast": {1: 1.1}, "2": {1: 2.5}, "4": {1: 2.6}, "8": {1: 3.0}, "auto": {1: 2.8}}
    levels = served_levels(model)
    table = LatencyTable({n: {1: 1e-3 * s[1]} for n, s in times.items()}, 1, {"auto": GoesOn("1", 0.2)})
    core = SchedulerCore(levels.accuracies, table, slo=0.01, levels=levels.names)
    assert [level.name for level in core.levels] == ["1", "fast", "auto", "8"]
    assert [level["share"] for level in core.front()] == [None, None, 0.2, None]
    for slack, name in ((0.0100, "8"), (0.0033, "auto"), (0.0014, "fast"), (0.0011, "1")):
        core.arrive(Request(None, deadline=slack), 0.0)
        batch = core.next(0.0)
        assert batch.level.name == name
        core.finish(batch, None, 0.0)
