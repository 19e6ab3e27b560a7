"""The page of one `anyprec train` run: accuracy and loss over the epochs, a curve a width, drawn as SVG. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from anyprec.colors import css_name
from anyprec.errors import DataError
from anyprec.files import make_folder, write_text
from anyprec.report.page import document, table_html
from anyprec.report.record import Row, Table

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 520, 300, 48, 40, 12, 62
NAMES = {"accuracy": "accuracy, %", "miou": "mean IoU, %", "loss": "loss"}

Points = Sequence[tuple[float, float]]


def is_run(folder: Path) -> bool:
    return (folder / "log.jsonl").is_file()


def write_run_report(folder: Path, to: Path | None = None) -> Path:
    to = to or folder / "report.html"
    log = read_log(folder)
    parts = [f"<h1>{escape(folder.resolve().name)}</h1>", f'<p class="soft">{len(log)} epochs.</p>']
    contents = []
    for split in ("test", "validation", "train"):
        for metric in ("accuracy", "miou", "loss"):
            series = series_of(log, split, metric)
            if series:
                at = f"{split}-{metric}"
                contents.append((at, f"{split}: {NAMES[metric]}", ""))
                parts.append(f'<h2 id="{at}">{split}: {NAMES[metric]}</h2>{chart(series, NAMES[metric])}')
    last = last_table(log)
    if last is not None:
        contents.insert(0, ("last", "At the end", ""))
        parts.insert(2, f'<h2 id="last">At the end</h2>{table_html(last)}')
    recipe = folder / "recipe.toml"
    if recipe.is_file():
        contents.append(("recipe", "Recipe", ""))
        parts.append(f'<h2 id="recipe">Recipe</h2><pre>{escape(recipe.read_text(encoding="utf-8"))}</pre>')
    make_folder(to.parent)
    write_text(to, document(folder.resolve().name, contents, "\n".join(parts)))
    return to


def read_log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    try:
        log = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not the log of a training ({error})") from error
    if not log:
        raise DataError(f"{path} is empty; the report needs at least one epoch")
    return log


def series_of(log: list[dict[str, Any]], split: str, metric: str) -> dict[str, list[tuple[float, float]]]:
    """Width -> (epoch, value), of the epochs that have it."""
    series: dict[str, list[tuple[float, float]]] = {}
    for line in log:
        for bits, values in line.get(split, {}).items():
            if metric in values:
                series.setdefault(bits, []).append((line["epoch"], values[metric]))
    return dict(sorted(series.items(), key=lambda item: (not item[0].isdigit(), item[0].zfill(4))))


def last_table(log: list[dict[str, Any]]) -> Table | None:
    tested = [line["test"] for line in log if line.get("test")]
    if not tested:
        return None
    widths = sorted(tested[-1], key=lambda name: (not name.isdigit(), name.zfill(4)))
    metrics = [m for m in NAMES if all(m in tested[-1][w] for w in widths)]
    rows = tuple(Row((NAMES[m],), tuple(tested[-1][w][m] for w in widths)) for m in metrics)
    columns = tuple("float" if w == "32" else w for w in widths)
    return Table("last", "Test set, by bits", ("",), columns, rows, unit="")


def chart(series: Mapping[str, Points], y_label: str) -> str:
    """Lines over the epochs; names at their right ends, moved apart where they would overlap."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    x0, x1 = min(xs), max(max(xs), min(xs) + 1)
    margin = 0.05 * (max(ys) - min(ys)) or 1.0
    y0, y1 = max(0.0, min(ys) - margin), max(ys) + margin  # no metric here is negative
    if y_label.endswith("%"):
        y1 = min(100.0, y1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{escape(y_label)}">']
    for value in round_ticks(y0, y1):
        _, y = place(x0, value)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in round_ticks(x0, x1, whole=True):
        x, _ = place(value, y0)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">epoch</text>')
    ends = sorted((place(*points[-1])[1], name) for name, points in series.items())
    label_at, last = {}, -100.0
    for y, name in ends:
        last = max(y, last + 13)
        label_at[name] = last
    for name, points in series.items():
        color = css_name(name)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in points))
        if len(points) > 1:
            parts.append(f'<polyline points="{line}" fill="none" style="stroke:{color}" stroke-width="2"/>')
        for x, y in (place(*p) for p in points[-1:]):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{color}"/>')
        words = "float" if name == "32" else f"{name} bit" if name.isdigit() else name
        x = place(*points[-1])[0]
        parts.append(f'<text x="{x + 8:.1f}" y="{label_at[name] + 4:.1f}" style="fill:{color}">{escape(words)}</text>')
    return "".join([*parts, "</svg>"])


def round_ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Four to nine round numbers within [low, high]: 1, 2 or 5 times a power of ten apart.

    round_ticks(20.3, 93.1) -> [30, 40, 50, 60, 70, 80, 90]
    """
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 8)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]
