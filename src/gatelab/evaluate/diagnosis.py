"""Diagnosing models by name: open them, measure them on one text, write what was found as one folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gatelab.data.settings import CorpusSettings
from gatelab.data.text_files import text_files
from gatelab.diagnose.measure import measure
from gatelab.diagnose.page import diagnosis_page
from gatelab.diagnose.results import COLUMNS, NamedResult
from gatelab.diagnose.verdict import verdict_of
from gatelab.evaluate.clamp import probe_clamping
from gatelab.evaluate.model_tokenizer import ModelTokenizer
from gatelab.evaluate.models import OpenedModel, open_model, short_names
from gatelab.evaluate.precision import probe_precision
from gatelab.evaluate.rows import Subject
from gatelab.evaluate.texts import Windows, read_windows
from gatelab.gates.gate import Gate
from gatelab.report import folder as folders
from gatelab.report.folder import to_csv, write_report

SCHEMA_VERSION = 1
DEFAULT_LENGTH = 4096
DELIMITERS = (".", ",", ";", ":", "\n", "\n\n")
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
_FILES = ("metrics.json", "metrics.csv")


@dataclass(frozen=True)
class Examination:
    """On what text models are measured, and how much of them.

    ``length`` is in tokens; ``None`` takes 4,096, or what all models can read if that is less. ``full`` adds whole maps
    in blocks and ranks; ``clamp`` and ``precision`` add the probes, which run the model again. Raises ``ValueError``
    for values without a meaning and for files that are not there.
    """

    text: CorpusSettings
    cache: Path
    length: int | None = None
    samples: int = 4
    full: bool = False
    clamp: bool = False
    precision: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples={self.samples} measures nothing; take at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype} is unknown; take one of {', '.join(DTYPES)}")
        if self.text.name == "files":
            text_files(str(self.text.path))


class Diagnosis(NamedTuple):
    """One model's result, and its part of ``metrics.json``."""

    result: NamedResult
    mapping: dict[str, Any]


def diagnose(names: Sequence[str], examination: Examination) -> list[Diagnosis]:
    """Measure each model on the same text. All are opened, and their windows read, before the first is measured.

    Raises ``ValueError`` with one sentence for two models of one name and for what :func:`open_model` and
    :func:`read_windows` refuse, and for a clamp probe when no model has gates of GateLab's.
    """
    if len(set(names)) < len(names):
        raise ValueError(f"{names[0]} would be compared with itself; name another model, or leave out --compare")
    labels = short_names(names)
    opened = [open_model(name, DTYPES[examination.dtype]) for name in names]
    if examination.clamp or examination.precision:
        for one in opened:
            one.require_causal("be probed with the loss of the next token")
    if examination.clamp and not any(map(_has_gates, opened)):
        raise ValueError(f"{' and '.join(names)}: no gates of GateLab's to clamp; leave out --clamp")
    length = examination.length or min([DEFAULT_LENGTH, *(one.max_context for one in opened if one.max_context)])
    windows = [_read(model, examination, length) for model in opened]
    return [_diagnose(*one, examination) for one in zip(labels, opened, windows, strict=True)]


def require_replaceable(folder: Path) -> None:
    """Raise ``ValueError`` if writing a diagnosis to ``folder`` would remove anything but an earlier diagnosis."""
    folders.require_replaceable(folder, _FILES)


def write_diagnosis(folder: Path, diagnoses: Sequence[Diagnosis], command: str) -> Path:
    """Write ``metrics.json``, ``metrics.csv``, ``report.html`` and ``figures/``; returns the path of the page.

    The folder appears whole or not at all, in place of an earlier diagnosis. ``docs/diagnosis.md`` has the schema.
    """
    results = [one.result for one in diagnoses]
    metrics = {"schema_version": SCHEMA_VERSION, "command": command, "models": [one.mapping for one in diagnoses]}
    texts = (
        json.dumps(_for_json(metrics), indent=1, allow_nan=False) + "\n",
        to_csv(COLUMNS, (row for result in results for row in result.rows)),
    )
    return write_report(folder, diagnosis_page(results, command), dict(zip(_FILES, texts, strict=True)))


def _read(opened: OpenedModel, examination: Examination, length: int) -> Windows:
    return read_windows(
        examination.text,
        opened.tokenizer,
        examination.cache,
        length=length,
        samples=examination.samples,
        calibration_samples=examination.samples if examination.clamp and _has_gates(opened) else 0,
        max_context=opened.max_context,
    )


def _diagnose(name: str, opened: OpenedModel, windows: Windows, examination: Examination) -> Diagnosis:
    measurement = measure(
        opened.model,
        windows.tokens,
        attach=opened.attach,
        full=examination.full,
        delimiters=_delimiters(opened.tokenizer) if examination.full else None,
    )
    mapping = measurement.to_mapping()
    subject = Subject(name, opened.step)
    rows = [*measurement.rows(name, opened.step), *_histogram_rows(subject, mapping)]
    if windows.calibration is not None:
        rows += probe_clamping(opened.model, windows.tokens, windows.calibration, subject)
    if examination.precision:
        rows += probe_precision(opened.model, windows.tokens[:1], subject)
    model = {"family": opened.family, "step": opened.step, **opened.description}
    context = {**measurement.context, **windows.context, **model, "skipped_layers": mapping["skipped"]}
    result = NamedResult(name, rows, context)
    verdict = verdict_of(result)
    mapping |= {
        "name": name,
        "context": context,
        "verdict": {
            "sentences": verdict.sentences(),
            "sink": verdict.sink._asdict() if verdict.sink else None,
            "massive_activations": verdict.massive._asdict() if verdict.massive else None,
            "gates": [gate._asdict() for gate in verdict.gates],
        },
    }
    return Diagnosis(result, mapping)


def _histogram_rows(subject: Subject, mapping: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Counts of each layer's gate scores in 20 equal bins of [0, 1]; the channel column has the bin's number."""
    for layer in mapping["layers"]:
        for position, gate in layer["gates"].items():
            for number, count in enumerate(gate["histogram"]):
                row = subject.row(f"gate_histogram[{position}]", count, gate["n"], layer=layer["layer"])
                yield row | {"channel": number, "query_range": "all"}


def _has_gates(opened: OpenedModel) -> bool:
    return any(isinstance(module, Gate) for module in opened.model.modules())


def _delimiters(tokenizer: ModelTokenizer) -> dict[str, list[int]]:
    """The ids of those delimiters that are one token when they follow a word."""
    found = {}
    for delimiter in DELIMITERS:
        last = tokenizer.encode(f"word{delimiter}")[-1]
        if tokenizer.decode_one(last) == delimiter:
            found[delimiter] = [last]
    return found


def _for_json(value: Any) -> Any:
    """The value with every number that JSON does not have (infinite, not a number) as null."""
    match value:
        case dict():
            return {key: _for_json(one) for key, one in value.items()}
        case list() | tuple():
            return [_for_json(one) for one in value]
        case float():
            return value if math.isfinite(value) else None
    return value
