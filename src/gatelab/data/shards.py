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
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from gatelab.data.checksums import WAY_OUT, record_checksum, recorded_checksum, verify_checksum
from gatelab.data.tokenizer import Tokenizer
from gatelab.files import atomic_path, remove_leftovers, sha256

MAGIC = b"GLTOKENS"
VERSION = 1
HEADER_BYTES = 1024


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
    """One shard, memory-mapped. ``ValueError`` names the file when it is truncated, altered or of another version."""

    def __init__(self, path: Path, *, verify: bool = True):
        self.path = path
        self.sha256 = verify_checksum(path) if verify else recorded_checksum(path)
        self.header = _read_header(path)
        if path.stat().st_size != self.header.file_bytes:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes where its header says {self.header.file_bytes}: "
                f"it is truncated or altered; {WAY_OUT}"
            )
        raw = np.memmap(path, mode="r")
        documents, count = self.header.documents_offset, self.header.num_documents
        tokens_end = HEADER_BYTES + self.header.num_tokens * np.dtype(self.header.dtype).itemsize
        self.tokens = raw[HEADER_BYTES:tokens_end].view(np.dtype(self.header.dtype).newbyteorder("<"))
        self.document_starts = raw[documents : documents + 8 * count].view("<i8")
        self.document_text_bytes = raw[documents + 8 * count :].view("<i8")


class MissingShardError(ValueError):
    """A folder lacks one of its shards, or all; what is there is whole."""


class TokenShards:
    """All shards of a folder as one sequence of tokens with document boundaries; nothing is read until asked for.

    Raises ``ValueError``, naming the file, for a shard that is missing, truncated or altered. ``verify=False`` skips
    the checksums (which read every byte) and still compares sizes.
    """

    def __init__(self, folder: Path, *, verify: bool = True):
        self.folder = folder
        self.shards = _open_shards(folder, verify=verify)
        if not self.shards:
            raise MissingShardError(f"{folder} holds no token shards; prepare the data first")
        if not self.shards[-1].header.is_last:
            missing = _shard_path(folder, len(self.shards)).name
            raise MissingShardError(f"{folder} is incomplete: {missing} is missing; prepare the data again to go on")
        self._first_tokens = np.array([shard.header.first_token for shard in self.shards])

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
            yield shard, first, last


def write_shards(
    folder: Path,
    texts: Iterable[str],
    tokenizer: Tokenizer,
    *,
    tokens_per_shard: int,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Tokenize texts, each led by BOS, into the shards of ``folder``, going on after the last complete shard.

    An interrupted and repeated writing of the same texts gives the same bytes as one in a single go. A shard is closed
    at the first document end at or after ``tokens_per_shard`` tokens; memory holds one shard. ``on_progress`` gets the
    UTF-8 bytes of text written so far. Raises ``ValueError`` when there is no text, and names a damaged shard.
    """
    remove_leftovers(folder)
    done = [shard.header for shard in _open_shards(folder, verify=True)]
    if done and done[-1].is_last:
        return
    writer = _Writer(folder, tokenizer, done)
    for chunk in _chunks(islice(texts, sum(header.num_documents for header in done), None)):
        for text, ids in zip(chunk, tokenizer.encode_batch(chunk), strict=True):
            if writer.num_tokens >= tokens_per_shard:
                writer.close_shard(is_last=False)
            writer.add(ids, len(text.encode()))
        if on_progress is not None:
            on_progress(writer.num_text_bytes)
    if not writer.num_tokens:
        raise ValueError(f"there is no text for {folder.name}: the corpus, or this split of it, is empty")
    writer.close_shard(is_last=True)


class _Writer:
    """The open shard in memory and what stands in the shards before it."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, done: list[ShardHeader]):
        self.num_text_bytes = sum(header.num_text_bytes for header in done)
        self.num_tokens = 0
        self._folder = folder
        self._bos_id = tokenizer.bos_id
        self._dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 65_536 else np.uint32)
        self._done = list(done)
        self._tokens: list[np.ndarray] = []
        self._text_bytes: list[int] = []

    def add(self, ids: list[int], num_text_bytes: int) -> None:
        self._tokens.append(np.array([self._bos_id, *ids], dtype=self._dtype))
        self._text_bytes.append(num_text_bytes)
        self.num_tokens += 1 + len(ids)
        self.num_text_bytes += num_text_bytes

    def close_shard(self, *, is_last: bool) -> None:
        tokens = np.concatenate(self._tokens)
        lengths = np.array([len(document) for document in self._tokens])
        header = ShardHeader(
            version=VERSION,
            number=len(self._done),
            is_last=is_last,
            dtype=self._dtype.name,
            num_tokens=len(tokens),
            num_documents=len(lengths),
            num_text_bytes=sum(self._text_bytes),
            largest_token=int(tokens.max()),
            first_token=sum(header.num_tokens for header in self._done),
            first_document=sum(header.num_documents for header in self._done),
        )
        path = _shard_path(self._folder, header.number)
        with atomic_path(path) as temporary:
            with temporary.open("wb") as stream:
                stream.write(MAGIC + json.dumps(asdict(header)).encode().ljust(HEADER_BYTES - len(MAGIC)))
                stream.write(tokens.astype(self._dtype.newbyteorder("<")).tobytes())
                stream.write(bytes(header.documents_offset - stream.tell()))
                stream.write((np.cumsum(lengths) - lengths).astype("<i8").tobytes())
                stream.write(np.array(self._text_bytes, dtype="<i8").tobytes())
            record_checksum(path, sha256(temporary))
        self._done.append(header)
        self._tokens, self._text_bytes, self.num_tokens = [], [], 0


def _chunks(texts: Iterable[str], max_documents: int = 1024, max_characters: int = 1 << 20) -> Iterator[list[str]]:
    """Texts in lists of bounded size, so that the tokenizer's threads have work and memory stays flat."""
    chunk: list[str] = []
    num_characters = 0
    for text in texts:
        chunk.append(text)
        num_characters += len(text)
        if len(chunk) == max_documents or num_characters >= max_characters:
            yield chunk
            chunk, num_characters = [], 0
    if chunk:
        yield chunk


def _read_header(path: Path) -> ShardHeader:
    with path.open("rb") as stream:
        block = stream.read(HEADER_BYTES)
    if len(block) < HEADER_BYTES or not block.startswith(MAGIC):
        raise ValueError(f"{path} is not a token shard, or its beginning is damaged; {WAY_OUT}")
    try:
        found = json.loads(block[len(MAGIC) :])
        if found["version"] == VERSION:
            return ShardHeader(**found)
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} has a damaged header; {WAY_OUT}") from None
    raise ValueError(f"{path} has version {found['version']} of the shard format where {VERSION} is read; {WAY_OUT}")


def _open_shards(folder: Path, *, verify: bool) -> list[Shard]:
    """The shards that are there, from number 0 without a gap; each must follow on the one before it."""
    shards: list[Shard] = []
    num_tokens = num_documents = 0
    while (path := _shard_path(folder, len(shards))).exists():
        shard = Shard(path, verify=verify)
        if (shard.header.first_token, shard.header.first_document) != (num_tokens, num_documents):
            raise ValueError(f"{path} doesn't follow on the shards before it: it belongs to another set; {WAY_OUT}")
        num_tokens += shard.header.num_tokens
        num_documents += shard.header.num_documents
        shards.append(shard)
    return shards


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.tokens"
