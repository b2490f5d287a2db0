"""What a decoder costs: parameters, floating point operations, bytes. Counted on the module itself, never by hand."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gatelab.gates.gate import Gate, HeadNorm
from gatelab.gates.linear import Linear
from gatelab.model.decoder import Decoder
from gatelab.model.moe import Experts
from gatelab.model.settings import ModelSettings

BYTES_OF_TRAINING_STATE = 16


class ParameterCounts(NamedTuple):
    """Numbers of parameters; a tied head counts once, and a router's selection bias, which is a buffer, not at all.

    ``active``: those that one token meets, which is all but the experts it is not sent to; embedding (with places of
    patches) and head count whole. ``gates`` includes gate-free controls; a sink's parameters are in ``total`` and
    ``active`` alone.
    """

    total: int
    active: int
    embedding: int
    gates: int


def count_parameters(settings: ModelSettings) -> ParameterCounts:
    """Count a decoder built on the meta device, where no memory is taken."""
    decoder = _on_meta(settings)
    total = sum(parameter.numel() for parameter in decoder.parameters())
    return ParameterCounts(
        total=total,
        active=total - _numel(decoder, Experts) + _active_in_experts(decoder),
        embedding=sum(
            parameter.numel()
            for module in (decoder.model.embed_tokens, decoder.lm_head)
            if module is not None
            for parameter in module.parameters()
        ),
        gates=_numel(decoder, Gate) + _numel(decoder, HeadNorm),
    )


def _on_meta(settings: ModelSettings) -> Decoder:
    with torch.device("meta"):
        return Decoder(settings)


def _numel(decoder: Decoder, kind: type[torch.nn.Module]) -> int:
    found = (module for module in decoder.modules() if isinstance(module, kind))
    return sum(parameter.numel() for module in found for parameter in module.parameters())


def _active_in_experts(decoder: Decoder) -> int:
    """Parameters of the k experts of E that one token is sent to, on all layers."""
    mixture = decoder.settings.mixture
    if mixture is None:
        return 0
    return _numel(decoder, Experts) // mixture.num_experts * mixture.experts_per_token


def flops_per_token_forward(settings: ModelSettings, context: int) -> float:
    """Floating point operations of the forward pass for one token of a sequence of ``context`` tokens.

    Two for each weight of a matrix that the token meets (the embedding is a look-up; the head is a matrix), and for
    attention 2 H (C + Cv) for each visible key: half of the square under a causal mask, (context + 1) / 2 keys on
    average, and those within a layer's window; a learned key is one more. Norms, activations, biases, the gates'
    products and the zeros that fill up values to the size of keys are left out.
    """
    decoder = _on_meta(settings)
    matrices = sum(module.weight.numel() for module in decoder.modules() if isinstance(module, Linear))
    matrices += _active_in_experts(decoder)
    if settings.tied_head:
        matrices += settings.vocab_size * settings.width
    if settings.patches is not None:
        matrices += settings.patches.pixels * settings.width
    learned_keys = settings.sink is not None and settings.sink.kind == "learned_key_value"
    head_keys = sum(
        settings.shape_on_layer(layer).num_heads * (_visible_keys(settings, layer, context) + learned_keys)
        for layer in range(settings.num_layers)
    )
    return 2.0 * matrices + 2 * (settings.head_size + settings.value_size) * head_keys


def _visible_keys(settings: ModelSettings, layer: int, context: int) -> float:
    """Keys that a token of a sequence sees on average: sum_i min(i, w) / T for i = 1 .. T if causal, else all."""
    if not settings.causal:
        return float(context)
    window = min(settings.on_layer(layer).window or context, context)
    return window - window * (window - 1) / (2 * context)


def flops_per_token_training(settings: ModelSettings, context: int, recompute: bool = False) -> float:
    """Forward and backward, three times the forward pass; with recomputed layers their forward pass once more."""
    forward = flops_per_token_forward(settings, context)
    head = 2.0 * settings.vocab_size * settings.width
    return 3 * forward + (forward - head if recompute else 0.0)


def training_state_bytes(settings: ModelSettings) -> int:
    """Bytes of float32 weights and gradients and AdamW's two moments: 16 for each parameter, activations apart."""
    return BYTES_OF_TRAINING_STATE * count_parameters(settings).total


def describe_cost(settings: ModelSettings, context: int, recompute: bool = False) -> dict[str, int | float]:
    """The figures of this module by name; ``flops_per_token`` is that of training."""
    counts = count_parameters(settings)
    return {
        "parameters": counts.total,
        "active_parameters": counts.active,
        "gate_parameters": counts.gates,
        "flops_per_token": flops_per_token_training(settings, context, recompute),
        "flops_per_token_forward": flops_per_token_forward(settings, context),
        "training_state_bytes": training_state_bytes(settings),
    }
