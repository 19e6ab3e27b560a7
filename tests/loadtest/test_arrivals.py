"""Arrival times: rates, burstiness, order, repeatability, and every form of trace."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyprec.errors import ArrivalsError
from anyprec.loadtest.arrivals import gamma, parse, poisson, ramp, steps, trace


def cv2_of(times):
    gaps = np.diff(times)
    return gaps.var() / gaps.mean() ** 2


@pytest.mark.parametrize("cv2", [0.5, 1, 2, 4, 8])
def test_gamma_has_the_rate_and_the_burstiness_asked_for(cv2):
    times = gamma(200, cv2, 500, seed=3)
    # A mean of 100,000 gaps is off by sqrt(cv2 / 100000): 0.9 % for cv2 = 8. Four of those.
    assert len(times) == pytest.approx(100_000, rel=4 * np.sqrt(cv2 / 1e5))
    assert cv2_of(times) == pytest.approx(cv2, rel=0.1)


def test_poisson_is_gamma_of_one():
    assert (poisson(50, 10, seed=4) == gamma(50, 1, 10, seed=4)).all()
    # Counts of a Poisson process scatter as much as their mean: 1000 windows of 20 requests.
    counts = np.histogram(poisson(200, 100, seed=1), bins=1000, range=(0, 100))[0]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.2)


def test_a_clock():
    times = gamma(100, 0, 2, seed=0)
    assert len(times) == 200 and np.allclose(np.diff(times), 0.01)
    assert (parse("uniform:100", 2) == times).all()


def test_runs_do_not_all_begin_with_a_burst():
    # Expected number within the first 50 ms at 100 / s: 5, whatever the burstiness.
    first = [np.sum(gamma(100, 8, 0.2, seed) < 0.05) for seed in range(3000)]
    assert np.mean(first) == pytest.approx(5, abs=0.8)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.tuples(st.floats(0, 500), st.floats(0.01, 2)), min_size=1, max_size=5),
    cv2=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_steps_are_ordered_within_their_time_and_repeat(parts, cv2, seed):
    times = steps(parts, cv2, seed)
    assert times.dtype == np.float64
    assert (np.diff(times) >= 0).all()
    assert ((times >= 0) & (times < sum(s for _, s in parts) + 1e-9)).all()
    assert (times == steps(parts, cv2, seed)).all()


def test_steps_and_pauses():
    times = steps([(100, 10), (0, 5), (400, 5)], seed=2)
    counts = np.histogram(times, bins=[0, 10, 15, 20])[0]
    assert counts[1] == 0
    assert counts[0] == pytest.approx(1000, abs=130) and counts[2] == pytest.approx(2000, abs=180)


@pytest.mark.parametrize(("start", "end"), [(0, 400), (400, 0), (100, 300), (200, 200)])
def test_ramp(start, end):
    times = ramp(start, end, 20, seed=5)
    assert (np.diff(times) >= 0).all() and times[-1] < 20
    counts = np.histogram(times, bins=[0, 10, 20])[0]
    middle = (start + end) / 2
    for count, rate in zip(counts, ((start + middle) / 2, (middle + end) / 2), strict=True):
        assert count == pytest.approx(10 * rate, abs=4 * np.sqrt(10 * rate))


def test_other_seeds_other_times():
    assert len(poisson(100, 1, 1)) != len(poisson(100, 1, 2)) or (poisson(100, 1, 1) != poisson(100, 1, 2)).any()


# --- Traces ---


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "0\n1\n1.5\n4\n"),
        ("b.csv", "time,size\n10,3\n11,3\n11.5,9\n14,1\n"),
        ("c.csv", "# a day\nsize\ttimestamp\n1\t100\n1\t104\n1\t101\n1\t101.5\n"),
        ("d.jsonl", "\n".join(json.dumps({"Time": t}) for t in (0, 1, 1.5, 4))),
        ("e.json", "[0, 1, 1.5, 4]"),
    ],
)
def test_traces_of_times(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert trace(tmp_path / name).tolist() == [0, 1, 1.5, 4]
    # 4 requests in 4 s and one mean gap more, squeezed into 1 s
    squeezed = trace(tmp_path / name, seconds=1)
    assert np.allclose(squeezed, np.array([0, 1, 1.5, 4]) / (4 * 4 / 3))
    assert (parse(f"trace:{tmp_path / name}", 1) == squeezed).all()


@pytest.mark.parametrize(
    "text", ["count\n30\n0\n12\n", "hour,requests\n0,30\n1,0\n2,12\n", '{"n":30}\n{"n":0}\n{"n":12}']
)
def test_traces_of_counts(tmp_path, text):
    path = tmp_path / "counts.csv"
    path.write_text(text)
    times = trace(path, interval=60)
    assert np.histogram(times, bins=[0, 60, 120, 180])[0].tolist() == [30, 0, 12]
    assert (np.diff(times) >= 0).all()
    squeezed = trace(path, seconds=3, interval=60)
    assert np.histogram(squeezed, bins=[0, 1, 2, 3])[0].tolist() == [30, 0, 12]
    assert (parse(f"trace:{path}:60", 3) == squeezed).all()


def test_a_trace_brought_to_a_rate(tmp_path):
    path = tmp_path / "day.csv"
    path.write_text("count\n" + "\n".join(["100"] * 50 + ["300"] * 50))
    for rate in (20, 200, 1000):
        times = trace(path, seconds=10, rate=rate, seed=1)
        assert len(times) == pytest.approx(10 * rate, rel=0.1)
        # The shape stays: three of four requests are in the second half.
        assert (times > 5).mean() == pytest.approx(0.75, abs=0.06)
        assert (np.diff(times) >= 0).all() and times[-1] < 10


@pytest.mark.parametrize(
    "text", ["", "\n\n", "a,b\n1,2\n", "1,2\n3,4\n", "time\nsoon\n", '{"x": 1}', "{", "count\n-3\n", "nan\n"]
)
def test_what_is_no_trace(tmp_path, text):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ArrivalsError, match=r"bad\.csv"):
        trace(path)


def test_no_such_trace(tmp_path):
    with pytest.raises(ArrivalsError, match="cannot be read"):
        trace(tmp_path / "none.csv")


# --- Forms ---


def test_forms():
    assert (parse("poisson:50", 4, 9) == poisson(50, 4, 9)).all()
    assert (parse("gamma:50:4", 4, 9) == gamma(50, 4, 4, 9)).all()
    assert (parse("ramp:50:80", 4, 9) == ramp(50, 80, 4, 1.0, 9)).all()
    assert (parse("ramp:50:80:4", 4, 9) == ramp(50, 80, 4, 4.0, 9)).all()
    assert (parse("steps:50@1,80@2", 99, 9) == steps([(50, 1), (80, 2)], 1.0, 9)).all()
    assert (parse("steps:50@1,80@2:8", 99, 9) == steps([(50, 1), (80, 2)], 8.0, 9)).all()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "poisson",
        "poisson:",
        "poisson:x",
        "gamma:50",
        "gamma:1:2:3",
        "steps:50",
        "ramp:50",
        "burst:9",
        "ramp:1:2:3:4",
    ],
)
def test_unknown_forms(text):
    with pytest.raises(ArrivalsError, match="write poisson:200"):
        parse(text, 1)


@pytest.mark.parametrize("text", ["poisson:-1", "poisson:inf", "poisson:nan", "gamma:50:-1", "poisson:1e12"])
def test_impossible_numbers(text):
    with pytest.raises(ArrivalsError, match=r"give|at most"):
        parse(text, 1)


def test_the_package_still_opens_model_files():
    import anyprec
    import anyprec.loadtest.arrivals
    from anyprec.errors import ModelFileError

    with pytest.raises(ModelFileError, match=r"nothing\.apm"):
        anyprec.load("nothing.apm")
