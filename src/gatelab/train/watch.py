"""What looks on while runs train."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Watch(Protocol):
    """What looks on while a run trains, a progress display for example."""

    def start_run(self, name: str, total_steps: int, completed: int = 0) -> None:
        """A run begins, or goes on after ``completed`` steps."""

    def update(self, step: int, loss: float, tokens_per_second: float, peak_share: float) -> None:
        """``step`` steps are done; ``peak_share`` is the share of the measured peak of matrix products."""

    def finish_run(self, summary: str) -> None:
        """The run is finished."""

    def message(self, text: str) -> None:
        """Something that a user should know."""


class Unwatched:
    """A :class:`Watch` that shows nothing."""

    def start_run(self, name: str, total_steps: int, completed: int = 0) -> None: ...
    def update(self, step: int, loss: float, tokens_per_second: float, peak_share: float) -> None: ...
    def finish_run(self, summary: str) -> None: ...
    def message(self, text: str) -> None: ...
