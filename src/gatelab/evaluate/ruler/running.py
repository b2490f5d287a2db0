"""RULER on a model: make the samples, let the model go on from each, keep every prediction, score them.

The input of a sample is one BOS and the sample's text. ``length`` counts that text and the tokens to generate, as RULER
does; with BOS, and as the last new token is never read, the model reads at most ``length`` tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field

from gatelab.evaluate.generation import generate, stop_ids_of
from gatelab.evaluate.language_model import model_digest
from gatelab.evaluate.models import OpenedModel, open_model
from gatelab.evaluate.ruler.prompts import PromptName
from gatelab.evaluate.ruler.records import Prediction, Record, RecordFolder
from gatelab.evaluate.ruler.sample import to_lines
from gatelab.evaluate.ruler.sample_sets import SampleSet, sample_set
from gatelab.evaluate.ruler.scoring import TaskScore, score
from gatelab.evaluate.ruler.tasks import Task, find_tasks
from gatelab.evaluate.ruler.texts import MEMBERS, Texts
from gatelab.evaluate.ruler.tokens import encode_prompt, tokenizer_sha256
from gatelab.model.decoder import Decoder
from gatelab.settings import Settings

DECIDES = ("sha256", "samples", "seed", "prompt", "dtype", "stop_ids")


class RulerSettings(Settings):
    """What a model is asked. ``tasks`` are names with commas, ``all`` (the 13 of RULER) or ``mini`` (our own)."""

    tasks: str = "mini"
    lengths: tuple[int, ...] = Field(min_length=1, description="tokens of a sample with those to generate")
    samples: int = Field(default=100, gt=0, description="of each task at each length; RULER's papers have 500")
    seed: int = Field(default=42, ge=0)
    prompt: PromptName = "base"
    batch_size: int = Field(default=8, gt=0)
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    device: str = "cpu"


class Progress(NamedTuple):
    """How far one task at one length is, and the tokens a second that it reads and writes."""

    task: str
    length: int
    done: int
    samples: int
    tokens_per_second: float


class Cell(NamedTuple):
    """One task at one length, answered: the samples, with why they can't be compared with RULER's if they can't."""

    task: Task
    asked: SampleSet
    record: Record
    score: TaskScore


class RulerResult(NamedTuple):
    """The cells, task by task, and the context that they stand in, as plain values."""

    cells: list[Cell]
    context: dict[str, Any]


Watch = Callable[[Progress], None]


def evaluate_ruler(
    model: str, settings: RulerSettings, texts: Texts, out: Path, watch: Watch | None = None
) -> RulerResult:
    """Ask the model of that name, as :func:`open_model` knows it; what ``out`` has of an earlier call is not asked
    again, so a call that was stopped goes on with the next batch.

    Raises ``ValueError`` with one sentence, before the model reads anything, for an unknown task, a length that the
    task or the model's context does not hold, a tokenizer without BOS, a device that is not there, and a folder with an
    evaluation under other settings; also for what :func:`open_model` and :func:`sample_set` refuse.
    """
    tasks = find_tasks(settings.tasks)
    folder = RecordFolder(out)
    opened = open_model(model, getattr(torch, settings.dtype))
    _require_model(opened, settings.lengths)
    context = _context(opened, settings, tasks, texts)
    decides = {name: context[name] for name in DECIDES}
    folder.require_same(decides)
    _place(opened, settings.device)
    asked = [
        (task, _samples(opened, task, length, settings, texts))
        for task in tasks
        for length in sorted(set(settings.lengths))
    ]
    folder.begin(decides)
    cells = []
    for task, samples in asked:
        record = _answer(opened, task, samples, settings, folder, watch)
        predictions = [prediction.text for prediction in record.predictions]
        cells.append(Cell(task, samples, record, score(task, predictions, samples.samples)))
    return RulerResult(cells, context)


def _require_model(opened: OpenedModel, lengths: Sequence[int]) -> None:
    opened.require_causal("generate")
    if opened.tokenizer.bos_id is None:
        raise ValueError(f"the tokenizer of {opened.name} has no BOS, with which RULER's inputs begin; give it one")
    longest = max(lengths)
    if opened.max_context is not None and longest > opened.max_context:
        raise ValueError(
            f"length={longest} is beyond the {opened.max_context} tokens that {opened.name} was made for; take a "
            "smaller one, or extend the model with gatelab extend"
        )


def _place(opened: OpenedModel, device: str) -> None:
    try:
        opened.model.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"device={device} can't take {opened.name} ({reason}); take cpu, or a device of torch"
        ) from None


def _samples(opened: OpenedModel, task: Task, length: int, settings: RulerSettings, texts: Texts) -> SampleSet:
    """The samples of a task; RULER's ``vt`` and ``fwe`` may exceed the length by a few tokens."""
    count, prompt = settings.samples, settings.prompt
    samples = sample_set(task, opened.tokenizer, length, settings.seed, count, texts, prompt)
    if opened.max_context is not None and samples.longest > opened.max_context:
        raise ValueError(
            f"{task.name} at length={length} has a sample of {samples.longest} tokens, and {opened.name} was made for "
            f"{opened.max_context}; take a length that is {samples.longest - opened.max_context} less, or see gatelab "
            "extend"
        )
    return samples


def _answer(
    opened: OpenedModel,
    task: Task,
    asked: SampleSet,
    settings: RulerSettings,
    folder: RecordFolder,
    watch: Watch | None,
) -> Record:
    """The record with a prediction for every sample; it is kept after each batch."""
    stop_ids, bos_id = stop_ids_of(opened), opened.tokenizer.bos_id
    assert bos_id is not None
    record = folder.record(task.name, asked.length, hashlib.sha256(to_lines(asked.samples).encode()).hexdigest())
    while rest := asked.samples[len(record.predictions) :]:
        batch = rest[: settings.batch_size]
        inputs = [[bos_id, *encode_prompt(opened.tokenizer, sample.input, settings.prompt)] for sample in batch]
        began = time.perf_counter()
        written = generate(opened, inputs, task.generated, stop_ids)
        seconds = record.seconds + time.perf_counter() - began
        predictions = [
            Prediction(
                index=sample.index, text=opened.tokenizer.decode(new), input_tokens=len(read), new_tokens=len(new)
            )
            for sample, read, new in zip(batch, inputs, written, strict=True)
        ]
        record = record.model_copy(update={"predictions": (*record.predictions, *predictions), "seconds": seconds})
        folder.keep(record)
        if watch is not None:
            done = len(record.predictions)
            watch(Progress(task.name, record.length, done, len(asked.samples), record.tokens_per_second))
    return record


def _context(opened: OpenedModel, settings: RulerSettings, tasks: Sequence[Task], texts: Texts) -> dict[str, Any]:
    """What the scores stand on. Texts are those of the asked tasks, by name."""
    needed = {task.text for task in tasks}
    return {
        "model": {"name": opened.name, "family": opened.family, "step": opened.step, **opened.description},
        "sha256": model_digest(opened.model, tokenizer_sha256(opened.tokenizer)),
        "max_context": opened.max_context,
        "rope": _rotation(opened),
        "tasks": [task.name for task in tasks],
        **{name: value for name, value in settings.to_mapping().items() if name != "tasks"},
        "bos": opened.tokenizer.decode_one(opened.tokenizer.bos_id or 0),
        "stop_ids": sorted(stop_ids_of(opened)),
        "texts": {name: texts.origin(name)._asdict() for name in MEMBERS if name in needed},
    }


def _rotation(opened: OpenedModel) -> Mapping[str, Any] | None:
    """The model's rotary embedding, scaling included, under the names of its own settings."""
    if isinstance(opened.model, Decoder):
        return opened.model.settings.rope.to_mapping()
    config: Any = opened.model.config
    return getattr(config.get_text_config(), "rope_parameters", None)
