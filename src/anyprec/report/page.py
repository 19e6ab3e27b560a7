"""The report: a folder of results in, one self-contained HTML page out. No torch, no network, nothing but these files.

`write_report(folder)` reads run.json and */result.json, as many as there are, so a half-finished run has a report, too.
Called by `anyprec report` and after every experiment.
"""

from __future__ import annotations

import base64
import json
from html import escape
from pathlib import Path
from typing import Any

from anyprec.colors import DARK, css_variables
from anyprec.errors import DataError
from anyprec.files import make_folder, write_text
from anyprec.report.record import OURS, RESULT, Claim, Result, Table, load, write_csv

KINDS = {True: "holds", False: "fails", None: "untested"}
SCALE_WORDS = {
    "paper": "the paper's own setting",
    "small": "real data, small networks and short trainings, for two CPU cores",
    "tiny": "a test of the code: its numbers mean nothing",
}


def write_report(folder: Path, to: Path | None = None) -> Path:
    """The page; in its usual place, with claims.csv beside it."""
    results, run = read_results(folder)
    beside = folder / "claims.csv" if to is None else None
    to = to or folder / "report.html"
    make_folder(to.parent)
    write_text(to, page(results, run, folder))
    if beside:
        rows = [(r.name, c.verdict, c.sentence, c.numbers) for r in results for c in r.claims]
        write_csv(beside, ("experiment", "verdict", "claim", "numbers"), rows)
    return to


def read_results(folder: Path) -> tuple[list[Result], dict[str, Any]]:
    """In the order run.json names them; results it does not name come last."""
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        run = {}
    order = list(run.get("experiments", {}))
    found = [load(path.parent) for path in sorted(folder.glob(f"*/{RESULT}"))]
    return sorted(found, key=lambda r: order.index(r.name) if r.name in order else len(order)), run


def page(results: list[Result], run: dict[str, Any], folder: Path) -> str:
    scale = run.get("scale", results[0].scale if results else "")
    missing = {
        name: title for name, title in run.get("experiments", {}).items() if name not in {r.name for r in results}
    }
    claims = [(result, claim) for result in results for claim in result.claims]
    body = [
        "<header><h1>Any-precision networks: the paper's experiments, repeated</h1>",
        f'<p class="soft">Scale <b>{escape(scale)}</b>: {escape(SCALE_WORDS.get(scale, ""))}. '
        f"{len(results)} of {len(results) + len(missing)} experiments done; "
        f"{clock(total_seconds(results))} of computing time in all.</p></header>",
        summary(claims),
        *(section(result, folder / result.name) for result in results),
    ]
    if missing:
        body.append('<h2 id="missing">Not run yet</h2><ul>')
        body += [f"<li><b>{escape(name)}</b>: {escape(title)}</li>" for name, title in missing.items()]
        body.append("</ul>")
    body.append(about(results, run))
    contents = [("claims", "Claims", f"{sum(c.holds is True for _, c in claims)} of {len(claims)} hold")]
    contents += [(r.name, r.title, count_words(r.claims)) for r in results]
    contents += [("missing", "Not run yet", "")] if missing else []
    contents.append(("about", "How it was made", ""))
    return document("Any-precision networks, repeated", contents, "\n".join(body))


def style() -> str:
    """style.css, and the colors of widths for light and dark."""
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {css_variables(DARK)} }} }}"
    own = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    return f":root {{ {css_variables()} }} {dark}\n{own}"


def document(title: str, contents: list[tuple[str, str, str]], body: str) -> str:
    items = "".join(
        f'<li><a href="#{escape(at)}">{escape(words)}</a>'
        + (f'<br><span class="count">{escape(count)}</span>' if count else "")
        + "</li>"
        for at, words, count in contents
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{style()}</style></head>\n<body><div class="frame">'
        f"<nav><ol>{items}</ol></nav>\n<main>\n{body}\n</main></div></body></html>\n"
    )


def summary(claims: list[tuple[Result, Claim]]) -> str:
    counts = {kind: sum(KINDS[c.holds] == kind for _, c in claims) for kind in KINDS.values()}
    words = {"holds": "claims hold", "fails": "do not hold", "untested": "not tested"}
    totals = "".join(
        f'<div><b class="{kind}">{count}</b>{words[kind]}</div>'
        for kind, count in counts.items()
        if count or kind != "untested"
    )
    rows = "".join(
        f'<tr><td>{verdict(claim)}</td><td><a href="#{escape(result.name)}">{escape(result.name)}</a></td>'
        f'<td>{escape(claim.sentence)}<br><span class="soft small">{escape(claim.numbers)}</span></td></tr>'
        for result, claim in claims
    )
    return (
        '<h2 id="claims">Claims, and whether they hold here</h2>'
        f'<div class="totals">{totals}</div>'
        f'<div class="scroll"><table><tr><th>here</th><th>from</th><th>claim</th></tr>{rows}</table></div>'
        '<p class="soft small">Each verdict is computed from the numbers of this run, one seed each.</p>'
    )


def section(result: Result, folder: Path) -> str:
    parts = [f'<h2 id="{escape(result.name)}">{escape(result.title)}</h2>', "<h3>What the paper found</h3>"]
    parts.append(f'<p class="found">{escape(result.found)}</p>')
    parts.append("<h3>What was found here</h3>")
    if result.claims:
        rows = "".join(
            f"<li>{verdict(c)}: {escape(c.sentence)} <span class='soft'>{escape(c.numbers)}</span></li>"
            for c in result.claims
        )
        parts.append(f"<ul>{rows}</ul>")
    parts += [table_html(table) for table in result.tables]
    parts += [f"<p>{escape(note)}</p>" for note in result.notes]
    if result.pictures:
        few = " one" if len(result.pictures) == 1 else ""
        parts.append(f'<div class="pictures{few}">')
        for picture in result.pictures:
            image = data_uri(folder / f"{picture.name}.png")
            parts.append(
                f'<figure{" class=wide" if picture.wide else ""}><img src="{image}" alt="{escape(picture.title)}">'
                f"<figcaption><b>{escape(picture.title)}.</b> {escape(picture.caption)}</figcaption></figure>"
            )
        parts.append("</div>")
    if result.scaled:
        parts.append("<h3>What was scaled down</h3><ul>")
        parts += [f"<li>{escape(line)}</li>" for line in result.scaled]
        parts.append("</ul>")
    parts.append(repeat(result))
    return "\n".join(parts)


def table_html(table: Table) -> str:
    whose = "<th></th>" if table.both else ""
    head = "".join(f"<th>{escape(label)}</th>" for label in table.labels) + whose
    head += "".join(f'<th class="number">{escape(column)}</th>' for column in table.columns)
    rows = []
    for row in table.rows:
        cells = "".join(f'<td class="label">{escape(label)}</td>' for label in row.labels)
        cells += f'<td class="tag">{escape(row.of)}</td>' if table.both else ""
        if row.values:
            cells += "".join(f'<td class="number">{table.text(value)}</td>' for value in row.values)
        else:
            cells += f'<td class="soft" colspan="{len(table.columns)}">{escape(row.note)}</td>'
        kind = ("ours" if row.of == OURS else "paper") if table.both else ""
        rows.append(f'<tr class="{kind}">{cells}</tr>')
    unit = f" ({escape(table.unit)})" if table.unit else ""
    note = f'<p class="soft small">{escape(table.note)}</p>' if table.note else ""
    body = f"<table><tr>{head}</tr>{''.join(rows)}</table>"
    return f'<h3>{escape(table.title)}{unit}</h3><div class="scroll">{body}</div>{note}'


def repeat(result: Result) -> str:
    count, spent = len(result.trainings), sum(t["seconds"] for t in result.trainings)
    rows = "".join(
        f'<tr><td><code>{escape(t["name"])}</code></td><td class="number">{clock(t["seconds"])}</td></tr>'
        for t in result.trainings
    )
    trained = (
        f"<details><summary>{count} training{'s' * (count > 1)}, {clock(spent)} (shared between experiments)</summary>"
        f'<div class="scroll"><table>{rows}</table></div></details>'
        if result.trainings
        else ""
    )
    return (
        f"<h3>To repeat it</h3><pre>{escape(result.command)}</pre>"
        f'<p class="soft small">The experiment itself took {clock(result.seconds)}.</p>{trained}'
    )


def about(results: list[Result], run: dict[str, Any]) -> str:
    machine = run.get("machine") or (results[0].machine if results else {})
    rows = "".join(
        f"<tr><td>{escape(str(k))}</td><td>{escape(' '.join(v) if isinstance(v, list) else str(v))}</td></tr>"
        for k, v in machine.items()
    )
    command = f"<pre>{escape(run['command'])}</pre>" if run.get("command") else ""
    return (
        f'<h2 id="about">How it was made</h2>{command}<div class="scroll"><table>{rows}</table></div>'
        '<p class="soft small">Every number of this page is in result.json and the CSV files beside it.</p>'
    )


def verdict(claim: Claim) -> str:
    return f'<span class="verdict {KINDS[claim.holds]}">{claim.verdict}</span>'


def count_words(claims: tuple[Claim, ...]) -> str:
    return f"{sum(c.holds is True for c in claims)} of {len(claims)} claims hold" if claims else ""


def total_seconds(results: list[Result]) -> float:
    """A training that several experiments share counts once."""
    trained = {t["name"]: t["seconds"] for result in results for t in result.trainings}
    return float(sum(trained.values()) + sum(result.seconds for result in results))


def data_uri(path: Path) -> str:
    try:
        return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise DataError(f"cannot read the picture {path}: {error.strerror}; run its experiment again") from error


def clock(seconds: float) -> str:
    """34 -> '34 s', 3723 -> '1 h 02 min', 150 -> '2.5 min'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 60 else f"{int(minutes // 60)} h {int(minutes % 60):02d} min"
