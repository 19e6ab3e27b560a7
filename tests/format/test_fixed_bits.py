"""Weights and quantize ops that are 8 bit in every profile but the float one: a byte a weight, before the planes."""

import copy
import json

import numpy as np
import pytest

from anyprec import format as apm
from anyprec.cli import inspect as cli_inspect
from anyprec.errors import BadGraph, BadTensor, ModelFileError, TruncatedFile, UnsupportedBits
from anyprec.run.model import load
from anyprec.run.oracle import run_graph


@pytest.fixture
def path(tiny, tmp_path):
    apm.write(tiny(fixed=True, keep_float=True), tmp_path / "fixed.apm")
    return tmp_path / "fixed.apm"


@pytest.mark.parametrize("keep_float", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_what_goes_in_comes_out(tiny, same, tmp_path, nested, keep_float):
    graph = tiny(fixed=True, nested=nested, keep_float=keep_float)
    sizes = apm.write(graph, tmp_path / "net.apm")
    assert sizes.total == (tmp_path / "net.apm").stat().st_size
    assert (sizes.codes, sizes.floats) == (54 + 12, 0)
    same(graph, apm.read(tmp_path / "net.apm", verify=True))


def test_codes_stand_before_the_planes(path):
    with apm.ModelFile(path) as file:
        kinds = [name.partition(".")[0] for name in file.tensors]
        assert list(dict.fromkeys(kinds))[:3] == ["table", "codes", "plane00"] and kinds[-4:] == ["tail"] * 4
        assert file.tensors["codes.head"].shape == (12,) and file.tensors["tail.stem"].shape == (4 * 54,)
        with pytest.raises(UnsupportedBits, match="only codes of 8 bits"):
            file.codes("stem", 4)
        assert file.codes("stem", 8).shape == (3, 3, 3, 2) and file.values("head").shape == (3, 1, 1, 4)


def test_the_safetensors_library_keeps_the_order(path, same):
    library = pytest.importorskip("safetensors")
    from safetensors.numpy import save_file

    again = path.with_name("again.apm")
    with library.safe_open(path, "np") as file:
        save_file({name: file.get_tensor(name) for name in file.keys()}, again, file.metadata())  # noqa: SIM118
    same(apm.read(path), apm.read(again, verify=True))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_width_is_a_prefix_and_keeps_its_8_bit_layers(path, bits):
    part, x = path.with_name("part.apm"), np.ones((1, 6, 6, 2), np.float32)
    apm.truncate(path, part, bits)
    wanted = run_graph(apm.read(path), x, str(bits))["head"]
    for graph in (apm.read(part), apm.read(path, max_bits=bits)):
        assert graph.weights["stem"].bits == 8 and graph.weights["stem"].values is None
        assert np.array_equal(run_graph(graph, x, str(bits))["head"], wanted)
    apm.rewrite(path, part, bits)
    assert np.array_equal(run_graph(apm.read(part, verify=True), x, str(bits))["head"], wanted)


def test_a_file_without_its_codes_opens_with_no_profile(path):
    with apm.ModelFile(path) as file:
        end = file.data_start + file.tensors["codes.stem"].end
    part = path.with_name("part.apm")
    part.write_bytes(path.read_bytes()[: end - 1])
    refused(part, TruncatedFile, "narrowest profile needs")


def test_bits_in_every_profile(tiny):
    graph = tiny(fixed=True, keep_float=True)
    stem = graph.ops[0]
    found = {p.name: (p.weight_bits("stem", 8), p.act_bits(stem.name, stem.bits)) for p in graph.profiles}
    assert found == {"1": (8, 8), "2": (8, 8), "4": (8, 8), "8": (8, 8), "32": (32, 32), "fast": (8, 8)}


def test_inspect(path, capsys):
    args = type("Args", (), {"file": str(path), "json": True, "verify": False, "layers": True})
    cli_inspect.run(args)
    found = json.loads(capsys.readouterr().out)
    assert found["fixed"] == {"layers": 2, "weights": 66} and found["float"]["layers"] == 0
    assert found["sizes"]["codes"] == 66
    args.json = False
    cli_inspect.run(args)
    text = capsys.readouterr().out
    assert "8 bit      66 weights in 2 layers" in text and "8 bit layers" in text


# --- Hostile files: both readers ---


def refused(path, error, words=None):
    with pytest.raises(ModelFileError, match=words) as caught:
        apm.read(path, verify=True)
    assert type(caught.value) is error, caught.value
    with pytest.raises(ModelFileError) as caught:
        load(path)
    assert type(caught.value) is error, caught.value


def set_(record, *way, value=None):
    *way, last = way
    for key in way:
        record = record[key]
    if value is None:
        del record[last]
    else:
        record[last] = value


GRAPHS = {
    "width": (("weights", "stem", "bits"), 4, "it must be 8"),
    "not a number": (("weights", "stem", "bits"), "8", "it must be 8"),
    "true": (("weights", "stem", "bits"), True, "it must be 8"),
    "float": (("weights", "stem", "float"), True, "of no float weight"),
    "other key": (("weights", "stem", "fixed"), True, "unknown 'fixed'"),
    "op width": (("ops", 0, "bits"), 7, "bits is 7; it must be 8"),
    "op null": (("ops", 0, "bits"), [], "bits is"),
    "conv": (("ops", 1, "bits"), 8, "unknown 'bits'"),
    "mixed weight": (("profiles", 5, "weights", "stem"), 8, "names 'stem', which is not quantized by profiles"),
    "mixed op": (("profiles", 5, "acts", "stem.in"), 8, "names 'stem.in', which is not quantized by profiles"),
    "mixed left out": (("profiles", 5, "acts", "qa"), None, "leaves out 'qa'"),
    "float acts": (("profiles", 0, "acts"), 32, "both must be 32"),
    "float weights": (("profiles", 4, "acts"), {"qa": 32, "qb": 32}, "both must be 32"),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_graphs(forge, path, case):
    way, value, words = GRAPHS[case]
    header, graph, data = forge.take_apart(path.read_bytes())
    set_(graph, *way, value=value)
    path.write_bytes(forge.put_together(header, graph, data))
    refused(path, BadGraph, words)


def test_tensors(forge, path):
    header, graph, data = forge.take_apart(path.read_bytes())

    def write(new):
        path.write_bytes(forge.put_together(new, graph, data))

    missing = copy.deepcopy(header)
    missing["codes.more"] = missing.pop("codes.stem")
    write(missing)
    refused(path, BadTensor, "'codes.stem' is missing")
    shaped = copy.deepcopy(header)
    shaped["codes.stem"]["shape"] = [3, 3, 3, 2]
    write(shaped)
    refused(path, BadTensor, "codes.stem.*needs U8 of shape \\[54\\]")
    begin, end = header["codes.stem"]["data_offsets"]
    short = copy.deepcopy(header)
    short["codes.stem"] |= {"shape": [53], "data_offsets": [begin, end - 1]}
    write(short)
    refused(path, BadTensor)
    # In the place of plane 00: the sizes are right, the order is not.
    swapped, at = copy.deepcopy(header), begin
    for name in ("plane00.a", "codes.stem"):
        first, last = header[name]["data_offsets"]
        swapped[name]["data_offsets"] = [at, at + last - first]
        at += last - first
    write({name: swapped[name] for name in header if name not in ("plane00.b",)} | {"plane00.b": header["plane00.b"]})
    refused(path, BadTensor)


def test_without_the_word_it_would_be_planes(forge, path):
    header, graph, data = forge.take_apart(path.read_bytes())
    del graph["weights"]["stem"]["bits"]
    graph["profiles"] = graph["profiles"][:4]
    path.write_bytes(forge.put_together(header, graph, data))
    refused(path, BadTensor)


@pytest.mark.parametrize("terms", [33025, 33026])
def test_sums_count_8_bits_whatever_the_profile_says(terms, tmp_path):
    path = tmp_path / "net.apm"
    quantize = {"signed": False, "rectify": False, "affine": False, "bits": 8}
    linear = {"weight": "w", "signed": False, "affine": False}
    graph = apm.Graph(
        "net", (1, 1, terms), (apm.GraphProfile("1", 1, 1),), {},
        {"w": apm.Weight((1, 1, 1, terms), None, {8: np.full((1, 1, 1, terms), 255, np.uint8)}, bits=8)},
        (apm.Op("q", "quantize", ("input",), quantize), apm.Op("y", "linear", ("q",), linear)), ("y",), {},
    )  # fmt: skip
    if terms > 33025:
        with pytest.raises(BadGraph, match="does not fit 32 bits"):
            apm.write(graph, path)
        return
    apm.write(graph, path)
    assert load(path)(np.full((1, terms, 1, 1), 300, np.float32)).item() == np.float32(terms * 255 * 255)


def test_what_cannot_be_written(tiny, tmp_path):
    graph = tiny(fixed=True)
    weight = graph.weights["stem"]
    for codes, words in (({4: weight.codes[8]}, "are none"), ({8: weight.codes[8].astype(int)}, "are int64")):
        wrong = apm.Weight(weight.shape, None, codes, bits=8)
        with pytest.raises(BadTensor, match=words):
            apm.write(
                type(graph)(**{**graph.__dict__, "weights": {**graph.weights, "stem": wrong}}), tmp_path / "x.apm"
            )
