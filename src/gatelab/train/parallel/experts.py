"""Mixtures whose experts live on different ranks.

Every rank computes its own experts for the tokens of all ranks of its group, weighted, and the results are summed: an
all-gather and a reduce-scatter of whole hidden states in place of an all-to-all of the routed ones. Tensor ranks have
the same tokens and need neither.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from gatelab.model.moe import Experts
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
    return share_out(own_experts(experts, tokens, weights, chosen, _own(num_experts, group)), 0, group)


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
    part = own_experts(experts, enter(tokens, group), enter(weights, group), chosen, _own(num_experts, group))
    return leave(part, group)


def own_experts(
    experts: Experts,
    tokens: Float[Tensor, "N D"],
    weights: Float[Tensor, "N k"],
    chosen: Int[Tensor, "N k"],
    own: range,
) -> Float[Tensor, "N D"]:
    """The weighted sum of the experts ``own``, which this rank has; 0 for tokens that chose none of them."""
    sorted_experts, order = chosen.flatten().sort(stable=True)
    bounds = torch.searchsorted(sorted_experts, torch.arange(own.start, own.stop + 1, device=tokens.device))
    routes = order[bounds[0] : bounds[-1]]
    rows = routes // chosen.shape[1]
    outputs = experts(tokens[rows], (bounds[1:] - bounds[0]).to(torch.int32))
    return torch.zeros_like(tokens).index_add(0, rows, outputs * weights.flatten()[routes, None])


def _own(num_experts: int, group: dist.ProcessGroup) -> range:
    share = num_experts // group.size()
    return range(group.rank() * share, (group.rank() + 1) * share)
