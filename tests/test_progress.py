"""Progress: what a terminal shows, what a log gets, and the odd cases. Time is made up; nothing sleeps."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyprec import progress as module
from anyprec.progress import Progress


class Screen(io.StringIO):
    """A terminal of one line's worth of memory: applies carriage returns as a terminal does."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        shown = []
        for raw in self.getvalue().split("\n"):
            cells: list[str] = []
            for piece in raw.split("\r"):
                cells[: len(piece)] = piece
            shown.append("".join(cells).rstrip())
        return shown


@pytest.fixture
def clock(monkeypatch):
    """`clock(5)` lets 5 seconds pass."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.delenv("TERM", raising=False)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return sleep


@pytest.fixture
def columns(monkeypatch):
    def set_columns(n: int) -> None:
        monkeypatch.setattr(module, "_columns", lambda file: n)

    set_columns(100)
    return set_columns


def test_a_bar_with_percentage_rate_elapsed_eta_and_fields(clock, columns):
    screen = Screen()
    with Progress("train", total=200, unit="step", file=screen) as bar:
        for _ in range(84):
            clock(0.5)
            bar.update(loss=0.512345, acc=97.25)
        shown = screen.lines()[-1]
        assert shown.startswith("train  42% [######")
        assert shown.endswith("] 84/200 step, 2.0 step/s, 0:42, 0:58 left  loss=0.5123 acc=97.25")
    assert screen.lines() == [
        "train: 84/200 step (42 %), 2.0 step/s, 0:42, loss=0.5123 acc=97.25",
        "",
    ]


def test_a_slow_unit_shows_seconds_each(clock):
    log = io.StringIO()
    with Progress("epochs", total=4, unit="epoch", file=log) as bar:
        clock(25)
        bar.update()
    assert "25.0 s/epoch, 0:25, 1:15 left" in log.getvalue()


def test_at_most_ten_redraws_a_second(clock, columns):
    screen = Screen()
    with Progress("train", total=1000, file=screen) as bar:
        for _ in range(1000):
            clock(0.001)
            bar.update()
        assert screen.getvalue().count("\r") <= 1 + 10


def log_of(clock, label, total, step_s):
    """What a job of `total` steps writes to a file, not a terminal."""
    log = io.StringIO()
    with Progress(label, total=total, file=log) as bar:
        for _ in range(total):
            clock(step_s)
            bar.update()
    return log.getvalue()


def test_a_log_gets_a_line_in_ten_seconds_and_one_at_the_end(clock):
    log = log_of(clock, "train", total=50, step_s=1)
    lines = log.splitlines()
    assert [line.split(" it")[0] for line in lines] == [f"train: {n}/50" for n in (10, 20, 30, 40, 50, 50)]
    assert "\r" not in log
    assert lines[0].endswith("0:10, 0:40 left")
    assert lines[-1] == "train: 50/50 it (100 %), 1.0 it/s, 0:50"


def test_a_quick_job_leaves_one_line_in_a_log(clock):
    assert log_of(clock, "quick", total=3, step_s=0.5) == "quick: 3/3 it (100 %), 2.0 it/s, 0:02\n"


def test_no_total(clock, columns):
    screen = Screen()
    with Progress("scan", unit="file", file=screen) as bar:
        clock(2)
        bar.update(10)
        assert screen.lines()[-1] == "scan: 10 file, 5.0 file/s, 0:02"
    assert screen.lines()[0] == "scan: 10 file, 5.0 file/s, 0:02"


def test_bytes_are_shown_in_megabytes(clock):
    log = io.StringIO()
    with Progress("download", total=170_500_000, unit="B", file=log) as bar:
        clock(10)
        bar.update(5_000_000)
    assert log.getvalue().startswith("download: 5.0/170.5 MB (2 %), 0.5 MB/s, 0:10, 5:31 left\n")


def test_total_zero_and_beyond_the_total(clock, columns):
    for total, steps in ((0, 0), (0, 2), (3, 5)):
        screen = Screen()
        with Progress("odd", total=total, file=screen) as bar:
            for _ in range(steps):
                clock(1)
                bar.update()
            assert " 100% [" in screen.lines()[-1] and "left" not in screen.lines()[-1]
        assert f"odd: {steps}/{total} it (100 %)" in screen.lines()[0]


def test_a_resumed_run_counts_only_its_own_steps_in_the_rate(clock):
    log = io.StringIO()
    with Progress("train", total=100, file=log, done=80) as bar:
        clock(10)
        bar.update(10)
    assert log.getvalue().startswith("train: 90/100 it (90 %), 1.0 it/s, 0:10, 0:10 left\n")


def test_a_written_line_goes_above_the_bar(clock, columns):
    screen = Screen()
    with Progress("train", total=10, file=screen) as bar:
        clock(1)
        bar.update()
        bar.write("epoch 1: 97.1 %")
        assert screen.lines()[0] == "epoch 1: 97.1 %"
        assert screen.lines()[1].startswith("train  10% [")


def test_a_written_line_in_a_log_is_just_a_line(clock):
    log = io.StringIO()
    with Progress("train", total=10, file=log) as bar:
        bar.write("epoch 1: 97.1 %")
    assert log.getvalue().splitlines()[0] == "epoch 1: 97.1 %"


def test_an_exception_leaves_the_last_state_and_passes(clock, columns):
    screen = Screen()
    with pytest.raises(ZeroDivisionError), Progress("train", total=10, file=screen) as bar:
        clock(1)
        bar.update(3)
        raise ZeroDivisionError
    assert screen.lines() == ["train: 3/10 it (30 %), 3.0 it/s, 0:01 (stopped)", ""]
    assert module._open == []


def test_nested_the_inner_bar_wins_and_the_outer_comes_back(clock, columns):
    screen = Screen()
    with Progress("epochs", total=2, file=screen) as outer:
        with Progress("steps", total=4, file=screen) as inner:
            for _ in range(4):
                clock(1)
                inner.update()
                outer.update(0)
                assert screen.lines()[-1].startswith("steps ")
            outer.write("a line")
            assert screen.lines()[-2:][0] == "a line"
            assert screen.lines()[-1].startswith("steps 100%")
        outer.update()
        assert screen.lines()[-1].startswith("epochs ")
    assert screen.lines() == ["a line", "epochs: 1/2 it (50 %), 4.0 s/it, 0:04", ""]


def test_nested_in_a_log_short_inner_bars_are_silent(clock):
    log = io.StringIO()
    with Progress("epochs", total=2, file=log) as outer:
        for seconds in (1, 14):
            with Progress("steps", total=1, file=log) as inner:
                clock(seconds)
                inner.done += 1
            outer.update()
    names = [line.split(":")[0] for line in log.getvalue().splitlines()]
    assert names == ["steps", "epochs", "epochs"]


@given(
    label=st.text(max_size=60),
    n=st.integers(0, 10**9),
    total=st.one_of(st.none(), st.integers(0, 10**9)),
    width=st.integers(1, 250),
)
def test_the_bar_fits_every_terminal(label, n, total, width):
    screen = Screen()
    bar = Progress(label, total=total, file=screen)
    bar.update(n, loss=1e-9, note="two\nlines")
    text = bar._bar(width)
    assert len(text) <= width
    assert "\n" not in text and "\r" not in text


def test_a_narrow_terminal_loses_the_bar_before_the_numbers(clock, columns):
    columns(40)
    screen = Screen()
    with Progress("train", total=10, file=screen) as bar:
        clock(1)
        bar.update()
        assert screen.lines()[-1] == "train  10% 1/10 it, 1.0 it/s, 0:01, 0:0"


def test_a_terminal_that_is_not_utf8(clock):
    raw = io.BytesIO()
    log = io.TextIOWrapper(raw, encoding="ascii")
    with Progress("größe 日本", total=1, file=log) as bar:
        bar.update()
        bar.write("naïve")
    assert raw.getvalue().decode("ascii").startswith("na?ve\ngr??e ??: 1/1 it")


def test_a_terminal_that_goes_away_does_not_stop_the_work(clock, columns):
    class Gone(Screen):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with Progress("train", total=2, file=Gone()) as bar:
        clock(1)
        bar.update()
        bar.write("a line")
    assert bar.done == 1


def test_a_dumb_terminal_gets_plain_lines(clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen()
    with Progress("train", total=1, file=screen) as bar:
        clock(1)
        bar.update()
    assert "\r" not in screen.getvalue()


def test_no_stderr_at_all(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    with Progress("train", total=1) as bar:
        bar.update()
    assert bar.done == 1


def test_it_goes_to_the_stderr_of_the_moment(capsys):
    with Progress("train", total=1) as bar:
        bar.update()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("train: 1/1 it")
