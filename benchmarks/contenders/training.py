"""A training step around any peer's model: the same batches, clipping and optimizer for all.

``weights``: "bfloat16" keeps weights and optimizer state in bfloat16, a peer's fastest and least accurate way;
"float32" keeps them in float32 and computes in bfloat16 by autocast, which is what GateLab's own step computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


def random_batch(shape: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B T), the targets one token ahead."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape["vocab_size"], (shape["sequences"], shape["context"] + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def cross_entropy(logits_of: Callable[[Tensor], Tensor]) -> Loss:
    """The mean loss in float32, as every peer's own training code has it."""

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(inputs).float().flatten(0, 1), targets.flatten())

    return loss


def training_step(model: nn.Module, loss: Loss, settings: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
    """One step on one batch, over and over; its figures are the loss and the number of parameters."""
    if settings["weights"] == "bfloat16":
        model.to(torch.bfloat16)
    if settings["compile"]:
        loss = torch.compile(loss, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batch = random_batch(settings["shape"])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model.train()

    def turn() -> dict[str, float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=settings["weights"] == "float32"):
            value = loss(*batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": value.item(), "parameters": parameters}

    return turn
