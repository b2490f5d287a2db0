"""Running the arms of a study, each in its folder; what is finished is never repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import load_file

from gatelab.files import kept_if_used, require_folder, write_atomically
from gatelab.settings import difference
from gatelab.study.statistics import DocumentScores, TextDifference, compare_on_documents
from gatelab.study.study import Study
from gatelab.train.loop import train
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import STUDY_FILE, RunFolder
from gatelab.train.watch import Watch


class ArmRun(NamedTuple):
    """A finished run of one arm, read from its files."""

    name: str
    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    measurement: dict[str, Any]
    documents: dict[str, DocumentScores]
    environment: dict[str, Any]
    attributions: list[str]


def run_study(study: Study, folder: Path, cache: Path, watch: Watch | None = None) -> list[ArmRun]:
    """Train every arm that is not finished, one after another, and return them all in their order.

    Raises ``ValueError`` when the folder holds another study or a run.
    """
    _require_same_study(study, folder)
    require_folder(cache)
    with kept_if_used(folder, folder / STUDY_FILE):
        write_atomically(folder / STUDY_FILE, study.to_yaml())
        for arm in study.arms:
            train(study.settings_of(arm), folder / arm.name, cache, watch)
    return [read_arm(folder / arm.name) for arm in study.arms]


def read_arm(folder: Path) -> ArmRun:
    """The files of a finished run."""
    run = RunFolder(folder)
    result = run.result
    if result is None:
        raise ValueError(f"{folder} holds no finished run")
    tensors = load_file(run.documents)
    domains = dict.fromkeys(name.rpartition("/")[0] for name in tensors)
    documents = {
        domain: DocumentScores(*(tensors[f"{domain}/{part}"] for part in DocumentScores._fields)) for domain in domains
    }
    return ArmRun(
        name=folder.name,
        result=result,
        metrics=read_metrics(run.metrics),
        measurement=json.loads(run.measurement.read_text(encoding="utf-8")),
        documents=documents,
        environment=run.environment,
        attributions=run.data["attributions"],
    )


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


def _require_same_study(study: Study, folder: Path) -> None:
    """Raise ``ValueError`` when the folder holds a run, or another study, with the difference."""
    require_folder(folder)
    if RunFolder(folder).is_started:
        raise ValueError(f"{folder} holds a run, not a study; choose another folder")
    file = folder / STUDY_FILE
    if file.exists():
        changed = difference(Study.from_yaml(file.read_text(encoding="utf-8")), study)
        if changed:
            lines = [f"  {path}: {before!r} in the folder, {after!r} now" for path, (before, after) in changed.items()]
            raise ValueError("\n".join([f"{folder} holds another study; choose another folder:", *lines]))
