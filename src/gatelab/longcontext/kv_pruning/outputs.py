"""Presses that weigh a key by what its value does to the layer's output, with the gate inside or left out.

The gate stands after attention, so the part of query i's output that comes from key j is A_ij (g_i * v_j) W_O. The sums
run over blocks of logits: memory is O(T x block), not O(T x T).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from gatelab.diagnose.attention import LogitBlock, logit_blocks, widened
from gatelab.diagnose.calls import AttentionCall
from gatelab.longcontext.kv_pruning.observed import (
    OUTPUT_GATE,
    Observed,
    accumulated,
    group_mean,
    head_gate,
    require_output_weight,
)

_PAIR_ENTRIES = 2**22  # of one temporary


class AttentionValue:
    """sum_i A_ij ||v_j W_O||: accumulated attention times the norm of what the value writes, without any gate.

    The ungated form of :class:`GatedAttention`.
    """

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        """Accumulated over all queries so far, the mean over the group's heads."""
        return _output_shares(observed, gate=None, press="attention_value")


class GatedAttention:
    """sum_i A_ij ||(g_i * v_j) W_O||: the length of all that a key adds to gated outputs.

    An elementwise gate stands inside the norm, channel for channel. With constant gates the order of the keys of a
    query head is that of :class:`AttentionValue`.
    """

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        """Accumulated over all queries so far, the mean over the group's heads."""
        gate = head_gate(observed.call, "gated_attention")
        return _output_shares(observed, gate, press="gated_attention")


class Oracle:
    """sum_i ||change of query i's gated, projected output when key j alone is dropped||, over this call's queries.

    Without key j a head's output o_i becomes (o_i - A_ij v_j) / (1 - A_ij), so it changes by A_ij / (1 - A_ij)
    (o_i - v_j); the changes of the group's heads add up before the norm is taken. A query that sees no other key is
    left out, and A_ij is read as at most 1 - sqrt(machine epsilon). Time is that of T S D numbers for each query head:
    for short texts.
    """

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        """The summed error of dropping each key; exact for one key of one layer, not for many together."""
        call = observed.call
        weight = require_output_weight(call, "oracle")
        gate = _multiplier(call).expand(*call.query.shape[:3], call.value.shape[-1])
        sees_others = call.visibility.num_visible(call.query.device) > 1
        totals = _zeros(call, call.key.shape[2])
        for block, attention in _attention_blocks(call):
            sample, rows = block.sample, block.rows
            share = attention.clamp(max=1 - torch.finfo(attention.dtype).eps ** 0.5)
            factor = share / (1 - share) * sees_others[sample % len(sees_others), rows, None]
            values = widened(call.value[sample, block.keys, block.key_head])
            num_rows = max(1, _PAIR_ENTRIES // (len(values) * weight.shape[1]))
            for start in range(0, rows.stop - rows.start, num_rows):
                part = slice(start, start + num_rows)
                queries = slice(rows.start + start, min(rows.start + start + num_rows, rows.stop))
                change = torch.zeros(1, dtype=share.dtype, device=share.device)
                for index, head in enumerate(range(block.heads.start, block.heads.stop)):
                    output, scores = widened(call.output[sample, queries, head]), gate[sample, queries, head]
                    moved = scores[:, None] * (output[:, None] - values)
                    change = change + factor[index, part, :, None] * (moved @ weight[head].T)
                totals[sample, block.key_head, block.keys] += change.norm(dim=-1).sum(0)
        return totals


def _output_shares(observed: Observed, gate: Tensor | None, press: str) -> Float[Tensor, "B K S"]:
    """sum_i A_ij ||(g_i * v_j) W_O||, or without a gate sum_i A_ij ||v_j W_O||, added to earlier sums."""
    call = observed.call
    weight = require_output_weight(call, press)
    products = weight.transpose(1, 2) @ weight
    totals = _zeros(call, call.query.shape[2])
    for block, attention in _attention_blocks(call):
        values = widened(call.value[block.sample, block.keys, block.key_head])
        for index, head in enumerate(range(block.heads.start, block.heads.stop)):
            if gate is None or gate.shape[-1] == 1:
                lengths = (values @ products[head] * values).sum(-1).clamp(min=0).sqrt()
                passed = 1 if gate is None else gate[block.sample, block.rows, head].abs()
                shares = attention[index] * passed * lengths
            else:
                scores = gate[block.sample, block.rows, head]
                shares = attention[index] * _gated_lengths(scores, values, products[head])
            totals[block.sample, head, block.keys] += shares.sum(0)
    return accumulated(observed, group_mean(totals, call))


def _gated_lengths(
    scores: Float[Tensor, "rows Cv"], values: Float[Tensor, "keys Cv"], products: Float[Tensor, "Cv Cv"]
) -> Float[Tensor, "rows keys"]:
    """||(g_i * v_j) W_O|| of all pairs: its square is sum_cd g_ic g_id M_cd v_jc v_jd with M = W_O^T W_O.

    M is symmetric, so each pair of channels is taken once, and one matrix product does all pairs of query and key.
    """
    first, second = torch.triu_indices(*products.shape, device=products.device)
    coefficients = products[first, second] * torch.where(first == second, 1, 2)
    lengths = torch.empty(len(scores), len(values), dtype=values.dtype, device=values.device)
    of_queries = scores[:, first] * scores[:, second] * coefficients
    num_keys = max(1, _PAIR_ENTRIES // len(first))
    for start in range(0, len(values), num_keys):
        some = values[start : start + num_keys]
        lengths[:, start : start + num_keys] = of_queries @ (some[:, first] * some[:, second]).T
    return lengths.clamp_(min=0).sqrt_()


def _attention_blocks(call: AttentionCall) -> Iterator[tuple[LogitBlock, Float[Tensor, "G rows keys"]]]:
    """The attention of real queries, block by block; a query that sees no key attends to none."""
    lse = torch.where(call.visibility.counted(call.query.device)[:, None], call.lse, torch.inf)
    for block in logit_blocks(call.query, call.key, call.scale, call.visibility, call.softcap):
        yield block, (block.logits - lse[block.sample, block.heads, block.rows, None]).exp_()


def _multiplier(call: AttentionCall) -> Float[Tensor, "#B #T #H #Cv"]:
    """What the output is multiplied by: the gate's scores, or 1."""
    if OUTPUT_GATE in call.scores and OUTPUT_GATE not in call.added:
        return widened(call.scores[OUTPUT_GATE])
    return widened(call.query).new_ones(1, 1, 1, 1)


def _zeros(call: AttentionCall, num_heads: int) -> Float[Tensor, "B N S"]:
    return torch.zeros(len(call.query), num_heads, call.key.shape[1], dtype=torch.float64, device=call.query.device)
