"""`anyprec report DIR`: one HTML page of a folder of `anyprec reproduce`, or of one `anyprec train` run. No torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from anyprec.cli.output import print_json
from anyprec.errors import DataError
from anyprec.report.curves import is_run, write_run_report
from anyprec.report.page import write_report
from anyprec.report.record import RESULT

EXAMPLE = "anyprec report runs/small"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="DIR", help="the --out folder of `anyprec reproduce`, or the folder of a training run"
    )
    parser.add_argument("--out", metavar="FILE.html", help="the page to write (default: report.html in the folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the path")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    to = Path(args.out) if args.out else None
    if any(folder.glob(f"*/{RESULT}")) or (folder / "run.json").is_file():
        page = write_report(folder, to)
    elif is_run(folder):
        page = write_run_report(folder, to)
    else:
        raise DataError(
            f"{folder} holds neither results of `anyprec reproduce` nor the log of an `anyprec train` run; name the "
            "folder one of them was given as --out"
        )
    if args.json:
        print_json({"report": str(page)})
    else:
        print(page)
    return 0
