"""Runs that go on from what no profile changes: bit-exact for any profile, rows, batch, layout, thread and graph."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from anyprec.errors import Cancelled, InputError
from anyprec.format import Op, read, write
from anyprec.models.catalog import find
from anyprec.run.model import CancelToken, load
from anyprec.run.oracle import run_graph


@pytest.fixture(scope="module")
def model(path):
    with load(path, layout="NHWC") as made:
        yield made


def keep(model, x, profile, threads=1, channels_first=False):
    made, kept = model._engine.run_keeping([x], model._numbers[profile], threads, channels_first)
    return made[0].reshape(len(x), -1), kept


def go_on(model, kept, rows, profile, threads=1, cancel=None):
    made = kept.run(np.asarray(rows, np.int64), model._numbers[profile], threads, cancel)
    return made[0].reshape(len(rows), -1)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2, 7, 48])
def test_bit_exact_for_all_pairs_of_profiles(model, images, count):
    x = images[:count]
    draw = np.random.default_rng(count)
    wanted = {profile: model(x, bits=profile) for profile in model.profiles}
    for first in ("1", "8"):
        made, kept = keep(model, x, first)
        assert np.array_equal(made, wanted[first]) and kept.images == count
        for then in model.profiles:
            for rows in ([count - 1], draw.permutation(count), draw.integers(0, count, 2 * count)):
                assert np.array_equal(go_on(model, kept, rows, then), wanted[then][rows])


def test_the_oracle_agrees(model, images, graph):
    _, kept = keep(model, images[:3], "1")
    for row in (0, 2):
        wanted = run_graph(graph, images[row : row + 1], "4")["fc"][0, 0]
        assert np.array_equal(go_on(model, kept, [row], "4"), wanted)


def test_inputs_are_not_read_again(model, images):
    x = images[:2].copy()
    _, kept = keep(model, x, "1")
    x[:] = 0
    assert np.array_equal(go_on(model, kept, [0, 1], "8"), model(images[:2], bits=8))


def test_layouts_and_threads(model, images):
    x = np.ascontiguousarray(images[:5].transpose(0, 3, 1, 2))
    wanted = model(images[:5], bits=4)
    _, kept = keep(model, x, "1", threads=2, channels_first=True)
    assert np.array_equal(go_on(model, kept, range(5), "4", threads=2), wanted)


def test_many_threads_at_once(model, images):
    """Each batch of its own, and one kept run shared by all."""
    wanted = {profile: model(images, bits=profile) for profile in ("1", "4", "8")}
    _, shared = keep(model, images, "1")
    wrong = []

    def work(seed):
        draw = np.random.default_rng(seed)
        for _ in range(6):
            at = draw.integers(0, len(images), 9)
            _, kept = keep(model, np.ascontiguousarray(images[at]), "1")
            for then in ("4", "8"):
                rows = draw.permutation(9)[:4]
                if not np.array_equal(go_on(model, kept, rows, then), wanted[then][at[rows]]):
                    wrong.append((seed, then))
                if not np.array_equal(go_on(model, shared, at, then), wanted[then][at]):
                    wrong.append((seed, then, "shared"))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_its_memory_is_given_back(path, images):
    with load(path, layout="NHWC") as model:
        _, kept = keep(model, images[:2], "1")
        go_on(model, kept, [0], "8")
        held = model.memory["arenas"]
        for _ in range(5):
            _, kept = keep(model, images[:2], "1")
            go_on(model, kept, [0], "8")
        assert model.memory["arenas"] <= 2 * held


def test_it_outlives_its_model(path, images):
    model = load(path, layout="NHWC")
    wanted = model(images[:2], bits=8)
    _, kept = keep(model, images[:2], "1")
    numbers = dict(model._numbers)
    model.close()
    del model
    assert np.array_equal(kept.run(np.array([1]), numbers["8"], 1)[0].reshape(1, -1), wanted[1:])


def test_refused_in_one_line(model, images):
    _, kept = keep(model, images[:2], "1")
    for rows in ([2], [-1], [2**40], [0, 1, 7]):
        with pytest.raises(InputError, match="was not kept; there are 2"):
            go_on(model, kept, rows, "8")
    with pytest.raises(InputError, match="profile number 99 does not exist"):
        kept.run(np.array([0]), 99, 1)


def test_cancelled(model, images):
    _, kept = keep(model, images[:2], "1")
    token = CancelToken()
    token.cancel()
    with pytest.raises(Cancelled):
        go_on(model, kept, [0], "8", cancel=token)
    with pytest.raises(Cancelled):
        model._engine.run_keeping([images[:2]], 0, 1, False, True, token)
    assert np.array_equal(go_on(model, kept, [0], "8"), model(images[:1], bits=8))


def variant(graph, name):
    """Graphs whose prefix ends elsewhere."""
    ops = list(graph.ops)
    if name == "stem is an output":
        return replace(graph, outputs=(*graph.outputs, "conv0"))
    if name == "stem has two readers":  # its table cannot move to the quantize
        at = next(i for i, op in enumerate(ops) if op.name == "act0")
        ops.insert(at + 1, Op("also", "max_pool", ("conv0",), {"kernel": (2, 2), "stride": (2, 2),
                   "pad": (0, 0, 0, 0), "dilation": (1, 1), "ceil": False}))  # fmt: skip
        return replace(graph, ops=tuple(ops), outputs=(*graph.outputs, "also"))
    if name == "input is an output":
        return replace(graph, outputs=(*graph.outputs, "whiten"))
    if name == "one table for all profiles":
        tables = dict(graph.tables)
        tables["conv0"] = np.repeat(tables["conv0"][:1], len(tables["conv0"]), axis=0)
        return replace(graph, tables=tables)
    assert name == "one profile"
    rows = [i for i, profile in enumerate(graph.profiles) if profile.name == "8"]
    return replace(
        graph,
        profiles=tuple(graph.profiles[i] for i in rows),
        tables={op: table[rows] for op, table in graph.tables.items()},
    )


@pytest.mark.parametrize(
    "name",
    ["stem is an output", "stem has two readers", "input is an output", "one table for all profiles", "one profile"],
)
def test_other_graphs(graph, images, tmp_path, name):
    write(variant(graph, name), tmp_path / "net.apm")
    x = images[:4]
    with load(tmp_path / "net.apm", layout="NHWC") as model:
        profiles = model.profiles if len(model.profiles) == 1 else ("1", "4", "8")
        for first in profiles:
            made, kept = model._engine.run_keeping([x], model._numbers[first], 1, False)
            for then in profiles:
                again = kept.run(np.array([3, 1]), model._numbers[then], 1)
                for profile, outputs, rows in ((first, made, [0, 1, 2, 3]), (then, again, [3, 1])):
                    wanted = model._engine.run([x], model._numbers[profile], 1, False)
                    assert len(outputs) == len(wanted)
                    for have, want in zip(outputs, wanted, strict=True):
                        assert np.array_equal(have, want[rows])


def test_shipped_models(images):
    """Whatever their stems are."""
    for name in ("cifar10-vgg",):
        graph = read(find(name))
        with load(find(name), layout="NHWC") as model:
            _, kept = keep(model, images[:2], "1")
            wanted = run_graph(graph, images[1:2], "8")[graph.outputs[0]].reshape(1, -1)
            assert np.array_equal(go_on(model, kept, [1], "8"), wanted)


def test_a_file_that_is_still_growing(path, images, tmp_path):
    """What a first pass has kept before more planes came is good for the widths they bring."""
    whole = path.read_bytes()
    with load(path, layout="NHWC") as model:
        length, wanted = model.bytes_needed(1), model(images[:3], bits=8)
    part = tmp_path / "part.apm"
    part.write_bytes(whole[:length])
    with load(part, layout="NHWC") as model:
        assert "8" not in model.profiles
        _, kept = keep(model, images[:3], "1")
        with pytest.raises(InputError, match="needs planes that are not loaded"):
            go_on(model, kept, [0], "8")
        part.write_bytes(whole)
        model.refresh()
        assert np.array_equal(go_on(model, kept, [2, 0], "8"), wanted[[2, 0]])
