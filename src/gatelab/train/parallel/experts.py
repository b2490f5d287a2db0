"""Mixtures whose experts live on different ranks.

Every rank computes its own experts for the tokens of all ranks of its group, weighted, and the results are summed: an
all-gather and a reduce-scatter of whole hidden states in place of an all-to-all of the routed ones. Tensor ranks have
the same tokens and need neither.
"""

from __future__ import annotations

import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from gatelab.model.moe import Experts, weighted_sum_of_experts
from gatelab.train.parallel.collectives import enter, join, leave, share_out


def share_experts_of_own_tokens(
    experts: Experts,
    tokens: Float[Tensor, "N D"],
    weights: Float[Tensor, "N k"],
    chosen: Int[Tensor, "N k"],
    *,
    num_experts: int,
    group: dist.ProcessGroup,
) -> Float[Tensor, "N D"]:
    """The mixture's output where each rank has tokens of its own, equally many."""
    tokens, weights, chosen = (join(tensor, 0, group) for tensor in (tokens, weights, chosen))
    part = weighted_sum_of_experts(experts, tokens, weights, chosen, _own(num_experts, group), num_experts)
    return share_out(part, 0, group)


def share_experts_of_tokens_of_all(
    experts: Experts,
    tokens: Float[Tensor, "N D"],
    weights: Float[Tensor, "N k"],
    chosen: Int[Tensor, "N k"],
    *,
    num_experts: int,
    group: dist.ProcessGroup,
) -> Float[Tensor, "N D"]:
    """The mixture's output where all ranks have the same tokens."""
    tokens, weights = enter(tokens, group), enter(weights, group)
    part = weighted_sum_of_experts(experts, tokens, weights, chosen, _own(num_experts, group), num_experts)
    return leave(part, group)


def _own(num_experts: int, group: dist.ProcessGroup) -> range:
    share = num_experts // group.size()
    return range(group.rank() * share, (group.rank() + 1) * share)
