"""Fuzzes the readers of model files: python tests/format/fuzz_reader.py [--minutes 10] [--seed 0]

Takes the files of corpus/, changes bytes, headers, graphs and tensors (with checksums made right, so that the checks
behind them are reached), and reads all of the result in Python and in C++. Anything but a ModelFileError is a finding,
and so are two verdicts that differ: the file is kept in --keep.
"""

import argparse
import contextlib
import copy
import io
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path

from forge import put_together, take_apart
from verdicts import MAX_BITS, disagreements

from anyprec.cli import inspect as cli_inspect
from anyprec.errors import ModelFileError, UnsupportedBits
from anyprec.format import ModelFile, write

CORPUS = Path(__file__).with_name("corpus")
MEMORY = 4 << 30  # a file of some kilobytes that needs more is a finding
SLOW = 20.0  # seconds
ODD = [
    0, 1, -1, 2, 3, 8, 32, 255, 256, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64, 10**23, 10**24, 10**30,
    0.5, 1.0, 8.0, -0.0, 1e308, 5e-324, True, False, None, "", "input", "a", "\ud800", "\x00", "x" * 300, "🐦", [], {},
    [[]], [0], [1, 1],
    [0, 0, 0, 0], {"a": 1}, "conv", "quantize", "flatten", "resize", "concat", "like", "size", "F32", "U8",
    "reshape", "transpose", "gather", "matmul", "constant", "recurrent", "binary", "axis", ["q", "k"],
    [None], [1, 0, 2], [0, 1], -(2**31),
]  # fmt: skip


def places(record, way=()):
    """Every (container, key) in a JSON record."""
    items = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for key, value in items:
        yield record, key
        yield from places(value, (*way, key))


def change_record(record, rng):
    """Some random edits of a JSON record, in place."""
    for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
        spots = list(places(record))
        if not spots:
            return
        holder, key = rng.choice(spots)
        other, other_key = rng.choice(spots)
        way = rng.randrange(6)
        if way == 0:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        elif way == 1:
            holder[key] = copy.deepcopy(other[other_key])
        elif way == 2:
            del holder[key]
        elif way == 3 and isinstance(holder[key], (int, float)):
            holder[key] += rng.choice([-1, 1, 7, 2**31, -(2**31)])
        elif way == 4 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif isinstance(holder, dict):
            holder[rng.choice([f"{key}x", *map(str, ODD[:12]), other_key if isinstance(other_key, str) else "k"])] = (
                copy.deepcopy(holder[key])
            )


def change_bytes(raw, rng):
    raw = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        if not raw:
            break
        at = rng.randrange(min(len(raw), rng.choice([8, 64, len(raw)])))
        way = rng.randrange(6)
        if way == 0:
            raw[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            raw[at] = rng.randrange(256)
        elif way == 2:
            del raw[at : at + rng.randrange(1, 30)]
        elif way == 3:
            raw[at:at] = raw[at : at + rng.randrange(1, 30)]
        elif way == 4:
            raw[at:at] = rng.choice([b"{", b"}", b"[", b'"', b"\\", b"NaN", b"1e999", b"\xff", b"[" * 5000, b"\\ud800"])
        else:
            raw[:8] = struct.pack(
                "<Q", rng.choice([0, 1, 2, max(len(raw) - 8, 0), len(raw), 100_000_000, 2**63, 2**64 - 1])
            )
    return bytes(raw)


def change_tensor(header, graph, data, rng):
    """Other bytes in one tensor, with the checksum of the new ones: often in its last byte, often odd floats."""
    name = rng.choice(list(header))
    begin, end = header[name]["data_offsets"]
    new = bytearray(data[begin:end])
    if not new:
        return data
    at = rng.choice([rng.randrange(len(new)), len(new) - 1])
    if name.startswith("plane") or rng.random() < 0.2:
        new[at] ^= 1 << rng.randrange(8)
    else:
        at -= at % 4
        new[at : at + 4] = struct.pack(
            "<f", rng.choice([float("nan"), float("inf"), float("-inf"), 0.0, 3.4e38, 1e-45])
        )
    graph["checksums"][name] = f"{zlib.crc32(new):08x}"
    return data[:begin] + bytes(new) + data[end:]


def mutate(raw, rng):
    way = rng.randrange(12)
    if way == 0:
        return raw[: rng.randrange(len(raw) + 1)]
    if way < 3:
        return change_bytes(raw, rng)
    try:
        header, graph, data = take_apart(raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        return change_bytes(raw, rng)
    if way < 5:
        change_record(header, rng)
    elif way < 10:
        change_record(graph, rng)
    else:
        with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):  # a seed that is broken already
            data = change_tensor(header, graph, data, rng)
    if way == 9:
        change_record(header, rng)
        data = change_bytes(data, rng)
    try:
        return put_together(header, graph, data)
    except (TypeError, ValueError, RecursionError):
        return change_bytes(raw, rng)


def try_file(path, copy_path):
    """Reads all there is to read; returns the outcome. What can be read must survive being written again."""
    try:
        with ModelFile(path) as file:
            with contextlib.redirect_stdout(io.StringIO()):
                found = cli_inspect.describe(file)
                for part in (cli_inspect.summary, cli_inspect.profiles, cli_inspect.parts, cli_inspect.layers):
                    part(found)
            graph = file.graph()
            for weight in graph.weights.values():
                for bits in weight.codes or ():
                    assert weight.codes[bits].max() < 1 << bits
            for bits in (1, 4, 8):
                with contextlib.suppress(UnsupportedBits):
                    file.graph(bits)
        write(graph, copy_path)
        with ModelFile(copy_path) as file:
            file.graph(verify=True)
        return "opens"
    except ModelFileError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000, str(error)
        return type(error).__name__


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--runs", type=int, help="stop after so many files instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", type=Path, default=Path("fuzz-findings"), help="folder for files that break the reader"
    )
    args = parser.parse_args()
    rng = random.Random(args.seed)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    broken = [path.read_bytes() for path in sorted(CORPUS.glob("[A-Z]*.apm"))]
    seeds = [path.read_bytes() for path in sorted(CORPUS.glob("opens-*.apm"))]
    assert seeds and broken, f"no files in {CORPUS}"
    counts: Counter[str] = Counter()
    findings, started, last = 0, time.monotonic(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path, copy_path = Path(folder, "fuzz.apm"), Path(folder, "copy.apm")
        while sum(counts.values()) < args.runs if args.runs else time.monotonic() - started < 60 * args.minutes:
            raw = rng.choice(seeds if rng.random() < 0.9 else broken)
            for _ in range(rng.choice([1, 1, 1, 2])):
                raw = mutate(raw, rng)
            path.write_bytes(raw)
            begun = time.monotonic()
            try:
                outcome = try_file(path, copy_path)
                differing = disagreements(path, (rng.choice(MAX_BITS),))
                assert not differing, differing
                assert time.monotonic() - begun < SLOW, "too slow"
            except Exception:
                findings += 1
                outcome = "FINDING"
                args.keep.mkdir(exist_ok=True)
                kept = args.keep / f"finding{findings:03}.apm"
                kept.write_bytes(raw)
                print(f"{kept}:", traceback.format_exc(), file=sys.stderr)
                if findings >= 20:
                    break
            counts[outcome] += 1
            if outcome == "opens" and len(seeds) < 500 and len(raw) < 20_000 and rng.random() < 0.02:
                seeds.append(raw)  # changes that are accepted lead further
            if time.monotonic() - last > 30:
                last = time.monotonic()
                print(f"{last - started:.0f} s", dict(counts.most_common()), flush=True)
    print(f"{sum(counts.values()):,} files, {findings} findings:", dict(counts.most_common()))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
