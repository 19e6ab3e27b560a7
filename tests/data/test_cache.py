"""The cache of unpacked files: used when intact, never when damaged, and never a reason to fail."""

import os
from pathlib import Path

import pytest

from anyprec.data import cache

CONTENT = b"unpacked" * 100


class Unpack:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, packed: bytes) -> bytes:
        self.calls += 1
        assert packed == b"packed"
        return CONTENT


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.xz"
    path.write_bytes(b"packed")
    return path


def entries() -> list[Path]:
    return sorted((cache.cache_folder() / "unpacked").iterdir())


def test_second_time_comes_from_the_cache(source: Path, cache_home: Path) -> None:
    unpack = Unpack()
    assert cache.unpacked(source, len(CONTENT), unpack) == CONTENT
    assert cache.unpacked(source, len(CONTENT), unpack) == CONTENT
    assert unpack.calls == 1
    assert cache.cache_folder() == cache_home / "anyprec"
    assert [entry.suffix for entry in entries()] == [".bin"]  # no temporary file is left


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "checksum", "empty"])
def test_a_damaged_entry_is_made_again(source: Path, damage: str) -> None:
    unpack = Unpack()
    cache.unpacked(source, len(CONTENT), unpack)
    [entry] = entries()
    stored = bytearray(entry.read_bytes())
    if damage == "flip":
        stored[17] ^= 1
    elif damage == "checksum":
        stored[-1] ^= 1
    entry.write_bytes(bytes({"cut": stored[:-1], "longer": stored + b"x", "empty": b""}.get(damage, stored)))
    assert cache.unpacked(source, len(CONTENT), unpack) == CONTENT
    assert unpack.calls == 2
    assert cache.unpacked(source, len(CONTENT), unpack) == CONTENT
    assert unpack.calls == 2  # and stored anew


def test_a_changed_source_is_another_entry(source: Path) -> None:
    cache.unpacked(source, len(CONTENT), Unpack())
    source.write_bytes(b"other")
    assert cache.unpacked(source, 3, lambda packed: b"new") == b"new"
    assert len(entries()) == 2


def test_results_of_the_wrong_size_are_not_stored(source: Path) -> None:
    assert cache.unpacked(source, 5, Unpack()) == CONTENT
    assert not cache.cache_folder().exists()


def test_an_unusable_folder_only_costs_time(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache.unpacked(source, len(CONTENT), Unpack()) == CONTENT


def test_a_full_disk_only_costs_time(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cache.unpacked(source, len(CONTENT), Unpack()) == CONTENT
    assert entries() == []  # the temporary file is gone


def test_a_folder_of_its_own_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYPREC_CACHE", str(tmp_path / "own"))
    assert cache.cache_folder() == tmp_path / "own"
    monkeypatch.setenv("ANYPREC_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which counts as none
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache.cache_folder() == Path("/somewhere/.cache/anyprec")


def test_home_is_used_without_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache.cache_folder() == Path("/somewhere/.cache/anyprec")
