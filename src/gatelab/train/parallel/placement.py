"""All that is applied to a decoder from outside, in its one fixed order, and what reads a decoder spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gatelab.model.decoder import Decoder
from gatelab.train.parallel import compilation
from gatelab.train.parallel.mesh import Ranks, require_divisible
from gatelab.train.parallel.shard import shard_over_ranks, share_experts
from gatelab.train.parallel.tensor import split_over_ranks
from gatelab.train.settings import TrainSettings


def place(decoder: Decoder, settings: TrainSettings, ranks: Ranks, compiled: bool) -> None:
    """Spread an initialised decoder over the ranks: tensor, experts, recomputation, compilation, shards.

    Every rank starts from equal weights and keeps its part of them. Names of parameters stay as they are. Raises
    ``ValueError`` when heads, widths or experts can't be shared by so many ranks.
    """
    if ranks.mesh is not None:
        require_divisible(decoder.settings, settings.parallel)
        if ranks.mesh["tensor"].size() > 1:
            split_over_ranks(decoder, ranks.mesh["tensor"])
        if ranks.expert_mesh is not None:
            share_experts(decoder, ranks.expert_mesh["expert"])
    if settings.recompute:
        compilation.recompute_layers(decoder)
    if compiled:
        compilation.compile_layers(decoder)
    if ranks.num_data_ranks > 1:
        shard_over_ranks(decoder, ranks, getattr(torch, settings.precision))


def whole_decoder(decoder: Decoder, ranks: Ranks) -> Decoder | None:
    """The same decoder in one piece on the first rank, ``None`` on the others; all ranks call this together."""
    if ranks.mesh is None:
        return decoder
    weights = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in decoder.state_dict().items()
    }
    if not ranks.is_first:
        return None
    with torch.device("meta"):
        whole = Decoder(decoder.settings)
    whole.load_state_dict(weights, assign=True)
    whole.activation_dtype = decoder.activation_dtype
    return whole


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> float:
    """Scale all gradients so that their norm over all ranks is at most ``largest``; the norm before that."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return float(nn.utils.clip_grad_norm_(parameters, largest))
    squares: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    gradients = [parameter.grad for parameter in parameters]
    for gradient in gradients:
        assert isinstance(gradient, DTensor)
        groups = _groups_with_parts(gradient)
        square = gradient.to_local().double().square().sum()
        squares[groups] = squares[groups] + square if groups in squares else square
    for groups, square in squares.items():
        for group in groups:
            dist.all_reduce(square, group=group)
    norm = sum(squares.values(), start=torch.zeros((), dtype=torch.float64)).sqrt()
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        assert isinstance(gradient, DTensor)
        gradient.to_local().mul_(factor.to(gradient.dtype))
    return float(norm)


def _groups_with_parts(tensor: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks have different parts of a tensor."""
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
