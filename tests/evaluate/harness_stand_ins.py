"""Tasks, data files and a model that let a whole evaluation run in seconds and without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tiny_models import tiny_settings

from gatelab.data.settings import DataSettings
from gatelab.train.settings import RunSettings, TrainSettings

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
ASKED = [
    "Memorize and track the chain(s) of variable assignment hidden in the following text. Find all variables that",
    "are assigned the value in the text above. VAR ABCDE = 12345 VAR FGHIJ = VAR ABCDE Question: Answer: According to",
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that",
    "appear most often. What are the 10 most common words in the above list? The top 10 words that appear are: 1. 2.",
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared",
]
LONG_CONTEXT = 1283


def long_run(corpus: Path) -> RunSettings:
    """A gated decoder that reads ``LONG_CONTEXT`` tokens, with a tokenizer that has seen RULER's phrases."""
    lines = [{"title": f"{n}", "text": f"{NOISE}{text} {n}."} for n in range(30) for text in ASKED]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    data = {
        "train": {"name": "files", "path": str(corpus), "title_field": "title", "heldout_fraction": 0.3},
        "tokenizer": {"vocab_size": 900},
        "context": 19,
    }
    options = {"steps": 1, "sequences_per_step": 3, "precision": "float32", "threads": 1}
    model = tiny_settings(vocab_size=900, max_context=LONG_CONTEXT)
    return RunSettings(
        model=model,
        data=DataSettings.parse(data),
        train=TrainSettings.parse({**options, "schedule": {"warmup_steps": 0}}),
    )


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_task(folder: Path, **definition: Any) -> None:
    """A definition of lm-eval as a YAML file named after its task or group."""
    folder.mkdir(parents=True, exist_ok=True)
    name = definition.get("task") if isinstance(definition.get("task"), str) else definition["group"]
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(definition), encoding="utf-8")


def local_task(folder: Path, name: str, rows: list[dict[str, Any]], **changes: Any) -> None:
    """A multiple-choice task on a local file: ``question``, ``choices`` and the number of the ``answer``."""
    file = write_rows(folder / "files" / f"{name}.jsonl", rows)
    definition = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.5},
    }
    write_task(folder, **{**definition, **changes})


def questions(count: int) -> list[dict[str, Any]]:
    """Questions whose right answer moves."""
    return [
        {"question": f"The gate number {n} opens", "choices": [f"{n % 7} times", "the sink", "dry"], "answer": n % 3}
        for n in range(count)
    ]
