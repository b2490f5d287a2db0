"""Attention mass from one log-sum-exp for each query, without a T x T map.

With q_i and k_j of one head, A_ij = exp(scale q_i . k_j - LSE_i), where LSE_i = log sum_j exp(scale q_i . k_j) over
the visible keys. The mass on a few keys then costs O(T), whatever the kernel.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def log_sum_exp(
    query: Float[Tensor, "B T H C"],
    key: Float[Tensor, "B S K C"],
    scale: float,
    visible: Bool[Tensor, "#B 1 T S"] | None = None,
    causal: bool = True,
    chunk: int = 256,
) -> Float[Tensor, "B H T"]:
    """LSE_i of every query over its visible keys, in float32 at least; -inf where a query sees none.

    Without ``visible`` the queries are the last T of the S keys and see what ``causal`` says. Memory is that of
    ``chunk`` rows of one map. Query head h reads key head h // (H / K).
    """
    num_queries, num_keys = query.shape[1], key.shape[1]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    keys = key.to(wide).repeat_interleave(query.shape[2] // key.shape[2], dim=2).permute(0, 2, 3, 1)
    index = torch.arange(num_keys, device=query.device)
    parts = []
    for start in range(0, num_queries, chunk):
        rows = slice(start, min(start + chunk, num_queries))
        logits = query[:, rows].to(wide).transpose(1, 2) @ keys * scale
        if visible is not None:
            logits = logits.masked_fill(~visible[:, :, rows], -torch.inf)
        elif causal:
            last_visible = index[num_keys - num_queries :][rows, None]
            logits = logits.masked_fill(index > last_visible, -torch.inf)
        parts.append(logits.logsumexp(-1))
    return torch.cat(parts, dim=-1)


def key_mass(
    query: Float[Tensor, "B T H C"],
    key: Float[Tensor, "B S K C"],
    lse: Float[Tensor, "B H T"],
    scale: float,
    position: int = 0,
) -> Float[Tensor, "B H T"]:
    """A_ij of every query i for the key at ``position``, which every query is taken to see."""
    one_key = key[:, position].to(lse.dtype).repeat_interleave(query.shape[2] // key.shape[2], dim=1)
    logits = torch.einsum("bthc,bhc->bht", query.to(lse.dtype), one_key) * scale
    return (logits - lse).exp()


def uniform_floor(num_queries: int, skipped: int = 0, causal: bool = True) -> float:
    """First-token attention of uniform attention: the mean of 1 / visible keys over the counted queries.

    H_T / T for causal attention with every query counted; ``skipped`` leaves the first queries out. A measured value
    means something only beside this one.
    """
    if not causal:
        return 1 / num_queries
    counted = range(skipped, num_queries)
    return sum(1 / (query + 1) for query in counted) / len(counted)
