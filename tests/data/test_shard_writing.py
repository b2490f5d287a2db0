"""Tokenizing in several processes: the same bytes, a killed process, an early end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gatelab.data import shard_writing
from gatelab.data.prepare import prepare
from gatelab.data.settings import CorpusSettings, DataSettings, TokenizerSettings
from gatelab.data.shard_writing import write_shards
from gatelab.data.shards import TokenShards
from gatelab.data.tokenizer import Tokenizer

TEXTS = [f"the gate opens {number} é" * (1 + number % 5) for number in range(83)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = shard_writing._chunks
    monkeypatch.setattr(shard_writing, "_chunks", lambda texts: chunks(texts, max_documents=3))


@pytest.mark.usefixtures("small_chunks")
def test_several_processes_write_the_bytes_of_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """28 chunks for three processes, then an interrupted writing that goes on in two."""
    for name, num_processes in (("one", 1), ("three", 3)):
        write_shards(tmp_path / name, TEXTS, tokenizer, tokens_per_shard=89, num_processes=num_processes)
    whole = contents(tmp_path / "one")
    assert len(whole) > 20 and contents(tmp_path / "three") == whole
    assert TokenShards(tmp_path / "one").fingerprint == TokenShards(tmp_path / "three").fingerprint
    for shard in sorted((tmp_path / "three").glob("*.tokens"))[4:]:
        shard.unlink()
    write_shards(tmp_path / "three", TEXTS, tokenizer, tokens_per_shard=89, num_processes=2)
    assert contents(tmp_path / "three") == whole


@pytest.mark.usefixtures("small_chunks")
def test_an_error_of_the_source_ends_all_processes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def broken() -> Iterator[str]:
        yield from TEXTS[:40]
        raise ValueError("row 41 is no text")

    with pytest.raises(ValueError, match="row 41 is no text"):
        write_shards(tmp_path, broken(), tokenizer, tokens_per_shard=89, num_processes=2)


def die(texts: list[str]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("small_chunks")
def test_a_killed_process_is_reported(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shard_writing, "_encode_in_process", die)
        with pytest.raises(OSError, match=r"one of 2 tokenizing processes was killed.*smaller data\.num_processes"):
            write_shards(tmp_path, TEXTS, tokenizer, tokens_per_shard=89, num_processes=2)
    write_shards(tmp_path, TEXTS, tokenizer, tokens_per_shard=89)
    assert TokenShards(tmp_path).num_documents == len(TEXTS)


def test_the_number_of_processes_decides_nothing(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in TEXTS))
    corpus = CorpusSettings(name="files", path=str(tmp_path / "text.jsonl"), heldout_fraction=0.3)
    one, two = (
        prepare(
            DataSettings(train=corpus, tokenizer=TokenizerSettings(vocab_size=270), num_processes=number),
            tmp_path / f"cache{number}",
        )
        for number in (1, 2)
    )
    assert one.fingerprint == two.fingerprint and one.folder.name == two.folder.name
