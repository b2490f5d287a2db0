"""The linear layers that take part: those inside the decoder's layers, gates included."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from gatelab.evaluate.precision import decoder_layers
from gatelab.evaluate.quantisation.schemes import Scheme
from gatelab.gates.gate import Gate
from gatelab.interop.gate_recovery import KNOWN_GATES

ROUTERS = ("gate", "router", "shared_expert_gate")


class Place(NamedTuple):
    """A linear layer: the number of its decoder layer, and its name inside it."""

    layer: int
    name: str

    def __str__(self) -> str:
        return f"layer {self.layer}, {self.name}"


def linear_layers(model: nn.Module, gates: bool = True) -> dict[Place, nn.Linear]:
    """The linear layers inside a decoder's layers in their order; without ``gates`` those of gates are left out.

    Embedding, head and routers are never among them, nor are experts whose weights are one tensor of three dimensions.
    Raises ``ValueError`` for a model that has none, and for gates to leave out that have no layer of their own.
    """
    found = {
        Place(number, name): module
        for number, layer in enumerate(decoder_layers(model))
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in ROUTERS
    }
    if not found:
        raise ValueError(
            f"the layers of {type(model).__name__} have no torch.nn.Linear to quantise; "
            "open a decoder whose projections are such modules"
        )
    if gates:
        return found
    of_gates = {id(module) for module in _gate_layers(model)}
    kept = {place: module for place, module in found.items() if id(module) not in of_gates}
    if len(kept) == len(found):
        raise ValueError(
            f"{type(model).__name__} has no gate with a linear layer of its own to leave out; quantise all layers"
        )
    return kept


def require_roundable(layers: dict[Place, nn.Linear], scheme: Scheme) -> None:
    """Raise ``ValueError`` for a weight that the scheme can't round."""
    for place, linear in layers.items():
        weight, rounding = linear.weight, scheme.weights
        if not weight.is_floating_point():
            raise ValueError(f"{place} has {weight.dtype} weights, quantised already; open the model unquantised")
        if not weight.numel():
            raise ValueError(f"{place} has weights of shape {tuple(weight.shape)}: there is nothing to round")
        if rounding is not None and rounding.group_size and linear.in_features % rounding.group_size:
            raise ValueError(
                f"{place} has {linear.in_features} inputs, which groups of {rounding.group_size} don't divide; "
                "take a scheme without groups"
            )


def _gate_layers(model: nn.Module) -> list[nn.Module]:
    """GateLab's gates, and those of the known families that have a projection of their own."""
    known = KNOWN_GATES.get(getattr(getattr(model, "config", None), "model_type", ""))
    projection = None if known is None or known.after_query else known.projection
    found = [part for module in model.modules() if isinstance(module, Gate) for part in module.modules()]
    for module in model.modules():
        gate = getattr(module, projection, None) if projection and "Attention" in type(module).__name__ else None
        found += [gate] if isinstance(gate, nn.Module) else []
    return found
