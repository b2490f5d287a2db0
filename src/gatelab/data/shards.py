"""Token shards: the tokens of a split in numbered, memory-mapped files, each verified by the checksum beside it.

A shard holds whole documents. Its layout, little-endian::

    bytes 0 to 7        the magic b"GLTOKENS"
    bytes 8 to 1023     the header, JSON padded with spaces (`ShardHeader`, with a version)
    from byte 1024      tokens, uint16 for vocabularies up to 65,536 and uint32 above, padded with zeros to 8 bytes
    then                where each document starts, int64, counted in tokens from the shard's first one
    then                the UTF-8 bytes of each document's text, int64

`NAME.sha256` beside it holds the SHA-256 of the whole file, readable by ``sha256sum --check``. The first token of each
document is BOS. The last shard says that it is the last, so that an interrupted writing is never taken for complete.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from gatelab.data.checksums import WAY_OUT, recorded_checksum, verify_checksum
from gatelab.files import parse_json

MAGIC = b"GLTOKENS"
VERSION = 1
HEADER_BYTES = 1024
DTYPES = ("uint16", "uint32")
MOST_MAPPED = 512  # an operating system allows a process some 65,000 maps


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says of itself; ``first_token`` and ``first_document`` count all shards before it."""

    version: int
    number: int
    is_last: bool
    dtype: str
    num_tokens: int
    num_documents: int
    num_text_bytes: int
    largest_token: int
    first_token: int
    first_document: int

    @property
    def documents_offset(self) -> int:
        """The byte at which the document starts begin."""
        return HEADER_BYTES + -(-self.num_tokens * np.dtype(self.dtype).itemsize // 8) * 8

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.documents_offset + 16 * self.num_documents


class Shard:
    """One shard, memory-mapped when it is first read.

    ``ValueError`` names a file that is truncated, altered, of another version, or whose parts contradict its header.
    """

    def __init__(self, path: Path, *, verify: bool = True):
        self.path = path
        self.sha256 = verify_checksum(path) if verify else recorded_checksum(path)
        self.header = _read_header(path)
        if path.stat().st_size != self.header.file_bytes:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes where its header says {self.header.file_bytes}: "
                f"it is truncated or altered; {WAY_OUT}"
            )
        if verify:
            self._require_consistent()
            self.unmap()

    @cached_property
    def _raw(self) -> np.ndarray:
        return np.memmap(self.path, mode="r")

    @property
    def is_mapped(self) -> bool:
        """Whether the file takes one of the process's memory maps."""
        return "_raw" in self.__dict__

    def unmap(self) -> None:
        """Forget the memory map; it is made again when it is needed."""
        self.__dict__.pop("_raw", None)

    @property
    def tokens(self) -> np.ndarray:
        dtype = np.dtype(self.header.dtype).newbyteorder("<")
        return self._raw[HEADER_BYTES : HEADER_BYTES + self.header.num_tokens * dtype.itemsize].view(dtype)

    @property
    def document_starts(self) -> np.ndarray:
        documents = self.header.documents_offset
        return self._raw[documents : documents + 8 * self.header.num_documents].view("<i8")

    @property
    def document_text_bytes(self) -> np.ndarray:
        return self._raw[self.header.documents_offset + 8 * self.header.num_documents :].view("<i8")

    def _require_consistent(self) -> None:
        """A checksum says that a file is as it was written, not that who wrote it meant well."""
        header, starts, text_bytes = self.header, self.document_starts, self.document_text_bytes
        is_sound = (
            starts[0] == 0
            and (starts[1:] > starts[:-1]).all()
            and starts[-1] < header.num_tokens
            and (text_bytes >= 0).all()
            and sum(text_bytes.tolist()) == header.num_text_bytes
            and self.tokens.max() == header.largest_token
        )
        if not is_sound:
            raise ValueError(f"{self.path} has tokens or documents that contradict its header; {WAY_OUT}")


class MissingShardError(ValueError):
    """A folder lacks one of its shards, or all; what is there is whole."""


class TokenShards:
    """All shards of a folder as one sequence of tokens with document boundaries; nothing is read until asked for.

    Memory holds the shards' headers and at most ``MOST_MAPPED`` maps, however many tokens there are. Raises
    ``ValueError``, naming the file, for a shard that is missing, truncated or altered. ``verify=False`` skips the
    checksums (which read every byte) and still compares sizes.
    """

    def __init__(self, folder: Path, *, verify: bool = True):
        self.folder = folder
        self.shards = open_shards(folder, verify=verify)
        if not self.shards:
            raise MissingShardError(f"{folder} holds no token shards; prepare the data first")
        if not self.shards[-1].header.is_last:
            missing = shard_path(folder, len(self.shards)).name
            raise MissingShardError(f"{folder} is incomplete: {missing} is missing; prepare the data again to go on")
        self._first_tokens = np.array([shard.header.first_token for shard in self.shards])
        self._mapped: deque[Shard] = deque()

    def __len__(self) -> int:
        last = self.shards[-1].header
        return last.first_token + last.num_tokens

    def __getitem__(self, key: slice) -> np.ndarray:
        """The tokens of a range, across shards, in their stored dtype."""
        start, stop, step = key.indices(len(self))
        assert step == 1, "tokens are read in steps of one"
        pieces = [shard.tokens[first:last] for shard, first, last in self._overlaps(start, stop)]
        return np.concatenate(pieces) if pieces else self.shards[0].tokens[:0]

    def starts_document(self, start: int, stop: int) -> np.ndarray:
        """For each token of a range whether it is the first of its document (its BOS); bool."""
        pieces = []
        for shard, first, last in self._overlaps(start, stop):
            piece = np.zeros(last - first, dtype=bool)
            low, high = np.searchsorted(shard.document_starts, [first, last])
            piece[shard.document_starts[low:high] - first] = True
            pieces.append(piece)
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=bool)

    def document_ids(self, start: int, stop: int) -> np.ndarray:
        """For each token of a range the number of its document, counted over all shards from 0; int64."""
        starts = self.starts_document(start, stop)
        if not len(starts):
            return np.zeros(0, dtype=np.int64)
        shard, first, _ = next(self._overlaps(start, stop))
        of_first = shard.header.first_document + np.searchsorted(shard.document_starts, first, side="right") - 1
        starts[0] = False
        return of_first + np.cumsum(starts, dtype=np.int64)

    @property
    def num_documents(self) -> int:
        last = self.shards[-1].header
        return last.first_document + last.num_documents

    @property
    def num_text_bytes(self) -> int:
        """UTF-8 bytes of all documents' text, the denominator of bits per byte."""
        return sum(shard.header.num_text_bytes for shard in self.shards)

    @property
    def document_text_bytes(self) -> np.ndarray:
        """UTF-8 bytes of each document's text; int64, one for each document."""
        return np.concatenate([shard.document_text_bytes for shard in self.shards])

    @property
    def largest_token(self) -> int:
        return max(shard.header.largest_token for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the checksums of all shards, in order."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise ``ValueError`` when a model of this vocabulary size has no row for the largest token."""
        if vocab_size <= self.largest_token:
            raise ValueError(
                f"a vocabulary of {vocab_size} is too small for {self.folder}, whose largest token is "
                f"{self.largest_token}; use at least {self.largest_token + 1}"
            )

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[Shard, int, int]]:
        """The shards that a range touches, with the range inside each, in tokens from that shard's first one."""
        number = max(int(np.searchsorted(self._first_tokens, start, side="right")) - 1, 0)
        for shard in self.shards[number:]:
            offset = shard.header.first_token
            first, last = max(start - offset, 0), min(stop - offset, shard.header.num_tokens)
            if first >= last:
                return
            self._count_map(shard)
            yield shard, first, last

    def _count_map(self, shard: Shard) -> None:
        """Note a shard that is about to be mapped, and let go of the one that has been for longest."""
        if shard.is_mapped:
            return
        self._mapped.append(shard)
        if len(self._mapped) > MOST_MAPPED:
            self._mapped.popleft().unmap()


def _read_header(path: Path) -> ShardHeader:
    with path.open("rb") as stream:
        block = stream.read(HEADER_BYTES)
    if len(block) < HEADER_BYTES or not block.startswith(MAGIC):
        raise ValueError(f"{path} is not a token shard, or its beginning is damaged; {WAY_OUT}")
    damaged = f"{path} has a damaged header; {WAY_OUT}"
    try:
        found = parse_json(block[len(MAGIC) :])
    except ValueError:
        raise ValueError(damaged) from None
    if not isinstance(found, dict) or "version" not in found:
        raise ValueError(damaged)
    if found["version"] != VERSION:
        raise ValueError(
            f"{path} has version {found['version']} of the shard format where {VERSION} is read; {WAY_OUT}"
        )
    counts = [found.get(field.name) for field in fields(ShardHeader) if field.type == "int"]
    is_sound = (
        found.keys() == {field.name for field in fields(ShardHeader)}
        and all(type(count) is int and 0 <= count < 2**62 for count in counts)
        and found["dtype"] in DTYPES
        and type(found["is_last"]) is bool
        and 1 <= found["num_documents"] <= found["num_tokens"]
    )
    if not is_sound:
        raise ValueError(damaged)
    return ShardHeader(**found)


def open_shards(folder: Path, *, verify: bool) -> list[Shard]:
    """The shards that are there, from number 0 without a gap; each must follow on the one before it."""
    shards: list[Shard] = []
    num_tokens = num_documents = 0
    while (path := shard_path(folder, len(shards))).exists():
        shard = Shard(path, verify=verify)
        header = shard.header
        if (header.number, header.first_token, header.first_document) != (len(shards), num_tokens, num_documents):
            raise ValueError(f"{path} doesn't follow on the shards before it: it belongs to another set; {WAY_OUT}")
        num_tokens += header.num_tokens
        num_documents += header.num_documents
        shards.append(shard)
    return shards


def shard_path(folder: Path, number: int) -> Path:
    """The file of the shard with this number, from 0."""
    return folder / f"{number:05d}.tokens"
