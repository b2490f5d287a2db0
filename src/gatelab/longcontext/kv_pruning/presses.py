"""Presses: what each key of a key/value cache is worth, so that the worthless ones can go.

Those with the highest scores are kept. The notation is that of :mod:`~gatelab.longcontext.kv_pruning.observed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gatelab.diagnose.attention import widened
from gatelab.diagnose.patterns import attention_pattern
from gatelab.longcontext.kv_pruning.observed import (
    VALUE_GATE,
    Observed,
    Press,
    accumulated,
    carried,
    group_mean,
    head_gate,
    last_queries,
    require_gate,
)
from gatelab.longcontext.kv_pruning.outputs import AttentionValue, GatedAttention, Oracle
from gatelab.settings import nearest

ORACLE = "oracle"
FIRST_KEPT = 4
SNAP_WINDOW, SNAP_POOLING = 64, 5


class Random:
    """A number for each new key from a seeded generator: the floor that every other press has to beat."""

    def __init__(self, seed: int = 0):
        self._generator = torch.Generator().manual_seed(seed)

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        """Uniform on [0, 1), drawn once for each key."""
        num_samples, num_heads, num_keys = observed.positions.shape
        num_new = num_keys - observed.earlier.shape[2]
        drawn = torch.rand(num_samples, num_heads, num_new, generator=self._generator, dtype=torch.float64)
        return carried(observed, drawn.to(observed.positions.device))


class StreamingLLM:
    """The first four tokens of the text, then the newest (Xiao et al. 2309.17453, without its re-rotation)."""

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        """The position; infinite for positions 0 to 3."""
        positions = observed.positions
        return torch.where(positions < FIRST_KEPT, torch.inf, positions.double())


class KeyNorm:
    """-||k_j||: keys of small norm are kept (Devoto et al. 2406.11430)."""

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        """The negative norm of the key as the kernel sees it; a rotation leaves it alone."""
        return -widened(observed.call.key).norm(dim=-1).transpose(1, 2)


class H2O:
    """sum_i A_ij over all queries so far (Zhang et al. 2306.14048), in O(T) memory through the log-sum-exp."""

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        """Accumulated attention, the mean over the group's heads."""
        return accumulated(observed, group_mean(attention_pattern(observed.call).columns, observed.call))


class SnapKV:
    """Attention from the newest 64 queries, smoothed over five neighbouring keys (Li et al. 2404.14469).

    Those queries' own keys are kept before all others. In decoding only the queries of the newest call are there.
    """

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        """Mean attention over the window's queries, average-pooled; infinite for the window's own keys."""
        call = last_queries(observed.call, SNAP_WINDOW)
        window = call.query.shape[1]
        columns = group_mean(attention_pattern(call).columns, call) / window
        before = columns[..., :-window]
        if before.shape[-1]:
            before = F.avg_pool1d(before, SNAP_POOLING, stride=1, padding=SNAP_POOLING // 2)
        return F.pad(before, (0, window), value=torch.inf)


class TOVA:
    """Attention from the newest query (Oren et al. 2401.06104), for each key/value head by itself."""

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        """A_ij of the last query i; that query's own key is kept before all others."""
        call = last_queries(observed.call, 1)
        columns = group_mean(attention_pattern(call).columns, call)
        return torch.cat((columns[..., :-1], torch.full_like(columns[..., -1:], torch.inf)), dim=-1)


class SelfGate:
    """g_j: the output gate's score of the token that wrote the key, without a look at any attention."""

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        """The mean over channels and the group's heads."""
        gate = head_gate(observed.call, "self_gate").mean(-1)
        return carried(observed, group_mean(gate.transpose(1, 2), observed.call))


class ValueGate:
    """||g_j * v_j|| in models with a gate on the value (G2): the weight that a key brings along by itself."""

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        """The norm of the value as attention reads it, which is after its gate."""
        require_gate(observed.call, VALUE_GATE, "value_gate")
        return widened(observed.call.value).norm(dim=-1).transpose(1, 2)


class Fixed:
    """Scores that were made before: for each layer number those of its key/value heads, (B S) each; used once."""

    def __init__(self, scores: Mapping[int, Sequence[Float[Tensor, "B S"]]]):
        self._scores = {layer: list(heads) for layer, heads in scores.items()}

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        """The next head's scores of this layer."""
        return self._scores[observed.call.layer].pop(0)[:, None]


PRESSES: dict[str, Callable[[int], Press]] = {
    "random": Random,
    "streaming_llm": lambda seed: StreamingLLM(),
    "key_norm": lambda seed: KeyNorm(),
    "h2o": lambda seed: H2O(),
    "snapkv": lambda seed: SnapKV(),
    "tova": lambda seed: TOVA(),
    "attention_value": lambda seed: AttentionValue(),
    "gated_attention": lambda seed: GatedAttention(),
    "self_gate": lambda seed: SelfGate(),
    "value_gate": lambda seed: ValueGate(),
    ORACLE: lambda seed: Oracle(),
}
"""Name of a press -> what builds it from a seed."""


def build_press(name: str, seed: int = 0) -> Press:
    """A fresh press by its name; ``ValueError`` with the nearest one for an unknown name."""
    if name not in PRESSES:
        raise ValueError(f"there is no press {name!r}; {nearest(name, PRESSES)}")
    return PRESSES[name](seed)
