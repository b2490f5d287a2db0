"""The figures that tell what a head does on some queries and not on others, for named sets of queries."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gatelab.diagnose.attention import key_mass, widened
from gatelab.diagnose.calls import AttentionCall
from gatelab.diagnose.head_means import HeadFigure, HeadMean

QuerySets = Mapping[str, Bool[Tensor, "B T"]]
_TAKEN = ("all", "first_token", "rest")


def require_query_sets(query_sets: Mapping[str, Tensor], shape: torch.Size) -> None:
    """Raise ``ValueError`` for a set whose mask has another shape (B T) or whose name is that of a query range."""
    for name, members in query_sets.items():
        if name in _TAKEN or name.startswith("from_"):
            raise ValueError(f"a query set can't be named {name!r}, which is a query range; choose another name")
        if members.shape != shape or members.dtype != torch.bool:
            raise ValueError(
                f"query set {name!r} is {members.dtype} of shape {tuple(members.shape)}; "
                f"give a boolean of the tokens' shape {tuple(shape)}"
            )


class QuerySetTotals:
    """What is added up about one layer's query sets; :meth:`figures` has the definitions."""

    def __init__(self) -> None:
        self.means: dict[tuple[str, str], HeadMean] = {}

    def add(self, call: AttentionCall, query_sets: QuerySets) -> None:
        """Add one pass."""
        if not query_sets:
            return
        sight, device = call.visibility, call.query.device
        counted, zero = sight.counted(device), torch.zeros(1, 1, dtype=torch.int64, device=device)
        even = 1 / sight.num_visible(device).clamp(min=1).double()
        on_zero = key_mass(call.query, call.key, call.lse, call.scale, zero, call.softcap)
        self._add("first_token_attention", query_sets, on_zero, counted & sight.sees(zero, device), even)
        if call.learned_sinks is not None:
            on_sink = (call.learned_sinks.to(call.lse.dtype) - call.lse).exp()
            self._add("learned_sink_attention", query_sets, on_sink, counted, 1 / (1 / even + 1))
        for position, scores in call.scores.items():
            by_head = widened(scores).mean(3).transpose(1, 2).expand(len(on_zero), -1, on_zero.shape[2])
            self._add(f"gate_mean[{position}]", query_sets, by_head, sight.real_queries(device), None)

    def _add(
        self,
        metric: str,
        query_sets: QuerySets,
        values: Float[Tensor, "B N T"],
        counted: Bool[Tensor, "#B T"],
        even: Float[Tensor, "#B T"] | None,
    ) -> None:
        for name, members in query_sets.items():
            self.means.setdefault((metric, name), HeadMean()).add(values, counted & members, even)

    def figures(self) -> list[HeadFigure]:
        """By head, with the set's name as query range and only its queries in the mean and its floor.

        ``first_token_attention`` and ``learned_sink_attention`` as in :mod:`~gatelab.diagnose.sinks`, and
        ``gate_mean[POSITION]``, the mean score of all channels.
        """
        found: list[HeadFigure] = []
        for (metric, name), mean in self.means.items():
            found += mean.figures(metric, name)
        return found
