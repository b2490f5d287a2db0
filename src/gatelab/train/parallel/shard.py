"""Data parallelism: FSDP2 over the shard ranks, and copies of that over the replicate ranks.

Each layer is a unit, so one layer's weights are whole at a time; embedding, head and final norm are another unit. With
bfloat16 activations the weights travel in bfloat16; gradients are always added up in float32, or float64 for float64.
They are summed, not averaged: every rank's loss is already divided by the target tokens of the whole batch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from gatelab.model.decoder import Decoder
from gatelab.model.moe import MixtureOfExperts
from gatelab.train.parallel.experts import share_experts_of_own_tokens
from gatelab.train.parallel.mesh import Ranks
from gatelab.train.parallel.tensor import Part, apply_plan


def share_experts(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Give each expert rank equally many experts of every mixture."""
    part = Part(Shard(0), lambda local: local)
    for module in list(decoder.modules()):
        if isinstance(module, MixtureOfExperts):
            apply_plan(module, {"experts.gate_up_proj": part, "experts.down_proj": part}, mesh)
            num_experts, group = module.gate.out_features, mesh.get_group()
            module.exchange = partial(share_experts_of_own_tokens, num_experts=num_experts, group=group)


def shard_over_ranks(decoder: Decoder, ranks: Ranks, activations: torch.dtype) -> None:
    """Shard weights, gradients and optimizer state over the data-parallel ranks."""
    assert ranks.mesh is not None
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if activations == torch.bfloat16 else None,
        reduce_dtype=torch.promote_types(activations, torch.float32),
        cast_forward_inputs=False,
    )
    mesh = _data_mesh(ranks.mesh, "shard")
    for layer in decoder.model.layers:
        if ranks.expert_mesh is not None and isinstance(layer.mlp, MixtureOfExperts):
            fully_shard(layer.mlp.experts, mesh=_data_mesh(ranks.expert_mesh, "outer"), mp_policy=policy)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(decoder, mesh=mesh, mp_policy=policy)
    for method in ("hidden", "logits"):
        register_fsdp_forward_method(decoder, method)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _data_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The ranks that weights are sharded over, and their copies where there are any."""
    return mesh["replicate", name] if mesh["replicate"].size() > 1 else mesh[name]
