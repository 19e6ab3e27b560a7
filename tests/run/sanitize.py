"""Runs a build of anyprec-run with sanitizers over many graphs: python tests/run/sanitize.py build/sanitize/anyprec-run

Writes graphs, images and the oracle's outputs to a temporary folder, runs every profile on every instruction set, and
compares to the last bit. A report of a sanitizer, a crash or a difference ends it. Called by `make sanitize`, and by
arm.py, whose program is one for ARM in an emulator.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from chain_builder import random_chain
from engine_check import usable_isas
from graph_builder import assert_same
from kernel_graphs import KERNEL_PAIRS, SHAPES, TOOM_COOK, TOOM_COOK_STRIDE_1, float_graph, images, pair_graph
from random_graphs import BLOCKS, random_graph
from test_first_layers import FRAMES, POOLS, first_layer, window
from test_split import LAYERS, extremes, layer, normal_codes

from anyprec.format import Graph, write
from anyprec.run.oracle import run_graph


def graphs(seeds: int) -> Iterator[tuple[str, Graph, np.ndarray | dict[str, np.ndarray]]]:
    for seed in range(1000, 1000 + seeds):
        with np.errstate(all="ignore"):
            yield f"chain {seed}", *random_chain(seed)
    for seed in range(seeds):
        options = {"special": seed % 3 == 1, "float_layers": seed % 3 == 2, "blocks": 1 + seed % 6}
        yield f"seed {seed}", *random_graph(seed, **options)
    for kind in BLOCKS:
        yield kind, *random_graph(1, kinds=[kind], blocks=2, max_channels=40, special=True)
    for c, out, kernel, ending, signed, groups in SHAPES:
        graph = pair_graph(c, out, kernel, ending, signed, groups, pairs=[*KERNEL_PAIRS, (1, 8), (8, 1), (3, 2)])
        for x in images((2, 3, 5), (1, 1, 1), (1, 1, 7), c=c):
            yield f"{c} to {out} channels, image {x.shape}", graph, x
    for c, out, signed in ((128, 80, False), (67, 129, True)):  # large enough for Winograd's way
        graph = pair_graph(c, out, 3, "all", signed, pairs=[*KERNEL_PAIRS, (3, 3)])
        for x in images((2, 9, 11), (1, 8, 40), c=c):
            yield f"3x3 of {c} to {out} channels, image {x.shape}", graph, x
    for pool in POOLS.values():  # large enough for a pool in bands
        one = window([1, 1], [1, 1], [0] * 4, [1, 1])
        for integer in (False, True):
            yield "pooled", first_layer(one, pool, integer=integer), images((2, 62, 68), c=3)[0]
        yield "Toom-Cook, pooled", first_layer(window(*TOOM_COOK["7x7"]), pool), images((1, 123, 130), c=3)[0]
    for frame in FRAMES:
        yield "framed", first_layer(window(*frame), POOLS["overlapping"]), images((2, 17, 21), c=3)[0]
    for name, place in (TOOM_COOK | TOOM_COOK_STRIDE_1).items():
        for c, out, ending in ((3, 64, "sums"), (1, 5, "float"), (4, 83, "added")):
            graph = float_graph(place, c, out, ending, toom_cook=name in TOOM_COOK_STRIDE_1)
            for x in images((2, 11, 33), (1, 8, 8), c=c):
                yield f"Toom-Cook, {name}, {ending}", graph, x
    for c, out, kernel, stride, pad, groups in LAYERS:
        graph = layer(normal_codes((out, kernel, kernel, c // groups)), kernel, stride, pad, groups)
        yield f"split weights of {c} to {out} channels", graph, extremes(c)[0]
    for bits, c in ((1, 65532), (1, 65540), (2, 7281), (2, 7300), (8, 33025)):  # the longest sums of each kernel
        graph = pair_graph(c, 64 if bits < 8 else 3, pairs=[(bits, bits)], signed=True)
        yield f"sums of {c}", graph, np.full((1, 1, 2, c), 9, np.float32)


def check(
    program: Sequence[str],  # the words that start it
    folder: Path,
    what: str,
    graph: Graph,
    x: np.ndarray | dict[str, np.ndarray],
    isas: Sequence[str],
) -> int:
    """Runs one graph; gives how many times the program ran."""
    write(graph, folder / "net.apm")
    more = dict(x) if isinstance(x, dict) else {"input": x}
    for name, array in more.items():
        np.save(folder / f"x.{name}.npy", array)
    files = [f"x.{name}.npy" for name in more]
    first = more.pop("input")
    runs = 0
    for profile in graph.profiles:
        with np.errstate(all="ignore"):
            wanted = run_graph(graph, first, profile.name, more=more)
        for isa in isas:
            threads = 1 + runs % 3
            words = [*program, "net.apm", *files, "--layout", "NHWC", "--bits", profile.name, "--isa", isa]
            words += ["--threads", str(threads), "--out", "y.npy", "--verify", "--no-check-finite"]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
            where = f"{what}, profile {profile.name}, {isa}, {threads} threads"
            if done.returncode or done.stderr:
                sys.exit(f"{where}: exit code {done.returncode}\n{done.stderr}")
            for i, (name, want) in enumerate(wanted.items()):
                got = np.load(folder / (f"y.{i}.npy" if i else "y.npy"))
                assert_same(got.reshape(want.shape), want, f"{where}, output {name}")
            runs += 1
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--seeds", type=int, default=40, help="random graphs (default: 40)")
    args = parser.parse_args()
    program, started, isas = [str(args.program.resolve())], time.monotonic(), usable_isas()
    count = runs = 0
    with tempfile.TemporaryDirectory() as folder:
        for what, graph, x in graphs(args.seeds):
            runs += check(program, Path(folder), what, graph, x, isas)
            count += 1
            if count % 20 == 0:
                print(f"{count} graphs, {runs} runs", flush=True)
    seconds = time.monotonic() - started
    print(f"{count} graphs, {runs} runs on {', '.join(isas)}: all as the oracle has it, {seconds:.0f} s")


if __name__ == "__main__":
    main()
