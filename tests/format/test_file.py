"""write and read: what goes in comes out, at every width, from a prefix, from a growing file, through safetensors."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyprec import format as apm
from anyprec.errors import BadGraph, BadTensor, ModelFileError, TruncatedFile, UnknownLayer, UnsupportedBits


@pytest.mark.parametrize("keep_float", [False, True])
@pytest.mark.parametrize("nested", [True, False])
def test_round_trip(tiny, same, tmp_path, nested, keep_float):
    graph = tiny(nested=nested, keep_float=keep_float)
    sizes = apm.write(graph, tmp_path / "net.apm")
    assert sizes.total == (tmp_path / "net.apm").stat().st_size
    assert len(sizes.planes) == (8 if nested else 15)
    same(graph, apm.read(tmp_path / "net.apm", verify=True))
    assert [path.name for path in tmp_path.iterdir()] == ["net.apm"]  # no temporary file is left


@pytest.mark.thorough
@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_round_trip_of_random_graphs(build, same, tmp_path_factory, data, seed):
    graph = build(lambda options: data.draw(st.sampled_from(options)), seed)
    path = tmp_path_factory.mktemp("random") / "net.apm"
    apm.write(graph, path)
    same(graph, apm.read(path, verify=True))
    with apm.ModelFile(path) as file:
        for op in graph.ops:
            assert str(file.checked.values[op.name])  # every value got a shape


def test_the_bytes_are_as_described(tiny_path, tiny):
    raw = tiny_path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert (8 + length) % 64 == 0
    header = json.loads(raw[8 : 8 + length])
    graph = json.loads(header.pop("__metadata__")["anyprec"])
    assert list(graph) == [
        "format", "name", "made_by", "input", "labels", "planes", "profiles", "weights", "ops", "outputs", "checksums",
    ]  # fmt: skip
    assert list(header)[:8] == [
        "table.conv_a", "table.head", "table.qa", "table.qb", "weight.head", "weight.stem", "plane00.a", "plane00.b",
    ]  # fmt: skip
    codes = tiny().weights["a"].codes[8].reshape(-1)
    begin, end = (8 + length + offset for offset in header["plane00.a"]["data_offsets"])
    assert end - begin == 17  # 135 weights
    for i, code in enumerate(codes):
        assert raw[begin + i // 8] >> (i % 8) & 1 == code >> 7
    assert raw[end - 1] >> 7 == 0  # the bit past the end
    begin, _ = (8 + length + offset for offset in header["plane05.b"]["data_offsets"])
    assert raw[begin] & 1 == tiny().weights["b"].codes[8].reshape(-1)[0] >> 2 & 1


@pytest.mark.parametrize("nested", [True, False])
def test_the_safetensors_library_reads_it_and_keeps_its_order(tiny, same, tmp_path, nested):
    library = pytest.importorskip("safetensors")
    from safetensors.numpy import save_file

    graph = tiny(nested=nested, keep_float=True)
    apm.write(graph, tmp_path / "net.apm")
    with library.safe_open(tmp_path / "net.apm", framework="np") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys(), reverse=True)}
    np.testing.assert_array_equal(tensors["table.qa"], graph.tables["qa"])
    np.testing.assert_array_equal(tensors["tail.a"].view(np.float32).reshape(5, 3, 3, 3), graph.weights["a"].values)
    save_file(tensors, tmp_path / "again.apm", metadata)
    with apm.ModelFile(tmp_path / "net.apm") as ours, apm.ModelFile(tmp_path / "again.apm") as theirs:
        assert list(ours.tensors.items()) == list(theirs.tensors.items())
    same(graph, apm.read(tmp_path / "again.apm", verify=True))


def spoil_after(path, length):
    raw = bytearray(path.read_bytes())
    for at in range(length, len(raw)):
        raw[at] ^= 0xFF
    path.write_bytes(raw)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_width_needs_only_its_prefix(tiny, same, tmp_path, bits, nested):
    graph = tiny(nested=nested, keep_float=True)
    path = tmp_path / "net.apm"
    apm.write(graph, path)
    with apm.ModelFile(path) as file:
        length = file.bytes_for(bits)
        assert length < file.total == file.bytes_for(32)
    cut = tmp_path / "cut.apm"
    assert apm.truncate(path, cut, bits) == length == cut.stat().st_size
    assert path.read_bytes().startswith(cut.read_bytes())
    spoil_after(path, length)  # verified below: so nothing after the prefix is looked at
    prefix = apm.read(path, max_bits=bits, verify=True)
    same(prefix, apm.read(cut, verify=True))
    assert list(prefix.planes) == [b for b in (1, 2, 4, 8) if b <= bits]
    for name in ("a", "b"):
        assert prefix.weights[name].values is None
        for width in prefix.planes:
            np.testing.assert_array_equal(prefix.weights[name].codes[width], graph.weights[name].codes[width])
    kept = [graph.profile(profile.name) for profile in prefix.profiles]
    assert [profile.name for profile in prefix.profiles] == [str(b) for b in prefix.planes] + ["fast"] * (bits >= 2)
    np.testing.assert_array_equal(prefix.tables["qa"], graph.tables["qa"][kept])


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 32])
def test_rewrite_makes_a_complete_smaller_file(tiny, same, tmp_path, bits):
    library = pytest.importorskip("safetensors")
    apm.write(tiny(keep_float=True), tmp_path / "net.apm")
    sizes = apm.rewrite(tmp_path / "net.apm", tmp_path / "small.apm", bits)
    assert len(sizes.planes) == min(bits, 8) and (sizes.tails > 0) == (bits == 32)
    with library.safe_open(tmp_path / "small.apm", framework="np") as file:
        assert "table.qa" in file.keys()  # noqa: SIM118
    same(apm.read(tmp_path / "net.apm", max_bits=bits), apm.read(tmp_path / "small.apm", verify=True))


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_truncated_at_every_byte(tiny, tmp_path, step):
    """Shorter files open with fewer bits and the same codes, or say that they are truncated. With a step: at every such
    byte, and beside every byte where a width becomes complete."""
    graph = tiny(widths=(1, 2), keep_float=True)
    whole, cut = tmp_path / "net.apm", tmp_path / "cut.apm"
    apm.write(graph, whole)
    raw = whole.read_bytes()
    with apm.ModelFile(whole) as file:
        least, ends = file.bytes_for(1), {file.bytes_for(bits): bits for bits in (1, 2, 32)}
    reached: set[int] = set()
    near = {end + i for end in ends for i in (-1, 0, 1)} & set(range(len(raw)))
    for length in sorted({*range(0, len(raw), step), *near}):
        cut.write_bytes(raw[:length])
        if length < least:
            with pytest.raises(TruncatedFile, match=f"has {length:,} bytes"):
                apm.ModelFile(cut)
            continue
        reached.update(bits for end, bits in ends.items() if end <= length)
        with apm.ModelFile(cut) as file:
            assert not file.complete
            assert set(file.widths) == reached
            names = {profile.name for profile in file.available_profiles}
            assert names == {str(bits) for bits in reached} | ({"fast"} if 2 in reached else set())
            for name in ("a", "b"):
                for bits in reached:
                    np.testing.assert_array_equal(file.codes(name, bits), graph.weights[name].codes[bits])
            for bits in {2, 32} - reached:
                with pytest.raises(TruncatedFile, match="has"):
                    file.codes("b", bits) if bits == 2 else file.values("b")
            assert [profile.name for profile in file.graph(verify=True).profiles] == [
                p.name for p in file.available_profiles
            ]


@pytest.mark.parametrize("nested", [True, False])
def test_a_growing_file_gains_bits(tiny, tmp_path, nested):
    graph = tiny(nested=nested, keep_float=True)
    apm.write(graph, tmp_path / "net.apm")
    raw = (tmp_path / "net.apm").read_bytes()
    with apm.ModelFile(tmp_path / "net.apm") as file:
        ends = [file.bytes_for(bits) for bits in (1, 2, 4, 8, 32)]
    growing = tmp_path / "growing.apm"
    growing.write_bytes(raw[: ends[0]])
    with apm.ModelFile(growing) as file, open(growing, "ab") as download:
        assert file.widths == (1,) and file.available_planes == 1 and not file.refresh()
        for number, (bits, planes) in enumerate([(2, 2), (4, 4), (8, 8), (32, 8)], 1):
            download.write(raw[ends[number - 1] : ends[number]][:-1])
            download.flush()
            assert bits not in file.widths and not (file.refresh() and bits in file.widths)
            download.write(raw[ends[number] - 1 : ends[number]])
            download.flush()
            assert file.refresh() and file.widths[-1] == bits
            if nested:
                assert file.available_planes == planes
            codes = file.codes("a", min(bits, 8))
            np.testing.assert_array_equal(codes, graph.weights["a"].codes[min(bits, 8)])
        assert file.complete and not file.refresh() and file.verify() == len(file.tensors)
        np.testing.assert_array_equal(file.values("a"), graph.weights["a"].values)


def test_what_is_not_there_has_a_name(tiny_path):
    with apm.ModelFile(tiny_path) as file:
        with pytest.raises(UnsupportedBits, match=r"bits=3 is not one of the widths of .*: 1, 2, 4, 8"):
            file.bytes_for(3)
        with pytest.raises(UnsupportedBits, match="bits=32"):
            file.bytes_for(32)
        with pytest.raises(UnsupportedBits, match="bits=9"):
            file.codes("a", 9)
        with pytest.raises(UnknownLayer, match="'c' is not a quantized weight"):
            file.codes("c", 1)
        with pytest.raises(UnknownLayer, match=r"no tensor 'table\.pool'"):
            file.table("pool")
    with pytest.raises(UnsupportedBits, match="bits=9 is not a bit-width"):
        apm.read(tiny_path, max_bits=9)


def test_no_profile_is_narrow_enough(tiny, tmp_path):
    apm.write(tiny(widths=(2, 4)), tmp_path / "net.apm")
    with pytest.raises(UnsupportedBits, match=r"max_bits=1 leaves no profile of .*; its narrowest needs 2"):
        apm.read(tmp_path / "net.apm", max_bits=1)
    with pytest.raises(ModelFileError, match="cannot be opened: No such file"):
        apm.read(tmp_path / "none.apm")
    with pytest.raises(ModelFileError, match="is not a regular file"):
        apm.read(tmp_path)
    with pytest.raises(ModelFileError, match=r"cannot write .*: No such file or directory; make the folder first"):
        apm.write(tiny(), tmp_path / "none" / "net.apm")


def test_a_failed_write_leaves_the_old_file(tiny, tiny_path, monkeypatch):
    before = tiny_path.read_bytes()

    def disk_full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(ModelFileError, match=r"cannot write .*: No space left on device; make room"):
        apm.write(tiny(widths=(1, 2)), tiny_path)
    assert tiny_path.read_bytes() == before and list(tiny_path.parent.iterdir()) == [tiny_path]


def test_numbers_that_do_not_fit_the_graph_are_not_written(tiny, tmp_path):
    from dataclasses import replace

    graph = tiny()
    a = graph.weights["a"]
    cases = [
        (BadGraph, "differ from a wider width's", {"a": replace(a, codes={**a.codes, 1: 1 - a.codes[1]})}),
        (BadGraph, "does not fit 1 bits", {"a": replace(a, codes={**a.codes, 1: a.codes[8]})}),
        (BadGraph, "must be uint8", {"a": replace(a, codes={8: a.codes[8].astype(np.int8)})}),
        (BadGraph, "no codes at 8 bits", {"a": replace(a, codes={4: a.codes[4]})}),
        (BadTensor, "its shape is", {"a": replace(a, codes={8: a.codes[8].reshape(5, 27)})}),
        (BadTensor, "but brings no numbers", {"stem": replace(graph.weights["stem"], values=None)}),
        (BadTensor, "must be float32", {"stem": replace(graph.weights["stem"], values=np.zeros((3, 3, 3, 2)))}),
    ]
    for error, message, changed in cases:
        with pytest.raises(error, match=message):
            apm.write(replace(graph, weights={**graph.weights, **changed}), tmp_path / "net.apm")
    tables = [("the graph needs", {"qa": graph.tables["qa"][:-1]}), ("none of its ops", {"pool": graph.tables["qa"]})]
    for message, changed in tables:
        with pytest.raises(BadTensor, match=message):
            apm.write(replace(graph, tables={**graph.tables, **changed}), tmp_path / "net.apm")
    assert not list(tmp_path.iterdir())
    only_widest = replace(graph, weights={**graph.weights, "a": replace(a, codes={8: a.codes[8]})})
    apm.write(only_widest, tmp_path / "net.apm")
    np.testing.assert_array_equal(apm.read(tmp_path / "net.apm").weights["a"].codes[2], a.codes[2])
