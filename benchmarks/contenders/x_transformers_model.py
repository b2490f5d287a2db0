"""x-transformers' decoder with q/k norm, rotation, SwiGLU and, with ``gated``, elementwise gates of the values' sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from x_transformers import Decoder, TransformerWrapper

from contenders.training import cross_entropy, training_step


def prepare(settings: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
    """A training step of this model."""
    shape = settings["shape"]
    model = TransformerWrapper(
        num_tokens=shape["vocab_size"],
        max_seq_len=shape["context"],
        use_abs_pos_emb=False,
        tie_embedding=True,
        attn_layers=Decoder(
            dim=shape["width"],
            depth=shape["num_layers"],
            heads=shape["num_heads"],
            attn_dim_head=shape["head_size"],
            attn_kv_heads=shape["num_kv_heads"],
            attn_flash=True,
            attn_gate_values=settings["gated"],
            attn_qk_norm=True,
            use_rmsnorm=True,
            rotary_pos_emb=True,
            rotary_emb_dim=shape["head_size"],
            ff_swish=True,
            ff_glu=True,
            ff_no_bias=True,
            ff_mult=shape["feedforward_width"] / shape["width"],
        ),
    )
    return training_step(model, cross_entropy(model), settings)
