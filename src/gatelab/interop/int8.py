"""Weight-only int8: which matrices take part, their rounding in place, and the same as torchao's configuration.

The policy: projections of attention and feed-forward layers are rounded. Embedding, head, routers and experts keep
their dtype, and so do gate projections unless asked for: a gate multiplies a whole channel, or head, by its score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gatelab.gates.gate import Gate
from gatelab.model.attention import GatedAttention
from gatelab.model.decoder import Decoder
from gatelab.model.feedforward import FeedForward

if TYPE_CHECKING:
    from transformers import TorchAoConfig


def rounded_projections(model: nn.Module, gates: bool = False) -> list[str]:
    """Names of the linear layers that int8 takes, in a decoder or its Hugging Face form; with ``gates`` theirs too."""
    names = []
    for prefix, module in model.named_modules():
        if isinstance(module, GatedAttention | FeedForward):
            names += [f"{prefix}.{name}" for name, child in module.named_children() if isinstance(child, nn.Linear)]
        elif gates and isinstance(module, Gate):
            names += [f"{prefix}.{name}" for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    return names


@torch.no_grad()
def round_to_int8(decoder: Decoder, gates: bool = False) -> None:
    """Replace the weights of :func:`rounded_projections` by what int8 would hold of them, in their own dtype.

    The result computes what a weight-only int8 model computes, so its perplexity is that of the quantised model.
    """
    for name in rounded_projections(decoder, gates):
        weight = decoder.get_parameter(f"{name}.weight")
        weight.copy_(nearest_int8(weight))


def nearest_int8(weight: Float[Tensor, "O I"]) -> Float[Tensor, "O I"]:
    """Each row at the nearest of 256 even steps, -128 to 127 times max|row| / 127.5, as torchao has it."""
    step = (weight.abs().amax(dim=1, keepdim=True) / 127.5).clamp(min=torch.finfo(weight.dtype).eps)
    return (weight * (1 / step)).round().clamp(-128, 127) * step


def torchao_config(model: nn.Module, gates: bool = False) -> TorchAoConfig:
    """The policy for ``from_pretrained(..., quantization_config=)``; needs torchao (``pip install gatelab[quant]``)."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig  # pyright: ignore[reportMissingImports]
        from transformers import TorchAoConfig
    except ImportError:
        raise ValueError("int8 through transformers needs torchao and transformers: install gatelab[quant]") from None
    rounded = set(rounded_projections(model, gates))
    kept = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in rounded]
    return TorchAoConfig(Int8WeightOnlyConfig(version=2), modules_to_not_convert=kept)
