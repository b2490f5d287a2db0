"""Tensor parallelism: every rank computes some heads with their gates, and some of the feed-forward width.

A plan says for each parameter which part of it a rank holds and how the rank reads it (:class:`Part`). Parameters
become DTensors under their own names; the modules' code stays as it is and sees plain local tensors. What a rank
computes is a part of one sum: the input of a shared region enters it by :func:`~.collectives.enter`, its output leaves
it by :func:`~.collectives.leave`, one sum over ranks in each direction for attention and one for the feed-forward.

- Query heads, their gates, sink logits and the weights of an output norm are split over ranks by heads, ``o_proj`` by
  its inputs. With latent attention so are the keys and values of heads; latents and the shared key are whole.
- Key/value heads are split where there are enough. Fewer of them than ranks are whole on every rank, which reads the
  one that its query heads use; likewise key and value gates and a sink's key and value.
- A head-shared gate computes its rank's rows, and logits of all heads are joined before they are averaged.
- A gate that reads values or the attention output reads those of all heads, joined.
- A gate on the dense output, the first matrix of a low-rank gate, and q/k norms are whole on every rank.
- Embedding, head, the other norms and routers are outside of the regions and whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from gatelab.gates.gate import Gate
from gatelab.gates.spec import AttentionShape
from gatelab.model.attention import GatedAttention
from gatelab.model.decoder import Decoder
from gatelab.model.feedforward import FeedForward
from gatelab.model.moe import MixtureOfExperts
from gatelab.train.parallel.collectives import enter, join, leave
from gatelab.train.parallel.experts import share_experts_of_tokens_of_all


@dataclass(frozen=True)
class Part:
    """What of a parameter a rank holds, and how it reads that: a function of the local tensor."""

    placement: Placement
    read: Callable[[Tensor], Tensor]


Plan = dict[str, Part]


def split_over_ranks(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Turn every parameter into a DTensor on ``mesh`` (the tensor ranks) and let each rank compute its share."""
    group = mesh.get_group()
    for number, layer in enumerate(decoder.model.layers):
        attention = layer.self_attn
        assert isinstance(attention, GatedAttention)
        apply_plan(attention, attention_plan(attention, decoder.settings.shape_on_layer(number), group), mesh)
        _connect_attention(attention, decoder.settings.shape_on_layer(number), group)
    for module in list(decoder.modules()):
        if isinstance(module, FeedForward):
            down = {"down_proj.weight": split(1)}
            apply_plan(module, {"gate_proj.weight": split(0), "up_proj.weight": split(0)} | down, mesh)
            _make_region(module, module, group)
        if isinstance(module, MixtureOfExperts):
            apply_plan(module, {"experts.gate_up_proj": split(0), "experts.down_proj": split(0)}, mesh)
            num_experts = module.gate.out_features
            module.exchange = partial(share_experts_of_tokens_of_all, num_experts=num_experts, group=group)
    others = {name: whole() for name, one in decoder.named_parameters() if not isinstance(one, DTensor)}
    apply_plan(decoder, others, mesh)


def attention_plan(attention: GatedAttention, shape: AttentionShape, group: dist.ProcessGroup) -> Plan:
    """The plan of one attention layer, by parameter name."""
    of_kv_heads = _of_kv_heads(shape, group)
    plan = {
        "q_proj.weight": split(0),
        "k_proj.weight": of_kv_heads,
        "v_proj.weight": of_kv_heads,
        "o_proj.weight": split(1),
        "q_proj.bias": split(0),
        "k_proj.bias": of_kv_heads,
        "v_proj.bias": of_kv_heads,
        "o_proj.bias": divided(group),
        "q_norm.weight": summed(group),
        "k_norm.weight": summed(group),
        "q_a_proj.weight": summed(group),
        "q_a_layernorm.weight": summed(group),
        "q_b_proj.weight": split(0),
        "kv_a_proj_with_mqa.weight": summed(group),
        "kv_a_layernorm.weight": summed(group),
        "kv_b_proj.weight": split(0),
        "control.weight": split(0),
        "sink.logits": split(0),
        "sink.key": of_kv_heads,
        "sink.value": of_kv_heads,
    }
    for position, gate in attention.gates.items():
        assert isinstance(gate, Gate)
        plan |= {f"gates.{position}.{name}": part for name, part in _gate_plan(gate, of_kv_heads, group).items()}
    return {name: plan[name] for name, _ in attention.named_parameters()}


def _gate_plan(gate: Gate, of_kv_heads: Part, group: dist.ProcessGroup) -> Plan:
    spec = gate.spec
    if spec.position == "dense_output":
        rows, logits = divided(group), whole()
    else:
        rows = of_kv_heads if spec.position in ("key", "value") else split(0)
        logits = summed(group) if spec.sharing == "head_shared" else rows
    return {
        "logits": logits,
        "projection.weight": rows,
        "projection.bias": rows,
        "projection.down.weight": summed(group),
        "projection.up.weight": rows,
        "projection.up.bias": rows,
    }


def _connect_attention(attention: GatedAttention, shape: AttentionShape, group: dist.ProcessGroup) -> None:
    """What ranks tell each other in one attention layer."""
    _make_region(attention, attention.o_proj, group)
    copies = max(1, group.size() // shape.num_kv_heads)
    for gate in attention.gates.values():
        assert isinstance(gate, Gate)
        if gate.spec.source == "parameter":
            continue
        if gate.spec.source in ("value", "attention_output"):
            repeats = copies if gate.spec.source == "value" else 1
            _change_input(gate.projection, partial(_all_heads, head_size=shape.value_size, copies=repeats, group=group))
        if gate.spec.position == "dense_output":
            _change_output(gate.projection, partial(leave, group=group))
        elif gate.spec.sharing == "head_shared":
            _change_output(gate.projection, partial(join, dim=-1, group=group))


def _make_region(first: nn.Module, last: nn.Module, group: dist.ProcessGroup) -> None:
    """Ranks share what lies between the first argument of ``first`` and the output of ``last``."""
    _change_input(first, partial(enter, group=group))
    _change_output(last, partial(leave, group=group))


def _change_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return change(inputs[0]), *inputs[1:]

    module.register_forward_pre_hook(hook)


def _change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    def hook(module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> Tensor:
        return change(output)

    module.register_forward_hook(hook)


def _all_heads(
    x: Float[Tensor, "B T local"], head_size: int, copies: int, group: dist.ProcessGroup
) -> Float[Tensor, "B T all"]:
    """The channels of all heads, of which ``copies`` ranks have each."""
    heads = join(x, -1, group).unflatten(-1, (-1, head_size))
    return heads[:, :, ::copies].flatten(2)


def apply_plan(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Turn the named parameters into DTensors, which their modules read as the plan says."""
    by_owner: dict[str, Plan] = {}
    for name, part in plan.items():
        owner, _, short = name.rpartition(".")
        by_owner.setdefault(owner, {})[short] = part
    for owner_name, parts in by_owner.items():
        owner = module.get_submodule(owner_name)
        for name, part in parts.items():
            values = getattr(owner, name).detach()
            setattr(owner, name, nn.Parameter(distribute_tensor(values, mesh, [part.placement], src_data_rank=None)))
        read_locally(owner, {name: part.read for name, part in parts.items()})


def read_locally(module: nn.Module, reads: dict[str, Callable[[Tensor], Tensor]]) -> None:
    """Let the module's own code read its DTensor parameters as local tensors, by a class of its own.

    What ``parameters()`` and ``state_dict()`` give, and what an optimizer or FSDP replaces, are still the DTensors.
    While FSDP has a parameter sharded (a second dimension of its mesh), the attribute is the DTensor too.
    """

    def reader(name: str, read: Callable[[Tensor], Tensor]) -> property:
        def get(self: nn.Module) -> Tensor:
            parameter = self._parameters[name]
            assert isinstance(parameter, DTensor)
            return parameter if parameter.device_mesh.ndim > 1 else read(parameter.to_local())

        return property(get)

    properties = {name: reader(name, read) for name, read in reads.items()}
    module.__class__ = type(type(module).__name__, (type(module),), properties)


def split(dim: int) -> Part:
    """Equal pieces along a dimension, in the order of ranks."""
    return Part(Shard(dim), lambda local: local)


def whole() -> Part:
    """Everything on every rank, used alike by all: their gradients are equal."""
    return Part(Replicate(), lambda local: local)


def summed(group: dist.ProcessGroup) -> Part:
    """Everything on every rank, each using it for its own heads: the gradient is the sum over ranks."""
    return Part(Replicate(), lambda local: enter(local, group))


def divided(group: dist.ProcessGroup) -> Part:
    """Everything on every rank, each using 1/R of it: the outputs add up to that of the whole, and so do gradients."""
    return Part(Replicate(), lambda local: enter(local, group) / group.size())


def _of_kv_heads(shape: AttentionShape, group: dist.ProcessGroup) -> Part:
    """Split by heads; where ranks outnumber heads everything on every rank, each using the rows of one head."""
    copies = group.size() // shape.num_kv_heads
    if copies <= 1:
        return split(0)
    head = group.rank() // copies
    return Part(Replicate(), lambda local: enter(local, group).chunk(shape.num_kv_heads)[head])
