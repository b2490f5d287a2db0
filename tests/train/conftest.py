from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import write_corpus

from gatelab.train import throughput


@pytest.fixture(scope="module", autouse=True)
def no_waiting() -> Iterator[None]:
    """Flushing to disk matters after a power cut alone, and the machine's peak for no figure that is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(throughput, "measure_peak", lambda dtype, **_: 1e12)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small local text."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "gates.jsonl")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where prepared text is kept for all tests of a session."""
    return tmp_path_factory.mktemp("cache")
