"""The beginning of a GGUF file, checked before a parser that believes it reads it.

The parser that transformers uses makes one Python object for each entry that a header announces, also where the file
has long ended: a few bytes that promise 2**60 entries would fill all memory. Here every count is held against the size
of the file. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4
LEAST_ENTRY_BYTES = 13  # of a key: its length, its type, one byte of value
LEAST_TENSOR_BYTES = 24


def require_sound_gguf(path: Path) -> None:
    """Raise ``ValueError`` for a file that is no GGUF, or whose header announces more than the file has."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _Header(content).check()
    except ValueError as error:
        raise ValueError(f"{path} can't be opened: it is no sound GGUF file ({error}); download it again") from None


class _Header:
    """A position in a file's bytes that moves on only over bytes that are there."""

    def __init__(self, content: mmap.mmap | bytes):
        self._content = content
        self._at = 0

    def check(self) -> None:
        """Walk over the whole header."""
        if self._content[:4] != MAGIC:
            raise ValueError("it doesn't begin with GGUF")
        self._skip(4)
        version = self._number("<I")
        if version not in VERSIONS:
            raise ValueError(f"it has version {version} (little-endian) where 2 and 3 are read")
        num_tensors, num_entries = self._number("<Q"), self._number("<Q")
        self._require(num_tensors * LEAST_TENSOR_BYTES + num_entries * LEAST_ENTRY_BYTES)
        for _ in range(num_entries):
            self._skip(self._number("<Q"))
            self._value(self._number("<I"))
        for _ in range(num_tensors):
            self._skip(self._number("<Q"))
            dimensions = self._number("<I")
            if dimensions > MOST_DIMENSIONS:
                raise ValueError(f"it has a tensor of {dimensions} dimensions, more than {MOST_DIMENSIONS}")
            self._skip(8 * dimensions + 12)

    def _value(self, kind: int) -> None:
        if kind == STRING:
            self._skip(self._number("<Q"))
        elif kind == ARRAY:
            self._array(self._number("<I"), self._number("<Q"))
        else:
            self._skip(_scalar_bytes(kind))

    def _array(self, kind: int, length: int) -> None:
        if kind == STRING:
            self._require(8 * length)
            for _ in range(length):
                self._skip(self._number("<Q"))
        else:
            self._skip(length * _scalar_bytes(kind))

    def _number(self, form: str) -> int:
        start = self._at
        self._skip(struct.calcsize(form))
        return struct.unpack(form, self._content[start : self._at])[0]

    def _skip(self, num_bytes: int) -> None:
        self._require(num_bytes)
        self._at += num_bytes

    def _require(self, num_bytes: int) -> None:
        left = len(self._content) - self._at
        if num_bytes > left:
            raise ValueError(f"byte {self._at} announces {num_bytes} bytes where {left} are left")


def _scalar_bytes(kind: int) -> int:
    if kind not in SCALAR_BYTES:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return SCALAR_BYTES[kind]
