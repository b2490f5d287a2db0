"""What a config.json of ours says and who reads it: model type, version, and the sizes under transformers' names."""

from __future__ import annotations

from typing import Any

from gatelab.model.settings import ModelSettings

MODEL_TYPE = "gatelab"
SCHEMA_VERSION = 1


def named_sizes(settings: ModelSettings) -> dict[str, Any]:
    """The sizes that all decoders of transformers have, under their names there."""
    return {
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.width,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads,
        "head_dim": settings.head_size,
        "intermediate_size": settings.feedforward_width,
        "max_position_embeddings": settings.max_context,
        "tie_word_embeddings": settings.tied_head,
        "rms_norm_eps": settings.norm_epsilon,
        "initializer_range": settings.init_std,
        "hidden_act": "silu",
    }
