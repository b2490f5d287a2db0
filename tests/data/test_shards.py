from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from gatelab.data import shard_writing as writing_module
from gatelab.data.shard_writing import write_shards
from gatelab.data.shards import HEADER_BYTES, Shard, TokenShards
from gatelab.data.tokenizer import Tokenizer

TEXTS = [f"the gate opens {number} é" * (1 + number % 4) for number in range(17)]


def stream_of(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    return [[tokenizer.bos_id, *tokenizer.encode_batch([text])[0]] for text in texts]


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1), size=st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_shards_hold_the_stream(
    texts: list[str], size: int, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("stream")
    write_shards(folder, texts, tokenizer, tokens_per_shard=size)
    tokens, documents = TokenShards(folder), stream_of(texts, tokenizer)
    stream = [token for document in documents for token in document]
    ids = [number for number, document in enumerate(documents) for _ in document]
    assert len(tokens) == len(stream)
    assert tokens[:].tolist() == stream
    assert tokens.document_ids(0, len(stream)).tolist() == ids
    assert tokens.starts_document(0, len(stream)).tolist() == [True] + [a != b for a, b in pairwise(ids)]
    assert tokens.num_documents == len(texts)
    assert tokens.document_text_bytes.tolist() == [len(text.encode()) for text in texts]
    assert tokens.num_text_bytes == sum(len(text.encode()) for text in texts)
    assert tokens.largest_token == max(stream)
    for shard in tokens.shards[:-1]:
        assert size <= shard.header.num_tokens < size + shard.tokens.shape[0] - shard.document_starts[-1]


@pytest.fixture(scope="module")
def tokens(make_shards: Callable[..., TokenShards]) -> TokenShards:
    return make_shards(TEXTS)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_any_range_is_read_across_shards(tokens: TokenShards, data: st.DataObject):
    start = data.draw(st.integers(0, len(tokens)))
    stop = data.draw(st.integers(start, len(tokens)))
    assert tokens[start:stop].tolist() == tokens[:].tolist()[start:stop]
    assert tokens.document_ids(start, stop).tolist() == tokens.document_ids(0, len(tokens)).tolist()[start:stop]
    assert tokens.starts_document(start, stop).tolist() == tokens.starts_document(0, len(tokens)).tolist()[start:stop]
    assert len(tokens.shards) > 3


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_large_vocabularies_are_stored_in_four_bytes(tmp_path: Path, vocab_size: int, dtype: type):
    backend = Backend(models.WordLevel({str(number): number for number in range(vocab_size)}, unk_token="0"))
    backend.add_special_tokens(["0"])
    write_shards(tmp_path, [str(vocab_size - 1)] * 3, Tokenizer(backend, "0"), tokens_per_shard=3)
    tokens = TokenShards(tmp_path)
    assert tokens[:].dtype == dtype
    assert tokens[:].tolist() == [0, vocab_size - 1] * 3
    assert tokens.largest_token == vocab_size - 1


def test_the_files_are_as_documented(tokens: TokenShards, tokenizer: Tokenizer):
    content = (tokens.folder / "00000.tokens").read_bytes()
    header = tokens.shards[0].header
    assert content[:8] == b"GLTOKENS" and b'"version": 1' in content[:HEADER_BYTES]
    stream = np.frombuffer(content, "<u2", header.num_tokens, HEADER_BYTES)
    assert stream.tolist() == tokens[: header.num_tokens].tolist()
    starts = np.frombuffer(content, "<i8", header.num_documents, len(content) - 16 * header.num_documents)
    assert (stream[starts] == tokenizer.bos_id).all() and len(starts) == (stream == 0).sum()
    recorded = (tokens.folder / "00000.tokens.sha256").read_text()
    assert recorded == f"{tokens.shards[0].sha256}  00000.tokens\n"


@pytest.fixture
def folder(tokens: TokenShards, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tokens.folder, tmp_path / "copy"))


def test_any_flipped_byte_is_refused_by_name(folder: Path):
    path = folder / "00001.tokens"
    content = path.read_bytes()
    for position in [*range(0, len(content), 37), len(content) - 1]:
        altered = bytearray(content)
        altered[position] ^= 1 + position % 255
        path.write_bytes(altered)
        with pytest.raises(ValueError, match=r"00001\.tokens does not match its checksum: it is truncated or altered"):
            TokenShards(folder)
    path.write_bytes(content)
    assert len(TokenShards(folder)) > 0


def test_a_truncated_shard_is_refused_by_name_with_and_without_checksums(folder: Path):
    path = folder / "00002.tokens"
    content = path.read_bytes()
    for length in [0, 5, HEADER_BYTES, len(content) - 1]:
        path.write_bytes(content[:length])
        for verify in (True, False):
            with pytest.raises(ValueError, match=r"00002\.tokens .*; delete it and prepare the data again"):
                TokenShards(folder, verify=verify)
    path.write_bytes(content + b"\0")
    with pytest.raises(ValueError, match=r"00002\.tokens has \d+ bytes where its header says \d+"):
        TokenShards(folder, verify=False)


def test_missing_parts_are_refused_by_name(folder: Path):
    last = sorted(folder.glob("*.tokens"))[-1]
    last.rename(folder / "aside")
    with pytest.raises(ValueError, match=f"is incomplete: {last.name} is missing; prepare the data again to go on"):
        TokenShards(folder)
    (folder / "aside").rename(last)
    (folder / "00000.tokens.sha256").unlink()
    with pytest.raises(ValueError, match=r"00000\.tokens has no readable 00000\.tokens\.sha256 beside it"):
        TokenShards(folder)
    with pytest.raises(ValueError, match="holds no token shards; prepare the data first"):
        TokenShards(folder / "nowhere")


def test_an_altered_checksum_is_refused(folder: Path):
    path = folder / "00000.tokens.sha256"
    path.write_text(("0" if path.read_text()[0] != "0" else "1") + path.read_text()[1:])
    with pytest.raises(ValueError, match=r"00000\.tokens does not match its checksum"):
        TokenShards(folder)


def test_another_version_and_another_file_are_named(folder: Path):
    path = folder / "00000.tokens"
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 9', 1))
    with pytest.raises(ValueError, match="has version 9 of the shard format where 1 is read"):
        Shard(path, verify=False)
    path.write_bytes(path.read_bytes().replace(b'"version": 9', b'"vers_on": 9', 1))
    with pytest.raises(ValueError, match="has a damaged header"):
        Shard(path, verify=False)
    path.write_bytes(b"x" * 2000)
    with pytest.raises(ValueError, match="is not a token shard, or its beginning is damaged"):
        Shard(path, verify=False)


def test_a_shard_of_another_set_is_refused(folder: Path, make_shards: Callable[..., TokenShards]):
    other = make_shards(TEXTS[5:])
    for name in ("00001.tokens", "00001.tokens.sha256"):
        shutil.copy(other.folder / name, folder / name)
    with pytest.raises(ValueError, match=r"00001\.tokens doesn't follow on the shards before it"):
        TokenShards(folder)


def test_an_empty_corpus_is_refused(tokenizer: Tokenizer, tmp_path: Path):
    with pytest.raises(ValueError, match="there is no text for train: the corpus, or this split of it, is empty"):
        write_shards(tmp_path / "train", [], tokenizer, tokens_per_shard=5)
    assert not list(tmp_path.rglob("*.tokens"))


def test_a_vocabulary_smaller_than_the_largest_token_is_refused(tokens: TokenShards):
    tokens.require_vocabulary(tokens.largest_token + 1)
    with pytest.raises(ValueError, match=f"a vocabulary of {tokens.largest_token} is too small for .*; use at least"):
        tokens.require_vocabulary(tokens.largest_token)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("num_texts", range(len(TEXTS)))
def test_a_writing_killed_at_any_text_goes_on_to_the_same_bytes(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_texts: int
):
    def killed() -> Iterator[str]:
        yield from TEXTS[:num_texts]
        raise KeyboardInterrupt

    monkeypatch.setattr(writing_module, "_chunks", lambda texts: ([text] for text in texts))
    target = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        write_shards(target, killed(), tokenizer, tokens_per_shard=23)
    with pytest.raises(ValueError, match="prepare the data"):
        TokenShards(target)
    write_shards(target, TEXTS, tokenizer, tokens_per_shard=23)
    assert contents(target) == contents(folder)


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("checksum_is_written", [False, True])
def test_a_writing_killed_inside_a_shard_goes_on_to_the_same_bytes(
    folder: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    checksum_is_written: bool,
):
    target = tmp_path / "killed"
    record = writing_module.record_checksum

    def killed_record(path: Path, digest: str) -> None:
        if path.name != f"{number:05d}.tokens" or checksum_is_written:
            record(path, digest)
        if path.name == f"{number:05d}.tokens":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writing_module, "record_checksum", killed_record)
        write_shards(target, TEXTS, tokenizer, tokens_per_shard=23)
    (target / f".{number:05d}.tokens.0badcafe.tmp").write_bytes(b"half a shard, as a SIGKILL leaves it")
    assert len(list(target.glob("*.tokens"))) == number
    write_shards(target, TEXTS, tokenizer, tokens_per_shard=23)
    assert contents(target) == contents(folder)


def test_going_on_reads_past_finished_documents_without_tokenizing_them(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    before = contents(folder)
    for path in sorted(folder.glob("*.tokens"))[2:]:
        path.unlink()
    done = sum(Shard(folder / f"0000{number}.tokens").header.num_documents for number in (0, 1))
    encoded = []
    original = tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: encoded.extend(texts) or original(texts))
    progress: list[int] = []
    write_shards(folder, TEXTS, tokenizer, tokens_per_shard=23, on_progress=progress.append)
    assert encoded == TEXTS[done:]
    assert progress[-1] == sum(len(text.encode()) for text in TEXTS)
    assert contents(folder) == before
    write_shards(folder, TEXTS, tokenizer, tokens_per_shard=23)
    assert encoded == TEXTS[done:], "a complete folder is left alone"


def test_a_damaged_shard_stops_the_going_on(folder: Path, tokenizer: Tokenizer):
    sorted(folder.glob("*.tokens"))[-1].unlink()
    (folder / "00001.tokens").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"00001\.tokens does not match its checksum"):
        write_shards(folder, TEXTS, tokenizer, tokens_per_shard=23)
