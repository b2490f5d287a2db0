"""Tiny random models of the families of transformers whose attention can be measured, and of those where it cannot."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_SIZE, WINDOW = 97, 3, 48, 6, 2, 8, 7
SIZES = {
    "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE, "intermediate_size": 56, "max_position_embeddings": 128,
}  # fmt: skip
ALL_HEADS = SIZES | {"num_key_value_heads": HEADS}
GPT2 = {"vocab_size": VOCABULARY, "n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": 128}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LINEAR = EXPERTS | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MLA = {
    "q_lora_rank": 20, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 10, "v_head_dim": 9,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "head_dim": 4,
}  # fmt: skip
MAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4}

# Family of transformers -> configuration class and its arguments.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen3": ("Qwen3Config", SIZES),
    "qwen3_moe": ("Qwen3MoeConfig", SIZES | EXPERTS),
    "qwen3_next": ("Qwen3NextConfig", SIZES | LINEAR),
    "qwen3_5": ("Qwen3_5TextConfig", SIZES | LINEAR),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", SIZES | SLIDING | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 5}),
    "gemma3": ("Gemma3TextConfig", SIZES | SLIDING),
    "gpt_oss": ("GptOssConfig", SIZES | SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2Config", GPT2),
    "gptj": ("GPTJConfig", GPT2 | {"rotary_dim": 4}),
    "gpt_neox": ("GPTNeoXConfig", ALL_HEADS),
    "opt": ("OPTConfig", SIZES | {"ffn_dim": 56, "word_embed_proj_dim": WIDTH}),
    "deepseek_v3": ("DeepseekV3Config", ALL_HEADS | MLA),
    "phi": ("PhiConfig", SIZES),
    "phi3": ("Phi3Config", SIZES | TOKENS),
    "olmo2": ("Olmo2Config", SIZES),
    "glm4": ("Glm4Config", SIZES | TOKENS),
    "smollm3": ("SmolLM3Config", SIZES | TOKENS),
    "granite": ("GraniteConfig", SIZES | {"attention_multiplier": 0.5}),
    "starcoder2": ("Starcoder2Config", SIZES),
    "stablelm": ("StableLmConfig", SIZES),
    "cohere": ("CohereConfig", SIZES | TOKENS),
    "llama4": ("Llama4TextConfig", SIZES | {
        "intermediate_size_mlp": 40, "num_local_experts": 3, "attention_chunk_size": 9, "no_rope_layers": [1, 1, 0],
    }),
    "jamba": ("JambaConfig", SIZES | TOKENS | MAMBA),
    "lfm2": ("Lfm2Config", SIZES | {"layer_types": ["conv", "full_attention", "conv"]}),
    "bitnet": ("BitNetConfig", SIZES | TOKENS),
    "afmoe": ("AfmoeConfig", SIZES | SLIDING | EXPERTS | {"num_dense_layers": 1}),
    "laguna": ("LagunaConfig", SIZES | SLIDING | EXPERTS | {
        "num_attention_heads_per_layer": [HEADS] * LAYERS, "shared_expert_intermediate_size": 24,
    }),
    "lfm3": ("Lfm3Config", SIZES | TOKENS | {"layer_types": ["conv", "full_attention", "full_attention"]}),
}  # fmt: skip

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("FalconConfig", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    }),
    "bloom": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS}),
    "mpt": ("MptConfig", {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS}),
    "gpt_neo": ("GPTNeoConfig", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_layers": 2, "num_heads": HEADS,
        "attention_types": [[["global", "local"], 1]],
    }),
}  # fmt: skip


def build(family: str, seed: int = 0) -> Any:
    """A random model in eval mode, float32, with weights large enough for attention that is far from uniform."""
    class_name, arguments = (FAMILIES | REFUSED)[family]
    torch.manual_seed(seed)
    config = getattr(transformers, class_name)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | transformers.pytorch_utils.Conv1D):
                module.weight.normal_(std=module.weight.shape[1] ** -0.5)
    return model


def batch(left_padded: bool, num_tokens: int = 20) -> tuple[Tensor, Tensor]:
    """Token ids (3 T) and their mask: all real, or with none, four and seven tokens of padding on the left."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(3, VOCABULARY, (3, num_tokens), generator=generator)
    padding = torch.tensor([0, 4, 7] if left_padded else [0, 0, 0])
    return tokens, (torch.arange(num_tokens) >= padding[:, None]).long()
