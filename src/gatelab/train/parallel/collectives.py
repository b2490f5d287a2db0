"""Sums and joins over a group of ranks that a gradient passes through, each with its counterpart in the backward pass.

In a region that ranks share, every rank has some heads, or some channels, of one computation. A gradient inside the
region is a rank's own part; outside, every rank holds the whole. ``enter`` and ``leave`` are f and g of Megatron-LM
(Shoeybi et al. 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function


def enter(x: Float[Tensor, "*shape"], group: dist.ProcessGroup) -> Float[Tensor, "*shape"]:
    """``x`` itself, which all ranks hold; its gradient is the sum of the ranks' parts."""
    return _Enter.apply(x, group)  # pyright: ignore[reportReturnType]


def leave(x: Float[Tensor, "*shape"], group: dist.ProcessGroup) -> Float[Tensor, "*shape"]:
    """The sum of the ranks' ``x``; the gradient, which all ranks hold, passes."""
    return _Leave.apply(x, group)  # pyright: ignore[reportReturnType]


def join(x: Float[Tensor, "*shape"], dim: int, group: dist.ProcessGroup) -> Float[Tensor, "*joined"]:
    """The ranks' ``x`` one after another along ``dim``; its gradient is this rank's piece of the sum of the parts."""
    return _Join.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def share_out(x: Float[Tensor, "*shape"], dim: int, group: dist.ProcessGroup) -> Float[Tensor, "*piece"]:
    """This rank's piece along ``dim`` of the sum of the ranks' ``x``; the counterpart of :func:`join`."""
    return _ShareOut.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _joined(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces, dim)


def _piece_of_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return _sum(x, group).chunk(group.size(), dim)[group.rank()].contiguous()


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], ctx.group), None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _joined(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _piece_of_sum(gradients[0], ctx.dim, ctx.group), None, None


class _ShareOut(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _piece_of_sum(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _joined(gradients[0], ctx.dim, ctx.group), None, None
