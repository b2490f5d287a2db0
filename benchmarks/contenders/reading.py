"""A prepared corpus opened, its checksums compared, and read once as training batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from process_memory import resident_bytes

from contenders.loading import loader_of


def prepare(settings: Mapping[str, Any]) -> Callable[[], dict[str, float | None]]:
    """One epoch; ``own_bytes`` is what is resident after it without pages of mapped files."""
    before = resident_bytes("RssAnon")

    def turn() -> dict[str, float | None]:
        loader = loader_of(settings)
        for step in range(loader.num_windows // loader.sequences_per_step):
            loader.batch(step)
        after = resident_bytes("RssAnon")
        return {"own_bytes": None if before is None or after is None else after - before}

    return turn
