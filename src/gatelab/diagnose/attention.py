"""Attention without a T x T map: the output with its log-sum-exp, and the mass on single keys from that.

With the logits l_ij = scale q_i . k_j (or c tanh(scale q_i . k_j / c) under a softcap c), LSE_i = log sum_j exp(l_ij)
over the visible keys and A_ij = exp(l_ij - LSE_i). The mass on a few keys then costs O(T), whatever the kernel.
Query head h reads key head h // (H / K).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gatelab.diagnose.calls import Segment, Visibility
from gatelab.diagnose.kernels import Kernel, find_kernel

BLOCK_ENTRIES = 2**20


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@torch.no_grad()
def attend(
    query: Float[Tensor, "B T H C"],
    key: Float[Tensor, "B S K C"],
    value: Float[Tensor, "B S K Cv"],
    *,
    scale: float,
    visibility: Visibility,
    softcap: float | None = None,
    learned_sinks: Float[Tensor, "#B H #T"] | None = None,
    sink_value: Float[Tensor, "K Cv"] | None = None,
) -> tuple[Float[Tensor, "B T H Cv"], Float[Tensor, "B H T"]]:
    """Softmax attention and its log-sum-exp, in float32 at least; no gradient.

    A fused kernel does it where the visibility is made of plain pieces (padding and documents are), block-wise plain
    arithmetic elsewhere; both in O(T) memory. A learned sink s joins the sum: LSE' = log(exp(LSE) + exp(s)), and the
    output shrinks by exp(LSE - LSE') and gets exp(s - LSE') times the sink's value, if it has one. A query that sees no
    key has output 0 (with such a value: that one) and LSE -inf (with a sink: s).
    """
    kernel = find_kernel(query.device.type, query.dtype) if key.dtype == value.dtype == query.dtype else None
    segments = visibility.segments() if kernel is not None and softcap is None else None
    if kernel is not None and segments is not None:
        output, lse = _attend_in_segments(kernel, segments, query, key, value, scale, visibility.causal)
    else:
        output, lse = _attend_in_blocks(query, key, value, scale, visibility, softcap)
    if learned_sinks is not None:
        without, sinks = lse, learned_sinks.to(lse.dtype)
        lse = torch.logaddexp(without, sinks)
        joined = output * (without - lse).exp().transpose(1, 2)[..., None]
        if sink_value is not None:
            values = sink_value.to(lse.dtype).repeat_interleave(query.shape[2] // key.shape[2], 0)
            joined = joined + (sinks - lse).exp().transpose(1, 2)[..., None] * values
        output = joined.to(output.dtype)
    return output, lse


def _attend_in_segments(
    kernel: Kernel,
    segments: list[Segment],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Each piece by the kernel, which wants equal sizes of keys and values: the smaller is filled up with zeros."""
    value_size, largest = value.shape[-1], max(query.shape[-1], value.shape[-1])
    query, key, value = (
        F.pad(tensor, (0, largest - tensor.shape[-1])).transpose(1, 2) for tensor in (query, key, value)
    )
    if len(segments) == 1 and segments[0] == Segment(slice(None), 0, query.shape[2]):
        output, lse = kernel(query, key, value, causal, scale)
        return output.transpose(1, 2)[..., :value_size], lse
    output = torch.zeros_like(query[..., :value_size].transpose(1, 2), memory_format=torch.contiguous_format)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=widened(query[:0]).dtype, device=query.device)
    for samples, start, stop in segments:
        queries, keys, values = (tensor[samples, :, start:stop] for tensor in (query, key, value))
        found, found_lse = kernel(queries, keys, values, causal, scale)
        output[samples, start:stop] = found.transpose(1, 2)[..., :value_size]
        lse[samples, :, start:stop] = found_lse
    return output, lse


def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visibility: Visibility, softcap: float | None
) -> tuple[Tensor, Tensor]:
    wide = widened(query[:0]).dtype
    num_samples, num_queries, num_heads, _ = query.shape
    output = query.new_zeros(num_samples, num_queries, num_heads, value.shape[-1])
    lse = torch.empty(num_samples, num_heads, num_queries, dtype=wide, device=query.device)
    for block in logit_blocks(query, key, scale, visibility, softcap):
        sums = block.logits.logsumexp(-1)
        lse[block.sample, block.heads, block.rows] = sums
        sums = sums.masked_fill(sums == -torch.inf, torch.inf)
        weights = block.logits.sub_(sums[..., None]).exp_()
        found = weights @ value[block.sample, block.keys, block.key_head].to(wide)
        output[block.sample, block.rows, block.heads] = found.transpose(0, 1).to(output.dtype)
    return output, lse


class LogitBlock(NamedTuple):
    """Logits of some queries of one sample and of the query heads that share one key head."""

    sample: int
    key_head: int
    heads: slice
    rows: slice
    keys: slice
    logits: Float[Tensor, "G rows keys"]


def logit_blocks(
    query: Float[Tensor, "B T H C"],
    key: Float[Tensor, "B S K C"],
    scale: float,
    visibility: Visibility,
    softcap: float | None = None,
    hidden: float = -torch.inf,
) -> Iterator[LogitBlock]:
    """All visible logits in blocks of about a million entries, in float32 at least; ``hidden`` where none is visible.

    Keys that no query of a block sees are left out of it. A block may be overwritten by who gets it.
    """
    num_samples, num_queries, num_heads, _ = query.shape
    num_key_heads = key.shape[2]
    group = num_heads // num_key_heads
    num_rows = max(1, min(num_queries, BLOCK_ENTRIES // (group * key.shape[1])))
    wide = widened(query[:0]).dtype
    for start in range(0, num_queries, num_rows):
        rows = slice(start, min(start + num_rows, num_queries))
        keys = slice(*visibility.key_range(start, rows.stop))
        first, is_hidden = _hidden_part(visibility, rows, keys, query.device)
        for sample in range(num_samples):
            sample_hidden = None if is_hidden is None else is_hidden[sample if len(is_hidden) > 1 else 0]
            for key_head in range(num_key_heads):
                heads = slice(key_head * group, (key_head + 1) * group)
                queries = query[sample, rows, heads].to(wide).transpose(0, 1).reshape(-1, query.shape[-1])
                logits = (queries @ key[sample, keys, key_head].to(wide).T).mul_(scale)
                logits = logits.view(group, rows.stop - start, -1)
                if softcap is not None:
                    logits = logits.div_(softcap).tanh_().mul_(softcap)
                if sample_hidden is not None:
                    logits[..., first:].masked_fill_(sample_hidden, hidden)
                yield LogitBlock(sample, key_head, heads, rows, keys, logits)


def _hidden_part(
    visibility: Visibility, rows: slice, keys: slice, device: torch.device
) -> tuple[int, Bool[Tensor, "#B 1 rows hidden_keys"] | None]:
    """The part of a block in which some key may be hidden: its first key, and what is hidden from there on."""
    if visibility.is_plain:
        if not visibility.causal:
            return 0, None
        first = rows.start
        keys_from_there = torch.arange(first, keys.stop, device=device)
        return first, (keys_from_there > keys_from_there[: rows.stop - rows.start, None])[None, None]
    return 0, ~visibility.rows(rows.start, rows.stop, device)[..., keys]


def key_mass(
    query: Float[Tensor, "B T H C"],
    key: Float[Tensor, "B S K C"],
    lse: Float[Tensor, "B H T"],
    scale: float,
    position: Int[Tensor, "#B #T"],
    softcap: float | None = None,
) -> Float[Tensor, "B H T"]:
    """A_ij of every query i for the key j at its ``position``; without meaning where the query does not see that key.

    Positions beyond the last key are read as the last.
    """
    position = position.clamp(max=key.shape[1] - 1).expand(len(key), -1)
    keys = key.gather(1, position[:, :, None, None].expand(-1, -1, *key.shape[2:])).to(lse.dtype)
    queries = query.to(lse.dtype).unflatten(2, (key.shape[2], -1))
    logits = torch.linalg.vecdot(queries, keys[:, :, :, None]).permute(0, 2, 3, 1).flatten(1, 2) * scale
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    return (logits - lse).exp()
