"""Text to token shards as a run's preparation does it, or the bare tokenizer on texts that are in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gatelab.data.corpora import documents
from gatelab.data.settings import DataSettings
from gatelab.data.shard_writing import write_shards
from gatelab.data.shards import TokenShards
from gatelab.data.tokenizer import Tokenizer


def prepare(settings: Mapping[str, Any]) -> Callable[[], dict[str, int]]:
    """The training text of ``settings["data"]`` once, on ``settings["cores"]``; ``bytes`` is its size.

    With ``settings["bare"]`` nothing is read or written.
    """
    os.environ["RAYON_NUM_THREADS"] = str(settings["cores"])
    data = DataSettings.parse(settings["data"])
    assert data.tokenizer.path is not None
    tokenizer, no_cache = Tokenizer.load(Path(data.tokenizer.path)), Path()

    def shards() -> dict[str, int]:
        with tempfile.TemporaryDirectory() as folder:
            texts = (document.text for document in documents(data.train, "train", no_cache))
            write_shards(Path(folder), texts, tokenizer, tokens_per_shard=data.tokens_per_shard)
            return {"bytes": TokenShards(Path(folder), verify=False).num_text_bytes}

    if not settings["bare"]:
        return shards
    texts = [document.text for document in documents(data.train, "train", no_cache)]
    num_bytes = sum(len(text.encode()) for text in texts)

    def bare() -> dict[str, int]:
        tokenizer.encode_batch(texts)
        return {"bytes": num_bytes}

    return bare
