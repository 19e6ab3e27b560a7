"""The wall: public networks, one by one, through convert, a training step, pack and the engine.

Each network runs in a process of its own, with a time limit. Rows go to bench/results/networks.csv, from which `--page`
makes docs/networks.md.

    python tests/networks/wall.py [--only PATTERN] [--jobs 1] [--limit 600] [--page]
    python tests/networks/wall.py --one SOURCE/NAME     # as JSON
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from catalog import Network, build, networks
from torch import Tensor, nn

import anyprec

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "networks.csv"
PAGE = ROOT / "docs" / "networks.md"
WIDTHS = (1, 2, 4, 8)
FIELDS = ("network", "state", "share", "agree 8", "agree 4", "agree 2", "agree 1", "difference", "seconds", "why")


def tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif hasattr(item, "values"):
        for part in item.values():
            yield from tensors(part)
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from tensors(part)


def call(model: nn.Module, example: Any) -> Any:
    return model(**example) if isinstance(example, dict) else model(example)


def train_once(model: nn.Module, example: Any) -> None:
    """One step at every width: finite gradients that move the weights."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for bits in (*WIDTHS, 32):
        anyprec.set_bits(model, bits)
        sum(t.float().square().mean() for t in tensors(call(model, example)) if t.is_floating_point()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None), "gradients not finite"
    optimizer.step()
    model.eval()


def repeat(example: Any, times: int) -> Any:
    if isinstance(example, dict):
        return {key: repeat(value, times) for key, value in example.items()}
    more = torch.cat([example.roll(i, -1) for i in range(times)])
    return more[:-1]  # an odd batch, other than that of the trace


def try_network(network: Network) -> dict[str, Any]:
    """One row. State: packs, refused (a line of ours), wrong, or broken (anything else)."""
    row: dict[str, Any] = {"network": str(network)}
    start = time.perf_counter()
    try:
        net, example = build(network)
        model = anyprec.convert(net, (*WIDTHS, 32), example=example)
        row["share"] = round(100 * model.conversion.share, 1)
        train_once(model, example)
        with tempfile.TemporaryDirectory() as folder:
            anyprec.pack(model, Path(folder) / "net.apm", example=example)
            packed = anyprec.load(Path(folder) / "net.apm")
            compare(model, packed, repeat(example, 2), row)
        row["state"] = "packs"
    except anyprec.AnyprecError as error:
        row |= {"state": "refused", "why": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        if "disagree" in str(error) or type(error).__name__ == "VerificationFailed":
            row["state"] = "wrong"
    except Exception as error:  # whatever a network of somebody else's raises
        row |= {"state": "broken", "why": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def compare(model: nn.Module, packed: anyprec.PackedModel, example: Any, row: dict[str, Any]) -> None:
    """Top-1 agreement and the largest difference at every width, at another batch than that of pack's own check."""
    arrays = [t.numpy() for t in tensors(example)]
    worst = 0.0
    for bits in WIDTHS:
        with torch.no_grad(), anyprec.bits(model, bits):
            want = next(t for t in tensors(call(model, example)) if t.is_floating_point()).float().numpy()
        got = packed(*arrays, bits=bits)
        got = got[0] if isinstance(got, (tuple, list)) else next(iter(got.values())) if isinstance(got, dict) else got
        assert got.shape == want.shape, (got.shape, want.shape)
        axis = 1 if want.ndim in (2, 4) else -1
        row[f"agree {bits}"] = round(100 * float((got.argmax(axis) == want.argmax(axis)).mean()), 1)
        worst = max(worst, float(np.abs(got - want).max() / max(want.std(), 1e-12)))
    row["difference"] = f"{worst:.1e}"


def run_apart(network: Network, limit: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", str(network)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"network": str(network), "state": "broken", "why": f"no answer within {limit:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"network": str(network), "state": "broken", "why": f"exit code {done.returncode}: {last}"}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="a pattern such as 'timm/*vit*'")
    parser.add_argument("--one", help="one network, in this process")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600, help="seconds for a network")
    parser.add_argument("--page", action="store_true", help="only make the page of the last results")
    args = parser.parse_args()
    if args.one:
        torch.set_num_threads(1)
        (network,) = [n for n in networks() if str(n) == args.one]
        print(json.dumps(try_network(network)))
        return
    if not args.page:
        chosen = [n for n in networks() if fnmatch.fnmatch(str(n), args.only) and n.missing is None]
        run_all(chosen, args.jobs, args.limit)
    write_page()


def run_all(chosen: list[Network], jobs: int, limit: float) -> None:
    rows = {row["network"]: row for row in read_rows()}
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(lambda network: run_apart(network, limit), chosen):
            rows[row["network"]] = row
            print(f"{row['state']:8} {row['network']:50} {row.get('why', '')}", flush=True)
            with RESULTS.open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(rows[str(n)] for n in networks() if str(n) in rows)


def read_rows() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def write_page() -> None:
    rows = read_rows()
    packed = [row for row in rows if row["state"] == "packs"]
    lines = [
        "# Networks that pack",
        "",
        f"{len(packed)} of the {len(rows)} public networks tried so far go through `convert`, a training step,",
        f"`pack` and the engine; the list has {len(networks())}. They are built with random",
        "weights. `python tests/networks/wall.py` repeats the table (`make networks` installs what it",
        "needs).",
        "",
        "- **Share**: parameters that are any-precision weights.",
        "- **Agreement**: images or positions with the same top-1 in torch and in the engine, at another",
        "  batch size than that of the check in `pack`. Where a value lies next to the border between two",
        "  codes, rounding may move the code; with random weights the answers are close to one another.",
        "- **Difference**: the largest difference of outputs over their standard deviation, all widths.",
        "",
        "| network | share, % | 8 bit | 4 bit | 2 bit | 1 bit | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in packed:
        cells = (row["network"], row["share"], *(row[f"agree {k}"] for k in (8, 4, 2, 1)), row["difference"])
        lines.append(f"| {' | '.join(cells)} |")
    others = [row for row in rows if row["state"] != "packs"]
    if others:
        lines += ["", "## Networks that do not", "", "| network | why |", "|---|---|"]
        lines += [f"| {row['network']} | {row['why'].replace('|', '/')} |" for row in others]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
