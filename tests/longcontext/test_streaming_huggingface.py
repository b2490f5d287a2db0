"""Window caches on models of transformers: against eviction token by token, and refused where they would be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from streaming_by_loops import T, V, stream_by_loops, token_ids
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from gatelab.interop.loading import load  # noqa: E402
from gatelab.longcontext.streaming.cache import WindowCache  # noqa: E402
from gatelab.longcontext.streaming.models import require_streamable, streaming  # noqa: E402
from gatelab.model.decoder import Decoder  # noqa: E402
from gatelab.model.settings import LayerSettings, ModelSettings, RopeSettings  # noqa: E402

SIZES = {
    "vocab_size": V, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 56, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
SLIDING = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
TWO_ROPES = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
        "full_attention": {"rope_type": "default", "rope_theta": 900.0},
    }
}
GEMMA3 = SIZES | SLIDING | TWO_ROPES | {"query_pre_attn_scalar": 8, "hidden_activation": "silu"}
YARN = {"rope_type": "yarn", "rope_theta": 90.0, "factor": 4.0, "original_max_position_embeddings": 16}
STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "yarn": ("LlamaConfig", SIZES | {"rope_parameters": YARN}),
    "qwen3": ("Qwen3Config", SIZES),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": 7}),
    "gemma2": ("Gemma2Config", SIZES | SLIDING | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 5}),
    "gemma3": ("Gemma3TextConfig", GEMMA3),
    "gpt_oss": ("GptOssConfig", SIZES | SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "partial rotary": ("PhiConfig", SIZES | {"hidden_size": 48}),
    "interleaved rotary": ("Glm4Config", SIZES),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "linear attention": ("Qwen3NextConfig", SIZES | LINEAR, "qwen3_next has linear_attention layers, whose memory"),
    "chunks": ("Llama4TextConfig", SIZES | {"intermediate_size_mlp": 40}, "llama4_text has chunked_attention layers"),
    "own attention": ("FalconConfig", {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 3},
                      "falcon computes attention in its own code; it can't be streamed"),
    "learned positions": ("GPT2Config", {"n_embd": 48, "n_head": 6, "vocab_size": V, "bos_token_id": 1,
                          "eos_token_id": 2}, "gpt2 has no one rotary embedding for all layers"),
    "latent attention": ("DeepseekV3Config", SIZES | {"num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 12,
                         "qk_rope_head_dim": 4, "qk_nope_head_dim": 10, "v_head_dim": 9, "first_k_dense_replace": 3,
                         "head_dim": 4}, "deepseek_v3 rotates in a way of its own; its positions can't be redone"),
    "layers that don't rotate": ("SmolLM3Config", SIZES | {"no_rope_layers": [1, 0, 1]},
                                 "SmolLM3ForCausalLM gives other logits with its rotation redone"),
}  # fmt: skip


def build(class_name: str, arguments: dict[str, Any]) -> Any:
    """A random model in eval mode, with weights large enough for attention that is far from uniform."""
    torch.manual_seed(5)
    config = getattr(transformers, class_name)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.weight.shape[1] ** -0.5)
            elif "Norm" in type(module).__name__ and hasattr(module, "weight"):
                module.weight.add_(0.1 * torch.randn_like(module.weight))
    return model


@torch.no_grad()
def read_in_chunks(model: nn.Module, ids: Tensor, cache: WindowCache, size: int) -> Tensor:
    with streaming(model, cache) as read:
        return torch.cat([read(piece) for piece in ids.split(size, dim=1)], dim=1)


def gemma3_as_decoder(model: Any) -> Decoder:
    """The same weights in a decoder of GateLab's."""
    local = LayerSettings(window=7, rope=RopeSettings(base=40.0))
    settings = ModelSettings(
        vocab_size=V, width=36, num_layers=3, num_heads=6, num_kv_heads=2, head_size=8, feedforward_width=56,
        max_context=64, sandwich_norm=True, centred_norms=True, embedding_scale=6.0, tied_head=True,
        layers=(local, LayerSettings(rope=RopeSettings(base=900.0)), local),
    )  # fmt: skip
    names = {
        "post_attention_layernorm": "after_attention_norm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "after_feedforward_norm",
    }
    state = {}
    for name, tensor in model.state_dict().items():
        norm = next((norm for norm in names if norm in name), None)
        state[name if norm is None else name.replace(norm, names[norm])] = tensor.double()
    state.pop("lm_head.weight")
    decoder = Decoder(settings).double()
    decoder.load_state_dict(state)
    return decoder.eval()


def as_decoder(family: str, model: Any, folder: Path) -> Decoder:
    if family == "gemma3":
        return gemma3_as_decoder(model)
    model.save_pretrained(folder)
    return load(folder).double()


@pytest.mark.parametrize("kept", [0, 1, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_equals_eviction_token_by_token(family: str, kept: int, tmp_path: Path) -> None:
    model, ids = build(*STREAMED[family]), token_ids()
    expected = stream_by_loops(as_decoder(family, model, tmp_path), ids, kept, 5)
    for size in (1, 4, T):
        found = read_in_chunks(model.double(), ids, WindowCache(kept, 5), size)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", STREAMED)
def test_families_are_their_own_model_until_something_is_evicted(family: str) -> None:
    model, ids = build(*STREAMED[family]), token_ids()
    with torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(read_in_chunks(model, ids, WindowCache(0, T), 9), expected, atol=2e-5, rtol=0)
    one_by_one, in_chunks = (read_in_chunks(model, ids, WindowCache(3, 6), size) for size in (1, 10))
    torch.testing.assert_close(in_chunks, one_by_one, atol=2e-5, rtol=0)
    assert (one_by_one - expected).abs().max() > 0.01
    require_streamable(model, [WindowCache(3, 6)], ids)


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_cannot_be_streamed_are_refused(family: str) -> None:
    class_name, arguments, message = REFUSED[family]
    model = build(class_name, arguments)
    with pytest.raises(ValueError, match=message):
        require_streamable(model, [WindowCache(1, 12)], token_ids())


def test_the_model_is_as_before() -> None:
    model, ids = build(*STREAMED["llama"]), token_ids()
    implementation = model.config._attn_implementation
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    with pytest.raises(RuntimeError, match="stop"), streaming(model, WindowCache(0, 4)) as read:
        read(ids)
        raise RuntimeError("stop")
    assert model.config._attn_implementation == implementation
    assert not [name for name in transformers.AttentionInterface._global_mapping if name.startswith("gatelab_stream")]
    assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] == hooks
