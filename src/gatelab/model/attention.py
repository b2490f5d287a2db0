"""Softmax attention with gates at any of the paper's five positions: what all kinds share, and grouped queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gatelab.gates.gate import Gate, Gating, build_control
from gatelab.gates.linear import Linear
from gatelab.gates.spec import Position
from gatelab.model.norm import RMSNorm
from gatelab.model.rope import Rotation, rotate
from gatelab.model.settings import ModelSettings
from gatelab.model.sink import Sink


@runtime_checkable
class LayerCache(Protocol):
    """What remembers one layer's keys and values while decoding."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add (B T K C) keys and (B T K Cv) values and return all so far."""
        ...


@runtime_checkable
class AttentionRecorder(Protocol):
    """What looks at an attention layer from outside; see ``gatelab.diagnose.recorder``."""

    def record(self, layer: int, tensors: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> None:
        """Receive ``query`` ``key`` ``value`` as the kernel sees them, ``output``, ``gated_output``; gate scores."""
        ...


@runtime_checkable
class AttentionKernel(Protocol):
    """What computes softmax attention from rotated queries, keys and values."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, sink: Sink | None = None
    ) -> Float[Tensor, "B T H Cv"]:
        """Attention of (B T H C) queries over (B S K C) keys; without a mask it is the causal triangle, or full.

        With a sink every query sees one key more, which is no token.
        """
        ...


def fused_attention(
    query: Float[Tensor, "B T H C"],
    key: Float[Tensor, "B S K C"],
    value: Float[Tensor, "B S K Cv"],
    mask: Bool[Tensor, "#B 1 T S"] | None,
    causal: bool,
    sink: Sink | None = None,
) -> Float[Tensor, "B T H Cv"]:
    """PyTorch's own fused kernels. They want equal sizes of keys and values: the smaller is filled up with zeros.

    A sink goes with equal sizes alone.
    """
    num_queries, head_size, value_size = query.shape[1], query.shape[-1], value.shape[-1]
    if sink is not None:
        extended = sink.extend(query, key, value, mask, causal)
        return _scaled_dot_product(*extended, causal, head_size**-0.5)[:, -num_queries:, :, :head_size]
    if head_size == value_size:
        return _scaled_dot_product(query, key, value, mask, causal)
    query, key, value = of_one_size(query, key, value)
    return _scaled_dot_product(query, key, value, mask, causal, head_size**-0.5)[..., :value_size]


def of_one_size(*tensors: Float[Tensor, "... _"]) -> tuple[Float[Tensor, "... largest"], ...]:
    """The tensors filled up with zeros to the most channels that one of them has."""
    largest = max(tensor.shape[-1] for tensor in tensors)
    return tuple(F.pad(t, (0, largest - t.shape[-1])) if t.shape[-1] < largest else t for t in tensors)


def _scaled_dot_product(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None = None
) -> Tensor:
    """PyTorch's function on tensors with heads after tokens."""
    if query.shape[1] == 1 and query.device.type == "cpu":
        return _single_query(query, key, value, mask, scale)
    output = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return output.transpose(1, 2)


def _single_query(
    query: Float[Tensor, "B 1 H C"],
    key: Float[Tensor, "B S K C"],
    value: Float[Tensor, "B S K Cv"],
    mask: Bool[Tensor, "#B 1 1 S"] | None,
    scale: float | None,
) -> Float[Tensor, "B 1 H Cv"]:
    """As a step of decoding asks it: in float32 at least, as PyTorch's kernel for CPUs is slow on one narrower query.

    The heads that share a key head are its queries, so that it is read once for all of them.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    output = F.scaled_dot_product_attention(
        query[:, 0].unflatten(1, (key.shape[2], -1)).to(wide),
        key.transpose(1, 2).to(wide),
        value.transpose(1, 2).to(wide),
        attn_mask=mask,
        scale=scale,
    )
    return output.flatten(1, 2)[:, None].to(query.dtype)


class GatedAttention(nn.Module):
    """What every kind of attention has behind its queries, keys and values: kernel, control, gates, output projection.

    Abstract: a kind makes the queries, keys and values, and its ``__init__`` sets these fields. ``kernel`` and
    ``recorder`` may be set from outside, to observe a forward pass. The layer's ``window`` is known to who makes masks.
    """

    layer: int
    causal: bool
    window: int | None
    o_proj: Linear
    gates: nn.ModuleDict
    sink: Sink | None
    control: nn.Module
    kernel: AttentionKernel
    recorder: AttentionRecorder | None

    def input_projections(self) -> tuple[Linear, ...]:
        """The projections that read the hidden state, gates apart."""
        raise NotImplementedError

    def value_weight(self) -> Float[Tensor, "KCv D"]:
        """The matrix that makes values of the hidden state, up to a factor of each token's own."""
        raise NotImplementedError

    def attend(
        self,
        query: Float[Tensor, "B T H C"],
        key: Float[Tensor, "B S K C"],
        value: Float[Tensor, "B S K Cv"],
        mask: Bool[Tensor, "#B 1 T S"] | None,
        gating: Gating,
    ) -> Float[Tensor, "B T D"]:
        """The layer's output from what its kind made; the recorder is shown all of it."""
        output = self.kernel(query, key, value, mask, self.causal, self.sink)
        gating.sources["attention_output"] = output.flatten(2)
        gated = gating.apply("sdpa_output", self.control(output))
        dense = self.o_proj(gated.flatten(2))
        dense = gating.apply("dense_output", dense[:, :, None])[:, :, 0]
        if self.recorder is not None:
            tensors = {"query": query, "key": key, "value": value, "output": output, "gated_output": gated}
            self.recorder.record(self.layer, tensors, gating.scores)
        return dense


class GroupedQueryAttention(GatedAttention):
    """Softmax attention with H query heads over K key/value heads, RoPE, optional biases, q/k norm and sink, and gates.

    Parameter names are those of Hugging Face's Qwen3; the gates are ``gates.<position>``.
    """

    def __init__(self, settings: ModelSettings, layer: int):
        super().__init__()
        shape, head_size = settings.shape_on_layer(layer), settings.head_size

        def linear(name: str, num_inputs: int, num_outputs: int) -> Linear:
            return Linear(num_inputs, num_outputs, bias=name in settings.biased_projections)

        def head_norm() -> nn.Module:
            if not settings.qk_norm:
                return nn.Identity()
            return RMSNorm(head_size, settings.norm_epsilon, settings.centred_norms)

        self.layer, self.causal, self.window = layer, settings.causal, settings.on_layer(layer).window
        self.head_size = head_size
        self.q_proj = linear("q", settings.width, shape.num_heads * head_size)
        self.k_proj = linear("k", settings.width, shape.num_kv_heads * head_size)
        self.v_proj = linear("v", settings.width, shape.num_kv_heads * head_size)
        self.o_proj = linear("o", shape.num_heads * head_size, settings.width)
        self.q_norm, self.k_norm = head_norm(), head_norm()
        self.gates = nn.ModuleDict({spec.position: Gate(spec, shape) for spec in settings.gates_on_layer(layer)})
        self.sink = None if settings.sink is None else Sink(settings.sink, shape)
        self.control = build_control(settings.control, shape, settings.norm_epsilon)
        self.kernel: AttentionKernel = fused_attention
        self.recorder: AttentionRecorder | None = None

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        rotation: Rotation | None,
        mask: Bool[Tensor, "#B 1 T S"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Attention of the pre-norm hidden state ``x``; without a mask it is the causal triangle, or full.

        Without a rotation queries and keys stay as they are.
        """
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_size)) for projection in self.input_projections()
        )
        gating = Gating(self.gates, x, value)
        value = gating.apply("value", value)
        query = self._rotate("query", query, self.q_norm, rotation, gating)
        key = self._rotate("key", key, self.k_norm, rotation, gating)
        if cache is not None:
            key, value = cache.extend(key, value)
        return self.attend(query, key, value, mask, gating)

    def input_projections(self) -> tuple[Linear, ...]:
        """Those of queries, keys and values, in this order."""
        return self.q_proj, self.k_proj, self.v_proj

    def value_weight(self) -> Float[Tensor, "KCv D"]:
        """That of the value projection."""
        return self.v_proj.weight

    def _rotate(
        self,
        position: Position,
        y: Float[Tensor, "B T N C"],
        norm: nn.Module,
        rotation: Rotation | None,
        gating: Gating,
    ) -> Float[Tensor, "B T N C"]:
        """Norm and rotation of queries or keys, with their gate at its place among them."""
        y = norm(gating.apply(position, y, "before_norm"))
        y = gating.apply(position, y, "after_norm")
        if rotation is not None:
            y = rotate(y, rotation)
        return gating.apply(position, y, "after_rope")
