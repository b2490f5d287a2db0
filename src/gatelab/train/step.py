"""One optimizer step on one global batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gatelab.data.loader import IGNORED, Batch
from gatelab.model.decoder import Decoder
from gatelab.model.masks import PADDING
from gatelab.model.moe import RouterStatistics, balance_loss, router_z_loss
from gatelab.train.parallel.mesh import ALONE, Ranks
from gatelab.train.parallel.placement import clip_gradients
from gatelab.train.settings import TrainSettings

SumOfNats = Callable[[Tensor, Tensor], Tensor]


class StepFigures(NamedTuple):
    """Mean cross-entropy over the targets in nats, gradient norm before clipping, learning rate of what is no gate."""

    loss: float
    gradient_norm: float
    learning_rate: float


def take_step(
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    sum_of_nats: SumOfNats,
    settings: TrainSettings,
    ranks: Ranks = ALONE,
) -> StepFigures:
    """One optimizer step on one global batch, of which every data-parallel rank has its rows.

    The batch is computed in ``settings.accumulation`` pieces; each piece's loss is divided by the target tokens of
    the whole batch, and its router losses weigh as much as its share of the tokens that are no padding. Losses and
    gradients are summed over ranks. Nothing is updated when loss or norm is not finite.
    """
    num_targets = ranks.sum_over_data((batch.targets != IGNORED).sum())
    is_token = torch.ones_like(batch.inputs) if batch.documents is None else batch.documents != PADDING
    num_tokens = ranks.sum_over_data(is_token.sum())
    total = torch.zeros((), dtype=torch.float64, device=batch.inputs.device)
    routed: RouterStatistics | None = None
    for piece in _pieces(batch, settings.accumulation):
        hidden = decoder.hidden(piece.inputs, piece.documents)
        nats = sum_of_nats(hidden.state, piece.targets)
        loss = nats / num_targets
        if hidden.router is not None:
            routed = _added(routed, RouterStatistics(*map(ranks.sum_over_data, hidden.router)))
            share = hidden.router.num_tokens[0] / num_tokens
            loss = loss + share * router_loss(hidden.router, routed, settings)
        loss.backward()
        total += nats.detach()
    norm = clip_gradients(decoder.parameters(), settings.optimizer.clip_norm or math.inf)
    total = ranks.sum_over_data(total)
    figures = StepFigures(float(total / num_targets), norm, optimizer.param_groups[0]["lr"])
    if math.isfinite(figures.loss) and math.isfinite(figures.gradient_norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return figures


def router_loss(piece: RouterStatistics, routed: RouterStatistics, settings: TrainSettings) -> Tensor:
    """Load-balancing and z-loss of one piece of a batch.

    Expert frequencies are those of all pieces routed so far in this step (Qiu et al. 2501.11873): exact over the
    global batch without accumulation, and with it exact at the step's last piece.
    """
    frequencies = routed.assignments / routed.num_tokens[:, None].clamp(min=1)
    balance = balance_loss(piece, frequencies)
    return settings.balance_loss_weight * balance + settings.router_z_loss_weight * router_z_loss(piece)


def _pieces(batch: Batch, count: int) -> list[Batch]:
    """The batch in ``count`` equal pieces along its sequences."""
    inputs, targets = batch.inputs.chunk(count), batch.targets.chunk(count)
    documents = [None] * count if batch.documents is None else batch.documents.chunk(count)
    return [Batch(*parts) for parts in zip(inputs, targets, documents, strict=True)]


def _added(total: RouterStatistics | None, more: RouterStatistics) -> RouterStatistics:
    return more if total is None else RouterStatistics(*(a + b for a, b in zip(total, more, strict=True)))
