"""What an attention layer hands over for measuring: its tensors, and who may see whom, without a T x T map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_NO_KEY = torch.iinfo(torch.int64).max


class Segment(NamedTuple):
    """Tokens ``start`` up to ``stop`` of some samples that see each other plainly, and nothing else."""

    samples: slice
    start: int
    stop: int


class _Ranges(NamedTuple):
    """The real keys in the order (document, position), and each query's visible ones as a range of that order."""

    positions: Int[Tensor, "#B S"]
    is_key: Bool[Tensor, "#B S"]
    left: Int[Tensor, "#B T"]
    right: Int[Tensor, "#B T"]


@dataclass(frozen=True)
class Visibility:
    """Which keys each query may see. The T queries are the last T of the S keys.

    ``window``: a query sees only keys less than so many tokens back. ``real``: False for padding, which is seen
    by none and whose own queries count nowhere. ``documents``: a query sees its own document's keys only.
    """

    num_queries: int
    num_keys: int
    causal: bool = True
    window: int | None = None
    real: Bool[Tensor, "B S"] | None = None
    documents: Int[Tensor, "B S"] | None = None

    @property
    def past(self) -> int:
        """Keys before the first query."""
        return self.num_keys - self.num_queries

    @property
    def is_plain(self) -> bool:
        """Whether this is the whole causal triangle, or the whole square, of equally many queries and keys."""
        return not self.past and not self._is_windowed and self.real is None and self.documents is None

    @property
    def _is_windowed(self) -> bool:
        return self.window is not None and self.window < self.num_keys

    def rows(self, start: int, stop: int, device: torch.device | str = "cpu") -> Bool[Tensor, "#B 1 rows S"]:
        """The visible keys of the queries ``start`` up to ``stop``, counted among the queries."""
        keys = torch.arange(self.num_keys, device=device)
        queries = keys[self.past :][start:stop, None]
        visible = keys <= queries if self.causal else torch.ones_like(keys <= queries)
        if self.window is not None:
            visible = visible & (queries - keys < self.window)
        visible = visible[None]
        if self.real is not None:
            visible = visible & self.real[:, None, :]
        if self.documents is not None:
            own = self.documents[:, self.past :][:, start:stop, None]
            visible = visible & (own == self.documents[:, None, :])
        return visible[:, None]

    def key_range(self, start: int, stop: int) -> tuple[int, int]:
        """The keys outside which the queries ``start`` up to ``stop`` see nothing."""
        first = 0 if self.window is None else max(0, self.past + start - self.window + 1)
        return first, self.past + stop if self.causal else self.num_keys

    def query_positions(self, device: torch.device | str = "cpu") -> Int[Tensor, "1 T"]:
        """Each query's place among the keys."""
        return torch.arange(self.past, self.num_keys, device=device)[None]

    def counted(self, device: torch.device | str = "cpu") -> Bool[Tensor, "#B T"]:
        """The queries that enter means: real, and seeing one key at least."""
        return self.real_queries(device) & (self.num_visible(device) > 0)

    def real_queries(self, device: torch.device | str = "cpu") -> Bool[Tensor, "#B T"]:
        """The queries that are not padding."""
        if self.real is None:
            return torch.ones(1, self.num_queries, dtype=torch.bool, device=device)
        return self.real[:, self.past :]

    def first_key(self, device: torch.device | str = "cpu") -> Int[Tensor, "#B #T"]:
        """The first real key of each query's own document: key 0 without padding and documents."""
        if self.documents is None:
            return torch.zeros(1, 1, dtype=torch.int64, device=device) if self.real is None else self._first_real()
        keys, own = self._sorted_keys(device), self.documents[:, self.past :] * self.num_keys
        found = keys.gather(1, torch.searchsorted(keys, own.contiguous()).clamp(max=self.num_keys - 1))
        return torch.where((found >= own) & (found < own + self.num_keys), found - own, 0)

    def _first_real(self) -> Int[Tensor, "B 1"]:
        assert self.real is not None
        return self.real.int().argmax(1, keepdim=True)

    def sees(self, key: Int[Tensor, "#B #T"], device: torch.device | str = "cpu") -> Bool[Tensor, "#B T"]:
        """Whether each query sees the key at its position in ``key``, which may lie beyond the last key."""
        queries = self.query_positions(device)
        visible = (key < self.num_keys) & ((key <= queries) | (not self.causal))
        if self.window is not None:
            visible = visible & (queries - key < self.window)
        for values, wanted in ((self.real, True), (self.documents, self._query_documents())):
            if values is not None:
                index = key.clamp(max=self.num_keys - 1).expand(len(values), -1)
                visible = visible & (values.gather(1, index) == wanted)
        return visible

    def _query_documents(self) -> Int[Tensor, "B T"] | None:
        return None if self.documents is None else self.documents[:, self.past :]

    def num_visible(self, device: torch.device | str = "cpu") -> Int[Tensor, "#B T"]:
        """How many keys each query sees, in O(T log T)."""
        ranges = self._ranges(device)
        return ranges.right - ranges.left

    def uniform_columns(self, device: torch.device | str = "cpu") -> Float[Tensor, "#B S"]:
        """Attention that each key gets from all counted queries together when each spreads it evenly, float64."""
        ranges, weight = self._ranges(device), self._uniform(device)
        steps = weight.new_zeros(len(weight), self.num_keys + 1)
        steps.scatter_add_(1, ranges.left.expand_as(weight), weight)
        steps.scatter_add_(1, ranges.right.expand_as(weight), -weight)
        in_order = torch.where(ranges.is_key, steps.cumsum(1)[:, :-1], 0.0)
        return torch.zeros_like(in_order).scatter_add_(1, ranges.positions.expand_as(in_order), in_order)

    def _uniform(self, device: torch.device | str) -> Float[Tensor, "#B T"]:
        """1 / visible keys of the counted queries, 0 elsewhere."""
        return torch.where(self.counted(device), 1.0 / self.num_visible(device).double().clamp(min=1), 0.0)

    def uniform_distance(self, device: torch.device | str = "cpu") -> Float[Tensor, "#B T"]:
        """Mean distance back to the visible keys, in tokens; 0 where a query sees none. Causal attention only."""
        ranges = self._ranges(device)
        sums = torch.cat((torch.zeros_like(ranges.positions[:, :1]), ranges.positions.cumsum(1)), dim=1)
        seen = sums.gather(1, ranges.right) - sums.gather(1, ranges.left)
        count = ranges.right - ranges.left
        return torch.where(count > 0, self.query_positions(device) - seen / count.clamp(min=1).double(), 0.0)

    def segments(self) -> list[Segment] | None:
        """The plain pieces that this visibility consists of; ``None`` when it is not made of such.

        Left or right padding and documents in one run each are; windows and earlier keys are not. Padding's own
        queries lie in no segment.
        """
        if self.past or self._is_windowed:
            return None
        if self.real is None and self.documents is None:
            return [Segment(slice(None), 0, self.num_keys)]
        some = self.real if self.documents is None else self.documents
        assert some is not None
        real = torch.ones_like(some, dtype=torch.bool) if self.real is None else self.real
        documents = torch.zeros_like(some, dtype=torch.int64) if self.documents is None else self.documents
        changes = (documents[:, 1:] != documents[:, :-1]) | (real[:, 1:] != real[:, :-1])
        found = []
        for sample, is_start in enumerate(changes.cpu()):
            starts = [0, *(is_start.nonzero()[:, 0] + 1).tolist()]
            stops = [*starts[1:], self.num_keys]
            pieces = [piece for piece in zip(starts, stops, strict=True) if real[sample, piece[0]]]
            if len({int(documents[sample, start]) for start, _ in pieces}) < len(pieces):
                return None
            found += [Segment(slice(sample, sample + 1), start, stop) for start, stop in pieces]
        return found

    def _sorted_keys(self, device: torch.device | str) -> Int[Tensor, "#B S"]:
        """document x S + position of the real keys in ascending order, then a largest number for each other key."""
        keys = torch.arange(self.num_keys, device=device)[None]
        if self.documents is not None:
            keys = self.documents.long() * self.num_keys + keys
        if self.real is not None:
            keys = torch.where(self.real, keys, _NO_KEY)
        return keys.sort(1).values

    def _ranges(self, device: torch.device | str) -> _Ranges:
        keys, queries = self._sorted_keys(device), self.query_positions(device)
        last = queries if self.causal else torch.full_like(queries, self.num_keys - 1)
        first = torch.zeros_like(queries) if self.window is None else (queries - self.window + 1).clamp(min=0)
        documents = self._query_documents()
        offset = torch.zeros_like(keys[:, :1]) if documents is None else documents.long() * self.num_keys
        left = torch.searchsorted(keys, (first + offset).contiguous())
        right = torch.searchsorted(keys, (last + offset).contiguous(), right=True)
        return _Ranges(keys.remainder(self.num_keys), keys != _NO_KEY, left, right.maximum(left))


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention in one pass: A_ij = exp(scale q_i . k_j - lse_i) over the visible keys.

    ``softcap`` c replaces a logit l by c tanh(l / c). ``learned_sinks`` are each query's logits of a key that no token
    has (gpt-oss): ``lse`` includes them, and no figure takes that key for a token. ``scores`` are gate scores by
    position and ``activations`` the functions that gave them, where known; ``added`` names the positions whose scores
    are added instead of multiplied. ``gated_output`` is what the output projection reads. The weights are those of the
    value and the output projection.
    """

    layer: int
    query: Float[Tensor, "B T H C"]
    key: Float[Tensor, "B S K C"]
    value: Float[Tensor, "B S K Cv"]
    output: Float[Tensor, "B T H Cv"]
    lse: Float[Tensor, "B H T"]
    scale: float
    visibility: Visibility
    softcap: float | None = None
    learned_sinks: Float[Tensor, "#B H #T"] | None = None
    scores: Mapping[str, Float[Tensor, "#B #T N C1"]] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=dict)
    added: frozenset[str] = frozenset()
    gated_output: Float[Tensor, "B T H Cv"] | None = None
    output_weight: Float[Tensor, "D HCv"] | None = None
    value_weight: Float[Tensor, "KCv D"] | None = None
