"""The runs of a study as jobs that know nothing of each other, and what is read from the folder of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from safetensors.numpy import load_file

from gatelab.files import write_atomically
from gatelab.model.accounting import count_parameters, flops_per_token_training
from gatelab.study.statistics import DocumentScores
from gatelab.study.study import HELDOUT_ERROR, Study
from gatelab.train.divergence import DivergedError, RiseMonitor
from gatelab.train.loop import train
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings
from gatelab.train.watch import Unwatched, Watch

DIVERGED, PROBED = "diverged.json", "probes.json"
Purpose = Literal["tuning", "comparison"]


class Job(NamedTuple):
    """One run. ``learning_rate`` is ``None`` where no grid is tuned over; ``folder`` is inside the study's."""

    arm: str
    seed: int
    learning_rate: float | None
    purpose: Purpose
    settings: RunSettings
    folder: str


class JobResult(NamedTuple):
    """A finished job, read from its files. Losses are nats a token of the first held-out domain.

    A run that tunes is scored on the validation half of the documents, one that is compared after tuning on the test
    half, and one without a grid on all. What a run that diverged (after ``diverged_at`` steps) never reached is
    ``None``, and so are the ``documents`` of a synthetic task. ``seconds`` and ``flops`` are those of training.
    """

    arm: str
    seed: int
    learning_rate: float | None
    purpose: Purpose
    folder: str
    heldout_loss: float | None
    documents: DocumentScores | None
    measurement: dict[str, Any] | None
    diverged_at: int | None
    seconds: float
    tokens: int
    parameters: int
    flops: float

    def value(self, metric: str) -> float | None:
        """The figure that a study's ``metric`` names; ``None`` when the run diverged."""
        if metric == "heldout_loss":
            return self.heldout_loss
        if self.measurement is None:
            return None
        key = "first_token_attention_worst_layer" if metric == "first_token_attention" else metric
        if key not in self.measurement:
            raise ValueError(
                f"the runs measured no {metric}: the task names the sets of queries, and encoders alone have delimiters"
            )
        return self.measurement[key]


def tuning_jobs(study: Study) -> list[Job]:
    """Every arm at every rate of the grid with every tuning seed; none without a grid."""
    return [
        _job(study, arm.name, seed, rate, "tuning", f"{arm.name}/tuning/lr_{rate:g}_seed_{seed}")
        for seed in study.tuning_seeds
        for rate in study.learning_rates
        for arm in study.arms
    ]


def comparison_jobs(study: Study, rates: Mapping[str, float] | None = None) -> list[Job]:
    """Every arm with every seed: at its own of the tuned ``rates`` and at the baseline's, or at that of its settings.

    The folder of a study with one seed and without a grid is the arm's name.
    """
    if rates is None:
        single = len(study.seeds) == 1
        return [
            _job(study, arm.name, seed, None, "comparison", arm.name if single else f"{arm.name}/seed_{seed}")
            for seed in study.seeds
            for arm in study.arms
        ]
    return [
        _job(study, arm.name, seed, rate, "comparison", f"{arm.name}/lr_{rate:g}_seed_{seed}")
        for seed in study.seeds
        for arm in study.arms
        for rate in dict.fromkeys([rates[arm.name], rates[study.baseline]])
    ]


def _job(study: Study, arm: str, seed: int, rate: float | None, purpose: Purpose, folder: str) -> Job:
    return Job(arm, seed, rate, purpose, study.settings_of(study.arm(arm), seed, rate), folder)


def run_job(settings: RunSettings, folder: Path, cache: Path, watch: Watch | None = None) -> None:
    """Train in the job's folder, or go on there; what diverges is written down as a result (``diverged.json``).

    It ends when a figure is not finite, or at the mark of :class:`gatelab.train.divergence.RiseMonitor`. Raises
    ``ValueError`` and ``OSError`` as :func:`gatelab.train.loop.train` does.
    """
    try:
        train(settings, folder, cache, _StopAtDivergence(folder, watch or Unwatched()))
    except DivergedError as error:
        found = {"step": error.num_steps, "reason": str(error)}
        write_atomically(folder / DIVERGED, json.dumps(found, indent=1) + "\n")


class _StopAtDivergence(Watch):
    """Hands on what it sees, and ends a run whose loss has risen for good."""

    def __init__(self, folder: Path, watch: Watch):
        self._folder = folder
        self._watch = watch
        self._monitor = RiseMonitor()

    def start_run(self, name: str, total_steps: int, completed: int = 0) -> None:
        rows = read_metrics(self._folder / "metrics.jsonl", "step") if completed else []
        self._monitor = RiseMonitor(row["loss"] for row in rows if row["step"] <= completed)
        self._watch.start_run(name, total_steps, completed)

    def update(self, step: int, loss: float, tokens_per_second: float, peak_share: float) -> None:
        self._watch.update(step, loss, tokens_per_second, peak_share)
        if self._monitor.add(loss):
            raise DivergedError(f"the median training loss has risen by more than 1 nat at step {step}", step)

    def finish_run(self, summary: str) -> None:
        self._watch.finish_run(summary)

    def message(self, text: str) -> None:
        self._watch.message(text)


def is_finished(folder: Path) -> bool:
    """Whether a job has its result, be it a divergence."""
    return RunFolder(folder).is_started and ((folder / "result.json").exists() or (folder / DIVERGED).exists())


def diverged_at(folder: Path) -> int | None:
    """The steps after which a job's run diverged; ``ValueError`` when the file that says so is damaged."""
    file = folder / DIVERGED
    if not file.exists():
        return None
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["step"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is unreadable; delete it to run the job again") from None


def read_result(job: Job, study_folder: Path) -> JobResult:
    """A finished job's figures; ``ValueError`` when it has none, or its folder holds a run with other settings."""
    folder = study_folder / job.folder
    run, step = RunFolder(folder), diverged_at(folder)
    run.require_same_settings(job.settings)
    known = (job.arm, job.seed, job.learning_rate, job.purpose, job.folder)
    if step is not None:
        return JobResult(*known, None, None, None, step, *_cost_until(job.settings, run, step))
    result = run.result
    if result is None:
        raise ValueError(f"{folder} holds no finished run; run the study again to continue it")
    loss, documents = _scores(job, run, result)
    cost = (result["training_seconds"], result["tokens"], result["parameters"])
    flops = result["flops_per_token_training"] * result["tokens"]
    measurement = result["measurement"] | _error(result) | _probes(folder)
    return JobResult(*known, loss, documents, measurement, None, *cost, flops)


def read_documents(run: RunFolder) -> dict[str, DocumentScores]:
    """The scores of each held-out document, by domain."""
    tensors = load_file(run.documents)
    domains = dict.fromkeys(name.rpartition("/")[0] for name in tensors)
    return {
        domain: DocumentScores(*(tensors[f"{domain}/{part}"] for part in DocumentScores._fields)) for domain in domains
    }


def _error(result: Mapping[str, Any]) -> dict[str, float]:
    """1 - accuracy on the first held-out domain, all of it; nothing of a run from before accuracy was kept."""
    figures = next(iter(result["heldout"].values()))
    return {HELDOUT_ERROR: 1 - figures["accuracy"]} if "accuracy" in figures else {}


def _probes(folder: Path) -> dict[str, float]:
    """What :mod:`gatelab.study.probes` found of a run; nothing where the study asks for none, or not yet."""
    file = folder / PROBED
    if not file.exists():
        return {}
    try:
        return {metric: float(value) for metric, value in json.loads(file.read_text(encoding="utf-8")).items()}
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{file} is unreadable; delete it to probe the run again") from None


def _scores(job: Job, run: RunFolder, result: Mapping[str, Any]) -> tuple[float, DocumentScores | None]:
    """The loss on the job's part of the held-out text, and that part's documents."""
    domain, figures = next(iter(result["heldout"].items()))
    documents = read_documents(run).get(domain)
    if documents is None or job.learning_rate is None:
        return figures["loss"], documents
    first = 0 if job.purpose == "tuning" else 1
    part = DocumentScores(*(column[first::2] for column in documents))
    if part.tokens.sum() == 0:
        raise ValueError(
            f"{run.path} has {len(documents.tokens)} held-out documents, too few for validation and test text; "
            "hold out more text or compare without learning_rates"
        )
    return float(part.nats.sum() / part.tokens.sum()), part


def _cost_until(settings: RunSettings, run: RunFolder, step: int) -> tuple[float, int, int, float]:
    """Seconds, tokens, parameters and operations of a run that ended after ``step`` steps."""
    seconds = sum(row["seconds"] for row in read_metrics(run.metrics, "step"))
    tokens = settings.tokens_per_step * step
    flops = flops_per_token_training(settings.model, settings.data.context, settings.train.recompute)
    return seconds, tokens, count_parameters(settings.model).total, flops * tokens
