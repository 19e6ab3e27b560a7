"""Runs that end before they are done, and working memory that goes back after a huge image."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from bombs import save_mask

from anyprec import _native
from anyprec.errors import Cancelled
from anyprec.run.model import CancelToken, load


@pytest.fixture(scope="module")
def mask(tmp_path_factory):
    """Twelve convolutions over an image of any size: long enough to be cancelled on the way."""
    return load(save_mask(tmp_path_factory.mktemp("cancel") / "mask.apm", depth=12))


def image(side: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (1, 3, side, side), np.uint8)


def test_a_token_that_is_not_cancelled_changes_nothing(mask):
    x = image(40)
    np.testing.assert_array_equal(mask(x, 8, cancel=CancelToken()), mask(x, 8))
    np.testing.assert_array_equal(mask(x, 8, cancel=CancelToken(timeout_s=60.0)), mask(x, 8))
    assert not CancelToken(1e300).cancelled  # no overflow: as good as no limit


@pytest.mark.parametrize("threads", [1, 2])
def test_cancelled_calls_raise_and_the_next_is_right(mask, threads):
    x = image(64)
    right = mask(x, 8)
    token = CancelToken()
    token.cancel()
    assert token.cancelled
    for early in (token, CancelToken(timeout_s=0.0), CancelToken(timeout_s=-1.0)):
        with pytest.raises(Cancelled, match="cancelled"):
            mask(x, 8, threads=threads, cancel=early)
        np.testing.assert_array_equal(mask(x, 8, threads=threads), right)


@pytest.mark.parametrize("threads", [1, 2])
def test_another_thread_ends_a_run_on_the_way(mask, threads):
    """64 images, one group after the other: whole, it takes many times as long as until it is cancelled."""
    x = np.repeat(image(128), 64, axis=0)
    mask(x[:1], 8, threads=threads)
    began = time.process_time()
    mask(x[:4], 8, threads=threads)
    whole = 16 * (time.process_time() - began)
    token = CancelToken()
    timer = threading.Timer(0.02, token.cancel)
    timer.start()
    began = time.process_time()
    with pytest.raises(Cancelled):
        mask(x, 8, threads=threads, cancel=token)
    assert time.process_time() - began < whole
    timer.join()


def test_many_threads_cancel_and_run_at_once(mask):
    """Each call is right or Cancelled; nothing is mixed up, and no memory is lost."""
    x = image(48)
    right = {bits: mask(x, bits) for bits in (2, 8)}
    wrong: list[str] = []
    ends = {"done": 0, "cancelled": 0}

    def calls(seed: int) -> None:
        draw = np.random.default_rng(seed)
        for _ in range(40):
            bits = int(draw.choice((2, 8)))
            token = CancelToken(timeout_s=float(draw.choice((0.0005, 0.002, 10.0))))
            try:
                if not np.array_equal(mask(x, bits, threads=2, cancel=token), right[bits]):
                    wrong.append(f"a wrong answer at {bits} bit")
                ends["done"] += 1
            except Cancelled:
                ends["cancelled"] += 1

    threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and min(ends.values()) > 0


@pytest.mark.thorough
def test_working_memory_goes_back_after_a_huge_image(tmp_path: Path):
    model = load(save_mask(tmp_path / "mask.apm", depth=3))
    small, huge = image(32), image(1100)
    right = model(small, 8)
    kept = model.memory["arenas"]
    before = resident_mb()
    assert model(huge, 8).shape == (1, 21, 1100, 1100)
    assert model.memory["arenas"] == kept  # freed at once; the small one was not given up for it
    np.testing.assert_array_equal(model(small, 8), right)
    if before:
        assert resident_mb() < before + 60  # 333 MB before it was given back; tables of up to 64 MiB may stay
    # Ordinary calls keep their memory: nothing is allocated for the next one of the same size.
    model(image(256), 8)
    kept = model.memory["arenas"]
    model(image(256), 8)
    assert model.memory["arenas"] == kept > 4_000_000


def resident_mb() -> float:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    return int(next(line for line in status.read_text().splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def test_output_shapes_are_known_before_the_run(mask):
    assert mask.output_shapes(2, 30, 40) == [(2, 21, 30, 40)] == [mask(np.zeros((2, 3, 30, 40), np.uint8)).shape]


def test_json_numbers_are_the_shortest_that_read_back():
    """Any bits of a float: the same float comes back; NaN and infinity are null; 17 bytes each at most."""
    draw = np.random.default_rng(0)
    x = draw.integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    x[:8] = [0.0, -0.0, 1.0, 0.1, 1e10, np.nan, np.inf, -np.inf]
    text = _native.json_numbers(x)
    assert text.startswith(b"0.0,-0.0,1.0,0.1,1e+10,null,null,null,") and len(text) < 17 * len(x)
    parts = text.decode().split(",")
    found = np.array([np.nan if part == "null" else float(part) for part in parts]).astype(np.float32)
    np.testing.assert_array_equal(found, np.where(np.isfinite(x), x, np.nan))
    assert _native.json_numbers(x[:0]) == b""
