"""GateLab's own training step, as ``gatelab train`` takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch._functorch.config as functorch_config

from contenders.training import random_batch
from gatelab.data.loader import Batch
from gatelab.model.attention import GatedAttention, fused_attention
from gatelab.recipes.table import resolve
from gatelab.train.loop import build
from gatelab.train.optimizer import build_optimizer, set_learning_rate
from gatelab.train.parallel.process import deterministic_kernels
from gatelab.train.settings import RunSettings
from gatelab.train.step import take_step


def run_settings(settings: Mapping[str, Any]) -> RunSettings:
    """The run of a shape; ``settings["words"]`` are further assignments."""
    shape = dict(settings["shape"])
    sequences, context = shape.pop("sequences"), shape.pop("context")
    words = [f"model.{name}={value}" for name, value in shape.items()]
    words += [
        f"model.max_context={context}",
        f"data.context={context}",
        f"data.tokenizer.vocab_size={shape['vocab_size']}",
        f"train.sequences_per_step={sequences}",
        "train.optimizer.learning_rate=1e-4",
    ]
    return resolve("dense_tiny", (*words, *settings.get("words", ())))


def prepare(settings: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
    """One step on one batch, over and over.

    ``settings["plain_attention"]`` leaves attention to PyTorch's kernel, and ``settings["kept_products"]`` what is kept
    for the backward pass to PyTorch's heuristic.
    """
    run = run_settings(settings)
    decoder, sum_of_nats = build(run, settings["compile"])
    if settings.get("plain_attention"):
        for module in decoder.modules():
            if isinstance(module, GatedAttention):
                module.kernel = fused_attention
    if settings.get("kept_products"):
        functorch_config.ban_recompute_materialized_backward = True
    optimizer = build_optimizer(decoder, run.train.optimizer)
    set_learning_rate(optimizer, 1.0)
    batch = Batch(*random_batch(settings["shape"]))
    parameters = sum(parameter.numel() for parameter in decoder.parameters())

    def turn() -> dict[str, float]:
        with deterministic_kernels(run.train.deterministic):
            figures = take_step(decoder, optimizer, batch, sum_of_nats, run.train)
        return {"loss": figures.loss, "parameters": parameters}

    return turn
