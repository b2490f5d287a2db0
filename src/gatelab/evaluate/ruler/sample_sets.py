"""Samples with everything that a table must say about them, made once and kept in the cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gatelab.data import retrieval
from gatelab.data.checksums import digest, verify_checksum, write_with_checksum
from gatelab.evaluate.model_tokenizer import ModelTokenizer
from gatelab.evaluate.ruler import words
from gatelab.evaluate.ruler.prompts import PromptName, open_prompt
from gatelab.evaluate.ruler.sample import Sample, read_samples, to_lines
from gatelab.evaluate.ruler.sentences import PUNKT_ARCHIVE
from gatelab.evaluate.ruler.tasks import RULER_TASKS, Task, make_samples
from gatelab.evaluate.ruler.texts import Texts
from gatelab.evaluate.ruler.tokens import counter, tokenizer_sha256
from gatelab.files import require_folder, write_atomically
from gatelab.report.tables import Column, Table

VERSION = 1


@dataclass(frozen=True)
class SampleSet:
    """Samples of one task at one length.

    ``longest`` counts the tokens that the longest of them really needs, those to generate included and BOS not: a model
    must read ``longest`` + 1. If not ``comparable`` with RULER, ``reason`` says why. ``prompt`` is how a model is
    asked, ``sources`` are the checksums of what the samples were made from.
    """

    task: str
    length: int
    seed: int
    prompt: PromptName
    comparable: bool
    reason: str
    longest: int
    sources: dict[str, str]
    samples: list[Sample]

    def describe(self) -> dict[str, Any]:
        """All but the samples, for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "samples"}


def sample_set(
    task: Task,
    tokenizer: ModelTokenizer,
    length: int,
    seed: int,
    count: int,
    texts: Texts,
    prompt: PromptName = "base",
) -> SampleSet:
    """Samples from the cache under ``texts.cache``, or made now and kept there. Raises as :func:`make_samples`."""
    wording = open_prompt(prompt, tokenizer)
    reason, sources = _comparison(task, texts)
    sources |= {"tokenizer": tokenizer_sha256(tokenizer), "prompt": digest([wording.before, wording.after])}
    key = digest([VERSION, task.name, length, seed, count, sources])[:16]
    folder = texts.cache / "ruler"
    path, about = folder / f"{task.name}-{length}-{key}.jsonl", folder / f"{task.name}-{length}-{key}.json"
    if path.exists() and about.exists():
        verify_checksum(path)
        return SampleSet(**json.loads(about.read_text(encoding="utf-8")), samples=read_samples(path))
    samples = make_samples(task, tokenizer, length, seed, count, texts, wording)
    tokens = counter(tokenizer)([sample.input for sample in samples]) if task.name == "vt" else None
    found = SampleSet(
        task=task.name,
        length=length,
        seed=seed,
        prompt=prompt,
        comparable=reason == "",
        reason=reason,
        longest=max(sample.length for sample in samples) if tokens is None else max(tokens) + task.generated,
        sources=sources,
        samples=samples,
    )
    write_with_checksum(path, to_lines(samples))
    write_with_checksum(about, json.dumps(found.describe(), indent=1) + "\n")
    return found


def write_sample_sets(
    tasks: Sequence[Task],
    tokenizer: ModelTokenizer,
    length: int,
    seed: int,
    count: int,
    texts: Texts,
    prompt: PromptName,
    out: Path,
) -> list[SampleSet]:
    """Write the samples of one task to the file ``out``, or those of several to a folder, one file each; beside them
    ``NAME.about.json`` says what they are."""
    paths = [out] if len(tasks) == 1 else [out / f"{task.name}.jsonl" for task in tasks]
    if len(tasks) == 1 and out.is_dir():
        raise ValueError(
            f"--out {out} is a folder, and one task is written to a file; give {out / tasks[0].name}.jsonl"
        )
    sets = []
    for task, path in zip(tasks, paths, strict=True):
        require_folder(path.parent)
        found = sample_set(task, tokenizer, length, seed, count, texts, prompt)
        write_atomically(path, to_lines(found.samples))
        write_atomically(path.with_suffix(".about.json"), json.dumps(found.describe(), indent=1) + "\n")
        sets.append(found)
    return sets


def sample_table(sets: Sequence[SampleSet]) -> Table:
    """Tasks with their samples, their lengths, and whether results on them compare with RULER's."""
    columns = [
        Column("task", "task"),
        Column("samples", "samples", ",d"),
        Column("shortest", "shortest", ",d"),
        Column("longest", "longest", ",d"),
        Column("comparable", "with RULER"),
    ]
    cells = [
        {
            "task": found.task,
            "samples": len(found.samples),
            "shortest": min(sample.length for sample in found.samples),
            "longest": found.longest,
            "comparable": "comparable" if found.comparable else f"not comparable: {found.reason}",
        }
        for found in sets
    ]
    return Table(columns, cells)


def _comparison(task: Task, texts: Texts) -> tuple[str, dict[str, str]]:
    """Why results do not compare with RULER's, if they don't, and the checksums of the words and texts in use."""
    if task.name not in RULER_TASKS:
        return f"{task.name} is a task of our own, not RULER's", {"retrieval": str(retrieval.VERSION)}
    sources = dict(words.SHA256)
    reasons = []
    if task.text is not None:
        origin = texts.origin(task.text)
        sources[task.text] = origin.sha256
        reasons += [origin.fault] if origin.fault else []
    if task.text == "essays":
        sources["sentences"] = PUNKT_ARCHIVE.sha256
    return "; ".join(reasons), sources
