"""The golden loss curves: ``python tests/golden/make_loss_curves.py`` writes them again into ``loss_curves.json``.

Each is the training loss of a tiny decoder on synthetic sequences: float64, eager, the plain path. Only a change of the
mathematics, the initialisation, the batches or the optimizer moves them; then write them again and say why in the
commit.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from gatelab.data.settings import BigramBackcopySettings, DataSettings
from gatelab.gates.variants import find_variant
from gatelab.model.settings import MixtureSettings, ModelSettings
from gatelab.train.loop import train
from gatelab.train.metrics import read_metrics
from gatelab.train.settings import RunSettings, TrainSettings

FILE = Path(__file__).parent / "loss_curves.json"
CURVES: dict[str, tuple[str, MixtureSettings | None]] = {
    "ungated": ("none", None),
    "sdpa_elementwise": ("sdpa_elementwise", None),
    "sdpa_headwise": ("sdpa_headwise", None),
    "mixture": ("none", MixtureSettings(num_experts=5, experts_per_token=2, expert_width=20, shared_width=12)),
}


def settings_of(name: str) -> RunSettings:
    """Twenty steps of warm-up and cosine, clipped, in two pieces each."""
    gate, mixture = CURVES[name]
    model = ModelSettings(
        vocab_size=31,
        width=24,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_size=10,
        feedforward_width=36,
        max_context=19,
        gates=find_variant(gate).gates,
        mixture=mixture,
    )
    train_settings = {
        "steps": 20,
        "sequences_per_step": 4,
        "accumulation": 2,
        "precision": "float64",
        "threads": 1,
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"warmup_steps": 4},
    }
    data = DataSettings(synthetic=BigramBackcopySettings(vocab_size=31), context=19)
    return RunSettings(model=model, data=data, train=TrainSettings.parse(train_settings))


def loss_curve(name: str) -> list[float]:
    """Loss of each step, in nats per token."""
    with tempfile.TemporaryDirectory() as folder:
        train(settings_of(name), Path(folder) / "run", Path(folder) / "cache")
        return [row["loss"] for row in read_metrics(Path(folder) / "run" / "metrics.jsonl", "step")]


def environment() -> dict[str, str]:
    """Where the curves are made; another one may change their last digits."""
    return {"torch": torch.__version__, "instruction_set": torch.backends.cpu.get_cpu_capability()}


if __name__ == "__main__":
    curves = {name: loss_curve(name) for name in CURVES}
    FILE.write_text(json.dumps({"environment": environment(), "curves": curves}, indent=1) + "\n", encoding="utf-8")
