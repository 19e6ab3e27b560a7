"""PackedModel: layouts, types and batches, precision, memory, files that grow or end early, and every mistake."""

import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from engine_check import usable_isas
from graph_builder import SPECIAL, assert_same

import anyprec
from anyprec import errors
from anyprec.bench.random_networks import resnet20_graph
from anyprec.errors import InputError
from anyprec.format import INPUT, Graph, GraphProfile, Op, Weight, read, truncate, write
from anyprec.run.model import all_finite, load
from anyprec.run.oracle import run_graph
from anyprec.widths import FLOAT, INTEGER_WIDTHS

F32 = np.float32


def fails(error, message):
    """The named error, in one line that begins as given (a pattern)."""
    return pytest.raises(error, match=rf"\A{message}[^\n]*\Z")


@pytest.fixture
def model(net):
    return load(net.path)


def nchw(x):
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


# --- Arrays in and out ----------------------------------------------------------------------------------------------


def test_load_is_at_the_top(net):
    assert callable(anyprec.load)  # the function, or the package anyprec.load once that is imported: it calls it
    assert repr(anyprec.load(str(net.path), isa="scalar")) == (
        "PackedModel('resnet20', bits=32, profiles=1, 2, 3, 4, 5, 6, 7, 8, 32, fast, isa=scalar)"
    )


def test_running_needs_numpy_alone(net):
    script = (
        "import sys, anyprec, numpy\n"
        f"anyprec.load({str(net.path)!r})(numpy.zeros((1, 3, 8, 8), 'f'), bits=2)\n"
        "print({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "numpy" in done.stdout and "torch" not in done.stdout and "PIL" not in done.stdout


def test_both_layouts_at_every_profile(net, model):
    for name, want in net.wanted.items():
        assert_same(model(nchw(net.x), name), want, name)
        assert_same(model(net.x, name, layout="NHWC"), want, name)
    nhwc = load(net.path, layout="NHWC")
    assert_same(nhwc(net.x, 4), net.wanted["4"])
    assert_same(nhwc(nchw(net.x), 4, layout="NCHW"), net.wanted["4"])


def test_arrays_of_any_strides_and_float_types(net, model):
    x, want = nchw(net.x), net.wanted["2"]
    assert_same(model(net.x.transpose(0, 3, 1, 2), 2), want)  # a view, not contiguous
    assert_same(model(np.repeat(x, 2, axis=3)[..., ::2], 2), want)
    assert_same(model(x[:, :, ::-1][:, :, ::-1], 2), want)
    assert_same(model(np.asfortranarray(x), 2), want)
    assert_same(model(x.astype(np.float64), 2), want)
    assert_same(model(x.astype(">f4"), 2), want)
    assert_same(model(x.tolist(), 2), want)  # lists of Python floats, which are double
    half = x.astype(np.float16)
    assert_same(model(half, 2), model(half.astype(F32), 2))
    x.setflags(write=False)
    assert_same(model(x, 2), want)
    assert_same(x, nchw(net.x), "the input is left alone")


def test_one_image(net, model):
    assert_same(model(nchw(net.x)[1], 3), net.wanted["3"][1])
    assert_same(model(net.x[1], 3, layout="NHWC"), net.wanted["3"][1])
    assert model(nchw(net.x)[1:2]).shape == (1, 10)


def test_bytes_become_floats_as_the_file_says(net, model):
    x = np.random.default_rng(1).integers(0, 256, (2, 8, 8, 3), np.uint8)
    scale, shift = (np.array(v, F32) for v in (net.graph.image_scale, net.graph.image_shift))
    for name in ("1", "8", "32"):
        want = run_graph(net.graph, x, name)["fc"][:, 0, 0]
        assert_same(model(x, name, layout="NHWC"), want)
        assert_same(model(nchw(x), name), want)
    assert model.takes_uint8
    # The same by hand, up to the rounding of the product: close, and closer than one level of gray.
    by_hand = model((x * scale + shift).astype(F32), 32, layout="NHWC")
    np.testing.assert_allclose(by_hand, model(x, 32, layout="NHWC"), atol=1e-3)


def test_results_are_ours_to_keep(net, model):
    first = model(nchw(net.x), 2)
    kept = first.copy()
    first_again = model(nchw(net.x), 2)
    model(nchw(-net.x), 8)
    assert_same(first, kept)
    first_again[:] = 0
    assert_same(model(nchw(net.x), 2), kept)
    del model
    assert_same(first, kept)


def test_sizes_change_from_call_to_call(net, model):
    rng = np.random.default_rng(2)
    for n, h, w in [(1, 8, 8), (2, 5, 9), (1, 8, 8), (4, 1, 1), (1, 33, 2), (3, 9, 11)]:
        x = rng.standard_normal((n, h, w, 3)).astype(F32)
        assert_same(model(x, 4, layout="NHWC"), run_graph(net.graph, x, "4")["fc"][:, 0, 0], f"{n} x {h} x {w}")


def test_hundreds_of_sizes_do_not_add_up(net):
    model = load(net.path)
    for side in range(1, 150):
        model(np.zeros((1, 3, side, 1), F32), 1)
    assert model.memory["arenas"] < 4_000_000
    assert_same(model(nchw(net.x), 1), net.wanted["1"])


@pytest.mark.parametrize("isa", usable_isas())
def test_odd_numbers_in_the_input(net, isa):
    x = net.x.copy()
    x.reshape(-1)[::5] = np.resize(np.array(SPECIAL, F32), len(x.reshape(-1)[::5]))
    model = load(net.path, isa=isa, check_finite=False)
    for name in ("1", "2", "8", "32", "fast"):
        assert_same(model(x, name, layout="NHWC"), run_graph(net.graph, x, name)["fc"][:, 0, 0], name)


@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_nan_and_infinity_are_refused(net, odd, layout):
    """Codes hide them: max(NaN, 0) is 0, so the answer would look like any other."""
    model = load(net.path)
    clean = net.x if layout == "NHWC" else nchw(net.x)
    for place in (0, 1, 15, 16, 17, clean.size // 2, clean.size - 2, clean.size - 1):
        x = clean.copy()
        x.reshape(-1)[place] = odd
        with pytest.raises(InputError, match="the input has NaN or infinity in it"):
            model(x, layout=layout)
        assert not all_finite(x)
    extremes = clean.copy()
    extremes.reshape(-1)[:4] = (np.finfo(F32).max, np.finfo(F32).min, -0.0, np.finfo(F32).smallest_subnormal)
    assert all_finite(extremes) and model(extremes, layout=layout).shape[0] == len(clean)


def vector_graph():
    """Vectors of 6 to a linear layer of 4, and its softmax: two outputs. No uint8."""
    codes = np.arange(24, dtype=np.uint8).reshape(4, 1, 1, 6) % 4
    ops = (
        Op("q", "quantize", (INPUT,), {"signed": True, "rectify": False, "affine": True}),
        Op("fc", "linear", ("q",), {"weight": "fc", "signed": True, "affine": False}),
        Op("p", "softmax", ("fc",)),
    )
    table = np.stack([np.full((1, 6), 2), np.full((1, 6), 1.5)], 1).astype(F32)
    profiles = (GraphProfile("only", 2, 2),)
    weights = {"fc": Weight((4, 1, 1, 6), None, {2: codes})}
    return Graph("vectors", (1, 1, 6), profiles, {2: (0, 1)}, weights, ops, ("fc", "p"), {"q": table})


def test_vectors_and_several_outputs(tmp_path):
    graph = vector_graph()
    write(graph, tmp_path / "vectors.apm")
    model = load(tmp_path / "vectors.apm")
    x = np.random.default_rng(3).standard_normal((5, 6)).astype(F32)
    want = run_graph(graph, x[:, None, None], "only")
    for layout in ("NCHW", "NHWC"):
        sums, shares = model(x, layout=layout)
        assert_same(sums, want["fc"][:, 0, 0])
        assert_same(shares, want["p"][:, 0, 0])
    # No uniform profile: the first one is active, and `bits` is its name.
    assert model.widths == () and model.profiles == ("only",) and model.bits == model.profile == "only"
    assert model.input_shape == (1, 1, 6) and model.labels == () and not model.takes_uint8
    assert model.accuracy() is None


def test_maps_come_out_in_the_layout_of_the_input(net, tmp_path):
    graph = replace(net.graph, outputs=("norm", "fc"), labels=None)
    write(graph, tmp_path / "maps.apm")
    model = load(tmp_path / "maps.apm")
    want = run_graph(graph, net.x, "2")
    maps, logits = model(nchw(net.x), 2)
    assert_same(maps, nchw(want["norm"]))
    assert maps.flags.c_contiguous and maps.shape == (3, 16, 3, 3)
    assert_same(logits, want["fc"][:, 0, 0])
    assert_same(model(net.x, 2, layout="NHWC")[0], want["norm"])
    assert_same(model(net.x[0], 2, layout="NHWC")[0], want["norm"][0])
    assert_same(model(nchw(net.x)[0], 2)[0], nchw(want["norm"])[0])


# --- Precision ------------------------------------------------------------------------------------------------------


def test_bits_and_profile(net, model):
    x = nchw(net.x)
    assert model.bits == 32 and model.profile == "32"  # the widest
    assert model.widths == (*INTEGER_WIDTHS, FLOAT)
    assert model.profiles == (*map(str, INTEGER_WIDTHS), "32", "fast")
    assert_same(model(x), net.wanted["32"])
    model.bits = 2
    assert (model.bits, model.profile) == (2, "2")
    assert_same(model(x), net.wanted["2"])
    assert_same(model(x, bits=1), net.wanted["1"])
    assert model.bits == 2  # one call's bits are its own
    model.bits = np.int64(4)
    assert model.bits == 4
    model.bits = "fast"
    assert (model.bits, model.profile) == ("fast", "fast")
    assert_same(model(x), net.wanted["fast"])
    model.profile = "8"
    assert (model.bits, model.profile) == (8, "8")
    assert_same(model(x, "fast"), net.wanted["fast"])


def test_what_the_file_says_about_itself(net, model):
    assert model.name == "resnet20" and model.labels == net.graph.labels
    assert model.input_shape == (None, None, 3) and model.image_size is None
    assert model.accuracy(4) == 70 and model.accuracy("1") == 55 and model.accuracy(3) is None
    model.bits = 8
    assert model.accuracy() == 90
    sizes = net.sizes
    before = sizes.header + sizes.tables + sizes.floats
    for k in INTEGER_WIDTHS:
        assert model.bytes_needed(k) == before + sum(sizes.planes[:k])
    assert model.bytes_needed("fast") == model.bytes_needed(4)
    assert model.bytes_needed(32) == sizes.total == net.path.stat().st_size


@pytest.mark.parametrize("isa", usable_isas())
def test_the_instruction_set_may_be_chosen(net, isa, monkeypatch):
    assert load(net.path, isa=isa).isa == isa
    monkeypatch.setenv("ANYPREC_ISA", isa)
    assert load(net.path).isa == isa
    assert load(net.path, isa="scalar").isa == "scalar"  # the argument is stronger


def test_steps_tell_what_runs(net, model):
    steps = model.steps(nchw(net.x), 4, repeat=2)
    assert {step.op for step in steps} >= {"conv0", "blocks.0.conv0", "fc"}
    # Of 3 images: 9 x 11 pixels, 4 channels, 3 x 3 taps of 3 channels
    stem = next(step for step in steps if step.op == "conv0")
    assert stem.products == 3 * 99 * 4 * 27 and stem.seconds > 0
    assert any(step.work.endswith("add, float, codes") for step in steps)


# --- Memory ---------------------------------------------------------------------------------------------------------


def test_a_memory_budget_is_kept(tmp_path):
    graph = resnet20_graph(size=None, widths=INTEGER_WIDTHS)
    write(graph, tmp_path / "net.apm")
    x = np.random.default_rng(4).standard_normal((1, 3, 8, 8)).astype(F32)
    free = load(tmp_path / "net.apm")
    wanted, alone = {}, 0
    for k in INTEGER_WIDTHS:
        wanted[k] = free(x, k)
        one = load(tmp_path / "net.apm")
        one(x, k)
        alone = max(alone, one.memory["panels"])
    assert free.memory["panels"] > 2 * alone  # all eight are there
    budget = 2 * alone
    bound = load(tmp_path / "net.apm", memory_budget=budget)
    for k in (*INTEGER_WIDTHS, *reversed(INTEGER_WIDTHS), 1, 8, 1, 8):
        assert_same(bound(x, k), wanted[k], f"{k} bits")
        assert 0 < bound.memory["panels"] <= budget
    # Too small for any width: the one in use stays, and nothing else.
    least = load(tmp_path / "net.apm", memory_budget=1)
    for k in INTEGER_WIDTHS:
        assert_same(least(x, k), wanted[k], f"{k} bits")
        assert 0 < least.memory["panels"] <= alone


def test_max_bits_reads_less(net):
    x = nchw(net.x)
    for k in INTEGER_WIDTHS:
        model = load(net.path, max_bits=k)
        assert model.widths == INTEGER_WIDTHS[:k] and model.bits == k
        assert ("fast" in model.profiles) == (k >= 4)
        assert_same(model(x), net.wanted[str(k)])
        if k < 8:
            with fails(errors.UnsupportedBits, f"bits={k + 1} is in the file but not loaded"):
                model(x, k + 1)
    assert load(net.path, max_bits=32).widths == (*INTEGER_WIDTHS, 32)


def test_max_bits_below_the_narrowest_width(tmp_path):
    write(resnet20_graph(multiplier=0.25, widths=(4, 8)), tmp_path / "net.apm")
    assert load(tmp_path / "net.apm", max_bits=5).widths == (4,)
    with fails(errors.UnsupportedBits, "max_bits leaves no profile of this file; the narrowest, 4, needs more planes"):
        load(tmp_path / "net.apm", max_bits=2)


# --- Files that end early -------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("nests", [True, False])
def test_a_file_cut_after_plane_k_is_the_k_bit_model(net, nests, tmp_path):
    graph = net.graph
    if not nests:  # widths with planes of their own, as dorefa has them
        graph = separate(graph)
    write(graph, tmp_path / "whole.apm")
    whole = load(tmp_path / "whole.apm")
    x = nchw(net.x)
    for k in INTEGER_WIDTHS:
        length = truncate(tmp_path / "whole.apm", tmp_path / "cut.apm", k)
        assert length == whole.bytes_needed(k) == (tmp_path / "cut.apm").stat().st_size
        cut = load(tmp_path / "cut.apm", verify=True)
        assert cut.widths == INTEGER_WIDTHS[:k]
        for narrower in range(1, k + 1):
            assert_same(cut(x, narrower), whole(x, narrower), f"{narrower} of {k} bits")
        # And the oracle says the same of what Python reads from it.
        assert_same(cut(x, k), run_graph(read(tmp_path / "cut.apm"), net.x, str(k))["fc"][:, 0, 0])


def separate(graph):
    """The same codes at every width, but stored apart."""
    first = {k: k * (k - 1) // 2 for k in INTEGER_WIDTHS}
    return replace(graph, planes={k: tuple(range(first[k], first[k] + k)) for k in INTEGER_WIDTHS})


def test_a_growing_file_gains_bits(net, tmp_path):
    whole = net.path.read_bytes()
    x, path = nchw(net.x), tmp_path / "download.apm"
    full = load(net.path)
    ends = [full.bytes_needed(k) for k in (*INTEGER_WIDTHS, 32)]
    with path.open("wb") as file:
        file.write(whole[: ends[0] - 1])
        file.flush()
        with fails(errors.TruncatedFile, ".*download.apm"):
            load(path)
        file.write(whole[ends[0] - 1 : ends[0]])
        file.flush()
        model, chosen = load(path), load(path)
        chosen.bits = 1
        assert model.widths == (1,) and model.bits == 1
        with fails(errors.UnsupportedBits, "bits=2 is in the file but not loaded"):
            model(x, 2)
        for k, (begin, end) in zip((2, 3, 4, 5, 6, 7, 8, 32), pairwise(ends), strict=True):
            file.write(whole[begin : end - 1])
            file.flush()
            assert k not in model.refresh()  # one byte is missing
            assert_same(model(x), net.wanted[str(model.bits)])
            file.write(whole[end - 1 : end])
            file.flush()
            assert k not in model.widths  # until someone looks
            if k % 2:
                assert k in model.refresh()
            else:
                assert_same(model(x, k), net.wanted[str(k)])  # asking for it looks too
            assert model.bits == max(model.widths) == k
            assert ("fast" in model.profiles) == (k >= 4)
            assert_same(model(x), net.wanted[str(k)])
            chosen.refresh()
            assert chosen.bits == 1 and max(chosen.widths) == k
            assert_same(chosen(x), net.wanted["1"])
    for name, want in net.wanted.items():
        assert_same(model(x, name), want)


def test_max_bits_holds_while_a_file_grows(net, tmp_path):
    whole = net.path.read_bytes()
    path = tmp_path / "download.apm"
    path.write_bytes(whole[: load(net.path).bytes_needed(1)])
    model = load(path, max_bits=3)
    with path.open("ab") as file:
        file.write(whole[path.stat().st_size :])
    assert model.refresh() == (1, 2, 3)
    assert_same(model(nchw(net.x)), net.wanted["3"])


# --- Mistakes -------------------------------------------------------------------------------------------------------

X = np.zeros((1, 3, 8, 8), F32)

CALLS = {
    "a width that is none": (
        lambda m: m(X, 9),
        errors.UnsupportedBits,
        r"bits=9 is not a bit-width; choose 1..8, or 32 for float",
    ),
    "no width at all": (lambda m: m(X, 0.5), errors.UnsupportedBits, r"bits=0.5 is not a bit-width; choose"),
    "a profile with a typo": (
        lambda m: m(X, "fats"),
        errors.UnsupportedBits,
        r"bits='fats' is not in this model file, which has 1, .*, fast; did you mean 'fast'\?",
    ),
    "an unknown profile": (
        lambda m: setattr(m, "profile", "?"),
        errors.UnsupportedBits,
        r"bits='\?' is not in this model file, which has 1, 2, 3",
    ),
    "setting bits": (lambda m: setattr(m, "bits", 16), errors.UnsupportedBits, "bits=16 is not a bit-width"),
    "accuracy of nothing": (lambda m: m.accuracy("x"), errors.UnsupportedBits, "bits='x' is not in this model"),
    "bytes of nothing": (lambda m: m.bytes_needed("x"), errors.UnsupportedBits, "bits='x' is not in this model"),
    "a layout": (
        lambda m: m(X, layout="CHW"),
        errors.InputError,
        "layout='CHW' is not known; choose 'NCHW' or 'NHWC'",
    ),
    "no threads": (lambda m: m(X, threads=0), errors.InputError, "threads=0 is not a number of threads; give 1"),
    "half a thread": (lambda m: m(X, threads=0.5), errors.InputError, "threads=0.5 is not a number of threads"),
    "threads for good": (lambda m: setattr(m, "threads", True), errors.InputError, "threads=True is not a number"),
    "five axes": (lambda m: m(X[None]), errors.InputError, r"input has shape \(1, 1, 3, 8, 8\); give images \(NCHW\)"),
    "one axis": (lambda m: m(X[0, 0, 0]), errors.InputError, r"input has shape \(8,\); give images"),
    "a number": (lambda m: m(3.0), errors.InputError, r"input has shape \(\); give images"),
    "integers": (lambda m: m(X.astype(np.int32)), errors.InputError, "input is int32; give float32, or uint8 images"),
    "complex numbers": (lambda m: m(X.astype(complex)), errors.InputError, "input is complex128; give float32"),
    "words": (lambda m: m(np.full((1, 3, 8, 8), "a")), errors.InputError, "input is <U1; give float32"),
    "the wrong layout": (
        lambda m: m(X, layout="NHWC"),
        errors.InputError,
        r"input has shape \(1, 3, 8, 8\), which is not layout='NHWC': .*; it fits with layout='NCHW'",
    ),
    "no pixels": (lambda m: m(X[:, :, :0]), errors.InputError, "an input of 1 images of 0 x 8 pixels is not what"),
    "steps of the wrong channels": (lambda m: m.steps(X[:, :2]), errors.InputError, "images have 2 channels"),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_go_wrong(call, net, model):
    do, error, message = CALLS[call]
    with fails(error, message):
        do(model)
    assert_same(model(nchw(net.x), 2), net.wanted["2"])  # no harm done


LOADS = {
    "max_bits": ({"max_bits": 9}, errors.UnsupportedBits, "bits=9 is not a bit-width"),
    "memory_budget": ({"memory_budget": 0}, errors.InputError, "memory_budget=0 is not a number of bytes; give at"),
    "memory_budget as a float": (
        {"memory_budget": 1e9},
        errors.InputError,
        "memory_budget=1000000000.0 is not a number",
    ),
    "memory_budget as a word": ({"memory_budget": "1G"}, errors.InputError, "memory_budget='1G' is not a number"),
    "layout": ({"layout": "nchw"}, errors.InputError, "layout='nchw' is not known"),
    "threads": ({"threads": -1}, errors.InputError, "threads=-1 is not a number of threads"),
    "isa": ({"isa": "sse9"}, errors.UnsupportedIsa, ".*sse9 is no instruction set"),
}


@pytest.mark.parametrize("option", LOADS)
def test_options_of_load(option, net):
    options, error, message = LOADS[option]
    with fails(error, message):
        load(net.path, **options)


def test_an_image_of_the_wrong_size(net, tmp_path):
    graph = replace(net.graph, input_shape=(9, 11, 3), image_scale=None, image_shift=None)
    write(graph, tmp_path / "fixed.apm")
    model = load(tmp_path / "fixed.apm")
    assert model.input_shape == (9, 11, 3) and model.image_size == (9, 11)
    assert_same(model(net.x, 2, layout="NHWC"), net.wanted["2"])
    for shape in [(1, 11, 9, 3), (1, 9, 12, 3), (2, 1, 1, 3)]:
        with fails(errors.InputError, rf"an input of {shape[0]} images of {shape[1]} x {shape[2]} pixels .* 9 x 11"):
            model(np.zeros(shape, F32), layout="NHWC")
    with fails(errors.InputError, "an input of 5 images of 1 x 1 pixels is not what the model takes"):
        model(np.zeros((5, 3), F32))
    with fails(errors.InputError, "this model file does not say how uint8 images become floats; give float32"):
        model(np.zeros((1, 9, 11, 3), np.uint8), layout="NHWC")


def test_an_image_too_small_for_a_window(tmp_path):
    pool = {"kernel": [7, 7], "stride": [1, 1], "pad": [0] * 4, "dilation": [1, 1], "ceil": False}
    ops = (Op("pool", "max_pool", (INPUT,), pool),)
    graph = Graph("pool", (None, None, 2), (GraphProfile("8", 8, 8),), {}, {}, ops, ("pool",), {})
    write(graph, tmp_path / "pool.apm")
    model = load(tmp_path / "pool.apm", layout="NHWC")
    assert model(np.ones((1, 7, 7, 2), F32)).shape == (1, 1, 1, 2)  # a map: larger images have larger ones
    with fails(errors.InputError, "op 'pool' needs 7 pixels, but has 6 pixels and 0 of padding; use a larger input"):
        model(np.ones((1, 7, 6, 2), F32))


def test_an_image_too_large_to_hold(tmp_path):
    """A resize that would make 65,536 x 65,537 pixels of a few: their number does not fit 32 bits."""
    for scale in ([16384.0, 16384.25], [16384.0, 16384.0], [25000.0, 25000.0]):
        way = {"mode": "nearest", "align": False, "size": None, "scale": scale, "like": None}
        ops = [Op("resize", "resize", (INPUT,), way)]
        ops.append(Op("pool", "adaptive_avg_pool", ("resize",), {"size": [1, 1]}))
        graph = Graph("big", (None, None, 1), (GraphProfile("8", 8, 8),), {}, {}, tuple(ops), ("pool",), {})
        write(graph, tmp_path / "big.apm")
        model = load(tmp_path / "big.apm")
        with fails(errors.InputError, "one image of 'resize' would take .* MiB; the engine holds at most 2048, give"):
            model(np.ones((1, 1, 4, 4), F32))


def test_files_that_cannot_be_opened(net, tmp_path):
    whole = net.path.read_bytes()
    with fails(errors.ModelFileError, ".*nowhere.apm"):
        load(tmp_path / "nowhere.apm")
    with fails(errors.ModelFileError, re.escape(str(tmp_path))):
        load(tmp_path)
    cases = {
        "TruncatedFile": whole[:7],
        "BadHeader": b"\xff" * 64,
        "NotAModelFile": (20).to_bytes(8, "little") + b'{"__metadata__":{}} ',
        "ChecksumMismatch": whole.replace(b"resnet20", b"resnet21", 1),
        "BadTensor": whole + b"more",
    }
    for name, content in cases.items():
        path = tmp_path / f"{name}.apm"
        path.write_bytes(content)
        with fails(getattr(errors, name), f".*{name}.apm"):
            load(path)


def test_a_flipped_bit_is_found_by_default(net, tmp_path):
    content = bytearray(net.path.read_bytes())
    content[-1] ^= 1
    path = tmp_path / "flipped.apm"
    path.write_bytes(content)
    load(path, verify=False)  # nobody looks
    with fails(errors.ChecksumMismatch, ".*flipped.apm.*tail"):
        load(path)
    assert load(path, max_bits=8).bits == 8  # what is flipped is not read
