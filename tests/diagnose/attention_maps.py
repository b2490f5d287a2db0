"""Full attention maps in float64, entry by entry: what the measurements of the house never build."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def naive_map(query: Tensor, key: Tensor, scale: float, visible: Tensor) -> Tensor:
    """Softmax weights (B H T S) of queries (B T H C) over keys (B S K C); ``visible`` is (T S) or (B T S)."""
    B, T, H, _ = query.shape
    S, K = key.shape[1:3]
    visible = visible.expand(B, T, S)
    weights = torch.zeros(B, H, T, S, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                logits = {
                    s: scale * torch.dot(query[b, t, h].double(), key[b, s, h // (H // K)].double()).item()
                    for s in range(S)
                    if visible[b, t, s]
                }
                total = sum(math.exp(logit) for logit in logits.values())
                for s, logit in logits.items():
                    weights[b, h, t, s] = math.exp(logit) / total
    return weights


def causal(num_queries: int, num_keys: int) -> Tensor:
    """The last queries of so many keys see their own key and those before it."""
    return torch.ones(num_queries, num_keys).tril(num_keys - num_queries).bool()


def random_tensors(B: int, T: int, S: int, H: int, K: int, C: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries and keys whose logits are far from flat."""
    generator = torch.Generator().manual_seed(7)
    query = 1.5 * torch.randn(B, T, H, C, generator=generator, dtype=torch.float64)
    key = 1.5 * torch.randn(B, S, K, C, generator=generator, dtype=torch.float64)
    return query.to(dtype), key.to(dtype)
