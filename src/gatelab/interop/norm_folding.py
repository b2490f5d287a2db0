"""Folding a norm's weight into the projections that read it, the gates' included, as quantisation methods do first.

Symbols: a norm gives n(x) * w over D channels, and a projection W (O D) reads it; W' = W diag(w) reads n(x) instead
(SmoothQuant, Xiao et al. 2211.10438, folds its scales the same way).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gatelab.gates.gate import Gate
from gatelab.model.attention import GatedAttention
from gatelab.model.decoder import Decoder, DecoderLayer
from gatelab.model.feedforward import FeedForward
from gatelab.model.moe import MixtureOfExperts
from gatelab.model.norm import RMSNorm


@torch.no_grad()
def fold_norms(decoder: Decoder) -> None:
    """Move the weights of all norms that feed projections into these, in place; the function stays the same.

    These are each layer's two input norms and, with a head of its own, the final norm. A tied head, norms of queries,
    keys or latents and sandwich norms keep theirs: what follows them is no projection of their own.
    """
    for layer in decoder.model.layers:
        assert isinstance(layer, DecoderLayer)
        _fold(layer.input_layernorm, _readers_of_attention_input(layer.self_attn))
        _fold(layer.post_attention_layernorm, _readers_of_feedforward_input(layer.mlp))
    if decoder.lm_head is not None:
        _fold(decoder.model.norm, [decoder.lm_head.weight])


def _fold(norm: RMSNorm, weights: Iterator[Tensor] | list[Tensor]) -> None:
    """``weights`` read the norm's channels, or the first of them, in their last dimension."""
    factor = 1 + norm.weight if norm.centred else norm.weight
    for weight in weights:
        weight.mul_(factor[: weight.shape[-1]].to(weight.dtype))
    norm.weight.fill_(0.0 if norm.centred else 1.0)


def _readers_of_attention_input(attention: GatedAttention) -> Iterator[Tensor]:
    yield from (projection.weight for projection in attention.input_projections())
    for gate in attention.gates.values():
        assert isinstance(gate, Gate)
        if gate.spec.source in ("hidden", "prefix"):
            first = gate.projection if gate.spec.rank is None else gate.projection.get_submodule("down")
            assert isinstance(first, nn.Linear)
            yield first.weight


def _readers_of_feedforward_input(mlp: nn.Module) -> Iterator[Tensor]:
    if isinstance(mlp, FeedForward):
        yield from (mlp.gate_proj.weight, mlp.up_proj.weight)
        return
    assert isinstance(mlp, MixtureOfExperts)
    yield mlp.gate.weight
    yield mlp.experts.gate_up_proj
    if mlp.shared_expert is not None:
        yield from _readers_of_feedforward_input(mlp.shared_expert)
    if mlp.shared_expert_gate is not None:
        yield mlp.shared_expert_gate.weight
