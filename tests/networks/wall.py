"""The wall: public networks, one by one, through convert, a training step, pack and the engine.

Each network runs in a process of its own, with a time limit. Rows go to bench/results/networks.csv, from which `--page`
makes docs/networks.md.

    python tests/networks/wall.py [--only PATTERN] [--limit 600] [--memory 8] [--page]
    python tests/networks/wall.py --resume --budget 240 # only networks without a row yet, for about four minutes
    python tests/networks/wall.py --one SOURCE/NAME     # as JSON
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import json
import math
import multiprocessing
import resource
import tempfile
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from catalog import Network, build, networks, preload
from torch import Tensor, nn

import anyprec
from anyprec.format.file import read
from anyprec.nn.layers import normalize_weights_once
from anyprec.run.oracle import run_graph

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "networks.csv"
PAGE = ROOT / "docs" / "networks.md"
WIDTHS = (1, 2, 4, 8)
FIELDS = ("network", "state", "share", "agree 8", "agree 4", "agree 2", "agree 1", "difference", "codes",
          "moved", "alone", "operations", "packed", "seconds", "why")  # fmt: skip


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
    """One step at every width: finite gradients that move the weights.

    Clipped, as users do: at 1 and 2 bit some random networks (ghostnetv2_100) have gradients of 1e24.
    """
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with normalize_weights_once(model):
        for bits in (*WIDTHS, 32):
            anyprec.set_bits(model, bits)
            sum(t.float().square().mean() for t in tensors(call(model, example)) if t.is_floating_point()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None), "gradients not finite"
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    optimizer.step()
    model.eval()


def try_network(network: Network, oracle: bool = True) -> dict[str, Any]:
    """One row. State: packs, refused (a line of ours), wrong, or broken (anything else)."""
    row: dict[str, Any] = {"network": str(network)}
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a network of somebody else's says of itself
            net, example = build(network)
        model = anyprec.convert(net, (*WIDTHS, 32), example=example)
        row["share"] = round(100 * (model.conversion.multiply_add_share or 0), 1)
        train_once(model, example)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "net.apm"
            report = anyprec.pack(model, path, example=example)
            row |= agreement(report)
            row["packed"] = round(time.perf_counter() - start, 1)
            if oracle:
                compare_with_oracle(path, example)
        row["state"] = "packs"
    except Wrong as error:
        row |= {"state": "wrong", "why": str(error)}
    except anyprec.AnyprecError as error:
        row |= {"state": "refused", "why": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        if "disagree" in str(error) or type(error).__name__ == "VerificationFailed":
            row["state"] = "wrong"
    except Exception as error:  # whatever a network of somebody else's raises
        row |= {"state": "broken", "why": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


class Wrong(Exception):
    """The engine is not the oracle."""


def agreement(report: anyprec.PackReport) -> dict[str, Any]:
    """What the check of `pack` found, the module going on with the file's codes."""
    assert report.check is not None
    found = {int(name): check for name, check in report.check.profiles.items()}
    codes, moved = (sum(getattr(check, name) for check in found.values()) for name in ("codes", "moved_codes"))
    return {
        **{f"agree {k}": round(100 * found[k].led_same_answers / found[k].led_answers, 2) for k in WIDTHS},
        "difference": f"{max(check.led_difference for check in found.values()):.1e}",
        "codes": codes,
        "moved": moved,
        "alone": round(100 * sum(f.same_answers for f in found.values()) / sum(f.answers for f in found.values()), 1),
        "operations": report.ops,
    }


def compare_with_oracle(path: Path, example: Any) -> None:
    """Bit for bit, one image or text, at every width."""
    graph, packed = read(path), anyprec.load(path, layout="NHWC")
    arrays = [t[:1].numpy() for t in tensors(example)]
    arrays = [np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x for x in arrays]
    more = dict(zip(list(packed.inputs)[1:], arrays[1:], strict=True))
    for bits in WIDTHS:
        wanted = run_graph(graph, arrays[0], str(bits), more=more)
        got = packed(*arrays, bits=bits)
        for name, ours in zip(graph.outputs, got if isinstance(got, tuple) else (got,), strict=True):
            if not np.array_equal(ours.reshape(wanted[name].shape), wanted[name]):
                apart = int((ours.reshape(wanted[name].shape) != wanted[name]).sum())
                raise Wrong(f"the engine ({packed.isa}) is not the oracle at {bits} bit: {apart} numbers of {name}")


def run_apart(network: Network, limit: float, memory: float, oracle: bool) -> dict[str, Any]:
    """In a process of its own, forked: what all need is imported once."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (int(memory * 2**30),) * 2)
        sender.send(try_network(network, oracle))

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            return {"network": str(network), "state": "broken", "why": f"no answer within {limit:.0f} s"}
        row: dict[str, Any] = receiver.recv()
        return row
    except EOFError:
        process.join()
        return {"network": str(network), "state": "broken", "why": f"exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="a pattern such as 'timm/*vit*'")
    parser.add_argument("--one", help="one network, in this process")
    parser.add_argument("--no-oracle", action="store_true", help="leave out the oracle, which is slow")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a network")
    parser.add_argument("--memory", type=float, default=8, help="GiB of address space for a network")
    parser.add_argument("--resume", action="store_true", help="only networks that have no row yet")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which none is started")
    parser.add_argument("--page", action="store_true", help="only make the page of the last results")
    args = parser.parse_args()
    if args.one:
        torch.set_num_threads(1)
        (network,) = [n for n in networks() if str(n) == args.one]
        print(json.dumps(try_network(network, not args.no_oracle)))
        return
    if not args.page:
        chosen = [n for n in networks() if fnmatch.fnmatch(str(n), args.only) and n.missing is None]
        if args.resume:
            done = {row["network"] for row in read_rows()}
            chosen = [n for n in chosen if str(n) not in done]
        run_all(chosen, args)
    write_page()


def run_all(chosen: list[Network], args: argparse.Namespace) -> None:
    end = time.monotonic() + args.budget
    torch.set_num_threads(1)
    for network in chosen:
        if time.monotonic() > end:
            break
        preload(network)
        row = run_apart(network, args.limit, args.memory, not args.no_oracle)
        print(f"{row['state']:8} {row['network']:50} {row.get('why', '')}", flush=True)
        rows = {known["network"]: known for known in read_rows()} | {row["network"]: row}  # another run may add rows
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[str(n)] for n in networks() if str(n) in rows)


def read_rows() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def read_speeds() -> dict[str, dict[str, float]]:
    """Network -> how many times as fast as ONNX Runtime in float it is, by width; of bench/networks.py's last run."""
    files = sorted(RESULTS.parent.glob("networks_speed_*.csv"), key=lambda path: path.stat().st_mtime)
    found: dict[str, dict[str, float]] = {}
    for path in files:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        theirs = {
            row["page"]: float(row["p50_ms"])
            for row in rows
            if (row["engine"], row["variant"]) == ("onnxruntime", "fp32")
        }
        for row in rows:
            if row["engine"] == "anyprec" and row["page"] in theirs:
                found.setdefault(row["page"], {})[row["variant"]] = theirs[row["page"]] / float(row["p50_ms"])
    return found


PAGE_TOP = """# Networks that pack

{summary}

Weights are random, after one training step; the layers and shapes are those of the original, the
images smaller.

- **Multiply-adds**: the share of multiply-adds in layers that run at any precision. The rest is the
  first and last layer, products of two values (attention), and layers that cannot be converted.
- **Agreement** at 8, 4, 2 and 1 bit: images (pixels, tokens) with the same largest output in torch
  and in the engine, where both go on with the same codes ([the check](cli/pack.md#the-check)). A
  number that lies on the border between two codes may round to either; without this, one moved code
  changes all that follows, and in a network with random weights the answers are close to one
  another.
- **Codes moved**: of a million codes, those on the other side of a border; each of them lies at the
  border, or the file would have been refused.
- **Difference**: the largest difference between outputs, as a share of the largest output, at any
  width, where both go on with the same codes.
- **Speed** at 8 and 1 bit: how many times as fast as ONNX Runtime in float, one thread, one image
  at full size (`python bench/networks.py`); for the networks that were raced.
"""


def summary(rows: list[dict[str, Any]]) -> str:
    states = Counter(row["state"] for row in rows)
    bad, untried = states["wrong"] + states["broken"], len(networks()) - len(rows)
    return (
        f"{states['packs']} of {len(rows)} public networks ({100 * states['packs'] / max(len(rows), 1):.0f} %) go "
        "through `convert`, a training step, `pack` and the engine. "
        + (f"{untried} more of the list have not been run yet. " if untried else "")
        + f"{states['refused']} are refused in one line, below. "
        + (f"{bad} fail in another way. " if bad else "None of them gives wrong answers: ")
        + "`pack` compares every file with the torch module at every width, and here the engine is also compared with "
        "the numpy oracle, bit for bit, at 1, 2, 4 and 8 bit. `python tests/networks/wall.py` repeats the table "
        "(`make networks` installs what it needs), and `make slow` fails where a network leaves its state."
    )


def write_page() -> None:
    rows, speeds = read_rows(), read_speeds()
    packed = [row for row in rows if row["state"] == "packs"]
    lines = PAGE_TOP.format(summary=textwrap.fill(summary(rows), 100, break_on_hyphens=False))
    lines = [
        *lines.splitlines(),
        "",
        "| network | multiply-adds, % | 8 bit, % | 4 bit, % | 2 bit, % | 1 bit, % | codes moved, ppm | difference |"
        " speed, 8 bit | speed, 1 bit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in packed:
        agree = (f"{float(row[f'agree {k}']):g}" for k in (8, 4, 2, 1))
        moved = f"{1e6 * int(row['moved']) / max(int(row['codes']), 1):.0f}"
        speed = (f"{speeds.get(row['network'], {}).get(k, 0):.2f}".replace("0.00", "") for k in ("8", "1"))
        lines.append(f"| {' | '.join((row['network'], row['share'], *agree, moved, row['difference'], *speed))} |")
    others = [row for row in rows if row["state"] != "packs"]
    if others:
        lines += ["", "## Networks that are refused", "", "| network | why |", "|---|---|"]
        lines += [
            f"| {row['network']} | {row['why'].split('; the model file has')[0].replace('|', '/')} |" for row in others
        ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
