"""Attention sinks: how much of its attention a head parks on the first tokens, whatever the query.

A_ij is the attention of query i to key j. Means run over counted queries: real ones that see what is asked about.
Positions are within a query's own document, so "the first n queries left out" leaves out n of each document. The floor
of a figure is the same mean under uniform attention, 1 / visible keys for each visible key: H_T / T for the first
token of T under plain causal attention. A learned sink is no token: the first token stays key 0, and the floors are
those of the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gatelab.diagnose.attention import key_mass
from gatelab.diagnose.calls import AttentionCall, Visibility
from gatelab.diagnose.head_means import HeadFigure, HeadMean

SINK_THRESHOLD = 0.3


def uniform_floor(visibility: Visibility, skipped: int = 0) -> float:
    """First-token attention of uniform attention: the mean of 1 / visible keys over the queries that see key 0.

    H_T / T for plain causal attention; ``skipped`` leaves the first queries out. A measured value means something only
    beside this one.
    """
    counted = visibility.counted() & visibility.sees(torch.zeros(1, 1, dtype=torch.int64))
    counted = counted & (visibility.query_positions() >= skipped)
    return float((1 / visibility.num_visible().double().clamp(min=1))[counted].mean())


class SinkTotals:
    """What is added up about one layer's first tokens; :meth:`figures` has the definitions."""

    def __init__(self, first_tokens: int, skipped_queries: Sequence[int]):
        self.first_tokens = first_tokens
        self.first_token = {skipped: HeadMean() for skipped in (0, *skipped_queries)}
        self.first_k, self.first_real_key = HeadMean(), HeadMean()
        self.rate, self.learned_sink = HeadMean(), HeadMean()

    def add(self, call: AttentionCall) -> tuple[Float[Tensor, "B H T"], Bool[Tensor, "#B T"]]:
        """Add one pass; returns the attention to the first real key, and which queries see it."""
        sight, device = call.visibility, call.query.device
        counted, first = sight.counted(device), sight.first_key(device)
        even = 1 / sight.num_visible(device).clamp(min=1).double()
        since_first = sight.query_positions(device) - first
        on_first, sees_first = self._mass(call, first), counted & sight.sees(first, device)
        zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        # Without padding and documents the first real key is key 0 itself.
        on_zero = on_first if first.numel() == 1 else self._mass(call, zero)
        sees_zero = counted & sight.sees(zero, device)
        for skipped, mean in self.first_token.items():
            mean.add(on_zero, sees_zero & (since_first >= skipped), even)
        self.first_real_key.add(on_first, sees_first, even)
        self._add_rate(on_first, sees_first, even)
        on_first_k, num_seen = torch.where(sees_first[:, None], on_first, 0), sees_first.long()
        for offset in range(1, self.first_tokens):
            sees = sight.sees(first + offset, device) & counted
            on_first_k = on_first_k + torch.where(sees[:, None], self._mass(call, first + offset), 0)
            num_seen = num_seen + sees
        self.first_k.add(on_first_k, num_seen > 0, num_seen * even)
        if call.learned_sinks is not None:
            on_sink = (call.learned_sinks.to(call.lse.dtype) - call.lse).exp()
            self.learned_sink.add(on_sink, counted, 1 / (1 / even + 1))
        return on_first, sees_first

    def _mass(self, call: AttentionCall, position: Tensor) -> Tensor:
        return key_mass(call.query, call.key, call.lse, call.scale, position, call.softcap)

    def _add_rate(self, mass: Float[Tensor, "B H T"], counted: Tensor, even: Tensor) -> None:
        counted = counted.expand(len(mass), -1)
        number = counted.sum(-1, keepdim=True)
        share = torch.where(counted[:, None], mass, 0).sum(-1, keepdim=True) / number.clamp(min=1)[:, None]
        uniform = torch.where(counted, even, 0).sum(-1, keepdim=True) / number.clamp(min=1)
        exceeds = torch.where(share.isnan(), share, (share > SINK_THRESHOLD).to(share.dtype))
        self.rate.add(exceeds, number > 0, (uniform > SINK_THRESHOLD).double())

    def figures(self) -> list[HeadFigure]:
        """By head:

        - ``first_token_attention``: mean of A_i0 over the queries that see key 0; ``from_n`` leaves the first n queries
          out. The paper's F-Attn is its mean over heads, then layers (arXiv 2505.06708, table 4). Query 0 sees itself
          alone and adds 1/T.
        - ``first_real_key_attention``: the same for the first unpadded key of the query's own document.
        - ``first_k_attention``: mean of the attention to the first k tokens of the document together, over the queries
          that see one of them at least.
        - ``sink_rate``: share of the samples whose mean attention to the first real key exceeds 0.3 (Gu et al.
          2410.10781, there with T = 64); ``n`` counts samples.
        - ``learned_sink_attention``: mean of exp(s_i - LSE_i) for the head's learned sink s; its floor takes the sink
          for one key more.
        """
        found: list[HeadFigure] = []
        for skipped, mean in self.first_token.items():
            found += mean.figures("first_token_attention", f"from_{skipped}" if skipped else "all")
        found += self.first_k.figures(f"first_{self.first_tokens}_attention")
        found += self.first_real_key.figures("first_real_key_attention")
        found += self.rate.figures("sink_rate")
        found += self.learned_sink.figures("learned_sink_attention")
        return found


class EffectiveSinkTotals:
    """Key 0's share of a head's gated output, as lengths after the output projection."""

    def __init__(self) -> None:
        self.from_key_zero, self.whole = HeadMean(), HeadMean()

    def add(self, call: AttentionCall, output_factors: Float[Tensor, "H Cr Cv"]) -> None:
        """Add one pass; ``output_factors`` R have R^T R = W_O^T W_O for each head's part W_O of the projection."""
        sight, device = call.visibility, call.query.device
        zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        counted = sight.counted(device) & sight.sees(zero, device)
        mass = key_mass(call.query, call.key, call.lse, call.scale, zero, call.softcap)
        value = call.value[:, 0].to(mass.dtype).repeat_interleave(mass.shape[1] // call.value.shape[2], 1)
        gated = call.output if call.gated_output is None else call.gated_output
        from_zero, whole = torch.empty_like(mass), torch.empty_like(mass)
        for head, factor in enumerate(output_factors.to(mass.dtype)):
            plain, passed = call.output[:, :, head].to(mass.dtype), gated[:, :, head].to(mass.dtype)
            whole[:, head] = (passed @ factor.T).norm(dim=-1)
            if "sdpa_output" in call.added and "sdpa_output" in call.scores:
                scores = call.scores["sdpa_output"].to(mass.dtype)
                passed = passed - scores[:, :, head if scores.shape[2] > 1 else 0]
            # What the gate or a control multiplied each channel by.
            passed_share = torch.where(plain == 0, 0, passed / plain)
            contribution = mass[:, head, :, None] * passed_share * value[:, None, head]
            from_zero[:, head] = (contribution @ factor.T).norm(dim=-1)
        self.from_key_zero.add(from_zero, counted)
        self.whole.add(whole, counted)

    def figures(self) -> list[HeadFigure]:
        """``effective_sink``, by head: sum_i ||A_i0 (g_i v_0) W_O|| / sum_i ||(g_i o_i) W_O||.

        The queries i are those that see key 0. g_i is what the gate on the SDPA output, or a control, multiplies the
        output o_i by, channel for channel; scores that are added belong to no key. Raw attention can stay while a value
        or a gate takes its effect away.
        """
        if not self.whole.count:
            return []
        pairs = zip(self.from_key_zero.means, self.whole.means, strict=True)
        shares = [share / whole if whole else 0.0 for share, whole in pairs]
        return [HeadFigure("effective_sink", "all", shares, None, self.whole.count)]
