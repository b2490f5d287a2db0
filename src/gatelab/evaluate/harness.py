"""Standard benchmarks through lm-eval: opening a model, running tasks, keeping what was found.

A task is evaluated once: its result is kept under a digest of the model, the task, its data and the settings, and an
evaluation that was stopped goes on with the next task.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gatelab
from gatelab.data.checksums import digest
from gatelab.data.settings import CorpusSettings
from gatelab.evaluate import domains, task_plan, task_running
from gatelab.evaluate.evaluation import Evaluation
from gatelab.evaluate.language_model import language_model, model_digest, open_tokenizer, saved_tokenizer
from gatelab.evaluate.made_up_texts import require_room_for_texts
from gatelab.evaluate.models import OpenedModel, open_model
from gatelab.evaluate.task_plan import PlannedGroup, PlannedTask
from gatelab.evaluate.task_results import ResultFolder, TaskResult

Watch = Callable[[TaskResult], None]


class Subject(NamedTuple):
    """The model under evaluation, its tokenizer as transformers knows it, and the digest of both."""

    opened: OpenedModel
    tokenizer: Any
    sha256: str


def evaluate_tasks(
    model: str, evaluation: Evaluation, out: Path, cache: Path, watch: Watch | None = None
) -> list[TaskResult]:
    """Evaluate the model of that name, as :func:`open_model` knows it, and return a result for each task and group.

    ``out`` gets ``tasks/`` (figures and a log of samples for each task, as soon as they are known), ``results.json``
    and ``results.csv``; ``cache`` keeps the corpora of ``paper_perplexity``. ``watch`` is told of each result. Raises
    ``ValueError`` with one sentence, before anything is evaluated, for what :func:`open_model`, :func:`plan_tasks` and
    :class:`ResultFolder` refuse, for a task whose data or packages can't be had, and for one that generates more tokens
    than the model reads.
    """
    folder = ResultFolder(out)
    corpora = domains.domain_corpora(evaluation.texts)
    names = [name for name in evaluation.tasks if name != domains.SUITE]
    plan = task_plan.plan_tasks(names, evaluation.source)
    if domains.SUITE not in evaluation.tasks:
        corpora = {}
    opened = open_model(model, getattr(torch, evaluation.dtype))
    opened.require_causal("be asked for the next token")
    opened.model.to(evaluation.device)
    tokenizer = open_tokenizer(opened)
    subject = Subject(opened, tokenizer, model_digest(opened.model, tokenizer.backend_tokenizer.to_str()))
    results = []
    tasks = _run_plan(plan, subject, evaluation, folder)
    for result in chain(tasks, _run_domains(corpora, subject, evaluation, folder, cache)):
        results.append(result)
        if watch is not None:
            watch(result)
    folder.finish(results, _context(subject, evaluation))
    return results


def _run_plan(
    plan: Sequence[PlannedTask | PlannedGroup], subject: Subject, evaluation: Evaluation, folder: ResultFolder
) -> Iterator[TaskResult]:
    tasks = [part for part in plan if isinstance(part, PlannedTask)]
    keys = {task.name: _task_key(task, subject, evaluation) for task in tasks}
    found = {task.name: folder.find(task.name, keys[task.name]) for task in tasks}
    pending = [task for task in tasks if found[task.name] is None and task.missing is None]
    lengths = evaluation.lengths_for(subject.opened.max_context)
    with task_running.guarded(), saved_tokenizer(subject.tokenizer) as tokenizer:
        for task in pending:
            task_running.require_room(task, subject.opened, evaluation)
            require_room_for_texts(task.name, lambda text: len(subject.tokenizer(text).input_ids), lengths)
        loaded = task_running.load_tasks(pending, evaluation, {"tokenizer": tokenizer, "max_seq_lengths": lengths})
        model = language_model(subject.opened, subject.tokenizer, evaluation.batch_size) if pending else None
        results: dict[str, TaskResult] = {}
        for part in plan:
            if isinstance(part, PlannedGroup):
                yield task_running.average_members(part, results)
                continue
            result = found[part.name]
            if part.missing is not None:
                result = TaskResult(task=part.name, missing=part.missing)
            elif result is None:
                answered, samples = task_running.run_task(model, part.name, loaded.pop(part.name), evaluation)
                result = answered.model_copy(update={"key": keys[part.name]})
                folder.keep(result, samples)
            results[part.name] = result
            yield result


def _run_domains(
    corpora: Mapping[str, CorpusSettings], subject: Subject, evaluation: Evaluation, folder: ResultFolder, cache: Path
) -> Iterator[TaskResult]:
    opened = subject.opened
    length = min(domains.DEFAULT_LENGTH, opened.max_context or domains.DEFAULT_LENGTH)
    reading = domains.DomainReading(length, evaluation.limit or domains.DEFAULT_WINDOWS, cache)
    results = []
    for name, corpus in corpora.items():
        key = digest([subject.sha256, evaluation.dtype, domains.domain_key(corpus, reading)])
        result = folder.find(domains.domain_task(name), key)
        if result is None:
            scored, windows = domains.score_domain(name, corpus, opened.model, opened.tokenizer, reading)
            result = scored.model_copy(update={"key": key})
            if result.missing is None:
                folder.keep(result, windows)
        results.append(result)
        yield result
    if results:
        yield domains.average_domains(results)


def _task_key(task: PlannedTask, subject: Subject, evaluation: Evaluation) -> str:
    """A digest of everything that decides a task's figures; batch size and device decide their last bits alone."""
    asked = ("shots", "limit", "max_new_tokens", "seed", "dtype")
    decides = {
        "lm_eval": importlib.metadata.version("lm_eval"),
        "task": task.config,
        "data": task_plan.data_checksums(task.config),
        "code": task_plan.code_checksums(task),
        "model": subject.sha256,
        "max_context": subject.opened.max_context,
        "evaluation": {name: getattr(evaluation, name) for name in asked},
        "lengths": evaluation.lengths_for(subject.opened.max_context) if "custom_dataset" in task.config else None,
    }
    return digest(decides)


def _context(subject: Subject, evaluation: Evaluation) -> dict[str, Any]:
    """What the figures stand on, for ``results.json``."""
    opened = subject.opened
    model = {"name": opened.name, "family": opened.family, "step": opened.step, "sha256": subject.sha256}
    return {
        "model": model | opened.description,
        "max_context": opened.max_context,
        "evaluation": evaluation.to_mapping(),
        "gatelab": gatelab.__version__,
    }
