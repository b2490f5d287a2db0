"""Runs for one machine without an accelerator."""

from __future__ import annotations

from gatelab.data.settings import BigramBackcopySettings, CorpusSettings, DataSettings, ImageSettings
from gatelab.gates.variants import find_variant
from gatelab.model.matching import Match, with_gate
from gatelab.model.settings import LatentSettings, MixtureSettings, ModelSettings, PatchSettings
from gatelab.train.settings import (
    CheckpointSettings,
    EvaluationSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
    TrainSettings,
)


def demo(gate: str = "none", match: Match = "none") -> RunSettings:
    """4.3M parameters on Wikipedia introductions, a few minutes on two cores.

    Everything that is known to raise first-token attention early is on: BOS in every window, a high learning rate,
    many small steps, initial weights at the scale of 1 / sqrt(width), no q/k norm, deep and narrow.
    """
    model = ModelSettings(
        vocab_size=4096,
        width=192,
        num_layers=8,
        num_heads=6,
        num_kv_heads=6,
        head_size=32,
        feedforward_width=512,
        max_context=512,
        qk_norm=False,
        init_std=0.07,
    )
    return RunSettings(
        model=with_gate(model, find_variant(gate), match),
        data=DataSettings(train=CorpusSettings(heldout_fraction=0.01), context=512),
        train=TrainSettings(
            steps=300,
            sequences_per_step=4,
            optimizer=OptimizerSettings(learning_rate=4e-3),
            schedule=ScheduleSettings(warmup_steps=40),
            evaluation=EvaluationSettings(every=60, windows=16, measure_every=30),
            checkpoint=CheckpointSettings(every=20),
        ),
    )


def dense_tiny(gate: str = "none", match: Match = "none") -> RunSettings:
    """A 1M-parameter decoder with grouped queries and q/k norm on the Python standard library; a minute or two."""
    model = ModelSettings(
        vocab_size=2048,
        width=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_size=32,
        feedforward_width=352,
        max_context=256,
    )
    data = DataSettings.parse(
        {"train": {"name": "python_standard_library"}, "tokenizer": {"vocab_size": 2048}, "context": 256}
    )
    train = TrainSettings(steps=300, sequences_per_step=8, schedule=ScheduleSettings(warmup_steps=30))
    return RunSettings(model=with_gate(model, find_variant(gate), match), data=data, train=train)


def moe_tiny(gate: str = "none", match: Match = "none") -> RunSettings:
    """``dense_tiny`` with 8 experts, 2 for each token, in place of each feed-forward."""
    dense = dense_tiny()
    mixture = MixtureSettings(num_experts=8, experts_per_token=2, expert_width=176)
    model = ModelSettings.parse({**dense.model.to_mapping(), "mixture": mixture.to_mapping()})
    return RunSettings(model=with_gate(model, find_variant(gate), match), data=dense.data, train=dense.train)


def latent_tiny(gate: str = "none", match: Match = "none") -> RunSettings:
    """``dense_tiny`` with latent attention: a cache of 48 numbers for a token and layer in place of 128.

    The proportions are those of DeepSeek-V2-Lite (arXiv 2405.04434).
    """
    dense = dense_tiny()
    latent = LatentSettings(key_value_rank=32, unrotated_size=32, rotated_size=16, value_size=32)
    changes = {"num_kv_heads": 4, "head_size": 48, "qk_norm": False, "latent": latent.to_mapping()}
    model = ModelSettings.parse({**dense.model.to_mapping(), **changes})
    return RunSettings(model=with_gate(model, find_variant(gate), match), data=dense.data, train=dense.train)


def encoder_tiny(gate: str = "none", match: Match = "none") -> RunSettings:
    """``dense_tiny`` that sees both sides and finds hidden tokens, of the same text in the same tokens."""
    dense = dense_tiny()
    model = ModelSettings.parse({**dense.model.to_mapping(), "causal": False, "vocab_size": dense.model.vocab_size + 2})
    data = DataSettings.parse({**dense.data.to_mapping(), "masking": {}})
    return RunSettings(model=with_gate(model, find_variant(gate), match), data=data, train=dense.train)


def vision_tiny(gate: str = "none", match: Match = "none") -> RunSettings:
    """A small ViT on scikit-learn's handwritten digits, a pixel a patch: 65 tokens an image. Needs gatelab[vision]."""
    model = ModelSettings(
        vocab_size=ImageSettings.num_classes,
        width=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        feedforward_width=176,
        max_context=65,
        tied_head=False,
        causal=False,
        patches=PatchSettings(),
        init_std=0.125,
    )
    data = DataSettings(images=ImageSettings(), context=65)
    train = TrainSettings(steps=450, sequences_per_step=32, schedule=ScheduleSettings(warmup_steps=45))
    return RunSettings(model=with_gate(model, find_variant(gate), match), data=data, train=train)


def backcopy(gate: str = "none", match: Match = "none") -> RunSettings:
    """Bigram-Backcopy (arXiv 2410.13835) in one layer with one head: the smallest functional attention sink."""
    model = ModelSettings(
        vocab_size=67,
        width=64,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=64,
        feedforward_width=256,
        max_context=64,
        qk_norm=False,
    )
    return RunSettings(
        model=with_gate(model, find_variant(gate), match),
        data=DataSettings(synthetic=BigramBackcopySettings(), context=64),
        train=TrainSettings(steps=4000, sequences_per_step=64, precision="float32"),
    )
