"""Broken and hostile files: each gives the error it should, in one line that names the file, and reads no more."""

import copy
import json
import math
import os
import resource
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest

from anyprec import format as apm
from anyprec.errors import (
    BadGraph,
    BadHeader,
    BadTensor,
    ChecksumMismatch,
    ModelFileError,
    NotAModelFile,
    TruncatedFile,
    UnsupportedVersion,
)


def at(record, path):
    """The container that holds the last key of a path such as 'ops.1.signed', and that key."""
    *way, last = [int(key) if key.isdigit() else key.lstrip("@") for key in path.split("/")]
    for key in way:
        record = record[key]
    return record, last


def edit(record, path, value):
    """Sets, or with value `drop` removes, what the path leads to."""
    record = copy.deepcopy(record)
    holder, key = at(record, path)
    if value is drop:
        del holder[key]
    elif isinstance(holder, list) and key == len(holder):
        holder.append(value)
    else:
        holder[key] = value
    return record


def drop():
    """Stands for 'remove it'."""


def opens_as(raw, folder, error, message):
    path = folder / "bad.apm"
    path.write_bytes(raw)
    with pytest.raises(ModelFileError, match=message) as caught:
        apm.read(path, verify=True)
    text = str(caught.value)
    assert type(caught.value) is error, text
    assert text.startswith(f"{path}: ") and "\n" not in text and len(text) - len(str(path)) < 400, text


POOL = {"kernel": [2, 2], "stride": [2, 2], "pad": [0, 0, 0, 0], "dilation": [1, 1], "ceil": False}
DEEP = "[" * 200_000

# Graph (see `tiny` in conftest): path, new value, part of the message. '@8' is the key "8", not position 8.
GRAPHS = [
    ("made_by", 7, "made_by 7"),
    ("name", "", "name '' must be"),
    ("name", "n\nt", "printable"),
    ("surprise", 1, "unknown 'surprise'"),
    ("labels", drop, "no 'labels'"),
    ("labels", "cat", "labels is 'cat'"),
    ("labels/0", 7, "label 7 is not a text"),
    ("labels/0", "\ud800", "half a surrogate pair"),
    ("input/shape", [6, 6], "input shape"),
    ("input/shape/2", None, "input shape"),
    ("input/shape/0", 0, "input shape"),
    ("input/shape/0", 2**31, "input shape"),
    ("input/shape", [2**20, 2**20, 2], "below 2\\^40"),
    ("input/size", [6], "input size"),
    ("input/size", [6, 7], "input size .* allows"),
    ("input/size", [6, None], "input size"),
    ("input/size", [6.0, 6], "input size"),
    ("input/image/scale", [1.0], "image scale"),
    ("input/image/scale/0", 1e39, "image scale"),
    ("input/image/shift", drop, "no 'shift'"),
    ("weights", [], "weights is"),
    ("weights/a/shape", [2**30, 2**30, 1, 1], "below 2\\^40"),
    ("weights/a/shape", [5, 3, 3, 2], "reads 3 channels"),
    ("weights/a/shape", [5, 3, 2, 3], "kernel"),
    ("weights/a/shape/0", 5.0, "shape"),
    ("weights/a/float", 0, "float is 0"),
    ("weights/a/float", True, "takes floats"),
    ("weights/stem/float", False, "takes codes"),
    ("weights/spare", {"shape": [1, 1, 1, 1], "float": True}, "used by no op"),
    ("weights/" + "x" * 201, {"shape": [1, 1, 1, 1], "float": True}, "weight name"),
    ("planes", [[0]], "planes is"),
    ("planes/@9", list(range(9)), "width '9'"),
    ("planes/@2", [0], "planes of 2 bits"),
    ("planes/@2", [1, 0], "planes of 2 bits"),
    ("planes/@2", [0, 0], "planes of 2 bits"),
    ("planes/@2", [0, 100], "planes of 2 bits"),
    ("planes/@1", [2], "leaves out"),
    ("planes/@1", [True], "planes of 1 bits"),
    ("planes/@8", [0, 1, 2, 3, 4, 5, 6, 8], "leaves out"),
    ("planes/@8", drop, "weights is 8; this file has 1, 2, 4, 32"),
    ("profiles", [], "profiles is"),
    ("profiles/1/name", "1", "two profiles"),
    ("profiles/1/name", "3", "a number as its name"),
    ("profiles/1/name", "02", "a number as its name"),
    ("profiles/4/name", "4", "two profiles"),
    ("profiles/4/name", "5", "a number as its name"),
    ("profiles/4/name", "random", "no profile may be called that"),
    ("profiles/4/name", "random:2,4", "no profile may be called that"),
    ("profiles/1/weights", 3, "this file has 1, 2, 4, 8, 32"),
    ("profiles/1/weights", 32, "both must be 32"),
    ("profiles/1/weights", True, "weights is True"),
    ("profiles/1/acts", 0, "acts is 0"),
    ("profiles/1/acts", "2", "acts is '2'"),
    ("profiles/1/accuracy", 101, "percentage"),
    ("profiles/1/accuracy", True, "percentage"),
    ("profiles/4/weights/b", drop, "leaves out 'b'"),
    ("profiles/4/weights/stem", 2, "not quantized"),
    ("profiles/4/acts/pool", 2, "acts names 'pool'"),
    ("profiles/4/acts/qa", 9, "acts of 'qa' is 9"),
    ("ops", [], "ops is"),
    ("ops/0", 7, "op 0 is 7"),
    ("ops/0/name", "input", "is taken"),
    ("ops/1/name", "stem", "is taken"),
    ("ops/1/op", "exec", "unknown kind 'exec'; known are quantize"),
    ("ops/1/op", ["quantize"], "unknown kind"),
    ("ops/1/in", ["later"], "reads 'later'"),
    ("ops/1/in", ["conv_a"], "reads 'conv_a', which is neither"),
    ("ops/1/in", [], "must name 1 values"),
    ("ops/1/in", ["stem", "stem"], "must name 1 values"),
    ("ops/1/in", [["stem"]], "neither"),
    ("ops/1/in", "stem", "'in' is"),
    ("ops/1/signed", drop, "no 'signed'"),
    ("ops/1/signed", 0, "true or false"),
    ("ops/1/signed", True, "signed is False, what it reads is made with True"),
    ("ops/1/zero", 0, "unknown 'zero'"),
    ("ops/2/in", ["stem"], "which is floats; it takes codes"),
    ("ops/2/weight", "none", "no weight 'none'"),
    ("ops/2/weight", 1, "weight is 1"),
    ("ops/2/stride", [0, 1], "stride"),
    ("ops/2/stride", [1], "stride"),
    ("ops/2/pad", [-1, 0, 0, 0], "pad"),
    ("ops/2/pad", [2**31 - 1, 0, 0, 0], "does not fit"),
    ("ops/2/pad", [8000, 8000, 8000, 8000], "reads 9 taps for each of 256,"),
    ("ops/2/dilation", [2**31 - 1, 1], "reaches over"),
    ("ops/2/dilation", [9, 1], "does not fit windows of 19"),
    ("ops/2/groups", 2, "is for 6"),
    ("ops/2/groups", 0, "groups is 0"),
    ("ops/3/in", ["qa"], "takes floats"),
    ("ops/4/pad", [2, 0, 0, 0], "holds a whole window"),
    ("ops/4/kernel", [7, 1], "does not fit"),
    ("ops/6/size", [1, None], "size"),
    ("ops/6/size", [2**30, 2**30], "2\\^40"),
    ("outputs", [], "outputs is"),
    ("outputs", ["head", "head"], "names one twice"),
    ("outputs", ["input"], "not the name of an op"),
    ("outputs", [["head"]], "not the name of an op"),
    ("outputs", ["pool"], "outputs are floats"),
    ("checksums", [], "checksums is"),
    ("checksums/plane00.a", drop, "has none for 'plane00.a'"),
    ("checksums/plane99.a", "00000000", "does not need"),
    ("checksums/plane00.a", "0000000G", "8 hex digits"),
]


@pytest.mark.parametrize(("path", "value", "message"), GRAPHS, ids=lambda v: str(getattr(v, "__name__", v))[:30])
def test_bad_graph(forge, tiny_path, tmp_path, path, value, message):
    header, graph, data = forge.take_apart(tiny_path.read_bytes())
    opens_as(forge.put_together(header, edit(graph, path, value), data), tmp_path, BadGraph, message)


OPS = [
    ("add", {"in": ["stem", "head"]}, "differ in axis 0"),
    ("add", {"in": ["stem", "conv_b"]}, "differ in"),
    ("concat", {"in": ["stem", "mean"]}, "differ in axis 0"),
    ("concat", {"in": ["stem", "qa"]}, "takes floats"),
    ("dequantize", {"in": ["stem"]}, "takes codes"),
    ("max_pool", {"in": ["stem"], **POOL, "dilation": [7, 1], "pad": [2, 0, 2, 0]}, "steps over"),
    ("avg_pool", {"in": ["qa"], **POOL}, "unknown 'dilation'|no 'count_pad'"),
    ("resize", {"in": ["stem"], "mode": "cubic", "align": False, "size": None, "scale": None, "like": None}, "mode is"),
    (
        "resize",
        {"in": ["stem"], "mode": "nearest", "align": False, "size": None, "scale": None, "like": None},
        "one of",
    ),
    (
        "resize",
        {"in": ["stem"], "mode": "nearest", "align": False, "size": None, "scale": None, "like": "x"},
        "neither",
    ),
    (
        "resize",
        {"in": ["stem"], "mode": "nearest", "align": False, "size": [1, 1], "scale": [1, 1], "like": None},
        "one",
    ),
    (
        "resize",
        {"in": ["stem"], "mode": "nearest", "align": False, "size": None, "scale": [1e300, 1], "like": None},
        "above 0",
    ),
    (
        "resize",
        {"in": ["stem"], "mode": "nearest", "align": False, "size": None, "scale": [0.1, 1], "like": None},
        "from 1",
    ),
    ("pad", {"in": ["stem"], "h": [0, 0], "w": [0, 0], "c": [0, -1]}, "c is"),
    ("pad", {"in": ["stem"], "h": [2**31 - 1, 0], "w": [0, 0], "c": [0, 0]}, "from 1 to"),
    ("softmax", {"in": ["qb"]}, "takes floats"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), OPS)
def test_bad_op(forge, tiny_path, tmp_path, kind, fields, message):
    header, graph, data = forge.take_apart(tiny_path.read_bytes())
    graph["ops"].append({"name": "extra", "op": kind, **fields})
    opens_as(forge.put_together(header, graph, data), tmp_path, BadGraph, message)


def test_sums_that_overflow_are_refused(tiny, tmp_path):
    graph = tiny()
    # 3 x 3 x 3670 = 33030 terms of 255 x 255 reach 2^31 (33025 would not); 4 bits are fine
    deep = replace(graph.weights["a"], shape=(5, 3, 3, 3670))
    wide = {"stem": replace(graph.weights["stem"], shape=(3670, 3, 3, 2)), "a": deep}
    with pytest.raises(BadGraph, match=r"op 'conv_a' \(conv\) in profile '8': its sums may reach 2,147,775,750"):
        apm.write(replace(graph, weights={**graph.weights, **wide}), tmp_path / "net.apm")


# Header: path, new value, error, part of the message
HEADERS = [
    ("plane00.a", drop, BadTensor, "leaves 17 bytes after"),
    ("plane07.b", drop, BadTensor, "'plane07.b' is missing"),
    ("plane00.a", 7, BadTensor, "dtype, shape and data_offsets"),
    ("plane00.a/extra", 7, BadTensor, "dtype, shape and data_offsets"),
    ("plane00.a/dtype", "I8", BadTensor, "dtype 'I8' is not one of F32, U8"),
    ("plane00.a/dtype", ["U8"], BadTensor, "dtype"),
    ("plane00.a/dtype", "F32", BadTensor, "needs 68 bytes, data_offsets give it 17"),
    ("plane00.a/shape", [17, 1], BadTensor, "the graph needs U8 of shape \\[17\\]"),
    ("plane00.a/shape", [], BadTensor, "1 to 4 sizes"),
    ("plane00.a/shape", [2**60], BadTensor, "1 to 4 sizes"),
    ("plane00.a/shape", [2**39, 2**39, 2**39], BadTensor, "data_offsets give it 17"),
    ("plane00.a/shape", [-17], BadTensor, "1 to 4 sizes"),
    ("plane00.a/shape", [17.0], BadTensor, "1 to 4 sizes"),
    ("plane00.a/shape", [True], BadTensor, "1 to 4 sizes"),
    ("plane00.a/data_offsets", [0, 17], BadTensor, "overlaps"),
    ("plane00.a/data_offsets", [17, 0], BadTensor, "begin <= end"),
    ("plane00.a/data_offsets", [-17, 0], BadTensor, "begin <= end"),
    ("plane07.b/data_offsets", [2**62, 2**62 + 3], BadTensor, "leaves"),
    ("plane08.a", {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, BadTensor, "overlaps"),
    ("x", {"dtype": "U8", "shape": [1], "data_offsets": [5000, 5001]}, BadTensor, "leaves"),
]


@pytest.mark.parametrize(
    ("path", "value", "error", "message"), HEADERS, ids=lambda v: str(getattr(v, "__name__", v))[:30]
)
def test_bad_tensor(forge, tiny_path, tmp_path, path, value, error, message):
    header, graph, data = forge.take_apart(tiny_path.read_bytes())
    opens_as(forge.put_together(edit(header, path, value), graph, data), tmp_path, error, message)


def test_tensors_in_another_order(forge, tiny_path, tmp_path):
    header, graph, data = forge.take_apart(tiny_path.read_bytes())
    a, b = header["plane00.a"], header["plane01.a"]  # of one size, so that only the order is wrong
    swapped = {**header, "plane00.a": b, "plane01.a": a}
    opens_as(forge.put_together(swapped, graph, data), tmp_path, BadTensor, "stands where 'plane00.a' belongs")


def test_tensors_that_are_not_aligned(tiny_path, forge, tmp_path):
    raw = tiny_path.read_bytes()
    _, _, data = forge.take_apart(raw)
    header = raw[8 : len(raw) - len(data)]
    opens_as(forge.with_header(header + b" ", data), tmp_path, BadTensor, "which is not a multiple of 4")


def test_an_unknown_tensor_at_the_end(forge, tiny_path, tmp_path):
    header, graph, data = forge.take_apart(tiny_path.read_bytes())
    header["virus"] = {"dtype": "U8", "shape": [4], "data_offsets": [len(data), len(data) + 4]}
    opens_as(forge.put_together(header, graph, data + b"1234"), tmp_path, BadTensor, "'virus' at offset .* is none")
    opens_as(tiny_path.read_bytes() + b"1", tmp_path, BadTensor, "has 1 bytes after its last tensor")


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        (b"", TruncatedFile, "has 0 bytes, not even"),
        (b"\x89PNG\r\n\x1a\n" + b"pixels" * 9, BadHeader, "is it a model file"),
        (b"\xff" * 1024, BadHeader, "18,446,744,073,709,551,615 bytes, the limit is 100,000,000"),
        (b"\x01" + b"\x00" * 50, BadHeader, "the header has 1 bytes"),
        (b"\x40" + b"\x00" * 50, BadHeader, "starts with"),
        (b"\x00\xe1\xf5\x05\x00\x00\x00\x00{}", TruncatedFile, "its header alone needs 100,000,008"),
    ],
)
def test_bytes_that_are_no_model_file(tmp_path, raw, error, message):
    opens_as(raw, tmp_path, error, message)


@pytest.mark.parametrize(
    ("header", "error", "message"),
    [
        (b"[]", BadHeader, "instead of '{'"),
        (b'{"a": 1', BadHeader, "does not end in '}'"),
        (b"{}\n", BadHeader, "does not end in '}'"),
        (b"{}{}", BadHeader, "is not JSON"),
        (b'{"\xff": 1}', BadHeader, "not UTF-8 at byte 2"),
        (b'{"a": 1, "a": 2}', BadHeader, "has the key 'a' twice"),
        (b'{"a": NaN}', BadHeader, "the number NaN, which is not JSON"),
        (b'{"a": -Infinity}', BadHeader, "-Infinity"),
        (b'{"a": 1e999}', BadHeader, "too large"),
        (b'{"a": ' + b"9" * 25 + b"}", BadHeader, "25 digits"),
        (b'{"a": ' + b"9" * 5000 + b"}", BadHeader, "5000 digits"),
        (b'{"a": 0.' + b"1" * 399 + b"}", BadHeader, "401 characters"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", BadHeader, "more than 64 levels"),
        (b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}", BadTensor, "dtype, shape and data_offsets"),
        (b'{"a": ' + DEEP.encode() + b"}", BadHeader, "nested too deeply"),
        (b'{"a": ' + b'{"a":' * 200_000 + b"}", BadHeader, "nested too deeply"),
        (b'{"__metadata__": []}', BadHeader, "not a table of strings"),
        (b'{"__metadata__": {"anyprec": 1}}', BadHeader, "not a table of strings"),
        (b"{}", NotAModelFile, "anyprec pack"),
        (b'{"__metadata__": {"format": "pt"}}', NotAModelFile, "without a graph of anyprec"),
        (b'{"__metadata__": {"anyprec": "{}"}}', ChecksumMismatch, "written was ''"),
        (b'{"__metadata__": {"anyprec": "{}", "anyprec.crc32": "00000000"}}', ChecksumMismatch, "a374aa24|checksum"),
        (b'{"__metadata__": {"anyprec": "\\ud800", "anyprec.crc32": "0"}}', BadHeader, "half a surrogate pair"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_bad_header(forge, tmp_path, header, error, message):
    opens_as(forge.with_header(header), tmp_path, error, message)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", BadGraph, "the graph is not JSON"),
        ("\ud800", BadHeader, "half a surrogate pair"),
        (DEEP, BadGraph, "nested too deeply"),
        ("[]", BadGraph, "is not a table with 'format'"),
        ("null", BadGraph, "is not a table with 'format'"),
        ("{}", BadGraph, "is not a table with 'format'"),
        ('{"format": 1, "format": 1}', BadGraph, "'format' twice"),
        ('{"format": NaN}', BadGraph, "NaN"),
        ('{"format": 1}', BadGraph, "the graph has no 'name'"),
        ('{"format": 4, "made_by": "anyprec 9"}', UnsupportedVersion, "format version 4 is not 1, 2 or 3.*anyprec 9"),
        ('{"format": true}', UnsupportedVersion, "format version True"),
        ('{"format": "1"}', UnsupportedVersion, "format version '1'"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_bad_graph_text(forge, tmp_path, text, error, message):
    opens_as(forge.put_together({}, text, b""), tmp_path, error, message)


def test_a_real_safetensors_file_is_not_a_model(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"x": np.zeros((2, 2), np.float32)}, tmp_path / "x.safetensors")
    with pytest.raises(NotAModelFile, match=r"x\.safetensors: is a safetensors file without a graph"):
        apm.ModelFile(tmp_path / "x.safetensors")


def test_absurd_sizes_fail_before_anything_is_allocated(forge, tiny_path, tmp_path):
    """A consistent lie: graph and header agree on a weight of 2^36 numbers that the file does not have."""
    header, graph, data = forge.take_apart(tiny_path.read_bytes())
    graph["weights"]["stem"]["shape"] = [2**30, 3, 3, 2]
    graph["ops"] = [op for op in graph["ops"] if op["name"] in ("stem",)]
    graph["weights"] = {"stem": graph["weights"]["stem"]}
    graph["outputs"], graph["planes"] = ["stem"], {}
    graph["profiles"] = [{"name": "32", "weights": 32, "acts": 32, "accuracy": None}]
    graph["checksums"] = {"weight.stem": "00000000"}
    header = {"weight.stem": {"dtype": "F32", "shape": [2**30, 3, 3, 2], "data_offsets": [0, 72 * 2**30]}}
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, limit[1]))
    try:
        opens_as(
            forge.put_together(header, graph, data), tmp_path, TruncatedFile, "its narrowest profile needs 77,309,4"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flip_of_any_bit_is_found(tiny, same, tmp_path, step):
    """In the header: an error, or (a space, a foreign key) the same graph. In the data: the checksum of that tensor."""
    graph = tiny(widths=(1, 2))
    path = tmp_path / "net.apm"
    apm.write(graph, path)
    raw = path.read_bytes()
    with apm.ModelFile(path) as file:
        data_start = file.data_start
    rng = np.random.default_rng(1)
    for position in range(0, len(raw), step):
        bit = int(rng.integers(8))
        flipped = bytearray(raw)
        flipped[position] ^= 1 << bit
        path.write_bytes(flipped)
        if position >= data_start:
            with pytest.raises(ChecksumMismatch, match="tensor '"):
                apm.read(path, verify=True)
            continue
        try:
            found = apm.read(path, verify=True)
        except ModelFileError as error:
            assert "\n" not in str(error)
        else:
            same(graph, found)


@pytest.mark.parametrize("verify", [False, True])
def test_bits_past_the_end_of_a_plane(forge, tiny_path, verify):
    """With a checksum that agrees, and without: the plane is refused when the file is read, not when codes are made."""
    raw = with_tensor(forge, tiny_path.read_bytes(), "plane03.a", lambda old: old[:-1] + bytes([old[-1] | 0x80]))
    tiny_path.write_bytes(raw)
    with pytest.raises(BadTensor, match=r"tiny\.apm: tensor 'plane03\.a' has bits past its end set"):
        apm.read(tiny_path, verify=verify)
    apm.read(tiny_path, max_bits=2, verify=verify)
    with apm.ModelFile(tiny_path) as file:
        file.codes("a", 2)
        with pytest.raises(BadTensor, match="bits past its end set"):
            file.codes("a", 4)


FLOATS = [
    ("table.qa", 0, math.nan, "'table.qa' has nan as number 0; all must be finite"),
    ("table.conv_a", 7, math.inf, "'table.conv_a' has inf as number 7"),
    ("table.head", 29, -math.inf, "'table.head' has -inf as number 29"),
    ("weight.stem", 53, math.nan, "'weight.stem' has nan as number 53"),
    ("tail.b", 3, math.inf, "'tail.b' has inf as number 3"),
    ("table.bound", 0, math.inf, "'table.bound' has inf as number 0; a clip may have -inf as its lower"),
    ("table.bound", 3, -math.inf, "'table.bound' has -inf as number 3; a clip may"),
    ("table.bound", 2, math.nan, "'table.bound' has nan as number 2; a clip may"),
]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("name", "at", "value", "message"), FLOATS)
def test_numbers_that_are_not_finite(forge, tiny, tmp_path, name, at, value, message, verify):
    graph = with_clip(tiny(keep_float=True))
    path = tmp_path / "net.apm"
    apm.write(graph, path)
    place = slice(4 * at, 4 * at + 4)
    raw = with_tensor(
        forge, path.read_bytes(), name, lambda old: old[: place.start] + struct.pack("<f", value) + old[place.stop :]
    )
    path.write_bytes(raw)
    with pytest.raises(BadTensor, match=message):
        apm.read(path, verify=verify)


def test_the_writer_refuses_numbers_that_are_not_finite(tiny, tmp_path):
    graph = with_clip(tiny(keep_float=True))
    path = tmp_path / "net.apm"
    for value in (math.nan, math.inf, -math.inf):
        table = graph.tables["qa"].copy()
        table[1, 0, 2] = value
        with pytest.raises(BadTensor, match=rf"'table.qa' has {value} as number 8; all must be finite"):
            apm.write(replace(graph, tables={**graph.tables, "qa": table}), path)
        for name in ("stem", "b"):
            values = graph.weights[name].values.copy()
            values[0, 0, 0, 1] = value
            weights = {**graph.weights, name: replace(graph.weights[name], values=values)}
            with pytest.raises(BadTensor, match=rf"{name}' has {value} as number 1"):
                apm.write(replace(graph, weights=weights), path)
    assert not path.exists()


def test_a_clip_may_have_no_bounds(tiny, tmp_path):
    graph = with_clip(tiny())
    path = tmp_path / "net.apm"
    apm.write(graph, path)
    assert (apm.read(path).tables["bound"] == [-math.inf, math.inf]).all()


def with_clip(graph):
    """A clip without bounds behind the last op."""
    clip = apm.Op("bound", "clip", graph.outputs)
    bounds = np.tile(np.array([-math.inf, math.inf], np.float32), (len(graph.profiles), 1))
    return replace(graph, ops=(*graph.ops, clip), outputs=("bound",), tables={**graph.tables, "bound": bounds})


def with_tensor(forge, raw, name, change):
    """The file with other bytes in one tensor, its checksum made right."""
    header, graph, data = forge.take_apart(raw)
    begin, end = header[name]["data_offsets"]
    new = change(data[begin:end])
    graph["checksums"][name] = f"{zlib.crc32(new):08x}"
    return forge.put_together(header, graph, data[:begin] + new + data[end:])


def test_a_file_cut_while_it_is_open(tiny_path):
    with apm.ModelFile(tiny_path) as file:
        os.truncate(tiny_path, file.bytes_for(1))
        with pytest.raises(TruncatedFile, match="was cut short while it was read"):
            file.codes("b", 8)
        file.refresh()
        assert file.widths == (1,)


def test_a_foreign_key_in_the_metadata_is_fine(forge, tiny_path, tiny, same):
    header, graph, data = forge.take_apart(tiny_path.read_bytes())
    raw = forge.put_together(header, graph, data)
    metadata = json.loads(raw[8 : len(raw) - len(data)])["__metadata__"]
    tiny_path.write_bytes(forge.put_together(header, graph, data, {**metadata, "format": "np"}))
    same(tiny(), apm.read(tiny_path))
