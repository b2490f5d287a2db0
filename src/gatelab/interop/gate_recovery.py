"""The gate of a foreign model without its code: what the output projection reads, over what attention returned."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gatelab.gates.gate import ACTIVATIONS
from gatelab.gates.spec import Activation

RATIO_TOLERANCE_IN_EPSILONS = 16


class KnownGate(NamedTuple):
    """A family's gate: the projection with its logits, its activation, and whether query rows stand before them.

    With ``after_query`` the projection's rows are, head by head, C of the query and C of the gate.
    """

    projection: str
    activation: Activation = "sigmoid"
    after_query: bool = False


QWEN_GATE = KnownGate("q_proj", after_query=True)
KNOWN_GATES = {
    "qwen3_next": QWEN_GATE,
    "qwen3_5_text": QWEN_GATE,
    "qwen3_5_moe_text": QWEN_GATE,
    "afmoe": KnownGate("gate_proj"),
    "laguna": KnownGate("g_proj", "softplus"),
    "lfm3": KnownGate("g_proj"),
    "step3p5": KnownGate("g_proj"),
}  # by transformers' model_type


def read_gate(
    gate: KnownGate, projected: Float[Tensor, "B T R"], output: Float[Tensor, "B T H C"]
) -> Float[Tensor, "B T H C1"]:
    """The scores from a known projection's output; one a head (C1 = 1) where it has no more rows than that."""
    logits = projected.unflatten(-1, (output.shape[2], -1))
    if gate.after_query:
        logits = logits.chunk(2, dim=-1)[1]
    return ACTIVATIONS[gate.activation](logits.float()).to(projected.dtype)


def recover_gate(output: Float[Tensor, "B T H C"], gated: Float[Tensor, "B T H C"]) -> Float[Tensor, "B T H C1"] | None:
    """The scores ``gated / output``: one a head (C1 = 1) where all its channels are equal, ``None`` where all are 1.

    As exact as two roundings of the dtype. An output that is 0 tells nothing, such as that of a padding query: it
    takes the mean of its head's other channels, or 1 where there are none.
    """
    wide = torch.promote_types(output.dtype, torch.float32)
    limits = torch.finfo(output.dtype)
    known = output.abs() > limits.tiny / limits.eps
    ratio = torch.where(known, gated.to(wide) / torch.where(known, output, 1).to(wide), 0)
    num_known = known.sum(-1, keepdim=True)
    mean = torch.where(num_known > 0, ratio.sum(-1, keepdim=True) / num_known.clamp(min=1), 1)
    ratio = torch.where(known, ratio, mean)
    tolerance = RATIO_TOLERANCE_IN_EPSILONS * limits.eps
    if bool(((ratio - 1).abs() <= tolerance).all()):
        return None
    if bool(((ratio - mean).abs() <= tolerance * mean.abs()).all()):
        return mean
    return ratio
