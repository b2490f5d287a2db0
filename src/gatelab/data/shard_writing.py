"""Writing token shards: tokenization in this process or spread over several, with the same bytes either way."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gatelab.data.checksums import record_checksum
from gatelab.data.shards import HEADER_BYTES, MAGIC, VERSION, ShardHeader, open_shards, shard_path
from gatelab.data.tokenizer import Tokenizer
from gatelab.files import atomic_path, remove_leftovers, sha256

CHUNKS_IN_FLIGHT = 4  # for each process: enough that none waits, few enough that memory stays flat


class EncodedTexts(NamedTuple):
    """Documents one after another: tokens, each document led by BOS; tokens and UTF-8 bytes of each document."""

    tokens: np.ndarray
    lengths: list[int]
    text_bytes: list[int]


def write_shards(
    folder: Path,
    texts: Iterable[str],
    tokenizer: Tokenizer,
    *,
    tokens_per_shard: int,
    num_processes: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Tokenize texts, each led by BOS, into the shards of ``folder``, going on after the last complete shard.

    An interrupted and repeated writing of the same texts gives the same bytes as one in a single go, with any number
    of processes. One process reads the texts and writes the files; with more than one, the others tokenize. A shard is
    closed at the first document end at or after ``tokens_per_shard`` tokens; memory holds one shard. ``on_progress``
    gets the UTF-8 bytes of text written so far. Raises ``ValueError`` when there is no text, and names a damaged
    shard; ``OSError`` when a process was killed from outside.
    """
    remove_leftovers(folder)
    done = [shard.header for shard in open_shards(folder, verify=True)]
    if done and done[-1].is_last:
        return
    writer = _Writer(folder, tokenizer, done)
    chunks = _chunks(islice(texts, sum(header.num_documents for header in done), None))
    for encoded in _encoded_chunks(chunks, tokenizer, num_processes):
        start = 0
        for length, num_text_bytes in zip(encoded.lengths, encoded.text_bytes, strict=True):
            if writer.num_tokens >= tokens_per_shard:
                writer.close_shard(is_last=False)
            writer.add(encoded.tokens[start : start + length], num_text_bytes)
            start += length
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
        self._dtype = _dtype(tokenizer)
        self._number = len(done)
        self._first_token = sum(header.num_tokens for header in done)
        self._first_document = sum(header.num_documents for header in done)
        self._tokens: list[np.ndarray] = []
        self._text_bytes: list[int] = []

    def add(self, tokens: np.ndarray, num_text_bytes: int) -> None:
        self._tokens.append(tokens)
        self._text_bytes.append(num_text_bytes)
        self.num_tokens += len(tokens)
        self.num_text_bytes += num_text_bytes

    def close_shard(self, *, is_last: bool) -> None:
        tokens = np.concatenate(self._tokens)
        lengths = np.array([len(document) for document in self._tokens])
        header = ShardHeader(
            version=VERSION,
            number=self._number,
            is_last=is_last,
            dtype=self._dtype.name,
            num_tokens=len(tokens),
            num_documents=len(lengths),
            num_text_bytes=sum(self._text_bytes),
            largest_token=int(tokens.max()),
            first_token=self._first_token,
            first_document=self._first_document,
        )
        path = shard_path(self._folder, header.number)
        with atomic_path(path) as temporary:
            with temporary.open("wb") as stream:
                stream.write(MAGIC + json.dumps(asdict(header)).encode().ljust(HEADER_BYTES - len(MAGIC)))
                stream.write(tokens.astype(self._dtype.newbyteorder("<"), copy=False).data)
                stream.write(bytes(header.documents_offset - stream.tell()))
                stream.write((np.cumsum(lengths) - lengths).astype("<i8").tobytes())
                stream.write(np.array(self._text_bytes, dtype="<i8").tobytes())
            record_checksum(path, sha256(temporary))
        self._number += 1
        self._first_token += header.num_tokens
        self._first_document += header.num_documents
        self._tokens, self._text_bytes, self.num_tokens = [], [], 0


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 65_536 else np.uint32)


def _encoded_chunks(chunks: Iterator[list[str]], tokenizer: Tokenizer, num_processes: int) -> Iterator[EncodedTexts]:
    """The chunks' tokens in the order of the chunks."""
    if num_processes == 1:
        for chunk in chunks:
            yield _encode(tokenizer, chunk)
        return
    waiting: deque[Future[EncodedTexts]] = deque()
    start = (tokenizer.to_text(), tokenizer.bos_token)
    pool = ProcessPoolExecutor(num_processes, get_context("spawn"), _start_process, start)
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode_in_process, chunk))
            if len(waiting) == CHUNKS_IN_FLIGHT * num_processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise OSError(
            f"one of {num_processes} tokenizing processes was killed, perhaps for want of memory; prepare again to go "
            "on where it was, with a smaller data.num_processes"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _encode(tokenizer: Tokenizer, texts: list[str]) -> EncodedTexts:
    documents = [[tokenizer.bos_id, *ids] for ids in tokenizer.encode_batch(texts)]
    # Its dtype asks the tokenizer for its whole vocabulary, so it is asked once.
    tokens = np.fromiter(chain.from_iterable(documents), dtype=_dtype(tokenizer))
    return EncodedTexts(tokens, [len(document) for document in documents], [len(text.encode()) for text in texts])


_of_process: Tokenizer | None = None  # a process of a pool has no other place for what all its chunks need


def _start_process(tokenizer: str, bos_token: str) -> None:
    """What a tokenizing process does first: one thread each, and one tokenizer for all its chunks."""
    global _of_process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _of_process = Tokenizer.from_text(tokenizer, bos_token)


def _encode_in_process(texts: list[str]) -> EncodedTexts:
    assert _of_process is not None
    return _encode(_of_process, texts)


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
