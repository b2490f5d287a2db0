"""AdamW over groups of parameters: what is decayed, and what has a rate of its own."""

from __future__ import annotations

import torch
from torch import nn

from gatelab.gates.gate import Gate, HeadNorm
from gatelab.model.decoder import Decoder
from gatelab.model.norm import RMSNorm
from gatelab.train.settings import OptimizerSettings


def parameter_groups(decoder: Decoder, settings: OptimizerSettings) -> list[dict[str, object]]:
    """Up to four groups, in a fixed order: ordinary and gate parameters, each with and without weight decay.

    Norms, biases, input-independent gates and logits of sinks are not decayed. ``peak`` is a group's learning rate
    before the schedule.
    """
    gate_rate = settings.gate_learning_rate or settings.learning_rate
    gate_decay = settings.weight_decay if settings.gate_weight_decay is None else settings.gate_weight_decay
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for in_gate, is_decayed, parameter in _classified(decoder):
        groups.setdefault((in_gate, is_decayed), []).append(parameter)
    return [
        {
            "params": groups[in_gate, is_decayed],
            "weight_decay": (gate_decay if in_gate else settings.weight_decay) if is_decayed else 0.0,
            "peak": gate_rate if in_gate else settings.learning_rate,
            "lr": 0.0,
        }
        for in_gate, is_decayed in sorted(groups)
    ]


def build_optimizer(decoder: Decoder, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW with these groups; PyTorch's fused pass."""
    groups = parameter_groups(decoder, settings)
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.epsilon, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Give every group its peak times the schedule's factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor


def _classified(decoder: Decoder) -> list[tuple[bool, bool, nn.Parameter]]:
    """(belongs to a gate, is decayed, parameter) of every parameter, in the decoder's order, each once."""
    gate_parameters = {id(p) for module in decoder.modules() if isinstance(module, Gate) for p in module.parameters()}
    result = []
    for module in decoder.modules():
        for name, parameter in module.named_parameters(recurse=False):
            keeps_size = isinstance(module, RMSNorm | HeadNorm) or name in ("bias", "logits")
            result.append((id(parameter) in gate_parameters, not keeps_size, parameter))
    return result
