"""One verdict: what the Python reader says of a file, the C++ reader says too, with the same error.

Over the kept corpora of both fuzzers, and over changes to every part of a file. `make fuzz` looks further.
"""

import random
import struct
import tarfile
import zlib
from pathlib import Path

import pytest

from anyprec import format as apm

HERE = Path(__file__).parent
FUZZED = HERE.parents[1] / "native" / "fuzz" / "corpus.tar.xz"
FLOATS = [struct.pack("<f", number) for number in (float("nan"), float("inf"), 3.4e38)]


@pytest.fixture
def agree(verdicts, tmp_path):
    """Fails where the readers differ over these bytes."""

    def check(raw, what, max_bits=(None,)):
        path = tmp_path / "file.apm"
        path.write_bytes(raw)
        found = verdicts.disagreements(path, max_bits)
        assert not found, f"{what}: {found}"
        return verdicts.verdict(lambda: apm.read(path))[0]

    return check


@pytest.mark.thorough
def test_the_corpus_of_the_tests(agree, verdicts):
    for path in sorted((HERE / "corpus").glob("*.apm")):
        found = agree(path.read_bytes(), path.name, verdicts.MAX_BITS)
        assert found == path.name.partition("-")[0]


@pytest.mark.thorough
def test_the_corpus_of_the_native_fuzzer(agree):
    with tarfile.open(FUZZED) as corpus:
        files = [(member.name, corpus.extractfile(member).read()) for member in corpus if member.isfile()]
    assert len(files) > 100
    seen = {agree(raw, name) for name, raw in files}
    assert len(seen) > 4, seen


@pytest.mark.thorough
@pytest.mark.parametrize("make_right", [False, True], ids=["wrong checksum", "right checksum"])
def test_every_tensor_changed(agree, forge, tiny, tmp_path, make_right):
    """Its last byte's first or last bit, or an odd float at its end, with and without a checksum that agrees."""
    seen = set()
    for fixed in (False, True):
        apm.write(tiny(widths=(1, 2), keep_float=True, fixed=fixed), tmp_path / "tiny.apm")
        header, graph, data = forge.take_apart((tmp_path / "tiny.apm").read_bytes())
        for name, row in header.items():
            begin, end = row["data_offsets"]
            packed = name.startswith(("plane", "codes"))
            changes = [bytes([data[end - 1] ^ 1 << bit]) for bit in (0, 7)] if packed else FLOATS
            for change in changes:
                new = data[begin : end - len(change)] + change
                sums = graph["checksums"] | ({name: f"{zlib.crc32(new):08x}"} if make_right else {})
                changed = forge.put_together(header, {**graph, "checksums": sums}, data[:begin] + new + data[end:])
                seen.add(agree(changed, f"{name} ends in {change!r}"))
    assert seen == ({"opens", "BadTensor"} if make_right else {"ChecksumMismatch"})


def test_bits_flipped_anywhere(agree, tiny_path):
    raw = tiny_path.read_bytes()
    rng = random.Random(0)
    for position in rng.sample(range(len(raw)), 100):
        flipped = bytearray(raw)
        flipped[position] ^= 1 << rng.randrange(8)
        agree(flipped, f"a bit of byte {position}")


@pytest.mark.thorough
def test_cut_anywhere(agree, tiny_path, verdicts):
    raw = tiny_path.read_bytes()
    with apm.ModelFile(tiny_path) as file:
        ends = [file.data_start, *(file.data_start + place.end for place in file.tensors.values())]
    seen = {agree(raw[:size], f"{size} bytes", verdicts.MAX_BITS[:2]) for end in ends for size in (end - 1, end)}
    assert seen == {"opens", "TruncatedFile"}


def test_garbage_behind_a_file_that_grows(agree, tiny_path, verdicts):
    """What came of a plane is checked, though other weights' parts of that plane are not there yet."""
    with apm.ModelFile(tiny_path) as file:
        ends = {name: file.data_start + place.end for name, place in file.tensors.items()}
    raw = tiny_path.read_bytes()
    good = raw[: ends["plane01.b"]]
    assert agree(good, "two planes", verdicts.MAX_BITS) == "opens"
    assert agree(good + bytes(10), "half of a tensor", verdicts.MAX_BITS) == "opens"
    assert agree(good + bytes(17), "a tensor of zeros", verdicts.MAX_BITS) == "ChecksumMismatch"
    assert agree(good + bytes(len(raw) - len(good)), "zeros up to the end", verdicts.MAX_BITS) == "ChecksumMismatch"
    assert agree(raw + b"0", "one byte too many", verdicts.MAX_BITS) == "BadTensor"
