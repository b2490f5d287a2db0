"""A whole decoder in float64, written with plain loops over sequences, layers, tokens, heads, keys and experts.

It reads its settings field by field and shares nothing with the model but the names of the weights; gates, rotation,
softmax and the plain norm are those of :mod:`gatelab.gates.reference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gatelab.gates import reference
from gatelab.gates.reference import Block, Sources
from gatelab.gates.spec import AttentionShape
from gatelab.model.decoder import Decoder
from gatelab.model.settings import LayerSettings, MixtureSettings, ModelSettings, PatchSettings, SinkSettings

Weights = Mapping[str, Tensor]


def decoder_by_loops(decoder: Decoder, ids: Tensor) -> Tensor:
    """Logits (B T V): each token's stream through all layers, the final norm, and the product with the head."""
    settings, weights = decoder.settings, {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}
    embedding = weights["model.embed_tokens.weight"]
    head = embedding if settings.tied_head else weights["lm_head.weight"]
    logits = []
    for sequence in ids.tolist():
        stream = (
            [settings.embedding_scale * embedding[token] for token in sequence]
            if settings.patches is None
            else patches_by_loops(settings.patches, under(weights, "model.embed_tokens."), sequence)
        )
        for number in range(settings.num_layers):
            stream = layer_by_loops(settings, number, under(weights, f"model.layers.{number}."), stream)
        logits.append(torch.stack([head @ norm(settings, weights["model.norm.weight"], x) for x in stream]))
    return torch.stack(logits)


def patches_by_loops(patches: PatchSettings, weights: Weights, sequence: Sequence[int]) -> list[Tensor]:
    """The learned place of each token, and for a patch each pixel, from -1 to 1, times its column."""
    embedded = []
    for place, number in enumerate(sequence):
        x = weights["positions"][place]
        if number != patches.levels**patches.pixels:
            for pixel in range(patches.pixels):
                number, brightness = divmod(number, patches.levels)
                x = x + (2 * brightness / (patches.levels - 1) - 1) * weights["weight"][:, pixel]
        embedded.append(x)
    return embedded


def under(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The weights whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def norm(settings: ModelSettings, weight: Tensor, x: Tensor) -> Tensor:
    """RMSNorm with w, or with 1 + w where norms are centred."""
    return reference.rms_norm(x, 1 + weight if settings.centred_norms else weight, settings.norm_epsilon)


def layer_by_loops(settings: ModelSettings, number: int, weights: Weights, stream: Sequence[Tensor]) -> list[Tensor]:
    """x + norm(attention(norm(x))), then x + norm(feedforward(norm(x))); the outer norms only where there are any."""
    own = settings.layers[number] if settings.layers else LayerSettings()
    normed = [norm(settings, weights["input_layernorm.weight"], x) for x in stream]
    attended = attention_by_loops(settings, own, number, under(weights, "self_attn."), normed)
    if settings.sandwich_norm:
        attended = [norm(settings, weights["after_attention_norm.weight"], y) for y in attended]
    stream = [x + y for x, y in zip(stream, attended, strict=True)]
    updates = []
    for x in stream:
        normed_x = norm(settings, weights["post_attention_layernorm.weight"], x)
        if settings.mixture is not None and own.mixture:
            update = mixture_by_loops(settings.mixture, under(weights, "mlp."), normed_x)
        else:
            update = swiglu(under(weights, "mlp."), normed_x)
        if settings.sandwich_norm:
            update = norm(settings, weights["after_feedforward_norm.weight"], update)
        updates.append(update)
    return [x + y for x, y in zip(stream, updates, strict=True)]


def attention_by_loops(
    settings: ModelSettings, own: LayerSettings, number: int, weights: Weights, hidden: Sequence[Tensor]
) -> list[Tensor]:
    """Grouped-query attention of every token: token t looks at the tokens s <= t with t - s < window, or at all."""
    num_heads, head_size = own.num_heads or settings.num_heads, settings.head_size
    group = num_heads // settings.num_kv_heads
    rope = own.rope or settings.rope
    rotary_channels = int(rope.fraction * head_size) if own.rotary and settings.patches is None else 0
    block = Block(
        AttentionShape(
            width=settings.width, num_heads=num_heads, num_kv_heads=settings.num_kv_heads, head_size=head_size
        ),
        weights={},
        gates=[
            (spec, under(weights, f"gates.{spec.position}."))
            for spec in settings.gates
            if spec.layers is None or number in spec.layers
        ],
    )

    def project(name: str, x: Tensor) -> Tensor:
        y = weights[f"{name}_proj.weight"] @ x
        return y + weights[f"{name}_proj.bias"] if name in settings.biased_projections else y

    def heads_of(name: str, x: Tensor, count: int, position: int) -> list[Tensor]:
        heads = reference.split_heads(project(name, x), count, head_size)
        if settings.qk_norm and name != "v":
            heads = [norm(settings, weights[f"{name}_norm.weight"], head) for head in heads]
        if name == "v" or not rotary_channels:
            return heads
        return [reference.rotate(head, position, rotary_channels, rope.base) for head in heads]

    queries = [heads_of("q", x, num_heads, t) for t, x in enumerate(hidden)]
    keys = [heads_of("k", x, settings.num_kv_heads, t) for t, x in enumerate(hidden)]
    values = [heads_of("v", x, settings.num_kv_heads, t) for t, x in enumerate(hidden)]
    outputs = []
    for t, x in enumerate(hidden):
        last = t if settings.causal else len(hidden) - 1
        seen = [s for s in range(last + 1) if own.window is None or t - s < own.window]
        heads = [
            attend_by_loops(
                settings.sink,
                under(weights, "sink."),
                (h, h // group),
                query,
                [(keys[s][h // group], values[s][h // group]) for s in seen],
            )
            for h, query in enumerate(queries[t])
        ]
        sources: Sources = {"hidden": x}
        outputs.append(project("o", torch.cat(reference.apply_gate(block, heads, "sdpa_output", sources))))
    return outputs


def attend_by_loops(
    sink: SinkSettings | None,
    weights: Weights,
    heads: tuple[int, int],
    query: Tensor,
    seen: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """Attention of one query head, and its key head, over the keys and values seen; the sink's is one term more."""
    head, key_head = heads
    if sink is None:
        return reference.attend(query, [key for key, _ in seen], [value for _, value in seen])
    numerator, denominator = torch.zeros_like(query), torch.zeros_like(query[0])
    if sink.kind == "learned_key_value":
        seen = [*seen, (weights["key"][key_head], weights["value"][key_head])]
    elif sink.kind == "learned_logit":
        denominator = denominator + torch.exp(weights["logits"][head])
    else:
        denominator = denominator + 1
    for key, value in seen:
        exponential = torch.exp(torch.dot(query, key) / len(query) ** 0.5)
        numerator, denominator = numerator + exponential * value, denominator + exponential
    return numerator / denominator


def swiglu(weights: Weights, x: Tensor) -> Tensor:
    """down(silu(gate x) * up x)."""
    opened = reference.silu(weights["gate_proj.weight"] @ x)
    return weights["down_proj.weight"] @ (opened * (weights["up_proj.weight"] @ x))


def mixture_by_loops(settings: MixtureSettings, weights: Weights, x: Tensor) -> Tensor:
    """sum over the k chosen experts of weight * expert(x), and the shared expert."""
    logits = [row @ x for row in weights["gate.weight"]]
    if settings.router == "softmax":
        exponentials = [torch.exp(logit) for logit in logits]
        scores = [one / torch.stack(exponentials).sum() for one in exponentials]
    else:
        scores = [1 / (1 + torch.exp(-logit)) for logit in logits]
    best = best_experts(settings, scores, weights.get("selection_bias"))
    total = torch.stack([scores[e] for e in best]).sum() if settings.renormalize else 1.0
    output = torch.zeros_like(x)
    for e in best:
        gate_up, down = weights["experts.gate_up_proj"][e], weights["experts.down_proj"][e]
        expert = {
            "gate_proj.weight": gate_up[: settings.expert_width],
            "up_proj.weight": gate_up[settings.expert_width :],
        }
        weight = settings.routed_scale * scores[e] / total
        output = output + weight * swiglu({**expert, "down_proj.weight": down}, x)
    if settings.shared_width is not None:
        shared = swiglu(under(weights, "shared_expert."), x)
        if settings.shared_gate:
            shared = shared * reference.sigmoid(weights["shared_expert_gate.weight"] @ x)
        output = output + shared
    return output


def best_experts(settings: MixtureSettings, scores: Sequence[Tensor], bias: Tensor | None) -> list[int]:
    """The k experts with the largest score, plus bias where there is one."""
    order = [score.item() if bias is None else (score + bias[e]).item() for e, score in enumerate(scores)]
    return sorted(range(settings.num_experts), key=lambda e: -order[e])[: settings.experts_per_token]
