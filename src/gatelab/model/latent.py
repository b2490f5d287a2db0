"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with gates at any of the paper's positions.

A token x_t has one latent c_t = norm(W_dkv x_t) of r channels and one key k_t = R_t W_kr x_t that is rotated, for all
heads together. Head h makes of them what softmax attention works on, with queries q_th = [W_uq c'_t ; R_t W_qr c'_t]
from a latent of their own, c'_t = norm(W_dq x_t), or from x_t itself:

    key    k_th = [W_uk,h c_t ; k_t]        unrotated channels, then rotated ones: C in all
    value  v_th = W_uv,h c_t                Cv channels
    score  (q_th . k_sh) m**2 / sqrt(C)     m = 0.1 a ln s + 1 with YaRN's factor s and mscale_all_dim a, else 1

Gates stand where they do in grouped-query attention, on whole heads, before a rotation or after it; the gate on the
output has H Cv channels. They read x_t, v_th or the attention output, never a latent.

A cache holds c_t and k_t alone, r + R numbers for a token. A gate on keys or values reads its token's hidden state,
so these are no function of the latent then: layers with one cache what the kernel sees, H (C + Cv) numbers.

Differs from DeepSeek's code: the rotated channels are in the half-split order of :mod:`gatelab.model.rope`, and m**2 is
a factor of the queries, so that every kernel and measurement has the scale 1 / sqrt(C).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gatelab.gates.gate import Gate, Gating, build_control
from gatelab.gates.linear import Linear
from gatelab.gates.spec import Position
from gatelab.model.attention import AttentionKernel, AttentionRecorder, GatedAttention, LayerCache, fused_attention
from gatelab.model.norm import RMSNorm
from gatelab.model.rope import Rotation, logit_factor, rotate
from gatelab.model.settings import ModelSettings


class LatentAttention(GatedAttention):
    """Latent attention under the parameter names of Hugging Face's DeepSeek-V3; the gates are ``gates.<position>``."""

    def __init__(self, settings: ModelSettings, layer: int):
        super().__init__()
        latent, shape, rope = settings.latent, settings.shape_on_layer(layer), settings.rope_on_layer(layer)
        assert latent is not None

        def linear(num_inputs: int, num_outputs: int) -> Linear:
            return Linear(num_inputs, num_outputs, bias=False)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, latent.norm_epsilon, settings.centred_norms)

        self.layer, self.causal, self.window = layer, settings.causal, settings.on_layer(layer).window
        self.head_size, self.query_rank = shape.head_size, latent.query_rank
        self.token_parts = [latent.key_value_rank, latent.rotated_size]
        self.query_parts = [latent.unrotated_size, latent.rotated_size]
        self.head_parts = [latent.unrotated_size, latent.value_size]
        self.query_factor = logit_factor(None if rope is None else rope.scaling)
        if self.query_rank is None:
            self.q_proj = linear(settings.width, shape.num_heads * shape.head_size)
        else:
            self.q_a_proj = linear(settings.width, self.query_rank)
            self.q_a_layernorm = norm(self.query_rank)
            self.q_b_proj = linear(self.query_rank, shape.num_heads * shape.head_size)
        self.kv_a_proj_with_mqa = linear(settings.width, sum(self.token_parts))
        self.kv_a_layernorm = norm(latent.key_value_rank)
        self.kv_b_proj = linear(latent.key_value_rank, shape.num_heads * sum(self.head_parts))
        self.o_proj = linear(shape.num_heads * latent.value_size, settings.width)
        self.gates = nn.ModuleDict({spec.position: Gate(spec, shape) for spec in settings.gates_on_layer(layer)})
        self.caches_latents = not {"key", "value"} & set(self.gates)
        self.sink = None
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

        Without a rotation all channels stay as they are. A cache gets latents and rotated keys, as one head each.
        """
        latent, shared = self.kv_a_proj_with_mqa(x)[:, :, None].split(self.token_parts, dim=-1)
        latent = self.kv_a_layernorm(latent)
        if self.caches_latents and rotation is not None:
            shared = rotate(shared, rotation)
        key, value = self._expanded(latent, shared)
        gating = Gating(self.gates, x, value)
        query = self._rotated("query", self._queries(x), rotation, gating)
        query = query if self.query_factor == 1 else query * self.query_factor
        if not self.caches_latents:
            value = gating.apply("value", value)
            key = self._rotated("key", key, rotation, gating)
        if cache is not None:
            kept = cache.extend(*((latent, shared) if self.caches_latents else (key, value)))
            key, value = self._expanded(*kept) if self.caches_latents else kept
        return self.attend(query, key, value, mask, gating)

    def input_projections(self) -> tuple[Linear, ...]:
        """That of the queries or of their latent, and that of the other latent with the shared key."""
        return (self.q_proj if self.query_rank is None else self.q_a_proj), self.kv_a_proj_with_mqa

    def value_weight(self) -> Float[Tensor, "HCv D"]:
        """W_uv diag(w) W_dkv: the norm, whose weight is w, also divides by each token's root mean square."""
        norm, (rank, _) = self.kv_a_layernorm, self.token_parts
        factor = 1 + norm.weight if norm.centred else norm.weight
        _, of_values = self.kv_b_proj.weight.unflatten(0, (-1, sum(self.head_parts))).split(self.head_parts, dim=1)
        return of_values.flatten(0, 1) @ (factor[:, None] * self.kv_a_proj_with_mqa.weight[:rank])

    def _queries(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H C"]:
        query = self.q_proj(x) if self.query_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return query.unflatten(-1, (-1, self.head_size))

    def _expanded(
        self, latent: Float[Tensor, "B S 1 r"], shared: Float[Tensor, "B S 1 R"]
    ) -> tuple[Float[Tensor, "B S H C"], Float[Tensor, "B S H Cv"]]:
        """Keys and values of all heads."""
        heads = self.kv_b_proj(latent[:, :, 0]).unflatten(-1, (-1, sum(self.head_parts)))
        key, value = heads.split(self.head_parts, dim=-1)
        return torch.cat((key, shared.expand(-1, -1, key.shape[2], -1)), dim=-1), value

    def _rotated(
        self, position: Position, y: Float[Tensor, "B T H C"], rotation: Rotation | None, gating: Gating
    ) -> Float[Tensor, "B T H C"]:
        """Rotation of the last channels of queries or keys, with their gate before or after it."""
        y = gating.apply(position, y, "after_norm")
        if rotation is not None:
            unrotated, turning = y.split(self.query_parts, dim=-1)
            y = torch.cat((unrotated, rotate(turning, rotation)), dim=-1)
        return gating.apply(position, y, "after_rope")
