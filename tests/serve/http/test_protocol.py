"""The protocol's bytes, without HTTP: what is read, what is written, and what is refused."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyprec.errors import AnyprecError, InputError
from anyprec.serve.http.protocol import (
    PIECE,
    InferRequest,
    ModelSignature,
    RequestedOutput,
    TensorMetadata,
    answer_size,
    as_text,
    read_infer_request,
    write_answer,
)

SIGNATURE = ModelSignature(
    input=TensorMetadata("input", "UINT8", (-1, 3, 2, 2)),
    takes_uint8=True,
    outputs=(TensorMetadata("head", "FP32", (-1, 3)), TensorMetadata("map", "FP32", (-1, 2, 4, 4))),
    labels=("cat", "dog", "bird"),
    levels=("1", "2", "8", "fast"),
    max_batch=4,
    max_pixels=64,
)
FREE = ModelSignature(
    TensorMetadata("input", "UINT8", (-1, 3, -1, -1)), True, SIGNATURE.outputs, (), ("8",), max_pixels=64
)
FLOAT_ONLY = ModelSignature(TensorMetadata("input", "FP32", (-1, 3, 2, 2)), False, SIGNATURE.outputs, (), ("8",))
X = np.arange(12, dtype=np.uint8).reshape(1, 3, 2, 2)


def body(tensor=None, **rest):
    """A good request, with parts changed; ... leaves one out."""
    whole = {"name": "input", "shape": [1, 3, 2, 2], "datatype": "UINT8", "data": list(range(12)), **(tensor or {})}
    whole = {key: value for key, value in whole.items() if value is not ...}
    return json.dumps({"inputs": [whole], **rest}).encode()


def binary(raw: bytes, datatype: str, shape=(1, 3, 2, 2), size=None):
    tensor = {
        "datatype": datatype,
        "shape": list(shape),
        "data": ...,
        "parameters": {"binary_data_size": size or len(raw)},
    }
    head = body(tensor=tensor)
    return head + raw, len(head)


def test_json_tensors_flat_and_nested():
    for data in (list(range(12)), X.tolist()):
        call = read_infer_request(body(tensor={"data": data}), None, SIGNATURE)
        np.testing.assert_array_equal(call.x, X, strict=True)
        assert [one.number for one in call.wanted] == [0, 1] and not any(one.binary for one in call.wanted)


@pytest.mark.parametrize("datatype, dtype", [("FP32", "<f4"), ("FP16", "<f2"), ("FP64", "<f8")])
def test_binary_floats_become_aligned_float32(datatype, dtype):
    values = np.random.default_rng(0).standard_normal((1, 3, 2, 2)).astype(dtype)
    for spaces in range(8):  # a JSON header of any length in front
        raw, length = binary(values.tobytes(), datatype)
        raw = b" " * spaces + raw
        call = read_infer_request(raw, length + spaces, SIGNATURE)
        assert call.x.dtype == np.float32 and call.x.flags.aligned
        np.testing.assert_array_equal(call.x, values.astype(np.float32))


def test_a_raw_body_without_json():
    call = read_infer_request(X.tobytes() * 3, 0, SIGNATURE)
    np.testing.assert_array_equal(call.x, np.concatenate([X] * 3), strict=True)
    assert all(one.binary for one in call.wanted)
    with pytest.raises(InputError, match="images of this model have 12 each"):
        read_infer_request(b"x" * 13, 0, SIGNATURE)
    with pytest.raises(InputError, match="leaves the size"):
        read_infer_request(b"x" * 12, 0, FREE)


def test_parameters():
    call = read_infer_request(body(parameters={"bits": 2, "deadline_ms": 20, "other": [1]}, id="a"), None, SIGNATURE)
    assert (call.bits, call.deadline_s, call.id, call.min_bits) == (2, 0.02, "a", 1)
    assert read_infer_request(body(parameters={"bits": "fast"}), None, SIGNATURE).bits == "fast"
    assert read_infer_request(body(parameters={"bits": "2"}), None, SIGNATURE).bits == 2
    assert read_infer_request(body(parameters={"min_bits": 2}), None, SIGNATURE).min_bits == 2
    assert read_infer_request(body(parameters={"timeout": 5000}), None, SIGNATURE).deadline_s == 0.005
    assert read_infer_request(body(parameters={"timeout": 0}), None, SIGNATURE).deadline_s is None
    assert all(
        one.binary for one in read_infer_request(body(parameters={"binary_data_output": True}), None, SIGNATURE).wanted
    )


@pytest.mark.parametrize(
    "raw, says",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"inputs": NaN}', "NaN is not a JSON number"),
        (b"[]", "not a JSON object"),
        (b"{}", "inputs must be a list of one"),
        (b'{"inputs": []}', "inputs must be a list of one"),
        (b'{"inputs": [1]}', "inputs must be a list of one"),
        (body(tensor={"name": "x"}), "'x' is not known; this model takes 'input'"),
        (body(tensor={"name": ...}), "'None' is not known"),
        (body(tensor={"datatype": "INT32"}), "give one of UINT8, FP32"),
        (body(tensor={"datatype": ["UINT8"]}), "is not taken"),
        (body(tensor={"shape": [1, 3, 2]}), "does not fit"),
        (body(tensor={"shape": [1, 2, 2, 3]}), "does not fit"),
        (body(tensor={"shape": [-1, 3, 2, 2]}), "not a list of up to 4 sizes"),
        (body(tensor={"shape": [True, 3, 2, 2]}), "not a list of up to 4 sizes"),
        (body(tensor={"shape": "1,3,2,2"}), "not a list of up to 4 sizes"),
        (body(tensor={"shape": [1 << 40, 3, 2, 2]}), "not a list of up to 4 sizes"),
        (body(tensor={"shape": [5, 3, 2, 2]}), "5 images in a request; at most 4"),
        (body(tensor={"data": list(range(11))}), "data has shape"),
        (body(tensor={"data": "abc"}), "must be integers"),
        (body(tensor={"data": ["1"] * 12}), "must be integers"),
        (body(tensor={"data": [True] * 12}), "must be integers"),
        (body(tensor={"data": [0.5] * 12}), "must be integers"),
        (body(tensor={"data": [256] * 12}), "from 0 to 255"),
        (body(tensor={"data": [-1] * 12}), "from 0 to 255"),
        (body(tensor={"data": [10**30] * 12}), "must be integers"),
        (body(tensor={"data": [[1, 2], [3]]}), "data is not a list of numbers"),
        (body(tensor={"data": None}), "must be integers"),
        (body(tensor={"data": {"a": 1}}), "must be integers"),
        (body(tensor={"data": ...}), "has no data"),
        (body(tensor={"data": ..., "parameters": {"binary_data_size": 12}}), "0 bytes follow"),
        (body(tensor={"parameters": {"binary_data_size": 12}}), "both data and binary_data_size"),
        (body(tensor={"parameters": 3}), "parameters is not a JSON object"),
        (body(parameters=[]), "parameters is not a JSON object"),
        (body(parameters={"bits": 3}), "which has 1, 2, 8, fast"),
        (body(parameters={"bits": 9}), "not a bit-width"),
        (body(parameters={"bits": True}), "not a bit-width"),
        (body(parameters={"bits": "slow"}), "'slow' is not in this model"),
        (body(parameters={"min_bits": 32}), "above what this model has"),
        (body(parameters={"min_bits": "2"}), "not a bit-width"),
        (body(parameters={"bits": 1, "min_bits": 2}), "below min_bits"),
        (body(parameters={"deadline_ms": 0}), "deadline_ms=0 must be above 0"),
        (body(parameters={"deadline_ms": True}), "deadline_ms"),
        (body(parameters={"deadline_ms": "5"}), "deadline_ms"),
        (body(parameters={"deadline_ms": 1e300}), "deadline_ms"),
        (body(parameters={"binary_data_output": 1}), "true or false"),
        (body(id=5), "id is not a string"),
        (body(outputs=[{"name": "nope"}]), "this model has head, map"),
        (body(outputs=[{"name": ["head"]}]), "this model has head, map"),
        (body(outputs=["head"]), "outputs must be a list of objects"),
        (body(outputs={"name": "head"}), "outputs must be a list of objects"),
        (body(outputs=[{"name": "head"}, {"name": "head"}]), "twice"),
        (body(outputs=[{"name": "map", "parameters": {"classification": 2}}]), "no scores of classes"),
        (body(outputs=[{"name": "head", "parameters": {"classification": -2}}]), "number of classes"),
        (body(outputs=[{"name": "head", "parameters": {"shared_memory_region": "r"}}]), "shared memory"),
    ],
)  # fmt: skip
def test_every_mistake_has_its_sentence(raw, says):
    with pytest.raises(AnyprecError, match=says) as error:
        read_infer_request(raw, None, SIGNATURE)
    assert len(str(error.value)) < 400


def test_binary_mistakes():
    raw, length = binary(X.tobytes(), "UINT8")
    for wrong, header, says in (
        (raw, len(raw) + 1, "must be the length of the JSON"),
        (raw[:-1], length, "binary_data_size is 12, and 11 bytes"),
        (raw + b"x", length, "binary_data_size is 12, and 13 bytes"),
        (*binary(X.tobytes(), "FP32"), "of FP32 are 48 bytes, got 12"),
        (body() + b"xx", len(body()), "2 bytes follow the JSON, and no input"),
    ):
        with pytest.raises(InputError, match=says):
            read_infer_request(wrong, header, SIGNATURE)


def test_images_of_free_size_are_bounded():
    good = np.zeros((1, 3, 8, 8), np.uint8)
    raw, length = binary(good.tobytes(), "UINT8", good.shape)
    assert read_infer_request(raw, length, FREE).x.shape == good.shape
    large = np.zeros((1, 3, 1, 65), np.uint8)
    raw, length = binary(large.tobytes(), "UINT8", large.shape)
    with pytest.raises(InputError, match="at most 64 pixels"):
        read_infer_request(raw, length, FREE)


def test_bytes_are_refused_where_the_file_does_not_explain_them():
    with pytest.raises(InputError, match="give one of FP32"):
        read_infer_request(body(), None, FLOAT_ONLY)


@given(st.binary(max_size=300), st.none() | st.integers(0, 310))
def test_random_bytes_are_an_error_of_ours(raw, header_length):
    with pytest.raises(AnyprecError):
        read_infer_request(raw + b"!", header_length or None, SIGNATURE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.sampled_from(["name", "shape", "datatype", "data", "parameters", "id", "outputs", "inputs"]),
    JSON,
    st.booleans(),
)
def test_any_json_in_any_place_is_read_or_refused(place, value, in_tensor):
    raw = body(tensor={place: value}) if in_tensor else body(**{place: value})
    try:
        call = read_infer_request(raw, None, SIGNATURE)
    except AnyprecError:
        return
    assert call.x.shape[1:] == (3, 2, 2)


# --- out ---

ABOUT = {"model_name": "net", "model_version": "1", "parameters": {"bits": 2}}
Y = [np.array([[0.5, 3.25, -1.0]], np.float32), np.zeros((1, 2, 4, 4), np.float32)]


def written(*args):
    """The whole body, and the length of its JSON where tensors follow."""
    found = write_answer(*args)
    head = b"".join(map(as_text, found.pieces()))
    return head + b"".join(found.tensors), len(head) if found.tensors else None


def test_json_and_binary_outputs():
    call = InferRequest(X, (RequestedOutput(0), RequestedOutput(1, binary=True)), id="7")
    raw, length = written(ABOUT, call, SIGNATURE, Y)
    record = json.loads(raw[:length])
    assert record["id"] == "7" and record["parameters"] == {"bits": 2}
    assert record["outputs"][0] == {"name": "head", "datatype": "FP32", "shape": [1, 3], "data": [0.5, 3.25, -1.0]}
    assert record["outputs"][1]["parameters"] == {"binary_data_size": 128}
    assert raw[length:] == bytes(128)


def test_json_has_no_nan():
    y = [np.array([[np.nan, np.inf, 1.0]], np.float32)]
    raw, length = written(ABOUT, InferRequest(X, (RequestedOutput(0),)), SIGNATURE, y)
    assert length is None
    assert json.loads(raw, parse_constant=pytest.fail)["outputs"][0]["data"] == [None, None, 1.0]


def test_classification():
    raw, length = written(ABOUT, InferRequest(X, (RequestedOutput(0, classes=2),)), SIGNATURE, Y)
    output = json.loads(raw)["outputs"][0]
    assert output == {"name": "head", "datatype": "BYTES", "shape": [1, 2], "data": ["3.25:1:dog", "0.5:0:cat"]}
    raw, length = written(ABOUT, InferRequest(X, (RequestedOutput(0, True, 1),)), SIGNATURE, Y)
    assert raw[length:] == struct.pack("<I", 10) + b"3.25:1:dog"


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3))
def test_json_numbers_keep_every_bit(values):
    y = np.array([values], np.float32)
    raw, _ = written(ABOUT, InferRequest(X, (RequestedOutput(0),)), SIGNATURE, [y])
    np.testing.assert_array_equal(np.array(json.loads(raw)["outputs"][0]["data"], np.float32), y[0])


def test_large_answers_come_in_pieces():
    """None has more than PIECE numbers; together they are the JSON; binary tensors are the engine's own memory."""
    y = np.random.default_rng(0).standard_normal((1, 2, 200, 300)).astype(np.float32)
    found = write_answer(ABOUT, InferRequest(X, (RequestedOutput(0), RequestedOutput(1))), SIGNATURE, [Y[0], y])
    pieces = list(found.pieces())
    assert max(len(piece) for piece in pieces if isinstance(piece, np.ndarray)) == PIECE
    outputs = json.loads(b"".join(map(as_text, pieces)))["outputs"]
    np.testing.assert_array_equal(np.array(outputs[1]["data"], np.float32).reshape(y.shape), y)
    assert outputs[0]["data"] == [0.5, 3.25, -1.0]
    found = write_answer(ABOUT, InferRequest(X, (RequestedOutput(1, binary=True),)), SIGNATURE, [Y[0], y])
    assert np.shares_memory(np.frombuffer(found.tensors[0], np.uint8), y)


def test_the_size_of_an_answer_is_known_before_the_run():
    shapes = [(2, 3), (2, 2, 400, 400)]
    count, most = answer_size(InferRequest(X, (RequestedOutput(0), RequestedOutput(1))), shapes)
    assert count == 6 + 2 * 2 * 400 * 400
    worst = np.full(count, -1776749510656.0, np.float32)
    assert len(as_text(worst)) == most - 1
    assert answer_size(InferRequest(X, (RequestedOutput(0, binary=True), RequestedOutput(1, binary=True))), shapes) == (
        0,
        0,
    )
    assert answer_size(InferRequest(X, (RequestedOutput(0, classes=1000),)), shapes)[0] == 6
