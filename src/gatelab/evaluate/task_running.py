"""Running planned tasks with lm-eval: their data, the model's answers, figures with standard errors, averages."""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np
import torch

from gatelab.evaluate.evaluation import Evaluation
from gatelab.evaluate.models import OpenedModel
from gatelab.evaluate.task_plan import PlannedGroup, PlannedTask
from gatelab.evaluate.task_results import Figure, TaskResult, finite, standard_error

GENERATED_BY_DEFAULT = 256


class DownloadedCodeError(ValueError):
    """A task tried to download code."""


@contextmanager
def guarded() -> Iterator[None]:
    """While it lasts, lm-eval is quiet below errors, and no task can download the code of its metric.

    Tasks fetch such code with ``evaluate.load``, some as soon as they are read.
    """
    import evaluate

    def refuse(path: str, *arguments: Any, **keywords: Any) -> None:
        raise DownloadedCodeError(f"it scores with {path!r}, code to download; GateLab never runs such code")

    logger = logging.getLogger("lm_eval")
    level, load = logger.level, evaluate.load
    logger.setLevel(logging.ERROR)
    evaluate.load = refuse
    try:
        yield
    finally:
        evaluate.load = load
        logger.setLevel(level)


def require_room(task: PlannedTask, opened: OpenedModel, evaluation: Evaluation) -> None:
    """Raise ``ValueError`` for a task that leaves no room for its prompt, which lm-eval only notices when it runs."""
    if task.config.get("output_type", "generate_until") != "generate_until" or opened.max_context is None:
        return
    asked = (task.config.get("generation_kwargs") or {}).get("max_gen_toks", GENERATED_BY_DEFAULT)
    generated = evaluation.max_new_tokens or asked
    if generated >= opened.max_context:
        raise ValueError(
            f"the task {task.name} generates up to {generated} tokens, and {opened.name} reads {opened.max_context} in "
            "all, the prompt included; set a smaller --max-new-tokens"
        )


def load_tasks(tasks: Sequence[PlannedTask], evaluation: Evaluation, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's task objects, their data read and their texts made; ``metadata`` is what tasks that make texts ask for.

    Raises ``ValueError`` with one sentence for a task whose data or packages can't be had.
    """
    from lm_eval.tasks import TaskManager

    folders: list[Any] = sorted({task.file.parent for task in tasks if task.file is not None})
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=dict(metadata))
    loaded = {}
    for task in tasks:
        _seed(evaluation.seed)
        with _explained(task), redirect_stdout(io.StringIO()):
            (one,) = manager.load([_specification(task)])["tasks"].values()
            one: Any
        _set_shots(one, task.name, evaluation.shots)
        if evaluation.max_new_tokens is not None and one.get_config("output_type") == "generate_until":
            one.set_config("generation_kwargs", {"max_gen_toks": evaluation.max_new_tokens}, update=True)
        one.set_fewshot_seed(evaluation.seed)
        loaded[task.name] = one
    return loaded


def run_task(model: Any, name: str, task: Any, evaluation: Evaluation) -> tuple[TaskResult, list[dict[str, Any]]]:
    """Ask lm-eval's language model one loaded task; returns its result and lm-eval's record of each sample."""
    from lm_eval import evaluator

    _seed(evaluation.seed)
    outcome: Any = evaluator.evaluate(
        lm=model,
        task_dict={"tasks": {name: task}},
        limit=evaluation.limit,
        bootstrap_iters=0,
        confirm_run_unsafe_code=evaluation.allow_code_execution,
    )
    samples = outcome["samples"][name]
    result = TaskResult(
        task=name,
        figures=tuple(figures_of(outcome["results"][name], samples, outcome["higher_is_better"][name])),
        version=str(outcome["versions"][name]),
        shots=outcome["n-shot"][name],
        samples=outcome["n-samples"][name]["effective"],
        truncated=count_truncated(model, samples),
    )
    return result, samples


def figures_of(
    results: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], higher_is_better: Mapping[str, Any]
) -> Iterator[Figure]:
    """lm-eval's figures of one task, ``metric`` or ``metric[filter]``, with the standard error of those that are means.

    RULER's metrics are lengths, and -1 marks the samples that have another length: they do not count.
    """
    for name, value in results.items():
        metric, comma, filter_name = name.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        values = [one[metric] for one in samples if one["filter"] == filter_name and metric in one]
        if metric.isdecimal():
            values = [one for one in values if one != -1]
            if not values:
                continue
        yield Figure(
            metric=metric if filter_name == "none" else f"{metric}[{filter_name}]",
            value=finite(value),
            stderr=standard_error(values) if _is_mean(value, values) else None,
            higher_is_better=higher_is_better.get(metric),
        )


def count_truncated(model: Any, samples: Iterable[Mapping[str, Any]]) -> int:
    """How many samples have a request that does not fit into the model: lm-eval cuts off its beginning."""
    from lm_eval.models.utils import normalize_gen_kwargs

    def fits(request: Sequence[Any]) -> bool:
        match tuple(request):
            case (str() as context, dict() as options):
                room = model.max_length - normalize_gen_kwargs(options, model.max_gen_toks).get("max_gen_toks", 0)
                return len(model.tok_encode(context)) <= room
            case (str() as context, str() as continuation):
                return len(model.tok_encode(context + continuation)) <= model.max_length + 1
        return True

    return len({sample["doc_id"] for sample in samples if not all(map(fits, sample["arguments"]))})


def average_members(group: PlannedGroup, results: Mapping[str, TaskResult]) -> TaskResult:
    """A group's averages over its members, with lm-eval's formulas for weights and standard errors."""
    members = [results[name] for name in group.members if results[name].missing is None]
    figures = []
    for wanted in group.aggregates:
        labels = dict.fromkeys(figure.metric for member in members for figure in member.figures)
        for label in (label for label in labels if label.partition("[")[0] == wanted["metric"]):
            parts = [
                (figure, member.samples) for member in members for figure in member.figures if figure.metric == label
            ]
            figures.append(_average(label, parts, weighted=wanted.get("weight_by_size", True)))
    shots = {member.shots for member in members}
    return TaskResult(
        task=group.name,
        figures=tuple(figures),
        version=group.version,
        shots=shots.pop() if len(shots) == 1 else None,
        samples=sum(member.samples for member in members),
        truncated=sum(member.truncated for member in members),
        subtasks=group.members,
    )


def _average(label: str, parts: Sequence[tuple[Figure, int]], weighted: bool) -> Figure:
    from lm_eval.api import metrics

    sizes = [size for _, size in parts]
    values = [figure.value for figure, _ in parts if figure.value is not None]
    errors = [figure.stderr for figure, _ in parts if figure.stderr is not None]
    value = error = None
    if len(values) == len(parts):
        value = finite(metrics.aggregate_subtask_metrics(values, sizes, weighted))
    if len(errors) == len(parts):
        pooled = metrics.pooled_sample_stderr(errors, sizes) if weighted else metrics.unweighted_mean_stderr(errors)
        error = finite(pooled)
    return Figure(metric=label, value=value, stderr=error, higher_is_better=parts[0][0].higher_is_better)


def _is_mean(value: float, values: Sequence[Any]) -> bool:
    if not values or not all(isinstance(one, int | float) for one in values):
        return False
    return abs(sum(values) / len(values) - value) <= 1e-9 * max(1.0, abs(value))


def _specification(task: PlannedTask) -> dict[str, Any]:
    """What lm-eval loads: a task's file with overrides (as a group of one), or a definition without a file."""
    if task.file is None:
        return task.config
    return {"group": "evaluation", "task": [{"task": task.name, **task.overrides}]}


def _set_shots(task: Any, name: str, asked: int | None) -> None:
    """Set how many examples a prompt has; a task that says 0 has no use for them."""
    said = task.get_config("num_fewshot")
    shots = 0 if said == 0 else asked if asked is not None else said or 0
    if shots:
        needed = shots + (task.fewshot_cfg.split == task.config.test_split)  # lm-eval leaves the asked sample out
        found = len(task.fewshot_docs())
        if found < needed:
            raise ValueError(f"the task {name} has {found} examples, and {shots} shots need {needed}; take fewer shots")
    task.set_config("num_fewshot", shots)


def _seed(seed: int) -> None:
    """RULER and the samplers of some tasks draw from the global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def _explained(task: PlannedTask) -> Iterator[None]:
    """Turn whatever fails while a task is read into one sentence."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"the task {task.name} needs more packages ({_first(error)}): install gatelab[eval]") from None
    except OSError as error:
        raise ValueError(
            f"the task {task.name} needs the data set {task.config.get('dataset_path')!r}, which can't be had "
            f"({_first(error)}); connect to a network, or give its files with --data-folder"
        ) from None
    except Exception as error:  # the kinds are those of every parser and function below it
        raise ValueError(f"the task {task.name} can't be loaded: {_first(error)}") from None


def _first(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
