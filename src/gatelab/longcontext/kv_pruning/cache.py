"""One layer's key/value cache whose heads hold different keys: attention over it, scores for it, and the cut.

Keys keep the rotation of their place in the text, and queries get theirs: nothing is turned anew when keys go, so the
distance between a query and a key that stays is the true one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelab.diagnose.attention import attend, widened
from gatelab.diagnose.calls import AttentionCall, Visibility
from gatelab.longcontext.kv_pruning.observed import OUTPUT_GATE, Observed, Press


@dataclass(frozen=True)
class HeadKeys:
    """What one key/value head holds, in the order of the text; rows with fewer keys have slots at position -1."""

    keys: Float[Tensor, "B P C"]
    values: Float[Tensor, "B P Cv"]
    positions: Int[Tensor, "B P"]
    scores: Float[Tensor, "B P"]

    @property
    def held(self) -> Int[Tensor, "B"]:
        """Keys of each sample."""
        return (self.positions >= 0).sum(1)

    def best(self, count: Int[Tensor, "B"], num_recent: int) -> HeadKeys:
        """The ``count`` keys with the highest scores; the newest ``num_recent``, but half of them at most, come first.

        Of equal scores the newer key stays.
        """
        vacant = self.positions < 0
        newest = self.positions.amax(1, keepdim=True)
        protected = self.positions > newest - torch.minimum(count // 2, torch.tensor(num_recent))[:, None]
        scores = self.scores.masked_fill(protected, torch.inf).masked_fill(vacant, -torch.inf)
        order = scores.flip(1).argsort(dim=1, descending=True, stable=True)
        rank = torch.empty_like(order)
        rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
        stays = (rank.flip(1) < count[:, None]) & ~vacant
        slots = (~stays).long().argsort(dim=1, stable=True)[:, : int(stays.sum(1).max())]
        return HeadKeys(
            keys=self.keys.gather(1, slots[..., None].expand(-1, -1, self.keys.shape[2])),
            values=self.values.gather(1, slots[..., None].expand(-1, -1, self.values.shape[2])),
            positions=self.positions.masked_fill(~stays, -1).gather(1, slots),
            scores=self.scores.gather(1, slots),
        )


@dataclass(frozen=True)
class Query:
    """What a layer asks with: (B T H C) queries of the newest tokens, and what becomes of q . k."""

    query: Float[Tensor, "B T H C"]
    scale: float
    window: int | None = None
    softcap: float | None = None
    learned_sinks: Float[Tensor, "#B H #T"] | None = None
    sink_value: Float[Tensor, "K Cv"] | None = None

    def of_head(self, head: int, num_key_heads: int) -> Query:
        """The part of one key/value head's group."""
        heads = heads_of_group(head, self.query.shape[2], num_key_heads)
        sinks, value = self.learned_sinks, self.sink_value
        return replace(
            self,
            query=self.query[:, :, heads],
            learned_sinks=None if sinks is None else sinks[:, heads],
            sink_value=None if value is None else value[head : head + 1],
        )


@dataclass
class LayerKeys:
    """One layer's cache, ``heads`` empty before the first call, and its mean gate scores (B K) so far.

    A layer with a sliding ``window`` is never cut by scores: it holds what its window still sees, of all heads alike.
    """

    heads: list[HeadKeys] = field(default_factory=list)
    window: int | None = None
    gate_sums: Float[Tensor, "B K"] | None = None
    num_gated: int = 0
    _calls: list[AttentionCall] = field(default_factory=list)

    @property
    def mean_gates(self) -> Float[Tensor, "B K"] | None:
        """Mean gate scores on the attention output over tokens, channels and the group's heads; ``None`` ungated."""
        return None if self.gate_sums is None else self.gate_sums / self.num_gated

    def attend(
        self, asked: Query, keys: Float[Tensor, "B T K C"], values: Float[Tensor, "B T K Cv"], first_position: int
    ) -> tuple[Float[Tensor, "B T H Cv"], Float[Tensor, "B H T"]]:
        """Attention of the newest T tokens over what is held and over themselves, and its log-sum-exp."""
        self.window = asked.window
        positions = torch.arange(first_position, first_position + keys.shape[1], device=keys.device)
        added = [self._with_new(head, keys, values, positions) for head in range(keys.shape[2])]
        calls = [self._call(one, asked.of_head(head, len(added))) for head, one in enumerate(added)]
        self.heads, self._calls = added, calls
        return torch.cat([call.output for call in calls], dim=2), torch.cat([call.lse for call in calls], dim=1)

    def _with_new(self, head: int, keys: Tensor, values: Tensor, positions: Int[Tensor, "T"]) -> HeadKeys:
        new = HeadKeys(
            keys=keys[:, :, head],
            values=values[:, :, head],
            positions=positions.expand(len(keys), -1),
            scores=torch.full(keys.shape[:2], torch.nan, dtype=torch.float64, device=keys.device),
        )
        if not self.heads:
            return new
        parts = zip(_tensors(self.heads[head]), _tensors(new), strict=True)
        return HeadKeys(*(torch.cat(pair, dim=1) for pair in parts))

    @staticmethod
    def _call(held: HeadKeys, asked: Query) -> AttentionCall:
        query, real = asked.query, held.positions >= 0
        sight = Visibility(query.shape[1], real.shape[1], True, asked.window, None if bool(real.all()) else real)
        options: dict[str, Any] = {
            "scale": asked.scale, "visibility": sight, "softcap": asked.softcap, "learned_sinks": asked.learned_sinks,
        }  # fmt: skip
        key, value = held.keys[:, :, None], held.values[:, :, None]
        output, lse = attend(query, key, value, sink_value=asked.sink_value, **options)
        return AttentionCall(-1, query, key, value, output, lse, **options)

    def observe(self, press: Press, seen: AttentionCall) -> None:
        """Score all held keys by the newest call; ``seen`` adds to it the layer's gate scores and output projection."""
        num_new, num_heads = seen.query.shape[1], len(self.heads)
        for head, (held, call) in enumerate(zip(self.heads, self._calls, strict=True)):
            heads = heads_of_group(head, seen.query.shape[2], num_heads)
            weight = seen.output_weight
            size = call.value.shape[-1]
            call = replace(
                call,
                layer=seen.layer,
                scores=_scores_of(head, heads, num_heads, seen.query.shape[2], seen.scores),
                added=seen.added,
                output_weight=None if weight is None else weight[:, heads.start * size : heads.stop * size],
            )
            observed = Observed(call, held.positions[:, None], held.scores[:, None, :-num_new])
            scores = press.score(observed)[:, 0].double()
            self.heads[head] = replace(held, scores=scores)
        self._add_gates(seen)

    def _add_gates(self, seen: AttentionCall) -> None:
        if OUTPUT_GATE in seen.scores and OUTPUT_GATE not in seen.added:
            gates = widened(seen.scores[OUTPUT_GATE]).expand(*seen.query.shape[:3], -1).double()
            sums = gates.mean(-1).sum(1).unflatten(1, (len(self.heads), -1)).mean(2)
            self.gate_sums = sums if self.gate_sums is None else self.gate_sums + sums
            self.num_gated += seen.query.shape[1]

    def cut(self, counts: Int[Tensor, "B K"], num_recent: int) -> None:
        """Keep so many keys of each head."""
        self.heads = [held.best(counts[:, head], num_recent) for head, held in enumerate(self.heads)]

    def forget_calls(self) -> None:
        """Let go of the newest call, and of keys that a sliding window hides from the next token."""
        self._calls = []
        if self.window is not None:
            start = max(0, self.heads[0].positions.shape[1] - self.window + 1)
            self.heads = [HeadKeys(*(tensor[:, start:] for tensor in _tensors(held))) for held in self.heads]

    def snapshot(self) -> LayerKeys:
        """A copy that later calls and cuts leave as it is."""
        return replace(self, heads=list(self.heads), _calls=[])


def heads_of_group(head: int, num_heads: int, num_key_heads: int) -> slice:
    """The query heads that read one key/value head."""
    group = num_heads // num_key_heads
    return slice(head * group, (head + 1) * group)


def _tensors(held: HeadKeys) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return held.keys, held.values, held.positions, held.scores


def _scores_of(
    head: int, heads: slice, num_key_heads: int, num_heads: int, scores: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The gate scores of one group: of its query heads, of its key/value head, or shared by all."""
    found = {}
    for position, of_layer in scores.items():
        num_gated = of_layer.shape[2]
        if position in ("value", "key") and num_gated == num_key_heads:
            found[position] = of_layer[:, :, head : head + 1]
        elif num_gated == num_heads:
            found[position] = of_layer[:, :, heads]
        else:
            found[position] = of_layer
    return found
