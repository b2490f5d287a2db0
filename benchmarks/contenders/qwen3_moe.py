"""transformers' Qwen3-MoE: every feed-forward a mixture of experts, no gate, no loss for its router."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers

from contenders.training import cross_entropy, training_step
from contenders.transformers_qwen3 import ROPE, sizes_of


def prepare(settings: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
    """A training step of this model; ``settings["experts"]`` is how transformers computes the experts.

    "grouped_mm" is its default, PyTorch's grouped product; "eager" a loop over the experts.
    """
    mixture = settings["mixture"]
    config = transformers.Qwen3MoeConfig(
        **sizes_of(settings["shape"]),
        rope_parameters=ROPE,
        num_experts=mixture["num_experts"],
        num_experts_per_tok=mixture["experts_per_token"],
        moe_intermediate_size=mixture["expert_width"],
        norm_topk_prob=True,
        experts_implementation=settings["experts"],
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    return training_step(model, cross_entropy(lambda ids: model(input_ids=ids).logits), settings)
