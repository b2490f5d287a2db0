"""Attention blocks with random weights for the tests of gates, and the same blocks for the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from gatelab.gates.reference import Block, attend_and_project, attention_block, prepare_token
from gatelab.gates.spec import AttentionShape, GateSpec, OutputControl
from gatelab.model.attention import GroupedQueryAttention
from gatelab.model.rope import Rotation, rotation_at
from gatelab.model.settings import ModelSettings, RopeSettings

B, T = 3, 17
SHAPE = AttentionShape(width=40, num_heads=6, num_kv_heads=2, head_size=8)  # 6 heads of 8 make 48, not 40
ONE_WIDTH = AttentionShape(width=48, num_heads=6, num_kv_heads=6, head_size=8)  # hidden, value and output are 48 wide


def block_settings(
    gates: tuple[GateSpec, ...] = (),
    control: OutputControl | None = None,
    qk_norm: bool = True,
    rope_fraction: float = 1.0,
    shape: AttentionShape = SHAPE,
    norm_epsilon: float = 1e-6,
    causal: bool = True,
) -> ModelSettings:
    """Settings of a decoder whose attention has these gates."""
    return ModelSettings(
        vocab_size=97,
        num_layers=3,
        feedforward_width=56,
        max_context=T,
        qk_norm=qk_norm,
        causal=causal,
        norm_epsilon=norm_epsilon,
        rope=RopeSettings(fraction=rope_fraction),
        gates=gates,
        control=control,
        **shape.model_dump(exclude={"value_size"}),
    )


def build_attention(settings: ModelSettings, layer: int = 0, seed: int = 0) -> GroupedQueryAttention:
    """One attention block in float64. Equal names get equal weights whatever the gates are.

    The spread of 0.3 lets gate logits reach about 4, so that activations differ by far more than rounding.
    """
    attention = GroupedQueryAttention(settings, layer).double()
    for name, parameter in attention.named_parameters():
        generator = torch.Generator().manual_seed(seed + sum(name.encode()))
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_norm = name in ("q_norm.weight", "k_norm.weight", "control.weight")
        parameter.data = 1 + 0.2 * values if is_norm else 0.3 * values
    return attention


def hidden_states(width: int = SHAPE.width, seed: int = 5) -> Tensor:
    """Random hidden states (B T D) in float64."""
    return torch.randn(B, T, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation_for(settings: ModelSettings, dtype: torch.dtype = torch.float64) -> Rotation:
    """The rotation of positions 0 to T - 1."""
    return rotation_at(torch.arange(T)[None], settings.rope, settings.head_size, dtype)


def run(settings: ModelSettings, attention: GroupedQueryAttention, hidden: Tensor) -> Tensor:
    """The block's output in the dtype of the hidden states."""
    return attention(hidden, rotation_for(settings, hidden.dtype))


def run_reference(settings: ModelSettings, attention: GroupedQueryAttention, hidden: Tensor) -> Tensor:
    """The oracle's output from the very weights of the block."""
    parameters = dict(attention.named_parameters())
    prefixes = [(spec, f"gates.{spec.position}.") for spec in settings.gates_on_layer(attention.layer)]
    block = Block(
        shape=settings.attention_shape,
        weights=parameters,
        gates=[
            (spec, {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)})
            for spec, prefix in prefixes
        ],
        control=settings.control,
        rotary_channels=settings.rope.rotated_channels(settings.head_size),
        rope_theta=settings.rope.base,
        epsilon=settings.norm_epsilon,
    )
    return attention_block(block, hidden) if settings.causal else _attention_both_ways(block, hidden)


def _attention_both_ways(block: Block, hidden: Tensor) -> Tensor:
    """Each token looks at all: the oracle takes the one that asks as the last, and a sum has no order."""
    sequences = []
    for sequence in hidden:
        tokens = [prepare_token(block, x, position) for position, x in enumerate(sequence)]
        asking_last = ([*tokens[:t], *tokens[t + 1 :], tokens[t]] for t in range(len(tokens)))
        sequences.append(torch.stack([attend_and_project(block, order) for order in asking_last]))
    return torch.stack(sequences)
