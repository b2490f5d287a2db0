"""Tiny random checkpoints of the families that load, as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

V = 97
SIZES = {
    "vocab_size": V, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 56, "max_position_embeddings": 64,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FULL = {"layer_types": ["full_attention"] * 3}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}
TWO_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 1.0},
    }
}
SHARED = {"shared_expert_intermediate_size": 20}
SPARSE_LATER = {"mlp_layer_types": ["dense", "sparse", "sparse"]}

# Name -> model type, what its text configuration has, and whether all heads have keys of their own (MHA).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", SIZES | {"hidden_size": 48} | ROPE),
    "qwen2 windows": ("qwen2", SIZES | {"hidden_size": 48, "use_sliding_window": True} | ROPE | SLIDING),
    "llama": ("llama", SIZES | {"hidden_size": 48} | ROPE),
    "llama biased": ("llama", SIZES | {"hidden_size": 48, "attention_bias": True} | ROPE),
    "qwen3": ("qwen3", SIZES | ROPE),
    "qwen3 tied": ("qwen3", SIZES | ROPE | {"tie_word_embeddings": True}),
    "qwen3 windows": ("qwen3", SIZES | ROPE | SLIDING | {"use_sliding_window": True, "attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", SIZES | ROPE | EXPERTS),
    "qwen3_moe mixed": ("qwen3_moe", SIZES | ROPE | EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_next": ("qwen3_next", SIZES | FULL | EXPERTS | SHARED | {"attention_bias": True}),
    "qwen3_next dense": ("qwen3_next", SIZES | FULL | {"num_experts": 0, "mlp_only_layers": [0, 1, 2]}),
    "qwen3_5_text": ("qwen3_5_text", SIZES | FULL),
    "qwen3_5": ("qwen3_5", SIZES | FULL | {"tie_word_embeddings": True}),
    "afmoe": ("afmoe", SIZES | ROPE | SLIDING | EXPERTS | {"route_scale": 1.5, "mup_enabled": True}),
    "laguna": ("laguna", SIZES | SLIDING | TWO_ROPES | EXPERTS | SHARED | SPARSE_LATER | {
        "num_attention_heads_per_layer": [6, 4, 6], "moe_routed_scaling_factor": 2.5,
    }),
    "laguna elementwise": ("laguna", SIZES | SLIDING | EXPERTS | SHARED | {"gating": "per-element"}),
    "step3p7": ("step3p7", SIZES | SLIDING | TWO_ROPES | SPARSE_LATER | {
        "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "share_expert_dim": 20,
        "num_sliding_attention_heads": 4, "moe_router_scaling_factor": 2.5, "pad_token_id": 0,
    }),
}  # fmt: skip
IMAGES = {
    "qwen3_5": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 40,
        "num_position_embeddings": 16,
    },
    "step3p7": {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14},
}  # fmt: skip
WITH_IMAGES = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "step3p7": "Step3p7ForConditionalGeneration"}


def build(name: str, changes: Mapping[str, Any] | None = None) -> Any:
    """A float32 model in eval mode whose weights are all random: norms, biases and selection biases too."""
    model_type, fields = FAMILIES[name]
    fields = {**fields, **(changes or {})}
    torch.manual_seed(0)
    if model_type in IMAGES:
        tied = {"tie_word_embeddings": True} if fields.get("tie_word_embeddings") else {}
        config = transformers.AutoConfig.for_model(
            model_type, text_config=fields, vision_config=dict(IMAGES[model_type]), **tied
        )
        model = getattr(transformers, WITH_IMAGES[model_type])(config)
    else:
        config = transformers.AutoConfig.for_model(model_type, **fields)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.15 * torch.randn(tensor.shape))
    return model.eval()


def saved(name: str, folder: Path, changes: Mapping[str, Any] | None = None) -> Any:
    """The model, saved to the folder."""
    model = build(name, changes)
    model.save_pretrained(folder)
    return model


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of a config.json; ``None`` removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def token_ids() -> Tensor:
    """Random token ids (B T)."""
    return torch.randint(V, (3, 17), generator=torch.Generator().manual_seed(3))
