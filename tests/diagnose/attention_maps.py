"""Full attention maps in float64, entry by entry: what the measurements of the house never build."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from gatelab.diagnose.attention import attend
from gatelab.diagnose.calls import AttentionCall, Visibility


def is_visible(sight: Visibility, sample: int, query: int, key: int) -> bool:
    """Whether a query, counted among the queries, sees a key, by the words of :class:`Visibility`."""
    place = sight.num_keys - sight.num_queries + query
    if sight.causal and key > place:
        return False
    if sight.window is not None and place - key >= sight.window:
        return False
    if sight.real is not None and not sight.real[sample, key]:
        return False
    return sight.documents is None or bool(sight.documents[sample, key] == sight.documents[sample, place])


def naive_visible(sight: Visibility, num_samples: int) -> Tensor:
    """All of it, (B T S)."""
    return torch.tensor(
        [
            [[is_visible(sight, b, t, s) for s in range(sight.num_keys)] for t in range(sight.num_queries)]
            for b in range(num_samples)
        ]
    )


def naive_map(
    query: Tensor,
    key: Tensor,
    scale: float,
    visible: Tensor,
    softcap: float | None = None,
    learned_sinks: Tensor | None = None,
) -> Tensor:
    """Softmax weights (B H T S) of queries (B T H C) over keys (B S K C); ``visible`` is (T S) or (B T S)."""
    logits = naive_logits(query, key, scale, softcap)
    weights = torch.zeros_like(logits)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, logits.shape[:3])).tolist():
        seen = [s for s in range(logits.shape[3]) if visible.expand(len(query), -1, -1)[b, t, s]]
        total = sum(math.exp(logits[b, h, t, s]) for s in seen)
        if learned_sinks is not None:
            total += math.exp(learned_sinks.expand(len(query), -1, query.shape[1])[b, h, t])
        for s in seen:
            weights[b, h, t, s] = math.exp(logits[b, h, t, s]) / total
    return weights


def naive_logits(query: Tensor, key: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """All logits (B H T S), seen or not."""
    B, T, H, _ = query.shape
    S, K = key.shape[1:3]
    logits = torch.zeros(B, H, T, S, dtype=torch.float64)
    for b, h, t, s in torch.cartesian_prod(*map(torch.arange, (B, H, T, S))).tolist():
        logit = scale * torch.dot(query[b, t, h].double(), key[b, s, h // (H // K)].double()).item()
        logits[b, h, t, s] = logit if softcap is None else softcap * math.tanh(logit / softcap)
    return logits


def causal(num_queries: int, num_keys: int) -> Tensor:
    """The last queries of so many keys see their own key and those before it."""
    return torch.ones(num_queries, num_keys).tril(num_keys - num_queries).bool()


def random_tensors(B: int, T: int, S: int, H: int, K: int, C: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries and keys whose logits are far from flat."""
    generator = torch.Generator().manual_seed(7)
    query = 1.5 * torch.randn(B, T, H, C, generator=generator, dtype=torch.float64)
    key = 1.5 * torch.randn(B, S, K, C, generator=generator, dtype=torch.float64)
    return query.to(dtype), key.to(dtype)


B, T, H, K, C, Cv = 3, 17, 6, 2, 8, 10
SCALE = 0.4


class Case(NamedTuple):
    """One way of seeing, and what else an attention layer may have."""

    sight: Visibility
    softcap: float | None = None
    has_sinks: bool = False


def padded(*numbers: int, left: bool = True, num_keys: int = T) -> Tensor:
    """Which keys are real when so many of each row are padding."""
    keys = torch.arange(num_keys)
    return torch.stack([keys >= number if left else keys < num_keys - number for number in numbers])


DOCUMENTS = torch.tensor([[0] * 4 + [1] * 6 + [2] * 7, [5] * 17, [3] * 1 + [9] * 13 + [4] * 3])
ALTERNATING = torch.tensor([[0, 1] * 8 + [0], [0] * 17, [2, 2, 1] * 5 + [1, 1]])
CASES = {
    "plain": Case(Visibility(T, T)),
    "full": Case(Visibility(T, T, causal=False)),
    "earlier_keys": Case(Visibility(5, T)),
    "window": Case(Visibility(T, T, window=4)),
    "wide_window": Case(Visibility(T, T, window=40)),
    "left_padding": Case(Visibility(T, T, real=padded(0, 3, 7))),
    "right_padding": Case(Visibility(T, T, real=padded(2, 0, 9, left=False))),
    "a_row_of_padding": Case(Visibility(T, T, real=padded(1, 17, 2))),
    "documents": Case(Visibility(T, T, documents=DOCUMENTS)),
    "documents_full": Case(Visibility(T, T, causal=False, documents=DOCUMENTS)),
    "documents_alternating": Case(Visibility(T, T, documents=ALTERNATING)),
    "everything": Case(Visibility(T, T, window=5, real=padded(0, 3, 1), documents=DOCUMENTS), 3.0, True),
    "padded_documents": Case(Visibility(T, T, real=padded(1, 2, 5), documents=DOCUMENTS)),
    "softcap": Case(Visibility(T, T), softcap=2.0),
    "learned_sinks": Case(Visibility(T, T), has_sinks=True),
    "padding_and_sinks": Case(Visibility(T, T, real=padded(4, 0, 2)), has_sinks=True),
    "earlier_keys_window_sinks": Case(Visibility(7, T, window=6, real=padded(12, 0, 2)), has_sinks=True),
}


class Truth(NamedTuple):
    """A call and its full maps; ``counted`` (B T) marks real queries that see something."""

    call: AttentionCall
    visible: Tensor
    weights: Tensor
    logits: Tensor
    counted: Tensor


@functools.cache
def _maps(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Who sees whom, logits and weights of a case."""
    sight, softcap, _ = CASES[name]
    query, key, _, sinks = _tensors(name, dtype)
    visible = naive_visible(sight, B)
    weights = naive_map(query, key, SCALE, visible, softcap, sinks)
    return visible, naive_logits(query, key, SCALE, softcap), weights


def _tensors(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and learned sinks of a case."""
    query, key = random_tensors(B, CASES[name].sight.num_queries, T, H, K, C, dtype)
    generator = torch.Generator().manual_seed(11)
    value = torch.randn(B, T, K, Cv, generator=generator, dtype=torch.float64).to(dtype)
    sinks = torch.randn(1, H, 1, generator=generator, dtype=torch.float64).to(dtype)
    return query, key, value, sinks if CASES[name].has_sinks else None


def make_truth(name: str, dtype: torch.dtype, poison: float | None = None) -> Truth:
    """An attention call of a case with everything that it may have; ``poison`` stands in for padding."""
    case = CASES[name]
    sight = case.sight
    query, key, value, sinks = _tensors(name, dtype)
    generator = torch.Generator().manual_seed(12)
    visible, logits, weights = _maps(name, dtype)
    real = torch.ones(B, sight.num_queries).bool() if sight.real is None else sight.real[:, T - sight.num_queries :]
    if poison is not None:
        query = query.masked_fill(~real[:, :, None, None], poison)
    output, lse = attend(
        query, key, value, scale=SCALE, visibility=sight, softcap=case.softcap, learned_sinks=sinks
    )  # fmt: skip
    scores = torch.rand(B, sight.num_queries, H, Cv, generator=generator, dtype=torch.float64).to(dtype)
    output_weight = torch.randn(37, H * Cv, generator=generator, dtype=torch.float64).to(dtype)
    call = AttentionCall(
        layer=1,
        query=query,
        key=key,
        value=value,
        output=output,
        lse=lse,
        scale=SCALE,
        visibility=sight,
        softcap=case.softcap,
        learned_sinks=sinks,
        scores={"sdpa_output": scores},
        gated_output=output * scores,
        output_weight=output_weight,
        value_weight=torch.randn(K * Cv, 37, generator=generator, dtype=torch.float64).to(dtype),
    )
    return Truth(call, visible, weights, logits, real & visible.any(-1))
