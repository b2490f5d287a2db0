"""RULER's scores: substrings without regard to case, in percent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from gatelab.evaluate.ruler.sample import Sample
from gatelab.evaluate.ruler.tasks import Task

_CONTROL = re.compile(r"[\x00-\x1f]")


class TaskScore(NamedTuple):
    """``mean`` and each of ``per_sample`` in percent, and how many predictions were ``empty``."""

    task: str
    mean: float
    per_sample: list[float]
    empty: int


def score(task: Task, predictions: Sequence[str | None], samples: Sequence[Sample]) -> TaskScore:
    """The score of one task: the mean of its samples' shares of references found.

    ``ValueError`` when there is not one prediction for each sample.
    """
    if len(predictions) != len(samples) or not samples:
        raise ValueError(f"{task.name} has {len(samples)} samples and {len(predictions)} predictions; give as many")
    cleaned = [clean(prediction) for prediction in predictions]
    match = string_match_all if task.match == "all" else string_match_part
    shares = [match(text, sample.outputs) for text, sample in zip(cleaned, samples, strict=True)]
    per_sample = [100 * share for share in shares]
    return TaskScore(task.name, 100 * sum(shares) / len(shares), per_sample, cleaned.count(""))


def clean(prediction: str | None) -> str:
    """A prediction with control characters as newlines, without space around it."""
    return "" if prediction is None else _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """The share of the references that the prediction holds."""
    return sum(reference.lower() in prediction.lower() for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if the prediction holds any reference, else 0."""
    return float(any(reference.lower() in prediction.lower() for reference in references))
