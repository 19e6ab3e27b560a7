"""When replicas are added and taken away: bits first, replicas second. No Ray is needed here."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import load, save

from anyprec.errors import ServeError
from anyprec.serve.ray.options import Options, read_options
from anyprec.serve.ray.scaling import LEAST, MOST, SHORT, report_of, scale
from anyprec.serve.scheduling.latency import LatencyTable
from anyprec.serve.scheduling.queue import Request
from anyprec.serve.scheduling.scheduler import Scheduler

# ms by images: a batch of 4 serves twice as many as four of 1; one of 32 takes too long for a target of 50 ms.
TABLE = {"1": {"1": 1.0, "4": 2.0, "32": 30.0}, "8": {"1": 8.0, "4": 16.0, "32": 240.0}}


def stats(rate=0.0, answers=None, attainment=1.0, policy="adaptive", bits=None):
    """What Scheduler.stats() says, as far as it is read here."""
    return {
        "rate": rate,
        "table": {"ms": TABLE},
        "levels": [{"name": "1", "accuracy": 88.0}, {"name": "8", "accuracy": 93.0}],
        "slo_ms": 50.0,
        "policy": policy,
        "bits": bits,
        "window": {"bits_histogram": answers or {}, "attainment": attainment},
    }


def wanted(replicas, *reports, running=None):
    """What the policy says to `replicas` replicas of which some have reported."""
    metrics = {key: {i: report[key] for i, report in enumerate(reports)} for key in (LEAST, MOST, SHORT)}
    context = SimpleNamespace(
        aggregated_metrics=metrics if reports else {},
        target_num_replicas=replicas,
        current_num_replicas=replicas if running is None else running,
    )
    return scale(context)[0]


# --- what a replica reports ---


def test_a_report_is_the_replicas_that_both_ends_need():
    # 0.5 ms an image at 1 bit, 4 ms at 8: 700 images a second keep 0.35 and 2.8 engines at work; 70 % of each is used.
    found = report_of([stats(rate=700.0)], busy=0.7)
    assert found[LEAST] == pytest.approx(0.5) and found[MOST] == pytest.approx(4.0) and found[SHORT] == 0.0
    assert report_of([stats(rate=700.0)], busy=0.7, engines=2)[LEAST] == pytest.approx(0.25)
    assert report_of([stats(rate=350.0), stats(rate=350.0)], busy=0.7)[MOST] == pytest.approx(4.0)


def test_a_fixed_width_leaves_no_range():
    found = report_of([stats(rate=700.0, policy="fixed", bits=8)])
    assert found[LEAST] == found[MOST] == pytest.approx(4.0)


@pytest.mark.parametrize(("settle", "least"), [(None, 0.5), (1, 0.5), (2, 4.0), (8, 4.0)])
def test_a_width_to_stay_at(settle, least):
    assert report_of([stats(rate=700.0)], settle=settle)[LEAST] == pytest.approx(least)


def test_misses_count_where_no_narrower_width_is_left():
    assert report_of([stats(answers={"1": 90, "8": 10}, attainment=0.8)])[SHORT] == pytest.approx(0.2)
    assert report_of([stats(answers={"1": 10, "8": 90}, attainment=0.8)])[SHORT] == 0.0
    assert report_of([stats(answers={}, attainment=0.0)])[SHORT] == 1.0  # all refused
    assert report_of([stats(answers={"8": 9}, attainment=0.8)], settle=8)[SHORT] == pytest.approx(0.2)


def test_reads_what_a_scheduler_says(tmp_path):
    model = load(save(tmp_path / "net.apm"))
    ms = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
    table = LatencyTable({str(b): {n: 1e-3 * n * ms[b] for n in (1, 8)} for b in model.widths})
    scheduler = Scheduler(model, table, slo=1.0)
    idle = report_of([scheduler.stats()])
    assert idle == {LEAST: 0.0, MOST: 0.0, SHORT: 0.0}
    with scheduler:
        x = np.zeros((1, 3, 8, 8), np.uint8)
        for _ in range(20):
            scheduler.submit(Request(x, scheduler.clock() + 10.0)).result()
        busy = report_of([scheduler.stats()])
    assert 0 < busy[LEAST] < busy[MOST] and busy[SHORT] == 0.0


# --- what the policy makes of it ---


def report(least, most, short=0.0):
    return {LEAST: least, MOST: most, SHORT: short}


def test_within_the_range_nothing_changes():
    assert wanted(3, report(0.5, 2.1), report(0.5, 2.1), report(0.4, 2.1)) == 3


def test_too_many_for_the_narrowest_width_adds():
    assert wanted(3, report(1.2, 9.0), report(1.2, 9.0), report(1.2, 9.0)) == 4
    assert wanted(1, report(3.5, 28.0)) == 4


def test_more_than_the_widest_width_needs_are_taken_away():
    assert wanted(3, report(0.1, 0.5), report(0.1, 0.5), report(0.1, 0.5)) == 2
    assert wanted(3, report(0, 0), report(0, 0), report(0, 0)) == 0  # Ray keeps to min_replicas


def test_without_reports_nothing_changes():
    assert wanted(3) == 3


def test_near_a_whole_number_it_rests():
    for whole in (1.95, 2.05):
        assert wanted(2, *[report(whole / 2, whole / 2)] * 2) == 2


def test_misses_add_one_at_a_time():
    assert wanted(2, report(0.7, 6.0, 0.1), report(0.7, 6.0, 0.1)) == 3
    assert wanted(2, report(0.7, 6.0, 0.005), report(0.7, 6.0, 0.005)) == 2  # so few are endured
    assert wanted(2, report(0.1, 6.0, 1.0), report(0.1, 6.0, 1.0)) == 2  # impossible deadlines, idle engines
    assert wanted(3, report(0.7, 6.0, 0.1), report(0.9, 6.0, 0.1), running=2) == 3  # one is still starting


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.floats(0, 20), st.floats(1, 8), st.floats(0, 1)), max_size=8),
)
def test_bounds(replicas, loads):
    found = wanted(replicas, *(report(least, least * ratio, short) for least, ratio, short in loads))
    least, most = sum(a for a, _, _ in loads), sum(a * r for a, r, _ in loads)
    assert isinstance(found, int) and found >= 0
    if loads:
        assert min(replicas, math.ceil(least - 0.11)) <= found <= max(replicas + 1, math.ceil(most + 0.11))
    else:
        assert found == replicas


def test_a_day():
    """Load up and down again, bits from 8 to 1: first the width gives way, then replicas come; they go in reverse."""
    rates = [*range(100, 6000, 100), *range(6000, 0, -100)]
    replicas, seen = 1, []
    for rate in rates:
        each = report_of([stats(rate=rate / replicas)])
        replicas = min(6, max(1, wanted(replicas, *[each] * replicas)))
        seen.append((rate, replicas))
    full = 0.7 / 4e-3  # images a second that one replica serves at 8 bit
    narrow = 0.7 / 0.5e-3
    up = dict(seen[: len(rates) // 2])
    assert all(count == 1 for rate, count in up.items() if rate < narrow)  # eight times what 8 bit can
    assert max(up.values()) == math.ceil(5900 / narrow - 0.1)
    assert all(count <= max(1, math.ceil(rate / full + 0.1)) for rate, count in seen)
    assert seen[-1][1] == 1


# --- options ---


def test_options_from_a_command_line_and_from_a_file():
    typed = {
        "model": ["a.apm", "b=x/b.apm"],
        "slo": "50ms",
        "levels": [1, 4, "auto"],
        "bits": 4,
        "busy": 0.5,
        "num_cpus": 1,
    }
    words = {
        "model": "a.apm,b=x/b.apm",
        "slo": "50ms",
        "levels": "1,4,auto",
        "bits": "4",
        "busy": "0.5",
        "num_cpus": "1",
    }
    assert read_options(typed) == read_options(words)
    assert read_options(words) == Options(
        model=("a.apm", "b=x/b.apm"), slo=0.05, bits=4, levels=("1", "4", "auto"), busy=0.5, num_cpus=1.0
    )
    assert read_options({"model": "a.apm", "bits": None, "downscale_delay": "5m"}).downscale_delay == 300.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "no model is given"),
        ({"model": "a.apm", "slow": "1"}, "slow='1' is not an option of the Ray application; there are model, slo"),
        ({"model": "a.apm", "slo": "fast"}, "slo='fast' cannot be: 'fast' is not a time"),
        ({"model": "a.apm", "slo": 50}, "slo=50 cannot be: '50' has no unit; write 50ms or 50s"),
        ({"model": "a.apm", "num_cpus": "many"}, "num_cpus='many' cannot be"),
        ({"model": "a.apm", "busy": "1.5"}, "busy='1.5' cannot be: 1.5 is not a share"),
        ({"model": "a.apm", "policy": "greedy"}, "choose one of adaptive, accuracy"),
        ({"model": "a.apm", "layout": "CHW"}, "layout='CHW' is not known"),
        ({"model": "a.apm", "min_replicas": "3", "max_replicas": "2"}, "min_replicas=3 is more than max_replicas=2"),
        ({"model": "a.apm", "slo": "5ms", "transit": "5ms"}, "leaves nothing of slo=0.005s"),
        ({"model": "a.apm", "levels": "1,,8"}, "levels='1,,8' cannot be: '1,,8' is not a list of names"),
        ({"model": "a.apm,dir/a.apm"}, "two models are called 'a'"),
    ],
)
def test_options_that_cannot_be(args, message):
    with pytest.raises(ServeError, match=message):
        read_options(args)
