"""Format 2: how pictures become inputs. Written and read back by both readers, kept by rewrite; every mistake is found
by both; files of format 1 stay what they were.
"""

from dataclasses import replace

import numpy as np
import pytest

import anyprec
from anyprec import format as apm
from anyprec.errors import BadGraph, UnsupportedVersion
from anyprec.format import Weight

COVER = {"resize": "cover", "to": [7, 8], "filter": "bilinear"}
NONE = {"resize": "none", "to": None, "filter": None}


@pytest.fixture
def graph(tiny):
    """`tiny` with a color image: its own has two channels, which no picture has."""
    plain = tiny()
    old = plain.weights["stem"]
    shape = (*old.shape[:3], 3)
    return replace(
        plain, input_shape=(6, 6, 3), weights={**plain.weights, "stem": Weight(shape, np.resize(old.values, shape))},
        image_scale=(1 / 128,) * 3, image_shift=(-1.0,) * 3, image_size=(6, 6), resize="cover", resize_to=(7, 8),
        filter="bicubic",
    )  # fmt: skip


def test_both_readers_say_the_same(graph, tmp_path):
    apm.write(graph, tmp_path / "net.apm")
    there = apm.read(tmp_path / "net.apm")
    assert (there.resize, there.resize_to, there.filter) == ("cover", (7, 8), "bicubic")
    how = anyprec.load(tmp_path / "net.apm").preprocessing
    assert how == there.preprocessing and (how.size, how.to, how.filter) == ((6, 6), (7, 8), "bicubic")
    scale, shift = how.image
    assert scale == pytest.approx(graph.image_scale, rel=1e-6) and shift == pytest.approx(graph.image_shift, rel=1e-5)


def test_rewriting_keeps_it(graph, tmp_path):
    apm.write(graph, tmp_path / "net.apm")
    apm.rewrite(tmp_path / "net.apm", tmp_path / "small.apm", max_bits=2)
    assert apm.read(tmp_path / "small.apm").preprocessing == apm.read(tmp_path / "net.apm").preprocessing


def test_a_file_without_it_is_of_format_1(tiny, forge, tmp_path):
    apm.write(tiny(), tmp_path / "net.apm")
    _, record, _ = forge.take_apart((tmp_path / "net.apm").read_bytes())
    assert record["format"] == 1 and "preprocessing" not in record["input"]
    assert anyprec.load(tmp_path / "net.apm").preprocessing is None
    assert apm.read(tmp_path / "net.apm").preprocessing is None


MISTAKES = [
    ({"format": 1}, {}, BadGraph),  # format 1 does not have it
    ({"format": 4}, {}, UnsupportedVersion),
    ({}, {"preprocessing": None}, BadGraph),
    ({}, {"preprocessing": {**COVER, "more": 1}}, BadGraph),
    ({}, {"preprocessing": {"resize": "cover", "to": [7, 8]}}, BadGraph),
    ({}, {"preprocessing": {**COVER, "resize": "crop"}}, BadGraph),
    ({}, {"preprocessing": {**COVER, "resize": 1}}, BadGraph),
    ({}, {"preprocessing": {**COVER, "to": [7]}}, BadGraph),
    ({}, {"preprocessing": {**COVER, "to": [5, 8]}}, BadGraph),
    ({}, {"preprocessing": {**COVER, "to": [7, 2**31]}}, BadGraph),
    ({}, {"preprocessing": {**COVER, "to": [2**30, 2**30]}}, BadGraph),
    ({}, {"preprocessing": {**COVER, "to": None}}, BadGraph),
    ({}, {"preprocessing": {**COVER, "filter": "area"}}, BadGraph),
    ({}, {"preprocessing": {**COVER, "filter": None}}, BadGraph),
    ({}, {"preprocessing": NONE}, BadGraph),  # with a size
    ({}, {"preprocessing": COVER, "size": None}, BadGraph),
    ({}, {"preprocessing": COVER, "image": None}, BadGraph),
    ({}, {"preprocessing": COVER, "image": {"scale": [0.0, 1.0, 1.0], "shift": [0.0] * 3}}, BadGraph),
    ({}, {"preprocessing": COVER, "image": {"scale": [-1.0, 1.0, 1.0], "shift": [0.0] * 3}}, BadGraph),
]


@pytest.mark.parametrize(("top", "given", "error"), MISTAKES, ids=str)
def test_mistakes_are_found_by_both_readers(graph, forge, tmp_path, top, given, error):
    apm.write(graph, tmp_path / "net.apm")
    header, record, data = forge.take_apart((tmp_path / "net.apm").read_bytes())
    (tmp_path / "bad.apm").write_bytes(
        forge.put_together(header, {**record, **top, "input": {**record["input"], **given}}, data)
    )
    for read in (apm.read, anyprec.load):
        with pytest.raises(error) as caught:
            read(tmp_path / "bad.apm")
        assert type(caught.value) is error and "\n" not in str(caught.value)


def test_none_is_for_free_sizes(graph, forge, tmp_path):
    apm.write(graph, tmp_path / "net.apm")
    header, record, data = forge.take_apart((tmp_path / "net.apm").read_bytes())
    for shape, opens in (([None, None, 3], True), ([6, None, 3], False), ([6, 6, 3], False)):
        source = {key: value for key, value in record["input"].items() if key != "size"}
        changed = {**record, "input": {**source, "shape": shape, "preprocessing": NONE}}
        (tmp_path / "free.apm").write_bytes(forge.put_together(header, changed, data))
        for read in (apm.read, anyprec.load):
            if opens:
                assert read(tmp_path / "free.apm").preprocessing.size is None
                continue
            with pytest.raises(BadGraph, match="free H and W"):
                read(tmp_path / "free.apm")
