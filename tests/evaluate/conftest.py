from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import save_llama, save_tokenizer, tiny_run, write_corpus, write_text

from gatelab.train import throughput
from gatelab.train.loop import train


@pytest.fixture(scope="module", autouse=True)
def no_waiting() -> Iterator[None]:
    """Flushing to disk matters after a power cut alone, and the machine's peak for no figure that is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(throughput, "measure_peak", lambda dtype, **_: 1e12)
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain text of some thousand tokens."""
    return write_text(tmp_path_factory.mktemp("text") / "gates.txt")


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gated run of two steps whose prepared text is gone."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = write_corpus(folder / "corpus.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "measure_peak", lambda dtype, **_: 1e12)
        train(tiny_run(corpus), folder / "run", folder / "cache")
    (folder / "cache").rename(folder / "gone")
    return folder / "run"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama folder whose tokenizer puts one BOS in front."""
    pytest.importorskip("transformers")
    folder = save_llama(tmp_path_factory.mktemp("llama"))
    save_tokenizer(folder, times_added=1)
    return folder
