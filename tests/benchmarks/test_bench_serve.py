"""Tables and verdicts of bench/serve.py, from slices made by hand."""

import csv

import numpy as np
import pytest
import serve_results
from serve_results import Measured, better_in_both, grid_name, grid_rows, read, save, slice_path, verdicts

from anyprec.loadtest.outcome import LoadOutcome

NAN = float("nan")
LABELS = np.array([0, 1, 2, 3])
OWN = {"8": np.array([0, 1, 2, 3]), "1": np.array([0, 1, 0, 0])}  # 8 bit is right on all images, 1 bit on two of them


def outcome(latency_ms, profile, said):
    """Requests 10 ms apart; a latency of None is a rejection."""
    count = len(latency_ms)
    planned = 0.01 * np.arange(count)
    there = np.array([ms is not None for ms in latency_ms])
    latency = np.array([NAN if ms is None else ms / 1e3 for ms in latency_ms])
    return LoadOutcome(
        planned=planned,
        sent=planned + 1e-4,
        done=planned + np.where(there, latency, 0.001),
        status=np.where(there, 200, 503).astype(np.int16),
        profile=np.where(there, profile, ""),
        queue_s=np.where(there, 0.001, NAN),
        run_s=np.where(there, 0.002, NAN),
        batch=there.astype(np.int32),
        retry_after_s=np.where(there, NAN, 1.0),
        image=np.arange(count) % 4,
        outputs={i: np.eye(4, dtype=np.float32)[said[i]].tobytes() for i in range(count) if there[i]},
        cpu_s=1e-4 * count,
        connections=2,
        notes={"503": int((~there).sum())},
    )


def measured(tmp_path, policies, rounds=3):
    """policies: name -> (latencies, widths) of 8 requests; the server says what the file would say."""
    for turn in range(rounds):
        for policy, (latency, widths) in policies.items():
            said = [int(OWN[width][i % 4]) for i, width in enumerate(widths)]
            path = slice_path(tmp_path, grid_name(0.8, 4.0, policy, turn))
            save(path, outcome(latency, widths, said), np.dtype(np.float32))
    facts = {"slo_s": 0.02, "c8": 100.0, "switching_us": {"median": 3.0, "error": 0.5}, "overhead_ms": {"p50": 0.8}}
    expected = {"8": 93.0, "1": 85.0}
    return Measured(facts, tmp_path, list(policies), [0.8], [4.0], rounds, 0.08, 1.0, LABELS, OWN, expected)


GOOD = ([5] * 8, ["8"] * 7 + ["1"])  # the last is image 3, which 1 bit gets wrong
EIGHT = ([5] * 4 + [30, 30, None, None], ["8"] * 8)


def test_slices_come_back_as_they_were(tmp_path):
    first = outcome([5, None, 30, 7], ["8", "8", "1", "8"], [0, 0, 2, 3])
    save(tmp_path / "a.npz", first, np.dtype(np.float32))
    again = read(tmp_path / "a.npz")
    assert again.label.tolist() == [[0], [-1], [2], [3]]
    assert again.outcome.status.tolist() == [200, 503, 200, 200] and again.outcome.notes == {"503": 1}
    assert np.array_equal(again.outcome.latency, first.latency, equal_nan=True)
    assert not list(tmp_path.glob("*.part"))


def test_a_row_worked_by_hand(tmp_path):
    m = measured(tmp_path, {"adaptive": GOOD, "8": EIGHT})
    ours, theirs = grid_rows(m)
    assert (ours["requests"], ours["misses"], ours["attainment"]) == (24, 0, 1.0)
    assert ours["accuracy"] == pytest.approx(100 * 7 / 8) and ours["points_below_8_bit"] == pytest.approx(12.5)
    assert ours["mean_bits"] == pytest.approx((7 * 8 + 1) / 8) and ours["share_1"] == 1 / 8
    assert (theirs["misses"], theirs["late"], theirs["rejected"], theirs["errors"]) == (12, 6, 6, 0)
    assert theirs["attainment"] == 0.5 and theirs["accuracy"] == 100
    assert theirs["effective_accuracy"] == 50 and theirs["goodput_per_s"] == pytest.approx(50)
    assert ours["wrong_answers"] == theirs["wrong_answers"] == 0
    assert ours["p99_ms"] == 5 and ours["generator_cpu_us"] == pytest.approx(100)


def test_wrong_answers_are_counted(tmp_path):
    m = measured(tmp_path, {"adaptive": GOOD}, rounds=1)
    m.own = {**OWN, "8": np.array([0, 1, 2, 0])}  # of the seven at 8 bit, one is image 3
    assert grid_rows(m)[0]["wrong_answers"] == 1


def test_without_labels_the_file_tells_what_to_expect(tmp_path):
    m = measured(tmp_path, {"adaptive": GOOD})
    m.labels, m.own = None, {}
    row = grid_rows(m)[0]
    assert row["accuracy"] == pytest.approx((7 * 93 + 85) / 8) and row["points_below_8_bit"] == pytest.approx(1.0)


def verdict(m, words):
    (found,) = [said for said in verdicts(m, grid_rows(m), []) if words in said["claim"]]
    return found["holds"], found["measured"]


def test_verdicts(tmp_path):
    m = measured(tmp_path, {"adaptive": GOOD, "8": EIGHT})
    assert verdict(m, "10 x fewer") == ("yes", "0 of 24 missed, 8 bit 12: 12.0 x fewer")
    said = "on the test set, by the widths chosen; 12.50 +- 6.75 on the images sent"  # one in eight at 1 bit, and wrong
    assert verdict(m, "at most 1 point") == ("yes", f"1.00 points {said}")
    m.expected = {"8": 93.0, "1": 84.0}
    assert verdict(m, "at most 1 point") == ("no", f"1.12 points {said}")
    assert verdict(m, "no fixed width")[0] == "yes"  # 8 bit is more accurate, and late
    assert verdict(m, "at most 10 us") == ("yes", "3.0 us, +- 0.5")
    assert verdict(m, "below 1.5 ms") == ("yes", "0.80 ms")
    assert verdict(m, "every answer") == ("yes", "0 of 42 differ")
    m.facts["switching_us"]["median"] = 11.0
    m.facts["overhead_ms"]["p50"] = 1.6
    assert verdict(m, "at most 10 us")[0] == verdict(m, "below 1.5 ms")[0] == "no"


def test_noise_leaves_it_open(tmp_path):
    m = measured(tmp_path, {"adaptive": GOOD, "8": EIGHT})
    m.facts["switching_us"] = {"median": -14.0, "error": 17.5}
    assert verdict(m, "at most 10 us") == ("", "-14.0 us, +- 17.5")
    m.facts["switching_us"] = {"median": 18.0, "error": 3.0}
    assert verdict(m, "at most 10 us")[0] == "no"
    m = measured(tmp_path / "one", {"adaptive": ([5] * 7 + [30], ["1"] * 8), "8": ([5] * 8, ["8"] * 8)}, rounds=1)
    assert verdict(m, "no fixed width")[0] == ""


def test_slices_that_were_sent_again_are_told_apart(tmp_path):
    m = measured(tmp_path, {"adaptive": GOOD})
    for turn in range(m.rounds):
        path = slice_path(tmp_path, grid_name(0.8, 1.0, "adaptive", turn))
        save(path, outcome(*GOOD, [0] * 8), np.dtype(np.float32))
    m.bursts = [1.0]
    assert verdict(m, "Poisson") == ("yes", "100.000 % at 0.8 x C8, the worst of 1 loads")
    save(serve_results.again_path(path, 0), outcome(*EIGHT, [0] * 8), np.dtype(np.float32))
    stood = "87.500 % with the slices in which the machine stood still"  # four of 32
    assert verdict(m, "Poisson") == ("yes", f"100.000 % at 0.8 x C8, the worst of 1 loads; {stood}")
    assert grid_rows(m)[0]["requests"] == 24


def test_the_simulator_gets_the_times_of_the_runs(tmp_path):
    """Sixteen runs in a slice: 2 ms and, twice, 5 ms; each batch but the first waited 3 ms and began 0.5 ms after."""
    m = measured(tmp_path, {"8": ([5] * 8, ["8"] * 8)}, rounds=4)
    m.facts["table"] = {"ms": {"8": {"1": 4.0, "2": 6.0}, "1": {"1": 1.0}}}
    for turn in range(4):
        run = np.where(np.arange(16) % 8 == 7, 0.005, 0.002)
        start = np.cumsum(np.r_[0.003, run[:-1] + 0.0005])
        part = outcome([5] * 16, ["8"] * 16, [0] * 16)
        part.run_s, part.queue_s, part.sent = run, np.full(16, 0.003), start - 0.003 - 0.0002
        part.done = start + run + 0.0002
        save(slice_path(tmp_path, grid_name(0.8, 4.0, "8", turn)), part, np.dtype(np.float32))
    times, noise = serve_results.fitted(m)
    assert times["8"][1] == pytest.approx(0.0025)  # not the table's 4 ms
    assert times["8"][2] == pytest.approx(0.003 + 0.0005) and times["1"][1] == pytest.approx(0.001 + 0.0005)
    assert noise.way == pytest.approx((0.0002, 0.0002)) and noise.spread == pytest.approx(0, abs=1e-9)
    assert noise.hiccup == pytest.approx(0.003) and noise.hiccups == pytest.approx(2 / (14 * 0.002 + 2 * 0.005))


def test_a_fixed_width_that_is_better_in_both_is_found(tmp_path):
    bad = ([5] * 7 + [30], ["1"] * 8)
    m = measured(tmp_path, {"adaptive": bad, "8": ([5] * 8, ["8"] * 8)})
    assert better_in_both(m, 0.8, 4.0, "8") == (True, True)
    assert verdict(m, "no fixed width")[0] == "no"
    assert verdict(m, "10 x fewer")[0] == "no"


def test_files(tmp_path):
    m = measured(tmp_path, {"adaptive": GOOD, "8": EIGHT})
    said = serve_results.write(m, tmp_path / "results", None)
    names = {"serve_facts.csv", "serve_grid.csv", "serve_verdicts.csv"}
    assert {path.name for path in (tmp_path / "results").iterdir()} == names
    rows = list(csv.DictReader((tmp_path / "results" / "serve_verdicts.csv").read_text().splitlines()))
    assert [row["claim"] for row in rows] == [one["claim"] for one in said]


@pytest.mark.thorough
def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    m = measured(tmp_path, {"adaptive": GOOD, "8": EIGHT})
    save(slice_path(tmp_path, "step-adaptive"), outcome(*GOOD, [0] * 8), np.dtype(np.float32))
    serve_results.write(m, tmp_path / "results", tmp_path / "img")
    assert {path.name for path in (tmp_path / "img").iterdir()} == {"serve_grid.png", "serve_step_adaptive.png"}
