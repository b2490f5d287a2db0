"""A line for each task and length as it is answered."""

from __future__ import annotations

import time
from collections.abc import Callable

from gatelab.evaluate.ruler.running import Progress


class ProgressLines:
    """Watches an evaluation: a line when a task at a length is done, and every so many seconds before."""

    def __init__(
        self, write: Callable[[str], None], every_seconds: float = 15.0, clock: Callable[[], float] = time.monotonic
    ):
        self._write, self._every_seconds, self._clock = write, every_seconds, clock
        self._next = clock() + every_seconds

    def __call__(self, progress: Progress) -> None:
        """Note how far it is."""
        if progress.done < progress.samples and self._clock() < self._next:
            return
        self._next = self._clock() + self._every_seconds
        self._write(
            f"{progress.task} at {progress.length:,}: {progress.done:,} of {progress.samples:,} samples, "
            f"{progress.tokens_per_second:,.0f} tokens/s"
        )
