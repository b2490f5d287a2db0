"""transformers' Qwen3; with ``gated`` its Qwen3-Next, which has the paper's gate, full attention on every layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers

from contenders.training import cross_entropy, training_step

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}


def sizes_of(shape: Mapping[str, Any]) -> dict[str, Any]:
    """A shape in the words of transformers' Qwen3 configurations."""
    return {
        "vocab_size": shape["vocab_size"],
        "hidden_size": shape["width"],
        "num_hidden_layers": shape["num_layers"],
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_kv_heads"],
        "head_dim": shape["head_size"],
        "intermediate_size": shape["feedforward_width"],
        "max_position_embeddings": shape["context"],
        "tie_word_embeddings": True,
        "use_cache": False,
    }


def prepare(settings: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
    """A training step of this model."""
    sizes, layers = sizes_of(settings["shape"]), settings["shape"]["num_layers"]
    if settings["gated"]:
        config = transformers.Qwen3NextConfig(
            **sizes,
            rope_parameters=ROPE | {"partial_rotary_factor": 1.0},
            layer_types=["full_attention"] * layers,
            num_experts=0,
            mlp_only_layers=list(range(layers)),
        )
        model = transformers.Qwen3NextForCausalLM(config)
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, rope_parameters=ROPE))
    return training_step(model, cross_entropy(lambda ids: model(input_ids=ids).logits), settings)
