"""Where a study stands, read from its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal, NamedTuple

from filelock import FileLock, Timeout

from gatelab.study.jobs import Job, comparison_jobs, diverged_at, tuning_jobs
from gatelab.study.study import Study
from gatelab.train.run_folder import STUDY_FILE, RunFolder

LOCK, RATES = ".lock", "learning_rates.json"
State = Literal["waiting", "running", "done", "diverged"]
_TAIL_BYTES = 16_384


class JobStatus(NamedTuple):
    """How far a job is. ``loss`` is the last training loss; ``seconds`` was spent on it, ``seconds_left`` is a guess.

    A job that was begun and that nobody works on is waiting, with its ``step``.
    """

    job: Job
    state: State
    step: int
    loss: float | None
    seconds: float
    seconds_left: float | None


class StudyStatus(NamedTuple):
    """How far a study is. While its arms are tuned, the jobs that compare them are counted at one rate for each arm."""

    name: str
    jobs: list[JobStatus]
    tuning: bool
    seconds_left: float | None

    def count(self, state: State) -> int:
        """The number of jobs in this state."""
        return sum(job.state == state for job in self.jobs)

    @property
    def is_over(self) -> bool:
        """Whether no job is left to run."""
        return not self.count("running") and not self.count("waiting")

    def summary(self) -> str:
        """One line: the number of jobs in each state, and the time left in minutes."""
        states: tuple[State, ...] = ("done", "diverged", "running", "waiting")
        counts = ", ".join(f"{self.count(state)} {state}" for state in states)
        return f"{self.name}: {counts} of {len(self.jobs)} jobs{self._left()}"

    def _left(self) -> str:
        if self.seconds_left is None or self.is_over:
            return ""
        if self.seconds_left < 60:
            return ", less than a minute left"
        return f", about {self.seconds_left / 60:,.0f} min left"


def status(folder: Path, num_workers: int | None = None) -> StudyStatus:
    """Where the study in a folder stands, also while another process runs it.

    The time left assumes ``num_workers`` jobs side by side, as many as are running when ``None``, and is that of the
    longest job at least. Raises ``ValueError`` for a folder without a study.
    """
    study = open_study(folder)
    return status_of(study, known_jobs(study, folder), folder, _is_driven(folder), num_workers)


def status_of(
    study: Study, jobs: Sequence[Job], folder: Path, is_driven: bool, num_workers: int | None = None
) -> StudyStatus:
    """Where a study with these jobs stands; ``is_driven`` says whether a process works on it."""
    known = _with_time_left([_job_status(job, folder / job.folder, is_driven) for job in jobs])
    lefts = [one.seconds_left for one in known if one.seconds_left is not None]
    side_by_side = num_workers or max(1, sum(one.state == "running" for one in known))
    left = max([sum(lefts) / side_by_side, *lefts]) if len(lefts) == len(known) else None
    return StudyStatus(study.name, known, bool(study.learning_rates) and read_rates(folder) is None, left)


def open_study(folder: Path) -> Study:
    """The study that was begun in a folder; ``ValueError`` when there is none."""
    file = folder / STUDY_FILE
    if not file.exists():
        raise ValueError(f"{folder} holds no study; begin one there, or name the folder of another")
    try:
        return Study.from_yaml(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is unreadable: {error}") from None


def read_rates(folder: Path) -> dict[str, float] | None:
    """Each arm's tuned learning rate; ``None`` as long as they are not chosen."""
    file = folder / RATES
    if not file.exists():
        return None
    try:
        return {arm: float(chosen["best"]) for arm, chosen in json.loads(file.read_text(encoding="utf-8")).items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} is unreadable; delete it to choose again from the runs beside it") from None


def known_jobs(study: Study, folder: Path) -> list[Job]:
    """All jobs of a study; before the rates are chosen, comparisons stand with the middle rate of the grid."""
    if not study.learning_rates:
        return comparison_jobs(study)
    middle = study.learning_rates[len(study.learning_rates) // 2]
    rates = read_rates(folder) or {arm.name: middle for arm in study.arms}
    return [*tuning_jobs(study), *comparison_jobs(study, rates)]


def _is_driven(folder: Path) -> bool:
    if not (folder / LOCK).exists():
        return False
    try:
        with FileLock(folder / LOCK).acquire(timeout=0):
            return False
    except Timeout:
        return True


def _job_status(job: Job, folder: Path, is_driven: bool) -> JobStatus:
    run, diverged = RunFolder(folder), diverged_at(folder)
    rows = _last_steps(run.metrics) if run.is_started else []
    step, loss = (rows[-1]["step"], rows[-1]["loss"]) if rows else (0, None)
    pace = median(row["seconds"] for row in rows) if rows else None
    if diverged is not None:
        return JobStatus(job, "diverged", diverged, loss, diverged * (pace or 0.0), 0.0)
    result = run.result if run.is_started else None
    if result is not None:
        seconds = sum(result[f"{what}_seconds"] for what in ("training", "evaluation", "measurement"))
        return JobStatus(job, "done", step, loss, seconds, 0.0)
    left = None if pace is None else pace * (job.settings.train.steps - step)
    state: State = "running" if run.is_started and is_driven else "waiting"
    return JobStatus(job, state, step, loss, step * (pace or 0.0), left)


def _with_time_left(jobs: Sequence[JobStatus]) -> list[JobStatus]:
    """What was not begun takes as long as the other jobs of its arm, or as all others where its arm has none."""
    whole = [(one.job.arm, one.seconds + one.seconds_left) for one in jobs if one.step and one.seconds_left is not None]
    guessed = []
    for one in jobs:
        same = [seconds for arm, seconds in whole if arm == one.job.arm] or [seconds for _, seconds in whole]
        guessed.append(one._replace(seconds_left=mean(same)) if one.seconds_left is None and same else one)
    return guessed


def _last_steps(file: Path) -> list[dict[str, Any]]:
    """The last training steps of a metrics file that may be growing, from its last 16 KiB."""
    if not file.exists():
        return []
    with file.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = stream.read().splitlines(keepends=True)
    rows = []
    for line in lines:
        try:
            row = json.loads(line) if line.endswith(b"\n") else {}
        except ValueError:
            continue
        if row.get("kind") == "step":
            rows.append(row)
    return rows
