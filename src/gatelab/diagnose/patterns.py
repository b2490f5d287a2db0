"""What needs every logit: one more pass in blocks with the log-sum-exp known, in O(T x block) memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gatelab.diagnose.attention import logit_blocks
from gatelab.diagnose.calls import AttentionCall, Visibility
from gatelab.diagnose.head_means import HeadFigure, HeadMean


@dataclass(frozen=True)
class Pattern:
    """Sums over one pass's maps; only counted queries enter ``columns`` and ``largest``.

    ``columns`` are sum_i A_ij; ``distance`` is sum_j A_ij |i - j| / sum_j A_ij over real keys; ``largest`` is the
    largest visible logit.
    """

    columns: Float[Tensor, "B H S"]
    distance: Float[Tensor, "B H T"]
    largest: Float[Tensor, "H"]


def attention_pattern(call: AttentionCall) -> Pattern:
    """All sums of :class:`Pattern` in one sweep over blocks of logits."""
    sight, lse, device = call.visibility, call.lse, call.query.device
    counted = sight.counted(device).expand(len(lse), -1)
    # A query that does not count gets weight exp(l - inf) = 0 everywhere, whatever its values are.
    shift = torch.where(counted[:, None], lse, torch.inf)
    query = call.query if counted.all() else torch.where(counted[:, :, None, None], call.query, 0)
    columns = torch.zeros(*lse.shape[:2], sight.num_keys, dtype=torch.float64, device=device)
    distance = torch.zeros_like(lse)
    largest = torch.full(lse.shape[:2], -torch.inf, dtype=lse.dtype, device=device)
    lowest = torch.finfo(lse.dtype).min / 4
    for sample, key_head, heads, rows, keys, logits in logit_blocks(
        query, call.key, call.scale, sight, call.softcap, hidden=lowest
    ):
        del key_head
        weights = (logits - shift[sample, heads, rows, None]).exp_()
        columns[sample, heads, keys] += weights.sum(1)
        maxima = torch.where(counted[sample, rows], logits.amax(-1), -torch.inf).amax(-1)
        largest[sample, heads] = largest[sample, heads].maximum(maxima)
        distance[sample, heads, rows] = _mean_distance(weights, sight.past + rows.start, keys, sight.causal)
    return Pattern(columns, distance, largest.amax(0))


def _mean_distance(
    weights: Float[Tensor, "G rows keys"], first_query: int, keys: slice, causal: bool
) -> Float[Tensor, "G rows"]:
    """Weighted mean of |i - j|; of i - j for causal attention, split at the first query so that no digits are lost."""
    back = first_query - torch.arange(keys.start, keys.stop, device=weights.device, dtype=weights.dtype)
    into = torch.arange(weights.shape[1], device=weights.device, dtype=weights.dtype)
    if causal:
        moments = weights @ torch.stack((torch.ones_like(back), back), dim=1)
        return into + moments[..., 1] / moments[..., 0].clamp(min=torch.finfo(weights.dtype).tiny)
    total = weights.sum(-1).clamp(min=torch.finfo(weights.dtype).tiny)
    return torch.linalg.vecdot(weights, (into[:, None] + back).abs()[None]) / total


class PatternTotals:
    """What is added up about one layer's whole maps; :meth:`figures` has the definitions."""

    def __init__(self, delimiters: Mapping[str, frozenset[int]]):
        self.delimiters = delimiters
        self.distance = HeadMean()
        self.columns = torch.zeros(0, 0, dtype=torch.float64)
        self.uniform_columns = torch.zeros(0, dtype=torch.float64)
        self.queries = 0
        self.largest: Float[Tensor, "H"] | None = None
        self.on_delimiter = {name: [torch.zeros(0), 0.0, 0] for name in delimiters}

    def add(self, call: AttentionCall, tokens: Int[Tensor, "B S"] | None) -> None:
        """Add one pass; ``tokens`` are the ids of its keys, without which no delimiter is found."""
        sight, device, pattern = call.visibility, call.query.device, attention_pattern(call)
        counted = sight.counted(device).expand(len(call.query), -1)
        self.distance.add(pattern.distance, counted, sight.uniform_distance(device) if sight.causal else None)
        even = sight.uniform_columns(device).expand(len(call.query), -1).sum(0).cpu()
        self.columns = _sum_padded(self.columns, pattern.columns.sum(0).cpu())
        self.uniform_columns = _sum_padded(self.uniform_columns, even)
        self.queries += int(counted.sum())
        largest = pattern.largest.cpu()
        self.largest = largest if self.largest is None else self.largest.maximum(largest)
        if tokens is not None and tokens.shape[1] == sight.num_keys:
            for name, ids in self.delimiters.items():
                self._add_delimiter(name, torch.isin(tokens, torch.tensor(sorted(ids), device=device)), pattern, sight)

    def _add_delimiter(self, name: str, is_delimiter: Bool[Tensor, "B S"], pattern: Pattern, sight: Visibility) -> None:
        real = is_delimiter if sight.real is None else is_delimiter & sight.real
        num_seen = replace(sight, real=real).num_visible(real.device)
        counted = sight.counted(real.device) & (num_seen > 0)
        even = torch.where(counted, num_seen / sight.num_visible(real.device).clamp(min=1).double(), 0.0)
        mass = (pattern.columns * real[:, None]).sum((0, 2)).cpu()
        total, uniform, count = self.on_delimiter[name]
        self.on_delimiter[name] = [
            mass if not count else total + mass, uniform + float(even.sum()), count + int(counted.sum())
        ]  # fmt: skip

    def figures(self) -> list[HeadFigure]:
        """By head:

        - ``attention_distance``: mean over queries of sum_j A_ij |i - j| / sum_j A_ij, in tokens.
        - ``top_key``: the key position with most attention from all counted queries together, and
          ``top_key_attention``: its share of all their attention; beside it the uniform share of that position.
        - ``delimiter_attention[NAME]``: mean attention to all visible keys whose token is such a delimiter, over the
          queries that see one.
        - ``largest_logit``: the largest scale q_i . k_j (after a softcap) of any counted query and visible key.
        """
        found = list(self.distance.figures("attention_distance"))
        if self.largest is None or not self.queries:
            return found
        top = self.columns.argmax(-1)
        shares = (self.columns.gather(1, top[:, None])[:, 0] / self.queries).tolist()
        even = (self.uniform_columns[top] / self.queries).tolist()
        found.append(HeadFigure("top_key", "all", [float(key) for key in top], None, self.queries))
        found.append(HeadFigure("top_key_attention", "all", shares, even, self.queries))
        for name, (total, uniform, count) in self.on_delimiter.items():
            if count:
                means = (total / count).tolist()
                metric = f"delimiter_attention[{name}]"
                found.append(HeadFigure(metric, "all", means, [uniform / count] * len(means), count))
        found.append(HeadFigure("largest_logit", "all", self.largest.tolist(), None, self.queries))
        return found


def _sum_padded(one: Float[Tensor, "... S1"], other: Float[Tensor, "... S2"]) -> Float[Tensor, "... S"]:
    """The sum, where the shorter counts as zero beyond its end."""
    if not one.numel():
        return other
    longer, shorter = (one, other) if one.shape[-1] >= other.shape[-1] else (other, one)
    total = longer.clone()
    total[..., : shorter.shape[-1]] += shorter
    return total
