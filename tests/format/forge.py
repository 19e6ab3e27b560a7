"""Takes a model file apart and puts it together again with a wrong header or graph, its checksum made right.

For test_corrupt (through the fixture `forge`) and for the script fuzz_reader.py.
"""

import json
import struct
import zlib


def take_apart(raw: bytes) -> tuple[dict, dict, bytes]:
    """Header without its metadata, graph, tensor data."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    graph = json.loads(header.pop("__metadata__")["anyprec"])
    return header, graph, raw[8 + length :]


def graph_text(graph) -> str:
    return json.dumps(graph, separators=(",", ":"))


def put_together(header, graph, data: bytes, metadata=None) -> bytes:
    """`graph` may be a text; `metadata` replaces what would be made of it."""
    text = graph if isinstance(graph, str) else graph_text(graph)
    crc = zlib.crc32(text.encode("utf-8", "surrogatepass"))
    if metadata is None:
        metadata = {"anyprec": text, "anyprec.crc32": f"{crc:08x}"}
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    return with_header(text + b" " * (-len(text) % 8), data)


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data
