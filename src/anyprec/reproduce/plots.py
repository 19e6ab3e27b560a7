"""Pictures by Matplotlib, each with its numbers as CSV beside it. Called by the experiments."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anyprec.colors import GRID, SERIES
from anyprec.errors import MissingExtra
from anyprec.files import make_folder, written_whole
from anyprec.report.record import Picture, write_csv


def pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise MissingExtra("the pictures need Matplotlib: pip install 'anyprec[report]'") from error
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


@contextmanager
def figure(path: Path, rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.2, 3.6)) -> Iterator[Any]:
    """Axes to draw in: one, or an array (rows, columns); the picture is written on leaving."""
    plt = pyplot()
    drawn, axes = plt.subplots(rows, columns, figsize=size, dpi=130)
    try:
        yield axes
        for one in np.ravel(axes):
            if one.axison and not one.images:
                one.grid(color=GRID, linewidth=0.7)
                one.set_axisbelow(True)
                for side in ("top", "right"):
                    one.spines[side].set_visible(False)
        drawn.tight_layout()
        make_folder(path.parent)
        with written_whole(path) as file:
            drawn.savefig(file, format=Path(path).suffix[1:])
    finally:
        plt.close(drawn)


def lines(
    folder: Path,
    picture: Picture,
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    y_label: str = "test accuracy, %",
    dashed: Sequence[str] = (),
) -> Picture:
    """One line a series over the named positions; numbers that are missing leave a gap."""
    with figure(folder / f"{picture.name}.png") as axes:
        for i, (name, values) in enumerate(series.items()):
            y = [np.nan if v is None else v for v in values]
            style = "--" if name in dashed else "-"
            axes.plot(range(len(names)), y, style, marker="o", markersize=4, color=SERIES[i % len(SERIES)], label=name)
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel("bits")
        axes.set_ylabel(y_label)
        axes.legend(frameon=False, fontsize=8)
    rows = [[name, *("" if v is None else v for v in values)] for name, values in series.items()]
    write_csv(folder / f"{picture.name}.csv", ["series", *names], rows)
    return picture


def heat(
    folder: Path, picture: Picture, names: Sequence[str], values: npt.NDArray[np.float64], form: str = "{:.1f}",
    x_label: str = "", y_label: str = "", mark_least: bool = False,
) -> Picture:  # fmt: skip
    """A square of numbers; `mark_least` frames the least of each row."""
    size = 0.9 * len(names) + 2
    with figure(folder / f"{picture.name}.png", size=(size + 1, size)) as axes:
        shown = axes.imshow(values, cmap="Blues")
        low, high = values.min(), values.max()
        for i, j in np.ndindex(*values.shape):
            ink = "white" if values[i, j] > low + 0.6 * (high - low) else "black"
            axes.text(j, i, form.format(values[i, j]), ha="center", va="center", fontsize=9, color=ink)
            if mark_least and values[i, j] == values[i].min():
                axes.plot([j - 0.45, j + 0.45, j + 0.45, j - 0.45, j - 0.45],
                          [i - 0.45, i - 0.45, i + 0.45, i + 0.45, i - 0.45], color=SERIES[1], linewidth=2)  # fmt: skip
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(values)), names[: len(values)])
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.figure.colorbar(shown, shrink=0.8)
    rows = [[name, *row] for name, row in zip(names, values.tolist(), strict=False)]
    write_csv(folder / f"{picture.name}.csv", ["", *names], rows)
    return picture
