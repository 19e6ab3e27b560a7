"""Widths and profiles: what is accepted, what is refused and with which words."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyprec.errors import AnyprecError, ProfileError, UnsupportedBits
from anyprec.widths import (
    DEFAULT_WIDTHS,
    Profile,
    check_bits,
    check_layer_bits,
    check_widths,
    parse_widths,
    split_bits,
)

WIDTHS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 32])
LAYER_BITS = st.one_of(WIDTHS, st.tuples(WIDTHS, WIDTHS))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 32])
def test_every_width_is_accepted(bits):
    assert check_bits(bits) == bits


@pytest.mark.parametrize("bits", [0, 9, -1, 16, 31, 33, True, 4.0, "4", None, (4, 4)])
def test_everything_else_is_refused_with_the_choices(bits):
    with pytest.raises(UnsupportedBits, match=r"choose 1\.\.8, or 32 for float") as caught:
        check_bits(bits)
    assert repr(bits) in str(caught.value)


@given(st.lists(WIDTHS, min_size=1, unique=True))
def test_widths_are_put_in_order(widths):
    assert check_widths(widths) == tuple(sorted(widths))
    assert check_widths(iter(widths)) == tuple(sorted(widths))


@pytest.mark.parametrize(
    ("widths", "words"),
    [
        ([], "widths is empty"),
        ([1, 2, 1], "twice"),
        ([1, 9], "bits=9"),
        (4, "not a list"),
        ("1,2", "not a list"),
    ],
)
def test_bad_widths(widths, words):
    with pytest.raises(UnsupportedBits, match=words):
        check_widths(widths)


@pytest.mark.parametrize(
    ("text", "widths"),
    [
        ("1,2,4,8,32", DEFAULT_WIDTHS),
        ("4", (4,)),
        ("1-8", (1, 2, 3, 4, 5, 6, 7, 8)),
        ("1-3, 8 ,float", (1, 2, 3, 8, 32)),
        ("FP32,2", (2, 32)),
        ("5-5", (5,)),
    ],
)
def test_widths_of_the_command_line(text, widths):
    assert parse_widths(text) == widths


@pytest.mark.parametrize("text", ["", "1,,2", "two", "1-", "-1", "1-2-3", "0-3", "7-9", "1,1", "2-1", "1.5"])
def test_bad_widths_of_the_command_line(text):
    with pytest.raises(UnsupportedBits):
        parse_widths(text)


@given(st.lists(WIDTHS, min_size=1, unique=True))
def test_widths_survive_being_written_and_parsed(widths):
    assert parse_widths(",".join(map(str, widths))) == check_widths(widths)


@given(LAYER_BITS)
def test_layer_bits_mean_the_same_before_and_after_the_check(bits):
    assert split_bits(check_layer_bits(bits)) == (bits if isinstance(bits, tuple) else (bits, bits))


def test_a_pair_of_equals_is_one_width():
    assert check_layer_bits((4, 4)) == 4
    assert check_layer_bits([8, 7]) == (8, 7)


@pytest.mark.parametrize("bits", [(8,), (8, 7, 6), (0, 4), (4, 9), ()])
def test_bad_pairs(bits):
    with pytest.raises(UnsupportedBits):
        check_layer_bits(bits)


@given(st.dictionaries(st.text(min_size=1), LAYER_BITS, min_size=1))
def test_a_profile_survives_its_file(tmp_path_factory, bits):
    path = tmp_path_factory.mktemp("profile") / "mixed.json"
    profile = Profile("mixed", bits)
    profile.save(path)
    assert Profile.load(path) == profile


def test_a_profile_keeps_its_own_copy_of_the_bits():
    bits = {"conv1": 2}
    profile = Profile("mixed", bits)
    bits["conv1"] = 99
    assert profile.bits == {"conv1": 2}


@pytest.mark.parametrize("name", ["", "4", "a.b", "a/b", "a\\b", "random", None, 7])
def test_bad_profile_names(name):
    with pytest.raises(ProfileError, match="not allowed"):
        Profile(name, {"conv1": 2})


def test_a_profile_that_sets_nothing():
    with pytest.raises(ProfileError, match="sets no layer"):
        Profile("mixed", {})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b'"text"',
        b"null",
        b'{"name": "m"}',
        b'{"bits": {"a": 1}}',
        b'{"name": "m", "bits": [1]}',
        b'{"name": "m", "bits": {"a": 1}, "more": 0}',
        b'{"name": "m", "bits": {}}',
        b'{"name": 5, "bits": {"a": 1}}',
        b'{"name": "m", "bits": {"a": 9}}',
        b'{"name": "m", "bits": {"a": "2"}}',
        b'{"name": "m", "bits": {"a": [1, 2, 3]}}',
    ],
)
def test_broken_profile_files_give_one_line(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(AnyprecError) as caught:
        Profile.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_profile_file(tmp_path):
    with pytest.raises(ProfileError, match=r"cannot read profile .*gone\.json: No such file"):
        Profile.load(tmp_path / "gone.json")


def test_a_profile_file_is_plain_json(tmp_path):
    Profile("mixed", {"conv1": 2, "conv2": (8, 7)}).save(tmp_path / "mixed.json")
    assert json.loads((tmp_path / "mixed.json").read_text()) == {
        "name": "mixed",
        "bits": {"conv1": 2, "conv2": [8, 7]},
    }
