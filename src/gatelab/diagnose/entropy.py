"""Entropy: of each query's attention, without a T x T map, and of gate scores."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelab.diagnose.attention import attend, logit_blocks, widened
from gatelab.diagnose.calls import AttentionCall


@torch.no_grad()
def attention_entropy(call: AttentionCall) -> Float[Tensor, "B H T"]:
    """-sum_j A_ij log A_ij of every query in nats, where a learned sink is one key more.

    With the logits l it is LSE_i - sum_j A_ij l_ij, and sum_j A_ij (scale q_i . k_j) = scale q_i . (sum_j A_ij k_j):
    one pass of attention with the keys for values, in float32 at least and O(T) memory. A softcap bends the logits, so
    they are summed block by block. Without meaning where a query sees no key.
    """
    query, key = widened(call.query), widened(call.key)
    if call.softcap is None:
        mean_key, lse = attend(query, key, key, scale=call.scale, visibility=call.visibility)
        mean_logit = torch.linalg.vecdot(query, mean_key).transpose(1, 2) * call.scale
    else:
        mean_logit, lse = _softcapped(call)
    if call.learned_sinks is None:
        return lse - mean_logit
    sinks = call.learned_sinks.to(lse.dtype)
    joined = torch.logaddexp(lse, sinks)
    return joined - (lse - joined).exp() * mean_logit - (sinks - joined).exp() * sinks


def _softcapped(call: AttentionCall) -> tuple[Float[Tensor, "B H T"], Float[Tensor, "B H T"]]:
    """Each query's mean logit under its attention to the keys alone, and their log-sum-exp."""
    mean_logit, lse = torch.zeros_like(call.lse), torch.zeros_like(call.lse)
    # Low enough to weigh nothing, and finite, so that weight times logit is 0.
    lowest = torch.finfo(lse.dtype).min / 4
    for block in logit_blocks(call.query, call.key, call.scale, call.visibility, call.softcap, hidden=lowest):
        place = block.sample, block.heads, block.rows
        lse[place] = block.logits.logsumexp(-1)
        mean_logit[place] = torch.linalg.vecdot(block.logits.softmax(-1), block.logits)
    return mean_logit, lse


def binary_entropy(scores: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """-s log s - (1 - s) log(1 - s) in nats, of scores in [0, 1]: log 2 = 0.69 at 0.5, 0 for a gate that is shut or
    open."""
    return torch.special.entr(scores) + torch.special.entr(1 - scores)


def histogram_entropy(counts: Int[Tensor, "*N bins"]) -> Float[Tensor, "*N"]:
    """-sum_b p_b log p_b in nats, float64, of the shares p of counts: 0 where all are in one bin, log(bins) where they
    are spread evenly."""
    shares = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.special.entr(shares).sum(-1)
