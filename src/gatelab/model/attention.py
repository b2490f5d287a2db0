"""Grouped-query attention with gates at any of the paper's five positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gatelab.gates.gate import Gate, build_control
from gatelab.gates.linear import Linear
from gatelab.model.norm import RMSNorm
from gatelab.model.rope import Rotation, rotate
from gatelab.model.settings import ModelSettings


@runtime_checkable
class LayerCache(Protocol):
    """What remembers one layer's keys and values while decoding."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add (B S K C) keys and values and return all so far."""
        ...


@runtime_checkable
class AttentionRecorder(Protocol):
    """What looks at an attention layer from outside; see ``gatelab.diagnose.recorder``."""

    def record(self, layer: int, tensors: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> None:
        """Receive ``query`` ``key`` ``value`` as the kernel sees them, ``output``, ``gated_output``; gate scores."""
        ...


class AttentionKernel(Protocol):
    """What computes softmax attention from rotated queries, keys and values."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
    ) -> Float[Tensor, "B T H C"]:
        """Attention of (B T H C) queries over (B S K C) keys; without a mask it is the causal triangle, or full."""
        ...


def fused_attention(
    query: Float[Tensor, "B T H C"],
    key: Float[Tensor, "B S K C"],
    value: Float[Tensor, "B S K C"],
    mask: Bool[Tensor, "#B 1 T S"] | None,
    causal: bool,
) -> Float[Tensor, "B T H C"]:
    """PyTorch's own fused kernels."""
    output = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal and mask is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return output.transpose(1, 2)


class GroupedQueryAttention(nn.Module):
    """Softmax attention with H query heads over K key/value heads, RoPE, optional q/k norm, and gates.

    Parameter names are those of Hugging Face's Qwen3; the gates are ``gates.<position>``. ``kernel`` and
    ``recorder`` may be set from outside, to observe a forward pass.
    """

    def __init__(self, settings: ModelSettings, layer: int):
        super().__init__()
        shape, head_size = settings.attention_shape, settings.head_size
        self.layer, self.causal = layer, settings.causal
        self.head_size = head_size
        self.q_proj = Linear(settings.width, settings.num_heads * head_size, bias=False)
        self.k_proj = Linear(settings.width, settings.num_kv_heads * head_size, bias=False)
        self.v_proj = Linear(settings.width, settings.num_kv_heads * head_size, bias=False)
        self.o_proj = Linear(settings.num_heads * head_size, settings.width, bias=False)
        self.q_norm = RMSNorm(head_size, settings.norm_epsilon) if settings.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_size, settings.norm_epsilon) if settings.qk_norm else nn.Identity()
        self.gates = nn.ModuleDict({spec.position: Gate(spec, shape) for spec in settings.gates_on_layer(layer)})
        self.control = build_control(settings.control, shape, settings.norm_epsilon)
        self.kernel: AttentionKernel = fused_attention
        self.recorder: AttentionRecorder | None = None

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        rotation: Rotation,
        mask: Bool[Tensor, "#B 1 T S"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Attention of the pre-norm hidden state ``x``; without a mask it is the causal triangle, or full."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_size)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        sources = {"hidden": x, "value": value.flatten(2)}
        scores: dict[str, Tensor] = {}
        value = self._gate("value", value, sources, scores)
        query = self._rotate("query", query, self.q_norm, rotation, sources, scores)
        key = self._rotate("key", key, self.k_norm, rotation, sources, scores)
        if cache is not None:
            key, value = cache.extend(key, value)
        output = self.kernel(query, key, value, mask, self.causal)
        sources["attention_output"] = output.flatten(2)
        gated = self._gate("sdpa_output", self.control(output), sources, scores)
        dense = self.o_proj(gated.flatten(2))
        dense = self._gate("dense_output", dense[:, :, None], sources, scores)[:, :, 0]
        if self.recorder is not None:
            tensors = {"query": query, "key": key, "value": value, "output": output, "gated_output": gated}
            self.recorder.record(self.layer, tensors, scores)
        return dense

    def _gate(
        self,
        position: str,
        y: Float[Tensor, "B T N C"],
        sources: Mapping[str, Tensor],
        scores: dict[str, Tensor],
        placement: str | None = None,
    ) -> Float[Tensor, "B T N C"]:
        """Gate ``y`` if this layer has a gate at this position and placement; its scores are noted in ``scores``."""
        if position not in self.gates:
            return y
        gate = self.gates[position]
        assert isinstance(gate, Gate)
        if gate.spec.placement != placement:
            return y
        scores[position] = gate.scores(sources)
        return gate(y, scores[position])

    def _rotate(
        self,
        position: str,
        y: Float[Tensor, "B T N C"],
        norm: nn.Module,
        rotation: Rotation,
        sources: Mapping[str, Tensor],
        scores: dict[str, Tensor],
    ) -> Float[Tensor, "B T N C"]:
        """Norm and rotation of queries or keys, with their gate at its place among them."""
        y = norm(self._gate(position, y, sources, scores, "before_norm"))
        y = rotate(self._gate(position, y, sources, scores, "after_norm"), rotation)
        return self._gate(position, y, sources, scores, "after_rope")
