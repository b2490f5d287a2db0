"""A corpus from text files to shards: tokenizer, held-out and training split, manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gatelab.data.prepare import prepare as prepare_data
from gatelab.data.settings import DataSettings


def prepare(settings: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
    """Prepare ``settings["data"]`` under ``settings["cache"]``."""

    def turn() -> dict[str, float]:
        prepared = prepare_data(DataSettings.parse(settings["data"]), Path(settings["cache"]))
        return {"tokens": len(prepared.train)}

    return turn
