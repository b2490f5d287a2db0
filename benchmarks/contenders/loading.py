"""Batches from prepared shards, as a training run draws them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from gatelab.data.loader import TrainLoader
from gatelab.data.prepare import prepare as prepare_data
from gatelab.data.settings import DataSettings


def loader_of(settings: Mapping[str, Any]) -> TrainLoader:
    """The loader of ``settings["data"]``, which is prepared under ``settings["cache"]`` or will be."""
    data = DataSettings.parse(settings["data"])
    prepared = prepare_data(data, Path(settings["cache"]))
    return TrainLoader(
        prepared.train,
        context=data.context,
        sequences_per_step=settings["sequences"],
        seed=0,
        bos_id=prepared.tokenizer.bos_id,
    )


def prepare(settings: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
    """``settings["batches"]`` further batches."""
    loader, steps = loader_of(settings), count()

    def turn() -> dict[str, float]:
        for _ in range(settings["batches"]):
            loader.batch(next(steps))
        return {}

    return turn
