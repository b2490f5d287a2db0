"""OLMo-core's transformer, with ``gated`` its own elementwise attention gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from olmo_core.config import DType
from olmo_core.nn.attention import AttentionConfig, GateConfig, GateGranularity
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.lm_head import LMHeadConfig
from olmo_core.nn.rope import RoPEConfig
from olmo_core.nn.transformer import TransformerBlockConfig, TransformerConfig

from contenders.training import cross_entropy, training_step


def prepare(settings: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
    """A training step of this model; its head is not tied, which costs no further operation."""
    shape = settings["shape"]
    norm = LayerNormConfig(name=LayerNormType.rms, bias=False)
    gate = GateConfig(granularity=GateGranularity.elementwise) if settings["gated"] else None
    attention = AttentionConfig(
        n_heads=shape["num_heads"],
        n_kv_heads=shape["num_kv_heads"],
        head_dim=shape["head_size"],
        bias=False,
        rope=RoPEConfig(theta=10_000),
        qk_norm=norm,
        use_head_qk_norm=True,
        gate=gate,
    )
    block = TransformerBlockConfig(
        sequence_mixer=attention,
        feed_forward=FeedForwardConfig(hidden_size=shape["feedforward_width"], bias=False),
        layer_norm=norm,
    )
    config = TransformerConfig(
        d_model=shape["width"],
        vocab_size=shape["vocab_size"],
        n_layers=shape["num_layers"],
        block=block,
        lm_head=LMHeadConfig(layer_norm=norm, bias=False),
        dtype=DType.float32,
    )
    model = config.build(init_device="cpu")
    model.init_weights(max_seq_len=shape["context"])
    return training_step(model, cross_entropy(model), settings)
