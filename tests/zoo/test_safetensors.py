"""safetensors files read without the library: every dtype as it reads them, and one error for each way to be broken."""

import json
import struct

import pytest

torch = pytest.importorskip("torch")

from anyprec.errors import CheckpointError  # noqa: E402
from anyprec.zoo.safetensors import DTYPES, read_safetensors  # noqa: E402
from anyprec.zoo.weights import read_state_dict  # noqa: E402


def written(path, header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def test_as_the_library_reads_them(tmp_path):
    library = pytest.importorskip("safetensors.torch", reason="the library to compare with")
    state = {f"t.{name}": torch.arange(6).reshape(2, 3).to(kind) for name, kind in DTYPES.items()}
    state |= {"scalar": torch.tensor(3), "empty": torch.zeros(0, 4)}
    library.save_file(state, tmp_path / "net.safetensors", metadata={"format": "pt"})
    found = read_state_dict(tmp_path / "net.safetensors")
    for name, value in library.load_file(tmp_path / "net.safetensors").items():
        wanted = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        assert found[name].dtype == wanted.dtype and torch.equal(found[name], wanted), name
    assert found.keys() == state.keys()


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "body", "said"),
    [
        (b"{]", b"", "not JSON"),
        (b"[1]", b"", "not a table of tensors"),
        (b"\xff\xff", b"", "not UTF-8"),
        ({"a": 3}, b"", "its entry is not dtype, shape and data_offsets"),
        ({"a": {**ONE, "dtype": "F4"}}, b"12345678", "dtype 'F4' is not one of"),
        ({"a": {**ONE, "shape": [-2]}}, b"12345678", "is not a list of sizes"),
        ({"a": {**ONE, "shape": [3]}}, b"12345678", "needs 12 bytes, not 8"),
        ({"a": {**ONE, "data_offsets": [8, 0]}}, b"12345678", "is not [begin, end]"),
        ({"a": ONE, "b": ONE}, b"12345678", "overlaps"),
        ({"a": ONE}, b"1234", "has 4 bytes of tensors, its header tells of 8"),
        ({"a": ONE}, b"1234567890", "has 10 bytes of tensors"),
    ],
)
def test_broken_files(header, body, said, tmp_path):
    with pytest.raises(CheckpointError) as error:
        read_safetensors(written(tmp_path / "net.safetensors", header, body))
    assert said in str(error.value) and "net.safetensors is not a safetensors file, or is damaged" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 50) + b"{}", struct.pack("<Q", 2**60)])
def test_truncated_headers(content, tmp_path):
    (tmp_path / "net.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a safetensors file, or is damaged"):
        read_safetensors(tmp_path / "net.safetensors")


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*: No such file"):
        read_safetensors(tmp_path / "none.safetensors")
