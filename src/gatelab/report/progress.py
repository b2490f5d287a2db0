"""A live view of training runs in a terminal, and the same figures as plain lines in a log. Knows only numbers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gatelab.report.tables import safe_for_terminal

_REFRESHES_PER_SECOND = 4
_UPDATES_FOR_PACE = 50  # the time left follows the recent pace


@dataclass
class _Run:
    """What is known of the current run; times are seconds of the display's clock."""

    name: str
    total_steps: int
    started: float
    step: int
    loss: float | None = None
    tokens_per_second: float | None = None
    peak_share: float | None = None
    history: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_UPDATES_FOR_PACE))

    def record(self, now: float, step: int) -> None:
        """Note that a step was reached; the start is forgotten at the second, since the first is slow (it compiles)."""
        if len(self.history) == 2 and self.history[0][0] == self.started:
            self.history.popleft()
        self.history.append((now, step))
        self.step = step

    def seconds_left(self, now: float) -> float | None:
        """The time that the remaining steps take at the recent pace; ``None`` before a step was made."""
        (first_time, first_step), (last_time, last_step) = self.history[0], self.history[-1]
        if last_step == first_step:
            return None
        pace = (last_time - first_time) / (last_step - first_step)
        return max(0.0, (self.total_steps - last_step) * pace - (now - last_time))

    def figures(self, now: float) -> list[str]:
        """Loss, speed, share of the peak, time gone and time left; what is unknown is left out."""
        left = self.seconds_left(now)
        return [
            *([f"loss {self.loss:.4f}"] if self.loss is not None else []),
            *([f"{self.tokens_per_second:,.0f} tokens/s"] if self.tokens_per_second is not None else []),
            *([f"{self.peak_share:.0%} of peak"] if self.peak_share is not None else []),
            f"{duration(now - self.started)} elapsed",
            *([f"{duration(left)} left"] if left is not None else []),
        ]


class TrainingProgress:
    """Shows one training run at a time; finished runs stay as lines above it. A context manager.

    In a terminal the current run is drawn in place. Elsewhere its figures are printed as one plain line at the first
    update, then every ``line_every_seconds``, and at the last step. ``clock`` gives seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        line_every_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._line_every_seconds = line_every_seconds
        self._clock = clock
        self._run: _Run | None = None
        self._next_line = 0.0
        self._live = Live(
            get_renderable=self._view,
            console=self._console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._console.is_interactive:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._run is not None:
            self._end_run("stopped", f"at step {self._run.step:,}/{self._run.total_steps:,}")
        self._live.stop()

    def start_run(self, name: str, total_steps: int, completed: int = 0) -> None:
        """Begin to show a run of ``total_steps`` steps; a resumed one has ``completed`` some of them before."""
        now = self._clock()
        self._run = _Run(safe_for_terminal(name), total_steps, started=now, step=completed)
        self._run.history.append((now, completed))
        self._next_line = now
        if not self._console.is_interactive:
            resumed = f", resumed after step {completed:,}" if completed else ""
            self.message(f"{name}: {total_steps:,} steps{resumed}")

    def update(
        self, step: int, loss: float, tokens_per_second: float | None = None, peak_share: float | None = None
    ) -> None:
        """Show the figures after ``step`` steps; ``peak_share`` is the share of the measured matrix-product peak."""
        run = self._current_run()
        now = self._clock()
        is_first = run.loss is None
        run.record(now, step)
        run.loss, run.tokens_per_second, run.peak_share = loss, tokens_per_second, peak_share
        if is_first:
            self._redraw()
        if not self._console.is_interactive and (now >= self._next_line or step == run.total_steps):
            self._next_line = now + self._line_every_seconds
            self.message("  ".join([f"{run.name}  step {step:,}/{run.total_steps:,}", *run.figures(now)]))

    def finish_run(self, summary: str) -> None:
        """Replace the current run by a line with its name, its time and this summary."""
        self._end_run("finished", summary)

    def message(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(Text(safe_for_terminal(text)), soft_wrap=True)

    def _current_run(self) -> _Run:
        assert self._run is not None, "start_run comes first"
        return self._run

    def _end_run(self, how: str, summary: str) -> None:
        run = self._current_run()
        self._run = None
        self._redraw()
        self.message(f"{run.name}  {how} after {duration(self._clock() - run.started)}  {summary}")

    def _redraw(self) -> None:
        if self._live.is_started:
            self._live.refresh()

    def _view(self) -> Group:
        run, now = self._run, self._clock()
        if run is None:
            return Group()
        heading = Table.grid(padding=(0, 2), expand=True)
        heading.add_column(no_wrap=True)
        heading.add_column(ratio=1)
        heading.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=run.total_steps, completed=run.step)
        heading.add_row(Text(run.name, style="bold"), bar, f"step {run.step:,}/{run.total_steps:,}")
        return Group(heading, Text("   ".join(run.figures(now)), style="dim"))


def duration(seconds: float) -> str:
    """A time as ``m:ss``, or ``h:mm:ss`` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
