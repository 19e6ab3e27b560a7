"""Progress of a long command: one redrawn bar with an ETA on a terminal, plain lines elsewhere.

    with Progress("train", total=steps, unit="step") as progress:
        for ...:
            progress.update(loss=loss)

Used by training, evaluation, calibration and downloads. Goes to stderr, so that results on stdout stay clean.
"""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any, TextIO

REDRAW_S = 0.1  # a terminal: at most 10 redraws a second
LINE_S = 10.0  # a log file: at most one line in 10 seconds, and one at the end
FALLBACK_COLUMNS = 80
BAR = 30  # letters between the brackets where there is room
MIN_BAR = 5

# Bars that are open, innermost last; only that one draws. See Progress.
_open: list[Progress] = []


class Progress:
    """A counter that shows itself. Use as a context manager, from one thread.

    `total=None`: no percentage, no ETA. `unit="B"` counts bytes and shows MB. `done` is where a resumed run
    starts; what was done before does not count in the rate. `file` is stderr unless given.

    Nested: the inner bar wins. While it is open the outer one counts on but does not draw; when it closes, it
    wipes its bar and the outer one comes back. A log gets no closing line from an inner bar of under 10 s.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        unit: str = "it",
        file: TextIO | None = None,
        done: int = 0,
    ) -> None:
        self.label = " ".join(label.split())  # a line break would break the redrawing
        self.total = total
        self.unit = unit
        self.done = done
        self.fields: dict[str, Any] = {}
        # sys.stderr is looked up now, not at import: it may have been replaced. Under pythonw it is None.
        self._file: TextIO | None = sys.stderr if file is None else file
        self._terminal = _is_terminal(self._file)
        self._first = done
        self._started = self._shown = time.monotonic()
        self._drawn = 0  # letters of the bar now on the terminal's last line

    def __enter__(self) -> Progress:
        if _open:
            _open[-1]._wipe()
        _open.append(self)
        self._started = self._shown = time.monotonic()
        if self._terminal:
            self._draw()
        return self

    def update(self, n: int = 1, **fields: Any) -> None:
        """Count `n` more. Fields such as `loss=0.31` are shown and kept until given anew."""
        self.done += n
        self.fields.update(fields)
        now = time.monotonic()
        if now - self._shown < (REDRAW_S if self._terminal else LINE_S) or not self._innermost():
            return
        self._shown = now
        if self._terminal:
            self._draw()
        else:
            self._print(self._line())

    def write(self, line: str) -> None:
        """Print a line above the bar."""
        below = _open[-1] if _open else self
        below._wipe()
        self._print(line)
        if below._terminal and _open:
            below._draw()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        nested = _open.index(self) > 0
        due = time.monotonic() - self._shown >= LINE_S
        self._wipe()
        if not nested or (not self._terminal and due):
            self._print(self._line(closing=True) + (" (stopped)" if kind else ""))
        _open.remove(self)
        if _open and _open[-1]._terminal:
            _open[-1]._draw()

    # Text

    def _line(self, closing: bool = False) -> str:
        """For a log: 'train: 421/1000 step (42 %), 12.3 step/s, 0:34, 0:47 left, loss=0.51'."""
        count = self._count(self.done)
        if self.total is not None:
            count += f"/{self._count(self.total)}"
        parts = [f"{self.label}: {count} {self._unit()}"]
        if self.total is not None:
            parts[0] += f" ({self._percent()} %)"
        parts += self._times(closing)
        if self.fields:
            parts.append(self._shown_fields())
        return ", ".join(parts)

    def _bar(self, columns: int) -> str:
        """For a terminal: 'train  42% [####------] 421/1000 step, 12.3 step/s, 0:34, 0:47 left  acc=97'."""
        if self.total is None:
            return self._line()[:columns]
        count = f"{self._count(self.done)}/{self._count(self.total)} {self._unit()}"
        right = ", ".join([count, *self._times()])
        if self.fields:
            right += "  " + self._shown_fields()
        left = f"{self.label} {self._percent():3d}%"
        room = min(BAR, columns - len(left) - len(right) - 4)  # 2 spaces, 2 brackets
        if room < MIN_BAR:
            return f"{left} {right}"[:columns]
        full = room * self._percent() // 100
        # Plain ASCII: a terminal that is not UTF-8 shows it as well.
        return f"{left} [{'#' * full}{'-' * (room - full)}] {right}"

    def _percent(self) -> int:
        """0..100. Nothing to do is done; more than expected is still 100."""
        assert self.total is not None
        return 100 if self.done >= self.total else max(0, 100 * self.done // self.total)

    def _times(self, closing: bool = False) -> list[str]:
        elapsed = time.monotonic() - self._started
        counted = self.done - self._first
        parts = []
        if elapsed > 0 and counted > 0:
            rate = counted / elapsed
            scaled = rate / 1e6 if self.unit == "B" else rate
            if scaled >= 1 or self.unit == "B":
                parts.append(f"{scaled:.1f} {self._unit()}/s")
            else:
                parts.append(f"{1 / rate:.1f} s/{self.unit}")
        parts.append(_clock(elapsed))
        if parts[1:] and self.total is not None and self.total > self.done and not closing:
            parts.append(f"{_clock((self.total - self.done) * elapsed / counted)} left")
        return parts

    def _shown_fields(self) -> str:
        return " ".join(f"{name}={_short(value)}" for name, value in self.fields.items())

    def _count(self, n: int) -> str:
        return f"{n / 1e6:.1f}" if self.unit == "B" else str(n)

    def _unit(self) -> str:
        return "MB" if self.unit == "B" else self.unit

    # Output

    def _innermost(self) -> bool:
        return bool(_open) and _open[-1] is self

    def _draw(self) -> None:
        # One column is left free: terminals differ in when they wrap a line that fills the last one.
        text = self._bar(_columns(self._file) - 1)
        self._put("\r" + text.ljust(self._drawn))
        self._drawn = len(text)

    def _wipe(self) -> None:
        if self._drawn:
            self._put("\r" + " " * self._drawn + "\r")
            self._drawn = 0

    def _print(self, line: str) -> None:
        self._put(line + "\n")

    def _put(self, text: str) -> None:
        if self._file is None:
            return
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        try:
            self._file.write(text.encode(encoding, "replace").decode(encoding))
            self._file.flush()
        except (OSError, ValueError):
            # The terminal is gone or the file closed. The work that is being counted matters more.
            self._file = None


def _is_terminal(file: TextIO | None) -> bool:
    # TERM=dumb cannot go back to the start of a line (an editor's shell window).
    if file is None or getattr(file, "closed", False) or os.environ.get("TERM") == "dumb":
        return False
    return file.isatty()


def _columns(file: TextIO | None) -> int:
    try:
        # 0 is what a terminal without a size reports.
        return os.get_terminal_size(file.fileno()).columns or FALLBACK_COLUMNS if file else FALLBACK_COLUMNS
    except (OSError, ValueError):
        return FALLBACK_COLUMNS


def _clock(seconds: float) -> str:
    """34 -> '0:34', 3723 -> '1:02:03'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
