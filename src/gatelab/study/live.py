"""A running study in a terminal: a table that is drawn in place, or plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gatelab.report.progress import duration
from gatelab.report.tables import Column, Table, safe_for_terminal, to_terminal
from gatelab.study.conditions import Conditions, conditions_table
from gatelab.study.status import JobStatus, StudyStatus
from gatelab.study.study import Study

_MOST_RUNNING = 12
_STATES = ("done", "running", "waiting", "diverged")


def status_table(status: StudyStatus) -> Table:
    """A row for each arm: its jobs by state, the time spent on them and the time left."""
    columns = [
        Column("arm", "arm"),
        *(Column(state, state, "d") for state in _STATES),
        Column("spent", "spent", align="right"),
        Column("left", "left", align="right"),
    ]
    arms = dict.fromkeys(one.job.arm for one in status.jobs)
    rows = [_arm_row(arm, [one for one in status.jobs if one.job.arm == arm]) for arm in arms]
    return Table(columns, rows)


def running_table(status: StudyStatus) -> Table | None:
    """The jobs that are running: step, training loss, time left; ``None`` where none is."""
    running = [one for one in status.jobs if one.state == "running"]
    columns = [
        Column("job", "running"),
        Column("step", "step", align="right"),
        Column("loss", "loss", ".4f"),
        Column("left", "left", align="right"),
    ]
    rows = [
        {
            "job": one.job.folder,
            "step": f"{one.step:,}/{one.job.settings.train.steps:,}",
            "loss": one.loss,
            "left": None if one.seconds_left is None else duration(one.seconds_left),
        }
        for one in running[:_MOST_RUNNING]
    ]
    return Table(columns, rows) if rows else None


class StudyObserver:
    """An :class:`~gatelab.study.runner.Observer` for a terminal; a context manager.

    In a terminal the two tables are drawn in place and stay when the study ends. Elsewhere the summary is printed as
    one line at the first update, then every ``line_every_seconds``, and when no job is left. ``clock`` gives seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        line_every_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._line_every_seconds = line_every_seconds
        self._clock = clock
        self._status: StudyStatus | None = None
        self._next_line = clock()
        self._live = Live(get_renderable=self._view, console=self._console, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._console.is_interactive:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def begin(self, study: Study, conditions: Sequence[Conditions]) -> None:
        """Print the question and that the conditions are equal; the report shows each declared difference."""
        self.message(study.question)
        table = conditions_table(study, conditions)
        self._console.print(to_terminal(replace(table, columns=table.columns[:-1])))

    def update(self, status: StudyStatus) -> None:
        """Show where the study stands."""
        self._status = status
        if self._live.is_started:
            self._live.refresh()
        elif self._clock() >= self._next_line or status.is_over:
            self._next_line = self._clock() + self._line_every_seconds
            self.message(status.summary())

    def message(self, text: str) -> None:
        """Print a line above the tables."""
        self._console.print(Text(safe_for_terminal(text)), soft_wrap=True)

    def _view(self) -> Group:
        if self._status is None:
            return Group()
        running = running_table(self._status)
        tables = [status_table(self._status), *([running] if running is not None else [])]
        return Group(*map(to_terminal, tables), Text(safe_for_terminal(self._status.summary())))


def _arm_row(arm: str, jobs: Sequence[JobStatus]) -> dict[str, object]:
    lefts = [one.seconds_left for one in jobs if one.seconds_left is not None]
    left = duration(sum(lefts)) if len(lefts) == len(jobs) else None
    counts = {state: sum(one.state == state for one in jobs) for state in _STATES}
    return {"arm": arm, **counts, "spent": duration(sum(one.seconds for one in jobs)), "left": left}
