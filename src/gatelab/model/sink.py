"""A key that no token has: what other projects put in the place of a gate, so that a head may attend to nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gatelab.gates.spec import AttentionShape
from gatelab.model.layer_settings import SinkSettings

# Of channels, for the fused kernels of accelerators; with other numbers they build the whole map.
_MULTIPLE = 8


class Extended(NamedTuple):
    """Queries, keys, values and mask of an attention call with the sink as its first key."""

    query: Float[Tensor, "B T1 H C1"]
    key: Float[Tensor, "B S1 K C1"]
    value: Float[Tensor, "B S1 K C1"]
    mask: Bool[Tensor, "#B 1 T S1"] | None


class Sink(nn.Module):
    """A key and value at position -1: every query sees it, whatever documents, windows and padding hide.

    With the logits l_ij = q_i . k_j / sqrt(C) of the visible tokens j, the sink's logit s_i and its value v', a head
    gives o_i = (sum_j exp(l_ij) v_j + exp(s_i) v') / (sum_j exp(l_ij) + exp(s_i)).

    - ``off_by_one``: s_i = 0 and v' = 0, no parameters ("attention is off by one", Miller 2023; the zero sink of Xiao
      et al., arXiv 2309.17453).
    - ``learned_logit``: s_i = ``logits`` (H), a number for each query head, and v' = 0 (gpt-oss, arXiv 2508.10925).
    - ``learned_key_value``: s_i = q_i . k' / sqrt(C) with k' = ``key`` and v' = ``value`` (K C), one pair for each
      key/value head (Sun et al., arXiv 2402.17762, section 4.3; theirs is one for each query head). The queries are
      normed and rotated, the pair is not, and no gate touches it.

    It is no token: token 0 stays the first one in masks, caches and measurements.
    """

    def __init__(self, settings: SinkSettings, shape: AttentionShape):
        super().__init__()
        has_pair = settings.kind == "learned_key_value"
        of_head = (shape.num_kv_heads, shape.head_size)
        self.logits = nn.Parameter(torch.zeros(shape.num_heads)) if settings.kind == "learned_logit" else None
        self.key = nn.Parameter(torch.zeros(of_head)) if has_pair else None
        self.value = nn.Parameter(torch.zeros(of_head)) if has_pair else None

    def logits_for(self, query: Float[Tensor, "B T H C"], scale: float) -> Float[Tensor, "#B H #T"]:
        """s_i of every head, in the dtype of the queries."""
        if self.key is not None:
            queries = query.unflatten(2, (len(self.key), -1))
            return scale * torch.einsum("btkgc,kc->bkgt", queries, self.key.to(query.dtype)).flatten(1, 2)
        if self.logits is not None:
            return self.logits.to(query.dtype)[None, :, None]
        return query.new_zeros(1, query.shape[2], 1)

    def extend(
        self,
        query: Float[Tensor, "B T H C"],
        key: Float[Tensor, "B S K C"],
        value: Float[Tensor, "B S K C"],
        mask: Bool[Tensor, "#B 1 T S"] | None,
        causal: bool,
    ) -> Extended:
        """The call with one key more, for any kernel of softmax attention with scale 1 / sqrt(C), C as given here.

        A causal call without a mask gets a query of zeros at position -1 too, so that it stays the plain triangle:
        only the last T queries and the first C channels of the output are the layer's. A learned logit needs a channel
        more, sqrt(C) s in the queries times 1 in the sink and 0 elsewhere, and has the precision of the activations.
        """
        first_key, first_value = self._or_zeros(self.key, key), self._or_zeros(self.value, value)
        if self.logits is not None:
            unused = -(query.shape[-1] + 1) % _MULTIPLE
            factors = F.pad((query.shape[-1] ** 0.5 * self.logits).to(query.dtype)[:, None], (0, unused))
            query = torch.cat((query, factors.expand(*query.shape[:3], -1)), dim=-1)
            first_key = F.pad(F.pad(first_key, (0, 1), value=1.0), (0, unused))
            key, value, first_value = (F.pad(tensor, (0, 1 + unused)) for tensor in (key, value, first_value))
        if causal and mask is None:
            query = F.pad(query, (0, 0, 0, 0, 1, 0))
        return Extended(
            query,
            torch.cat((first_key, key), dim=1),
            torch.cat((first_value, value), dim=1),
            None if mask is None else F.pad(mask, (1, 0), value=True),
        )

    @staticmethod
    def _or_zeros(own: Tensor | None, tokens: Float[Tensor, "B S K C"]) -> Float[Tensor, "B 1 K C"]:
        """The sink's part for each sample, like those of the tokens."""
        first = tokens.new_zeros(tokens.shape[2:]) if own is None else own.to(tokens.dtype)
        return first.expand(len(tokens), 1, -1, -1)
