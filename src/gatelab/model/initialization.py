"""Initial weights: a generator for each parameter, so that the arms of a study share all that they have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gatelab.gates.gate import Gate, HeadNorm
from gatelab.gates.linear import Linear
from gatelab.model.decoder import Decoder
from gatelab.model.norm import RMSNorm
from gatelab.model.settings import ModelSettings
from gatelab.model.sink import Sink

# Where a feed-forward weight has its width F, by the end of its name; of the fused gate_up_proj after unfolding (2 F).
_WIDTH_DIMENSION = {
    ".mlp.gate_proj.weight": 0,
    ".mlp.up_proj.weight": 0,
    ".mlp.down_proj.weight": 1,
    ".mlp.experts.gate_up_proj": 2,
    ".mlp.experts.down_proj": 2,
}


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on the seed and the parameter's name alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@torch.no_grad()
def initialize(decoder: Decoder, seed: int) -> None:
    """Fill every parameter: matrices from normal(0, init_std), norms that multiply by 1, gates as they specify.

    Biases start at 0, and so do a sink's logits and its value, so that every sink starts by adding nothing, like
    off_by_one or (with a key from normal(0, init_std)) close to it.
    Values are float32, drawn on the CPU, and depend on neither device nor dtype; feed-forward matrices are drawn
    at ``drawn_feedforward_width`` and cut to size. Two decoders with different gates share every common weight, bit
    for bit.
    """
    settings = decoder.settings
    for prefix, module in decoder.named_modules():
        for short_name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RMSNorm | HeadNorm):
                parameter.fill_(0.0 if isinstance(module, RMSNorm) and module.centred else 1.0)
            elif short_name == "bias":
                parameter.zero_()
            else:
                name = f"{prefix}.{short_name}"
                parameter.copy_(settings.init_std * _draw(name, parameter.shape, settings, generator_for(seed, name)))
    for selection_bias in decoder.buffers():
        selection_bias.zero_()
    for module in decoder.modules():
        if isinstance(module, Gate):
            _start_gate(module)
        if isinstance(module, Sink):
            for parameter in (module.logits, module.value):
                if parameter is not None:
                    parameter.zero_()


def _draw(name: str, shape: torch.Size, settings: ModelSettings, generator: torch.Generator) -> Tensor:
    """Standard normal values of the given shape, cut from the wider draw where the name has a feed-forward width."""
    dimension = next((d for end, d in _WIDTH_DIMENSION.items() if name.endswith(end)), None)
    if dimension is None:
        return _standard_normal(shape, generator)
    is_expert, mixture = ".experts." in name, settings.mixture
    width = mixture.expert_width if is_expert and mixture else settings.feedforward_width
    # Matching narrows the experts where there are any; dense layers beside them keep their width.
    drawn = settings.drawn_feedforward_width if is_expert == (mixture is not None) else None
    sizes = [shape[0], 2, width, shape[2]] if name.endswith("gate_up_proj") else list(shape)
    sizes[dimension] = drawn or width
    return _standard_normal(sizes, generator).narrow(dimension, 0, width).reshape(shape)


def _standard_normal(sizes: Sequence[int], generator: torch.Generator) -> Tensor:
    """Float32 values drawn in float64 on the CPU: the same bits whatever the instruction set and PyTorch's defaults."""
    return torch.randn(sizes, generator=generator, dtype=torch.float64, device="cpu").float()


def _start_gate(gate: Gate) -> None:
    """Zero weights and start biases where the specification asks for them."""
    if gate.spec.source == "parameter":
        nn.init.zeros_(gate.logits)
        return
    last = gate.projection if isinstance(gate.projection, Linear) else gate.projection.get_submodule("up")
    assert isinstance(last, Linear)
    if gate.spec.initialization == "zeros":
        nn.init.zeros_(last.weight)
    if gate.spec.bias is not None:
        nn.init.constant_(last.bias, gate.spec.bias)
