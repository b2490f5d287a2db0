"""What a press sees of one attention layer, and what presses share.

A_ij is the attention of query i to key j, g_i the gate scores of query i on the attention output, v_j the value, W_O a
query head's columns of the output projection. A press gives one score for each key and key/value head; with grouped
queries that is the mean over the group's query heads, because they share the key. Sums over queries add to what the
same key got in earlier calls, so that decoding continues what reading began.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gatelab.diagnose.attention import widened
from gatelab.diagnose.calls import AttentionCall

OUTPUT_GATE, VALUE_GATE = "sdpa_output", "value"


@dataclass(frozen=True)
class Observed:
    """One layer's attention over the P keys that its cache still held and T new ones; S = P + T.

    ``call`` holds queries, keys, values, gate scores, output projection and log-sum-exp. ``positions`` are the keys'
    places in the text, -1 in a slot without a key. ``earlier`` are the scores that the same press gave the first P.
    """

    call: AttentionCall
    positions: Int[Tensor, "B K S"]
    earlier: Float[Tensor, "B K P"]


@runtime_checkable
class Press(Protocol):
    """Scores keys: those with the highest scores are kept. ``inf`` keeps a key before all others."""

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        """A score for each key and key/value head, in float32 at least; any number in a slot without a key."""
        ...


def last_queries(call: AttentionCall, count: int) -> AttentionCall:
    """The same call as its last ``count`` queries alone saw it."""
    count = min(count, call.query.shape[1])
    sinks = call.learned_sinks
    if sinks is not None and sinks.shape[2] > 1:
        sinks = sinks[:, :, -count:]
    return replace(
        call,
        query=call.query[:, -count:],
        output=call.output[:, -count:],
        lse=call.lse[:, :, -count:],
        visibility=replace(call.visibility, num_queries=count),
        learned_sinks=sinks,
        scores={name: scores[:, -count:] if scores.shape[1] > 1 else scores for name, scores in call.scores.items()},
    )


def require_gate(call: AttentionCall, position: str, press: str) -> Tensor:
    """The scores of the gate at a position; ValueError where the layer has none, or one that is added."""
    what = "the attention output" if position == OUTPUT_GATE else f"the {position}"
    if position not in call.scores:
        raise ValueError(
            f"press {press} needs a gate on {what}, and layer {call.layer} of the model has none; "
            "take a press that needs no gate, such as snapkv or attention_value"
        )
    if position in call.added:
        raise ValueError(f"press {press} needs a gate that multiplies {what}; that of layer {call.layer} is added")
    return call.scores[position]


def head_gate(call: AttentionCall, press: str) -> Float[Tensor, "B T H C1"]:
    """The output gate's scores of every query head."""
    scores = widened(require_gate(call, OUTPUT_GATE, press))
    return scores.expand(*call.query.shape[:3], -1)


def require_output_weight(call: AttentionCall, press: str) -> Float[Tensor, "H D Cv"]:
    """Each query head's columns of the output projection; ValueError where they can't be read."""
    if call.output_weight is None:
        raise ValueError(
            f"press {press} needs the output projection's weight, which layer {call.layer} does not show "
            "(quantised, or not found); take a press that needs none, such as snapkv"
        )
    return widened(call.output_weight).unflatten(1, (call.query.shape[2], -1)).transpose(0, 1)


def group_mean(of_heads: Float[Tensor, "B H S"], call: AttentionCall) -> Float[Tensor, "B K S"]:
    """The mean over the query heads that share a key/value head."""
    return of_heads.unflatten(1, (call.key.shape[2], -1)).mean(2)


def carried(observed: Observed, new: Float[Tensor, "B K T"]) -> Float[Tensor, "B K S"]:
    """Scores that a key gets once, when it is written."""
    return torch.cat((observed.earlier.to(new.dtype), new), dim=-1)


def accumulated(observed: Observed, added: Float[Tensor, "B K S"]) -> Float[Tensor, "B K S"]:
    """What the queries of this call add to the scores of earlier ones."""
    return added + F.pad(observed.earlier, (0, added.shape[2] - observed.earlier.shape[2]))
