"""The latency table: measured, interpolated, and kept up to date without being fooled by a hiccup."""

import json
import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyprec.errors import ServeError
from anyprec.serve.scheduling.latency import LatencyTable, measure, read_table

TIMES = {"1": {1: 0.001, 4: 0.004}, "8": {1: 0.0025, 4: 0.01}}


def test_between_measured_batches_lies_a_straight_line():
    table = LatencyTable(TIMES, max_batch=8)
    assert table.typical("8", 1) == pytest.approx(0.0025)
    assert table.typical("8", 2) == pytest.approx(0.005)
    assert table.typical("8", 8) == pytest.approx(0.02)  # beyond the last: the line goes on
    assert table.typical("8", 16) == pytest.approx(0.04)  # beyond max_batch too
    assert table.high("8", 1) > table.typical("8", 1)


def test_one_cell_alone_means_that_time_grows_with_the_batch():
    assert LatencyTable({"8": {1: 0.002}}, 3).rows["8"] == pytest.approx([0, 0.002, 0.004, 0.006])


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-6, 10)), st.floats(1e-6, 10), st.integers(1, 80))
def test_rows_never_fall(cells, one, max_batch):
    row = LatencyTable({"8": {**cells, 1: one}}, max_batch).rows["8"]
    assert len(row) == max_batch + 1 and row[0] == 0 and row[1] == one
    assert all(a <= b for a, b in pairwise(row))


def test_noise_in_one_cell_does_not_carry_the_others_away():
    table, draw = LatencyTable(TIMES), random.Random(1)
    for i in range(5000):
        table.observe("8", 1, 0.0025 * math.exp(draw.gauss(0, 0.05)), i * 0.01)
        assert table.typical("8", 1) == pytest.approx(0.0025, rel=0.12)
        assert table.typical("1", 4) == pytest.approx(0.004, rel=0.12)


def test_a_hiccup_changes_next_to_nothing():
    table = LatencyTable(TIMES)
    for i in range(100):
        table.observe("8", 1, 0.0025, i * 0.01)
    before = table.typical("8", 1)
    table.observe("8", 1, 0.5, 1.0)
    assert table.typical("8", 1) == pytest.approx(before, rel=0.02)
    for i in range(3):
        table.observe("8", 1, 0.5, 1.1 + i)
    assert table.typical("8", 1) == pytest.approx(before, rel=0.06)


def test_a_lasting_change_is_followed_and_holds_for_widths_that_were_not_run():
    table = LatencyTable(TIMES)
    for i in range(40):
        table.observe("8", 1, 0.005, i * 0.01)
    assert table.typical("8", 1) == pytest.approx(0.005, rel=0.05)
    assert table.typical("1", 1) == pytest.approx(0.002, rel=0.15)  # the machine is slower: for all alike
    for i in range(40):
        table.observe("8", 1, 0.0025, 1 + i * 0.01)
    assert table.typical("8", 1) == pytest.approx(0.0025, rel=0.05)


def test_a_cell_that_is_slow_by_itself_is_learned_and_forgotten_when_it_is_not_used():
    table = LatencyTable(TIMES)
    for i in range(600):
        table.observe("8", 1, 0.004, i * 0.01)
        table.observe("1", 1, 0.001, i * 0.01)
        table.observe("1", 2, 0.002, i * 0.01)
    slow = table.typical("8", 1)
    assert slow == pytest.approx(0.004, rel=0.1)
    for i in range(1200):
        table.observe("1", 1, 0.001, 6 + i * 0.5)
    assert table.typical("8", 1) == pytest.approx(0.0025, rel=0.1)  # it will be tried again


def test_the_upper_quantile_follows_the_spread():
    table = LatencyTable(TIMES)
    for i in range(320):
        table.observe("8", 1, 0.0025 * (1.5 if i % 10 == 0 else 1.0), i * 0.01)
    assert table.high("8", 1) / table.typical("8", 1) == pytest.approx(1.5, rel=0.1)
    for i in range(320):
        table.observe("8", 1, 0.0025 * (100 if i % 10 == 0 else 1.0), 4 + i * 0.01)
    assert table.high("8", 1) / table.typical("8", 1) <= 2.0  # no width cures that


def test_nonsense_is_not_learned():
    table = LatencyTable(TIMES)
    for seconds in (0.0, -1.0, math.inf, math.nan):
        table.observe("8", 1, seconds, 0.0)
    assert table.typical("8", 1) == 0.0025 and table.runs == 0


def test_stale_cells_are_named_longest_unseen_first():
    table = LatencyTable(TIMES)
    table.observe("8", 1, 0.0025, 100.0)
    table.observe("1", 1, 0.001, 101.0)
    assert table.stale(102.0, ["1", "8"], 1.0) in {("1", 4), ("8", 4)}
    table.saw("1", 4, 102.0)
    table.saw("8", 4, 102.0)
    assert table.stale(103.0, ["1", "8"], 1.0) is None
    assert table.stale(131.0, ["1", "8"], 1.0) == ("8", 1)
    assert table.stale(200.0, ["8"], 0.005) == ("8", 1)  # four images would take too long


class Machine:
    """A clock that only runs when a model does."""

    def __init__(self, fixed=0.0005, each=0.002):
        self.now, self.fixed, self.each, self.runs = 0.0, fixed, each, []

    def clock(self):
        return self.now

    def run(self, profile, batch):
        self.runs.append((profile, batch))
        self.now += (self.fixed + self.each * batch) * int(profile) / 8


def test_measuring_finds_the_times():
    machine = Machine()
    table = measure(machine.run, ("1", "8"), 32, longest=1.0, seconds=3.0, clock=machine.clock)
    for batch in (1, 3, 32):
        assert table.typical("8", batch) == pytest.approx(0.0005 + 0.002 * batch)
        assert table.typical("1", batch) == pytest.approx((0.0005 + 0.002 * batch) / 8)


def test_measuring_takes_about_the_time_it_is_given_and_no_long_batches():
    machine = Machine(each=0.2)
    table = measure(machine.run, ("1", "2", "4", "8"), 32, longest=0.5, seconds=3.0, clock=machine.clock)
    assert machine.now < 5.0
    assert {profile for profile, _ in machine.runs} == {"1", "2", "4", "8"}
    assert ("8", 32) not in machine.runs
    assert table.typical("8", 32) == pytest.approx(32 * 0.2, rel=0.2)  # in a straight line instead


def test_a_disturbance_while_measuring_is_not_taken_for_the_model():
    machine = Machine()

    def run(profile, batch):
        machine.run(profile, batch)
        if len(machine.runs) % 5 == 0:
            machine.now += 0.05

    table = measure(run, ("1", "8"), 8, longest=1.0, seconds=3.0, clock=machine.clock)
    assert table.typical("8", 1) == pytest.approx(0.0025, rel=0.05)


def test_a_large_batch_is_no_slower_than_its_images_one_by_one():
    machine = Machine()

    def run(profile, batch):
        machine.run(profile, batch)
        machine.now += 1.0 if batch == 8 else 0.0

    table = measure(run, ("8",), 8, longest=1.0, seconds=30.0, clock=machine.clock)
    assert table.typical("8", 8) <= 1.2 * 8 * table.typical("8", 1)


def test_tables_from_files(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"ms": {"8": {"1": 2.5, "8": 16}, "1": {"1": 1}}, "accuracy": {"8": 93.9}}))
    times, accuracies, cascades = read_table(path)
    assert cascades == {}
    assert times == {"8": {1: 0.0025, 8: 0.016}, "1": {1: 0.001}}
    assert accuracies == {"8": 93.9, "1": None}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"ms": {}}', '{"ms": {"8": {}}}', '{"ms": {"8": {"2": 1}}}', '{"ms": {"8": {"1": -1}}}',
     '{"ms": {"8": {"1": "x"}}}', '{"ms": {"8": {"0": 1, "1": 1}}}', '{"ms": {"8": 3}}'],
)  # fmt: skip
def test_bad_tables_are_refused_in_one_line(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ServeError) as error:
        read_table(path)
    assert "\n" not in str(error.value)
    with pytest.raises(ServeError, match="cannot be read"):
        read_table(tmp_path / "missing.json")


def test_a_scaled_table_is_for_larger_images():
    assert LatencyTable(TIMES).scaled(4.0).typical("8", 2) == pytest.approx(0.02)
