"""Runs of a second or less, and what two of them must have in common to be called equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gatelab.data.settings import BigramBackcopySettings, DataSettings
from gatelab.gates.variants import find_variant
from gatelab.model.settings import MixtureSettings, ModelSettings
from gatelab.train.checkpoint import checkpoints
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings, TrainSettings
from gatelab.train.watch import Unwatched

MIXTURE = MixtureSettings(num_experts=5, experts_per_token=2, expert_width=20)
TIMES = (
    "tokens_per_second",
    "peak_flops",
    "peak_share",
    "training_seconds",
    "evaluation_seconds",
    "measurement_seconds",
)


def tiny_model(gate: str = "none", **changes: object) -> ModelSettings:
    """A decoder of distinct sizes with the named gate."""
    variant = find_variant(gate)
    sizes = {
        "vocab_size": 29,
        "width": 24,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_size": 10,
        "feedforward_width": 36,
        "max_context": 21,
        "gates": variant.gates,
        "control": variant.control,
    }
    return ModelSettings(**{**sizes, **changes})  # type: ignore[arg-type]


def tiny_run(*overrides: str, gate: str = "sdpa_elementwise", **model_changes: object) -> RunSettings:
    """Twelve steps on the synthetic task in float32, watched and saved often; ``overrides`` are ``path=value``."""
    train = {
        "steps": 12,
        "sequences_per_step": 4,
        "precision": "float32",
        "threads": 1,
        "schedule": {"warmup_steps": 3},
        "evaluation": {"every": 4, "windows": 3, "measure_every": 3, "final_measured_windows": 5},
        "checkpoint": {"every": 5},
    }
    synthetic = BigramBackcopySettings(vocab_size=29)
    settings = RunSettings(
        model=tiny_model(gate, **model_changes),
        data=DataSettings(synthetic=synthetic, context=19),
        train=TrainSettings.parse(train),
    )
    return settings.with_overrides(overrides)


def tiny_text_run(corpus: Path, *overrides: str, gate: str = "sdpa_elementwise") -> RunSettings:
    """The same run on a local text file, with a tokenizer of 270 entries."""
    data = {
        "train": {"name": "files", "path": str(corpus), "title_field": "title", "heldout_fraction": 0.3},
        "tokenizer": {"vocab_size": 270},
        "context": 19,
    }
    synthetic = tiny_run(gate=gate, vocab_size=270)
    settings = RunSettings(model=synthetic.model, data=DataSettings.parse(data), train=synthetic.train)
    return settings.with_overrides(overrides)


def write_corpus(path: Path, num_documents: int = 40, word: str = "gate") -> Path:
    """A JSONL file of short titled documents."""
    rows = [
        {
            "title": f"{word} {number}",
            "text": f"The {word} number {number} opens {number % 7} times. " * (1 + number % 3),
        }
        for number in range(num_documents)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class Recording(Unwatched):
    """A watch that remembers what it is told, and stops the run after given steps as an interrupt would."""

    def __init__(self, *stops: int):
        self.stops = set(stops)
        self.messages: list[str] = []
        self.starts: list[int] = []
        self.steps: list[int] = []

    def start_run(self, name: str, total_steps: int, completed: int = 0) -> None:
        self.starts.append(completed)

    def update(self, step: int, loss: float, tokens_per_second: float, peak_share: float) -> None:
        self.steps.append(step)
        if step in self.stops:
            self.stops.remove(step)
            raise KeyboardInterrupt

    def message(self, text: str) -> None:
        self.messages.append(text)


def without_times(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures that two equal runs share."""
    return {name: value for name, value in figures.items() if name not in (*TIMES, "seconds")}


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint of a run folder."""
    return load_file(checkpoints(RunFolder(folder).checkpoints)[-1] / "model.safetensors")


def assert_same_run(left: Path, right: Path) -> None:
    """Bit-equal weights, optimizer state, metrics rows, measurements, document scores and result figures."""
    runs = RunFolder(left), RunFolder(right)
    newest = [checkpoints(run.checkpoints)[-1] for run in runs]
    assert newest[0].name == newest[1].name
    for weights, expected in [
        [load_file(path / "model.safetensors") for path in newest],
        [load_file(run.documents) for run in runs],
        [load_file(path / "optimizer.safetensors") for path in newest],
    ]:
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
    rows = [[without_times(row) for row in read_metrics(run.metrics)] for run in runs]
    assert rows[0] == rows[1]
    assert runs[0].measurement.read_text() == runs[1].measurement.read_text()
    results = [run.result for run in runs]
    assert results[0] is not None and results[1] is not None
    assert without_times(results[0]) == without_times(results[1])
