"""The paper's models (arXiv 2505.06708, table 7) and what is known of their training, and one model beyond them.

AdamW's betas, weight decay and clipping and the final rates of the dense runs are not published; those here are usual
values. The text is a stand-in: the paper's corpus of 4T tokens is not public.
"""

from __future__ import annotations

from gatelab.data.settings import DataSettings
from gatelab.gates.variants import find_variant
from gatelab.model.matching import Match, with_gate
from gatelab.model.settings import MixtureSettings, ModelSettings
from gatelab.train.settings import (
    CheckpointSettings,
    EvaluationSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
    TrainSettings,
)


def paper_dense_28l(gate: str = "none", match: Match = "none") -> RunSettings:
    """1.7B parameters in 28 layers, 400B tokens (table 2, first block). match=parameters gives its widths."""
    model = ModelSettings(
        vocab_size=152_064,
        width=2048,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
        feedforward_width=6144,
        max_context=4096,
        matching_multiple=128,
    )
    return _run(with_gate(model, find_variant(gate), match), learning_rate=4e-3)


def paper_dense_48l(gate: str = "none", match: Match = "none") -> RunSettings:
    """1.7B parameters in 48 layers, 400B tokens (table 2, third block)."""
    model = ModelSettings(
        vocab_size=152_064,
        width=1536,
        num_layers=48,
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
        feedforward_width=4608,
        max_context=4096,
        matching_multiple=128,
    )
    return _run(with_gate(model, find_variant(gate), match), learning_rate=4e-3)


def paper_moe_15a2b(gate: str = "none", match: Match = "none") -> RunSettings:
    """15B parameters, 128 experts, 8 for each token, 400B tokens (table 1).

    The published sizes give 1.99B active parameters where the paper says 2.54B; the difference is unexplained. With
    match=parameters a gate narrows 128 experts by less than the multiple of 128, so nothing changes; match=active does.
    """
    model = ModelSettings(
        vocab_size=151_936,
        width=2048,
        num_layers=24,
        num_heads=32,
        num_kv_heads=4,
        head_size=128,
        feedforward_width=768,
        max_context=4096,
        matching_multiple=128,
        tied_head=False,
        mixture=MixtureSettings(num_experts=128, experts_per_token=8, expert_width=768),
    )
    return _run(with_gate(model, find_variant(gate), match), learning_rate=2e-3)


def dense_70b(gate: str = "none", match: Match = "none") -> RunSettings:
    """71B parameters in 80 layers, 3.5T tokens: not a model of the paper, but the size at which a gate has to pay.

    The sizes are those of Llama 3 70B (arXiv 2407.21783, table 3) with the paper's vocabulary and q/k norm.
    """
    model = ModelSettings(
        vocab_size=152_064,
        width=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_size=128,
        feedforward_width=28_672,
        max_context=4096,
        matching_multiple=128,
        tied_head=False,
    )
    run = _run(with_gate(model, find_variant(gate), match), learning_rate=1.5e-4)
    return run.with_overrides(["train.steps=834_465"])


def _run(model: ModelSettings, learning_rate: float) -> RunSettings:
    return RunSettings(
        model=model,
        data=DataSettings.parse({"tokenizer": {"vocab_size": 32_768}, "context": 4096, "bos_in_every_window": False}),
        train=TrainSettings(
            steps=100_000,
            sequences_per_step=1024,
            optimizer=OptimizerSettings(learning_rate=learning_rate),
            schedule=ScheduleSettings(warmup_steps=1000, final_fraction=0.015),
            evaluation=EvaluationSettings(every=1000, measure_every=1000),
            checkpoint=CheckpointSettings(every=1000),
        ),
    )
