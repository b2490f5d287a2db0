"""Computing a model whose weights are read layer by layer, so that one layer is in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from gatelab.interop.tensor_names import EMBEDDING, HEAD
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings

# Rows of the head that are widened to float32 at a time.
HEAD_ROWS = 8192


@torch.no_grad()
def streamed_logits(
    settings: ModelSettings, tensors: Mapping[str, Tensor], ids: Int[Tensor, "B T"]
) -> Float[Tensor, "B T V"]:
    """The logits of :class:`Decoder` with these tensors, in float32, whatever dtype the weights are stored in."""
    with torch.device("meta"):
        decoder = Decoder(settings).eval()
    decoder.activation_dtype = torch.float32
    stack = decoder.model
    for name, module in [("embed_tokens", stack.embed_tokens), ("norm", stack.norm)]:
        _read_when_called(module, f"model.{name}.", tensors)
    for number, layer in enumerate(stack.layers):
        _read_when_called(layer, f"model.layers.{number}.", tensors)
    state = decoder.hidden(ids).state
    head = tensors[EMBEDDING if settings.tied_head else HEAD]
    return torch.cat([F.linear(state, rows.float()) for rows in head.split(HEAD_ROWS)], dim=-1)


def _read_when_called(module: nn.Module, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    """Read a module's weights before its forward pass and let go of them after it."""
    names = list(module.state_dict())

    def read(module: nn.Module, inputs: Any) -> None:
        module.load_state_dict({name: tensors[prefix + name] for name in names}, assign=True)

    def let_go(module: nn.Module, inputs: Any, output: Any) -> None:
        module.to("meta")

    module.register_forward_pre_hook(read)
    module.register_forward_hook(let_go)
