"""Latent attention in float64 with loops over sequences, tokens and heads, one vector at a time.

Written from the equations of DeepSeek-V2 (arXiv 2405.04434, section 2.1.2); it shares nothing with the module but the
names of the weights. Gates, rotation, softmax and norms are those of :mod:`gatelab.gates.reference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gatelab.gates import reference
from gatelab.gates.reference import Block, Heads, Sources
from gatelab.model.settings import LatentSettings, ModelSettings


def latent_attention_by_loops(
    settings: ModelSettings, weights: Mapping[str, Tensor], hidden: Tensor, rotates: bool = True
) -> Tensor:
    """What the layer adds to the residual stream (B T D); all layers are alike."""
    return torch.stack([torch.stack(_sequence(settings, weights, list(x), rotates)) for x in hidden])


def _sequence(
    settings: ModelSettings, weights: Mapping[str, Tensor], hidden: Sequence[Tensor], rotates: bool
) -> list[Tensor]:
    latent = settings.latent
    assert latent is not None
    block = Block(
        settings.attention_shape,
        weights,
        gates=[
            (spec, {name.removeprefix(start): one for name, one in weights.items() if name.startswith(start)})
            for spec in settings.gates
            for start in [f"gates.{spec.position}."]
        ],
        control=settings.control,
        epsilon=settings.norm_epsilon,
    )
    queries: list[Heads] = []
    keys: list[Heads] = []
    values: list[Heads] = []
    sources: list[Sources] = []
    for t, x in enumerate(hidden):
        down = weights["kv_a_proj_with_mqa.weight"] @ x
        content = _norm(latent, weights["kv_a_layernorm.weight"], down[: latent.key_value_rank])
        shared = down[latent.key_value_rank :]
        new_keys, new_values = [], []
        for rows in _heads(settings, weights["kv_b_proj.weight"]):
            new_keys.append(torch.cat([rows[: latent.unrotated_size] @ content, shared]))
            new_values.append(rows[latent.unrotated_size :] @ content)
        sources.append({"hidden": x, "value": torch.cat(new_values)})
        position = t if rotates else 0
        queries.append(_turn(block, latent, _queries(settings, weights, x), "query", position, sources[t]))
        keys.append(_turn(block, latent, new_keys, "key", position, sources[t]))
        values.append(reference.apply_gate(block, new_values, "value", sources[t]))
    outputs = []
    for t, own in enumerate(sources):
        seen = range(t + 1 if settings.causal else len(hidden))
        heads = [
            reference.attend(queries[t][h], [keys[s][h] for s in seen], [values[s][h] for s in seen])
            for h in range(settings.num_heads)
        ]
        own = {**own, "attention_output": torch.cat(heads)}
        heads = reference.apply_gate(block, reference.apply_control(block, heads), "sdpa_output", own)
        output = weights["o_proj.weight"] @ torch.cat(heads)
        outputs.append(reference.apply_gate(block, [output], "dense_output", own)[0])
    return outputs


def _queries(settings: ModelSettings, weights: Mapping[str, Tensor], x: Tensor) -> Heads:
    latent = settings.latent
    assert latent is not None
    if latent.query_rank is None:
        return [rows @ x for rows in _heads(settings, weights["q_proj.weight"])]
    content = _norm(latent, weights["q_a_layernorm.weight"], weights["q_a_proj.weight"] @ x)
    return [rows @ content for rows in _heads(settings, weights["q_b_proj.weight"])]


def _heads(settings: ModelSettings, weight: Tensor) -> list[Tensor]:
    """The rows of each head, which lie together."""
    size = len(weight) // settings.num_heads
    return [weight[h * size : (h + 1) * size] for h in range(settings.num_heads)]


def _norm(latent: LatentSettings, weight: Tensor, x: Tensor) -> Tensor:
    return reference.rms_norm(x, weight, latent.norm_epsilon)


def _turn(block: Block, latent: LatentSettings, heads: Heads, place: str, position: int, sources: Sources) -> Heads:
    """Gate, rotation of the last channels, gate."""
    heads = reference.apply_gate(block, heads, place, sources, "after_norm")  # type: ignore[arg-type]
    still, size = latent.unrotated_size, latent.rotated_size
    heads = [torch.cat([y[:still], reference.rotate(y[still:], position, size, block.rope_theta)]) for y in heads]
    return reference.apply_gate(block, heads, place, sources, "after_rope")  # type: ignore[arg-type]
