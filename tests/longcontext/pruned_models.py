"""Tiny decoders to prune, and what pruning has to equal: one forward pass in which hidden keys are masked by head."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from gatelab.gates.variants import find_variant
from gatelab.model.attention import GroupedQueryAttention
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.layer_settings import LayerSettings
from gatelab.model.settings import ModelSettings

VOCABULARY, LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_SIZE, WINDOW = 97, 3, 48, 6, 2, 8, 7


def build_decoder(gate: str | None = "sdpa_elementwise", windowed: bool = False, **changes: Any) -> Decoder:
    """A GateLab decoder in float64 whose attention is far from uniform; ``windowed``: layers 0 and 2 see 7 tokens."""
    layers = tuple(LayerSettings(window=WINDOW if layer != 1 else None) for layer in range(LAYERS)) if windowed else ()
    settings = ModelSettings(
        vocab_size=VOCABULARY,
        width=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        feedforward_width=56,
        max_context=96,
        gates=() if gate is None else find_variant(gate).gates,
        layers=layers,
        **changes,
    )
    decoder = Decoder(settings).double().eval()
    initialize(decoder, seed=3)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if weight.ndim == 2:
                weight.normal_(std=weight.shape[1] ** -0.5, generator=torch.Generator().manual_seed(len(name)))
    return decoder


def build_foreign(family: str) -> Any:
    """A random model of transformers in float64, eager attention."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE, "intermediate_size": 56, "max_position_embeddings": 128,
    }  # fmt: skip
    own = {
        "llama": {},
        "qwen3_next": {"layer_types": ["full_attention"] * LAYERS, "num_experts": 0, "mlp_only_layers": [0, 1, 2]},
        "qwen3_next_hybrid": {
            "layer_types": ["linear_attention", "full_attention", "full_attention"], "num_experts": 0,
            "mlp_only_layers": [0, 1, 2], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
        "gemma3": {
            "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "laguna": {
            "num_attention_heads_per_layer": [HEADS] * LAYERS, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    }  # fmt: skip
    names = {"llama": "LlamaConfig", "gemma3": "Gemma3TextConfig", "laguna": "LagunaConfig"}
    config = getattr(transformers, names.get(family, "Qwen3NextConfig"))(**sizes | own[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model = model if family == "laguna" else model.double()  # its experts' kernel knows no float64
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.weight.shape[1] ** -0.5)
    return model


def tokens_of(num_samples: int = 3, num_tokens: int = 37) -> Tensor:
    return torch.randint(3, VOCABULARY, (num_samples, num_tokens), generator=torch.Generator().manual_seed(11))


def whole_logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits of one plain pass."""
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, Tensor) else found.logits


Sees = Callable[[int, int, int, int, int], bool]
"""Whether, in a layer and sample, a key/value head lets the query at a position see the key at an earlier one."""


def masked_logits(model: Any, tokens: Tensor, sees: Sees) -> Tensor:
    """Logits of one pass over all tokens, in which keys are hidden by head."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Of (B T H C) queries and (B S K C) keys, query by query."""
        output = torch.zeros(*query.shape[:3], value.shape[-1], dtype=query.dtype)
        group = query.shape[2] // key.shape[2]
        for b, k, t in product(range(len(query)), range(key.shape[2]), range(query.shape[1])):
            seen = [s for s in range(t + 1) if window is None or t - s < window]
            if window is None:
                seen = [s for s in seen if sees(layer, b, k, t, s)]
            for h in range(k * group, (k + 1) * group):
                logits = scale * key[b, seen, k] @ query[b, t, h]
                output[b, t, h] = logits.softmax(0) @ value[b, seen, k]
        return output

    if isinstance(model, Decoder):
        return _with_kernels(model, tokens, attend)
    return _with_attention_function(model, tokens, attend)


def _with_kernels(model: Decoder, tokens: Tensor, attend: Any) -> Tensor:
    modules = [module for module in model.modules() if isinstance(module, GroupedQueryAttention)]
    before = [module.kernel for module in modules]
    for module in modules:
        module.kernel = lambda q, k, v, mask, causal, sink=None, own=module: attend(
            own.layer, q, k, v, q.shape[-1] ** -0.5, own.window
        )
    try:
        return whole_logits(model, tokens)
    finally:
        for module, kernel in zip(modules, before, strict=True):
            module.kernel = kernel


def _with_attention_function(model: Any, tokens: Tensor, attend: Any) -> Tensor:
    from transformers import AttentionInterface

    def function(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **keywords: Any) -> tuple[Tensor, None]:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return attend(module.layer_idx, q, k, v, keywords["scaling"], keywords.get("sliding_window")), None

    AttentionInterface.register("masked_by_head", function)
    model.set_attn_implementation("masked_by_head")
    try:
        return whole_logits(model, tokens)
    finally:
        model.set_attn_implementation("eager")
        AttentionInterface._global_mapping.pop("masked_by_head")
