"""bench/plans_cascades.py: cascades are chosen on the held-out images, and outputs are kept between runs."""

from types import SimpleNamespace

import numpy as np
import plans_cascades
import pytest

from anyprec.cascade.calibrate import Measured
from anyprec.models.catalog import find


def test_cascades_keep_to_the_drop():
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 5, 3000)
    noise = draw.standard_normal((3000, 5))
    names = (*plans_cascades.UNIFORM, "latency-plan-0")
    level = dict(zip(names, (1.6, 1.1, 1.05, 1.0, 1.0, 1.2), strict=True))
    outputs = {name: (3 * np.eye(5)[labels] + level[name] * noise).astype(np.float32) for name in names}
    times = dict(zip(names, (1.0, 1.5, 2.0, 2.1, 4.0, 1.2), strict=True))
    found = Measured(outputs, times, "8", labels)
    wide = 100 * float((outputs["8"].argmax(1) == labels).mean())
    chosen = plans_cascades.chosen_cascades(found)
    assert [s.profile for s in chosen["cascade-1-8"][0].stages] == ["1", "8"]
    assert [s.profile for s in chosen["cascade-1-4"][0].stages] == ["1", "4"]
    assert chosen["cascade-plan-8"][0].last == "8"
    for _, point in chosen.values():
        assert point.accuracy >= wide - plans_cascades.DROP - 1e-9
    assert chosen["cascade-plan-8"][1].ms <= chosen["cascade-1-8"][1].ms


def test_outputs_are_kept(tmp_path):
    (tmp_path / "plans.apm").write_bytes(find("cifar10-vgg-small").read_bytes())
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    data = SimpleNamespace(images=images, labels=np.zeros(3, np.int64))
    args = SimpleNamespace(minutes=-1.0)
    with pytest.raises(SystemExit, match="1 and what follows are left"):
        plans_cascades.stored_outputs(args, tmp_path, "test", data, ["1", "8"])
    args.minutes = 1.0
    made = plans_cascades.stored_outputs(args, tmp_path, "test", data, ["1", "8"])
    assert made["8"].shape == (3, 10)
    args.minutes = -1.0  # nothing is left to do
    again = plans_cascades.stored_outputs(args, tmp_path, "test", data, ["1", "8"])
    assert np.array_equal(again["1"], made["1"])
