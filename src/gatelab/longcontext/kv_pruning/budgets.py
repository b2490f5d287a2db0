"""How many keys each key/value head may hold when all of a model's prunable heads together may hold so many."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelab.settings import nearest

Allocation = Literal["uniform", "heads", "layers", "both"]
ALLOCATIONS: tuple[Allocation, ...] = get_args(Allocation)
FLOOR_SHARE = 0.2


def require_allocation(name: str) -> Allocation:
    """The allocation of this name; ``ValueError`` with the nearest one for an unknown name."""
    for allocation in ALLOCATIONS:
        if name == allocation:
            return allocation
    raise ValueError(f"there is no allocation {name!r}; {nearest(name, ALLOCATIONS)}")


def allocate(
    allocation: Allocation,
    mean_gates: Float[Tensor, "N"] | None,
    held: Int[Tensor, "N"],
    layers: Int[Tensor, "N"],
    num_keys: int,
) -> Int[Tensor, "N"]:
    """Keys for each of a text's N heads: ``num_keys`` N in sum where the heads hold as many.

    ``layers`` numbers the layer of each head. ``uniform`` gives every head ``num_keys``. The others follow mean gate
    scores, so that heads whose output is gated away hold little: ``heads`` divides each layer's keys among its heads,
    ``layers`` divides all keys among the layers, equally within each, ``both`` divides all keys among all heads. Every
    head gets a fifth of ``num_keys`` beforehand, and the rest in proportion to its gate. No head gets more than it
    holds; what it leaves goes to the others.
    """
    if allocation == "uniform":
        return held.clamp(max=num_keys)
    if mean_gates is None:
        raise ValueError(
            f"allocation {allocation!r} divides the budget by mean gate scores, and the model lacks gates on the "
            "attention output; take uniform"
        )
    weights, whole = mean_gates.double(), torch.zeros_like(held)
    members = [layers == layer for layer in layers.unique()]
    if allocation == "heads":
        for is_member in members:
            whole[is_member] = _divide(weights[is_member], held[is_member], num_keys)
        return whole
    if allocation == "layers":
        for is_member in members:
            weights = torch.where(is_member, weights[is_member].mean(), weights)
    return _divide(weights, held, num_keys)


def _divide(weights: Float[Tensor, "N"], held: Int[Tensor, "N"], num_keys: int) -> Int[Tensor, "N"]:
    """``num_keys`` N keys over N heads: a floor each, the rest by weight, none beyond what it holds, whole numbers."""
    most = held.double()
    total = min(float(num_keys * len(weights)), float(most.sum()))
    floor = torch.minimum(most, torch.full_like(most, num_keys * FLOOR_SHARE))
    weights = weights.clamp(min=torch.finfo(weights.dtype).tiny)
    shares, is_full = floor, torch.zeros_like(most, dtype=torch.bool)
    while not is_full.all():
        rest = total - most[is_full].sum() - floor[~is_full].sum()
        shares = torch.where(is_full, most, floor + rest * weights / weights[~is_full].sum())
        if not bool((over := ~is_full & (shares > most)).any()):
            break
        is_full = is_full | over
    return _rounded(shares.minimum(most), most, round(total))


def _rounded(shares: Float[Tensor, "N"], most: Float[Tensor, "N"], total: int) -> Int[Tensor, "N"]:
    """Whole numbers with this sum: rounded down, then one more for those that lost most and have room."""
    whole = shares.floor()
    lost = torch.where(whole < most, shares - whole, -1.0)
    missing = total - int(whole.sum())
    whole[lost.argsort(descending=True, stable=True)[:missing]] += 1
    return whole.long()
