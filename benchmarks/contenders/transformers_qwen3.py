"""transformers' Qwen3; with ``gated`` its Qwen3-Next, which has the paper's gate, full attention on every layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers

from contenders.training import cross_entropy, training_step


def prepare(settings: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
    """A training step of this model."""
    shape = settings["shape"]
    layers = shape["num_layers"]
    sizes = {
        "vocab_size": shape["vocab_size"],
        "hidden_size": shape["width"],
        "num_hidden_layers": layers,
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_kv_heads"],
        "head_dim": shape["head_size"],
        "intermediate_size": shape["feedforward_width"],
        "max_position_embeddings": shape["context"],
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    if settings["gated"]:
        config = transformers.Qwen3NextConfig(
            **sizes,
            rope_parameters=rope | {"partial_rotary_factor": 1.0},
            layer_types=["full_attention"] * layers,
            num_experts=0,
            mlp_only_layers=list(range(layers)),
        )
        model = transformers.Qwen3NextForCausalLM(config)
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, rope_parameters=rope))
    return training_step(model, cross_entropy(lambda ids: model(input_ids=ids).logits), settings)
