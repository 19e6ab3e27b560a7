"""ModelSource: the file a PackedModel came from and how it was opened. A pickle keeps this instead of the weights.

Called by model.py. The file is known again by its header, which holds the checksums of all tensors (FORMAT.md).
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from anyprec import _native
from anyprec.errors import ModelFileError
from anyprec.format.header import parse_header
from anyprec.format.model_file import CASCADE_KEY

MAX_HEADER_BYTES = 100_000_000  # as the readers have it


@dataclass(frozen=True)
class ModelSource:
    path: bytes  # absolute
    max_bits: int
    verify: bool
    memory_budget: int
    isa: str
    keep_copy: bool
    digest: str | None  # SHA-256 of the header; None where the file went away while it was opened
    cascade: str | None = None  # the text in the header, unchecked

    @classmethod
    def load(
        cls, path: bytes, max_bits: int, verify: bool, memory_budget: int, isa: str, keep_copy: bool
    ) -> tuple[_native.Model, ModelSource]:
        native = _native.Model.open(path, max_bits, verify, memory_budget, isa, keep_copy)
        path = os.path.abspath(path)
        header = read_header(path)
        digest = None if header is None else hashlib.sha256(header).hexdigest()
        return native, cls(path, max_bits, verify, memory_budget, isa, keep_copy, digest, cascade_text(header))

    @property
    def name(self) -> str:
        return os.fsdecode(self.path)

    def reopen(self) -> _native.Model:
        try:
            native = _native.Model.open(
                self.path, self.max_bits, self.verify, self.memory_budget, self.isa, self.keep_copy
            )
        except ModelFileError as error:
            raise ModelFileError(
                f"a pickled model holds the path of its file, and that cannot be opened here ({error}); put the file "
                "there, or load the model where it is needed"
            ) from error
        if self.digest is not None and header_digest(self.path) != self.digest:
            raise ModelFileError(
                f"{self.name} is another model than when this one was pickled; load it where it is needed instead"
            )
        return native


def header_digest(path: bytes) -> str | None:
    header = read_header(path)
    return None if header is None else hashlib.sha256(header).hexdigest()


def read_header(path: bytes) -> bytes | None:
    """With the eight bytes that tell its length."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
            return start + file.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES))
    except OSError:
        return None


def cascade_text(header: bytes | None) -> str | None:
    """The header is parsed only where the key occurs: most files have no cascade."""
    if header is None or f'"{CASCADE_KEY}"'.encode() not in header:
        return None
    try:
        return parse_header(header[8:])[0].get(CASCADE_KEY)
    except ModelFileError:  # rewritten since it was opened
        return None
