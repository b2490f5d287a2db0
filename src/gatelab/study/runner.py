"""Running a study: equal conditions first, then each job in its folder; what is finished is never repeated."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from filelock import FileLock, Timeout

from gatelab.files import kept_if_used, remove_leftovers, require_folder, write_atomically
from gatelab.settings import difference
from gatelab.study.conditions import Conditions, check_conditions
from gatelab.study.executors import Executor, Serial, Task
from gatelab.study.inputs import require_inputs
from gatelab.study.jobs import (
    Job,
    JobResult,
    comparison_jobs,
    diverged_at,
    is_finished,
    read_documents,
    read_result,
    tuning_jobs,
)
from gatelab.study.learning_rates import choose_learning_rates
from gatelab.study.probes import is_probed, probe_runs, require_probeable
from gatelab.study.statistics import DocumentScores, TextDifference, compare_on_documents
from gatelab.study.status import LOCK, RATES, StudyStatus, known_jobs, open_study, read_rates, status_of
from gatelab.study.study import PROBES, STEP_SECONDS, Study
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import DECIDES_BITS, STUDY_FILE, RunFolder
from gatelab.train.watch import Watch

CONDITIONS = "conditions.json"
_OBSERVE_EVERY_SECONDS = 2.0


class Observer(Protocol):
    """What looks on while a study runs, a live table for example."""

    def begin(self, study: Study, conditions: Sequence[Conditions]) -> None:
        """The conditions were checked; the first job comes next."""

    def update(self, status: StudyStatus) -> None:
        """Where the study stands, every few seconds and at each phase's end."""

    def message(self, text: str) -> None:
        """Something that a user should know."""


class Unobserved:
    """An :class:`Observer` that shows nothing."""

    def begin(self, study: Study, conditions: Sequence[Conditions]) -> None: ...
    def update(self, status: StudyStatus) -> None: ...
    def message(self, text: str) -> None: ...


class ArmRun(NamedTuple):
    """A finished run of one arm, read from its files."""

    name: str
    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    measurement: dict[str, Any]
    documents: dict[str, DocumentScores]
    environment: dict[str, Any]
    attributions: list[str]


def conduct(
    study: Study, folder: Path, cache: Path, executor: Executor | None = None, observer: Observer | None = None
) -> list[JobResult]:
    """Run every job that is not finished and return the results of all, those that tuned first.

    Killed at any moment and called again, it goes on where it was: no job is lost and none is done twice. Writes
    ``study.yaml``, ``conditions.json``, a run folder for each job, and with a grid ``learning_rates.json``.

    Raises ``ValueError`` when the folder holds another study, a run, or runs of other settings or data; when a file
    that an unfinished run needs is missing (:func:`require_inputs`); when the conditions are unequal
    (:func:`check_conditions`) or a probe that is the metric is impossible (:func:`require_probeable`); when no rate
    can be chosen (:func:`choose_learning_rates`); and as :func:`gatelab.train.loop.train` does. Only the grid may be
    extended, as long as no rate is chosen: seeds that are added after a look at the results would make false positives
    likelier than stated.
    """
    executor, observer = executor or Serial(), observer or Unobserved()
    if study.metric == STEP_SECONDS:
        raise ValueError(f"study {study.name} times its arms in turns, not in runs: use measure_overhead")
    require_folder(cache)
    _require_same_study(study, folder)
    require_inputs(job.settings for job in known_jobs(study, folder) if not is_finished(folder / job.folder))
    if study.metric in PROBES:
        require_probeable(study, cache)
    begun = (folder / STUDY_FILE, folder / CONDITIONS, folder / LOCK)
    with kept_if_used(folder, *begun, lock=_only_driver_of(folder)):
        remove_leftovers(folder)
        write_atomically(folder / STUDY_FILE, study.to_yaml())
        conditions = _conditions(study, folder, cache)
        phases = _Phases(study, folder, cache, executor, observer, conditions)
        observer.begin(study, conditions)
        tuned = phases.run(tuning_jobs(study))
        if study.learning_rates and read_rates(folder) is None:
            chosen = {arm: rate.to_mapping() for arm, rate in choose_learning_rates(study, tuned).items()}
            write_atomically(folder / RATES, json.dumps(chosen, indent=1) + "\n")
        jobs = comparison_jobs(study, read_rates(folder))
        compared = phases.run(jobs)
        if study.metric in PROBES:
            compared = probe_runs(study, jobs, folder, cache)
        return tuned + compared


def run_study(study: Study, folder: Path, cache: Path, watch: Watch | None = None) -> list[ArmRun]:
    """Run a study of one seed and one learning rate in this process, and return the run of each arm.

    Raises ``ValueError`` as :func:`conduct` and :func:`read_arm` do.
    """
    results = conduct(study, folder, cache, Serial(watch))
    return [read_arm(folder / result.folder) for result in results]


def read_arm(folder: Path) -> ArmRun:
    """The files of a finished run; ``ValueError`` for one that is not finished or diverged."""
    run = RunFolder(folder)
    result, diverged = run.result, diverged_at(folder)
    if diverged is not None:
        raise ValueError(f"the run in {folder} diverged after step {diverged}; it has no final figures")
    if result is None:
        raise ValueError(f"{folder} holds no finished run")
    return ArmRun(
        name=folder.name,
        result=result,
        metrics=read_metrics(run.metrics),
        measurement=json.loads(run.measurement.read_text(encoding="utf-8")),
        documents=read_documents(run),
        environment=run.environment,
        attributions=run.data["attributions"],
    )


def read_results(folder: Path) -> list[JobResult]:
    """The results of all jobs of a study that are finished so far, and probed where its metric is a probe."""
    study = open_study(folder)
    jobs = known_jobs(study, folder)
    results = [read_result(job, folder) for job in jobs if is_finished(folder / job.folder)]
    return [one for one in results if is_probed(study, one)]


def read_conditions(folder: Path) -> list[Conditions]:
    """What was checked before the first job of the study in a folder."""
    file = folder / CONDITIONS
    try:
        return [Conditions.from_mapping(one) for one in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} is unreadable; delete it to have the conditions checked again") from None


def compare_with_baseline(study: Study, runs: list[ArmRun]) -> dict[str, TextDifference]:
    """Each other arm against the baseline, on the first held-out domain.

    Raises ``ValueError`` when an arm has no held-out documents, as on a synthetic task.
    """
    for run in runs:
        if not run.documents:
            raise ValueError(
                f"arm {run.name} has no held-out documents to compare on: a synthetic task has none; compare the "
                "losses under heldout in result.json, or train on text"
            )
    baseline = next(run for run in runs if run.name == study.baseline)
    domain = next(iter(baseline.documents))
    return {
        run.name: compare_on_documents(run.documents[domain], baseline.documents[domain])
        for run in runs
        if run.name != study.baseline
    }


class _Phases:
    """Runs the jobs of one phase after the other: what is pending goes to the executor, all are read in the end."""

    def __init__(
        self,
        study: Study,
        folder: Path,
        cache: Path,
        executor: Executor,
        observer: Observer,
        conditions: Sequence[Conditions],
    ):
        self._study = study
        self._folder = folder
        self._cache = cache
        self._executor = executor
        self._observer = observer
        self._fingerprints = {one.arm: one.fingerprint for one in conditions}
        self._observed = time.monotonic()

    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        """Finish the jobs and return their results."""
        all_jobs = known_jobs(self._study, self._folder)

        def tick(at_least_seconds: float = _OBSERVE_EVERY_SECONDS) -> None:
            if time.monotonic() - self._observed >= at_least_seconds:
                status = status_of(self._study, all_jobs, self._folder, True, self._executor.num_workers)
                self._observer.update(status)
                self._observed = time.monotonic()

        for job in jobs:
            self._require_own(job)
        pending = [job for job in jobs if not is_finished(self._folder / job.folder)]
        if pending:
            tasks = [Task(job.settings, self._folder / job.folder, self._cache) for job in pending]
            self._executor.run(tasks, tick)
        if jobs:
            tick(0.0)
        self._warn_of_environments(jobs)
        return [read_result(job, self._folder) for job in jobs]

    def _require_own(self, job: Job) -> None:
        """Raise ``ValueError`` when the job's folder holds a run with other settings or data."""
        run = RunFolder(self._folder / job.folder)
        run.require_whole()
        run.require_same_settings(job.settings)
        if run.is_started:
            run.require_same_data(run.data | {"fingerprint": self._fingerprints[job.arm]})

    def _warn_of_environments(self, jobs: Sequence[Job]) -> None:
        environments = [RunFolder(self._folder / job.folder).environment for job in jobs]
        for key in DECIDES_BITS:
            values = sorted({str(environment.get(key)) for environment in environments})
            if len(values) > 1:
                self._observer.message(
                    f"The runs differ in {key}: {', '.join(values)}. Their last bits may differ too."
                )


def _conditions(study: Study, folder: Path, cache: Path) -> list[Conditions]:
    """Checked before the first job, and read afterwards."""
    if not (folder / CONDITIONS).exists():
        found = [one._asdict() for one in check_conditions(study, cache)]
        write_atomically(folder / CONDITIONS, json.dumps(found, indent=1) + "\n")
    return read_conditions(folder)


@contextmanager
def _only_driver_of(folder: Path) -> Iterator[None]:
    try:
        # A look at the status holds the lock for a moment.
        lock = FileLock(folder / LOCK).acquire(timeout=1.0)
    except Timeout:
        raise ValueError(f"another process is running the study in {folder}; wait for it or stop it") from None
    with lock:
        yield


def _require_same_study(study: Study, folder: Path) -> None:
    """Raise ``ValueError`` when the folder holds a run, or another study, with the difference."""
    require_folder(folder)
    if RunFolder(folder).is_started:
        raise ValueError(f"{folder} holds a run, not a study; choose another folder")
    if not (folder / STUDY_FILE).exists():
        return
    before = open_study(folder)
    if set(before.learning_rates) <= set(study.learning_rates) and before.learning_rates and read_rates(folder) is None:
        before = before.model_copy(update={"learning_rates": study.learning_rates})
    changed = difference(before, study)
    if changed:
        lines = [f"  {path}: {was!r} in the folder, {now!r} now" for path, (was, now) in changed.items()]
        raise ValueError("\n".join([f"{folder} holds another study; choose another folder:", *lines]))
