"""Mixture of experts: softmax or sigmoid router, top-k, experts computed in groups, no token dropped.

E experts, k of them for each token, N = B T tokens. The load-balancing loss is that of Switch Transformer
(2101.03961) over all tokens that its statistics cover, E/k sum_e f_e P_e, which is 1 at perfect balance; Hugging
Face's own convention differs twice (k at balance, layers pooled) and is :func:`pooled_balance_loss`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gatelab.gates.linear import Linear
from gatelab.model.feedforward import FeedForward
from gatelab.model.settings import MixtureSettings

# Keeps the scores of a sigmoid router that all vanish from 0 / 0; AFMoE's value, and nothing beside any other sum.
_SMALLEST_SUM = 1e-20
_MULTIPLE = 32  # rows of a rounded group


class RouterStatistics(NamedTuple):
    """Sums over the counted tokens of a forward pass, one row for each layer; sums of two passes may be added.

    They are returned, never stored, so recomputing a layer in the backward pass counts nothing twice. ``assignments``
    carries no gradient; the others do. ``probabilities`` sum to 1 for each token: a sigmoid router's scores are
    divided by their sum over all experts (DeepSeek-V3). Dense layers have no row.
    """

    assignments: Float[Tensor, "*L E"]
    probabilities: Float[Tensor, "*L E"]
    squared_log_partition: Float[Tensor, "*L"]
    num_tokens: Float[Tensor, "*L"]


def balance_loss(statistics: RouterStatistics, frequencies: Float[Tensor, "L E"] | None = None) -> Float[Tensor, ""]:
    """Mean over layers of E/k sum_e f_e P_e, each layer by itself; f_e sums to k, P_e to 1.

    ``frequencies`` replaces f when they were gathered over more tokens than these statistics (a global batch seen in
    pieces, Qiu et al. 2501.11873).
    """
    num_tokens = statistics.num_tokens[:, None].clamp(min=1)
    if frequencies is None:
        frequencies = statistics.assignments / num_tokens
    mean_probabilities = statistics.probabilities / num_tokens
    experts_per_token = frequencies.sum(-1).clamp(min=1)
    num_experts = frequencies.shape[-1]
    return (num_experts / experts_per_token * (frequencies * mean_probabilities).sum(-1)).mean()


def pooled_balance_loss(statistics: RouterStatistics) -> Float[Tensor, ""]:
    """The convention of Hugging Face's ``load_balancing_loss_func``: layers pooled, and k at perfect balance."""
    num_tokens = statistics.num_tokens.sum().clamp(min=1)
    frequencies = statistics.assignments.sum(0) / num_tokens
    return frequencies.shape[-1] * (frequencies * statistics.probabilities.sum(0) / num_tokens).sum()


def router_z_loss(statistics: RouterStatistics) -> Float[Tensor, ""]:
    """Mean over tokens and layers of logsumexp(router logits)^2 (ST-MoE, 2202.08906)."""
    return (statistics.squared_log_partition / statistics.num_tokens.clamp(min=1)).mean()


class Experts(nn.Module):
    """E SwiGLU feed-forward layers as three-dimensional weights, named as in Hugging Face's Qwen3-MoE.

    ``gate_up_proj`` (E 2F D) holds an expert's F gate rows, then its F up rows; ``down_proj`` is (E D F).
    """

    def __init__(self, num_experts: int, width: int, expert_width: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * expert_width, width))
        self.down_proj = nn.Parameter(torch.empty(num_experts, width, expert_width))

    def forward(self, x: Float[Tensor, "M D"], ends: Int[Tensor, "E"]) -> Float[Tensor, "M D"]:
        """Rows of ``x`` are sorted by expert; expert e takes those from ``ends[e - 1]`` up to ``ends[e]``."""
        gate, up = grouped_linear(x, self.gate_up_proj.to(x.dtype), ends).chunk(2, dim=-1)
        return grouped_linear(F.silu(gate) * up, self.down_proj.to(x.dtype), ends)


def grouped_linear(
    x: Float[Tensor, "M I"], weight: Float[Tensor, "E O I"], ends: Int[Tensor, "E"]
) -> Float[Tensor, "M O"]:
    """Row group e times ``weight[e]`` transposed.

    One grouped kernel where PyTorch has it: not for float64, and not for rows that are no multiple of 16 bytes.
    """
    has_kernel = x.dtype != torch.float64 and all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if has_kernel and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return _grouped_linear_outside_graphs(x, weight, ends, has_kernel)


@torch.compiler.disable(reason="the size of each group is known at run time alone")
def _grouped_linear_outside_graphs(x: Tensor, weight: Tensor, ends: Tensor, has_kernel: bool) -> Tensor:
    """What compiled graphs cannot hold: the kernel in other dtypes than bfloat16, and groups of unknown size."""
    if has_kernel:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    groups = torch.tensor_split(x, ends[:-1].long().cpu())
    return torch.cat([F.linear(group, expert) for group, expert in zip(groups, weight, strict=True)])


def weighted_sum_of_experts(
    experts: Experts,
    tokens: Float[Tensor, "N D"],
    weights: Float[Tensor, "N k"],
    chosen: Int[Tensor, "N k"],
    own: range,
    num_experts: int,
) -> Float[Tensor, "N D"]:
    """Each token's sum of its ``chosen`` experts times their ``weights``, counting those numbered ``own`` alone.

    ``experts`` has these and no others of the ``num_experts``; a token that chose none of them gets 0.
    """
    is_rounded = tokens.device.type == "cpu" and tokens.dtype == torch.bfloat16
    multiple = _MULTIPLE if is_rounded and chosen.numel() >= len(own) * _MULTIPLE else 1
    placement = place(chosen, own, num_experts, multiple)
    tokens_of_rows = placement.choices // chosen.shape[1]
    outputs = experts(move_rows(tokens, tokens_of_rows, placement.rows), placement.ends)
    of_choices = move_rows(outputs, placement.rows.flatten(), placement.choices[:, None])
    return (of_choices.unflatten(0, chosen.shape) * weights[..., None]).sum(1)


class Placement(NamedTuple):
    """Rows sorted by expert. Of N k choices, numbered token by token, row r serves ``choices[r]``, or none if N k.

    Choice (n, i) is served by row ``rows[n, i]``, or by none if R. Expert e has the rows from ``ends[e - 1]`` up to
    ``ends[e]``.
    """

    choices: Int[Tensor, " R"]
    rows: Int[Tensor, "N k"]
    ends: Int[Tensor, "E"]


def place(chosen: Int[Tensor, "N k"], own: range, num_experts: int, multiple: int = 1) -> Placement:
    """A row for each choice of an expert in ``own``, in the order of tokens, and rows for none at each group's end.

    They make each group a multiple of so many rows. A CPU's kernel for bfloat16 is made for each number of rows that it
    meets, which takes longer than the product; of rounded numbers there are few. Where all experts are own, the last
    group takes what is left over of a number of rows that is known in advance.
    """
    num_choices, num_own = chosen.numel(), len(own)
    groups = chosen.flatten() - own.start
    groups = torch.where((groups < 0) | (groups >= num_own), num_own, groups)
    sorted_groups, order = groups.sort(stable=True)
    ends = torch.searchsorted(sorted_groups, torch.arange(num_own, device=chosen.device), right=True)
    starts = F.pad(ends[:-1], (1, 0))
    new_ends = ((ends - starts + multiple - 1) // multiple * multiple).cumsum(0)
    if num_own == num_experts:
        num_rows = num_choices if multiple == 1 else -(-num_choices // multiple) * multiple + num_own * multiple
        new_ends = F.pad(new_ends[:-1], (0, 1), value=num_rows)
    else:
        num_rows = int(new_ends[-1])
    shift = F.pad(F.pad(new_ends[:-1], (1, 0)) - starts, (0, 1), value=num_rows + num_choices)
    rows_of_sorted = (torch.arange(num_choices, device=chosen.device) + shift[sorted_groups]).clamp(max=num_rows)
    rows = torch.empty_like(order).scatter(0, order, rows_of_sorted)
    choices = order.new_full((num_rows + 1,), num_choices).scatter(0, rows_of_sorted, order)[:num_rows]
    return Placement(choices, rows.view_as(chosen), new_ends.to(torch.int32))


def move_rows(x: Float[Tensor, "R D"], sources: Int[Tensor, " M"], readers: Int[Tensor, "R j"]) -> Float[Tensor, "M D"]:
    """Row m is ``x[sources[m]]``, or 0 where that is R; ``readers[r]`` are the rows m that read row r, or M for none.

    Its gradient sums over readers in their order: indexing's own would not know them, and sort to find them.
    """
    return _MoveRows.apply(x, sources, readers)  # type: ignore[no-any-return]


class _MoveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, sources: Tensor, readers: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(readers)
        return _rows_or_zero(x, sources)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (readers,) = ctx.saved_tensors
        return _rows_or_zero(gradient, readers.flatten()).unflatten(0, readers.shape).sum(1), None, None


def _rows_or_zero(x: Float[Tensor, "R D"], places: Int[Tensor, " M"]) -> Float[Tensor, "M D"]:
    return F.pad(x, (0, 0, 0, 1))[places]


@runtime_checkable
class Exchange(Protocol):
    """What computes a mixture whose experts are not all here."""

    def __call__(self, experts: Experts, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Float[Tensor, "N D"]:
        """Each token's (N D) sum of its ``chosen`` experts (N k) times their ``weights`` (N k)."""
        ...


class MixtureOfExperts(nn.Module):
    """Each token's output is the weighted sum of its k best experts, plus a shared expert if there is one.

    The weights are the k scores, over their sum if renormalised, times ``routed_scale``. ``selection_bias`` (E) takes
    part in choosing the k alone. ``exchange`` may be set from outside, where other ranks have some of the experts.
    """

    selection_bias: Tensor | None

    def __init__(self, settings: MixtureSettings, width: int):
        super().__init__()
        self.experts_per_token, self.renormalize = settings.experts_per_token, settings.renormalize
        self.router, self.routed_scale = settings.router, settings.routed_scale
        self.gate = Linear(width, settings.num_experts, bias=False)
        self.register_buffer("selection_bias", torch.zeros(settings.num_experts) if settings.selection_bias else None)
        self.experts = Experts(settings.num_experts, width, settings.expert_width)
        self.shared_expert = FeedForward(width, settings.shared_width) if settings.shared_width else None
        self.shared_expert_gate = Linear(width, 1, bias=False) if settings.shared_gate else None
        self.exchange: Exchange | None = None

    def forward(
        self, x: Float[Tensor, "B T D"], counted: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T D"], RouterStatistics]:
        """Output and router statistics; tokens outside ``counted`` (padding) are computed but not counted."""
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        is_softmax = self.router == "softmax"
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
        weights, experts = self._choose(scores)
        weights = weights.to(x.dtype)
        if self.exchange is None:
            output = self._combine(tokens, weights, experts).view_as(x)
        else:
            output = self.exchange(self.experts, tokens, weights, experts).view_as(x)
        if self.shared_expert is not None:
            output = output + self._shared(x)
        probabilities = scores if is_softmax else scores / (scores.sum(-1, keepdim=True) + _SMALLEST_SUM)
        return output, _statistics(logits, probabilities, experts, counted)

    def _choose(self, scores: Float[Tensor, "N E"]) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"]]:
        """The k experts of each token and their weights."""
        biased = scores if self.selection_bias is None else scores + self.selection_bias.to(scores.dtype)
        experts = biased.topk(self.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
        return weights * self.routed_scale, experts

    def _shared(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        assert self.shared_expert is not None
        output = self.shared_expert(x)
        return output if self.shared_expert_gate is None else self.shared_expert_gate(x).sigmoid() * output

    def _combine(
        self, tokens: Float[Tensor, "N D"], weights: Float[Tensor, "N k"], experts: Int[Tensor, "N k"]
    ) -> Float[Tensor, "N D"]:
        num_experts = self.gate.out_features
        return weighted_sum_of_experts(self.experts, tokens, weights, experts, range(num_experts), num_experts)


def _statistics(
    logits: Float[Tensor, "N E"],
    probabilities: Float[Tensor, "N E"],
    experts: Int[Tensor, "N k"],
    counted: Bool[Tensor, "B T"] | None,
) -> RouterStatistics:
    weight = torch.ones_like(logits[:, 0]) if counted is None else counted.flatten().to(logits.dtype)
    chosen = torch.zeros_like(probabilities).scatter(1, experts, 1.0)
    return RouterStatistics(
        assignments=weight @ chosen.detach(),
        probabilities=weight @ probabilities,
        squared_log_partition=weight @ logits.logsumexp(-1).square(),
        num_tokens=weight.sum(),
    )
