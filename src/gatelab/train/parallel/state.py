"""A run's state in one piece: gathered from its ranks to be written, spread over them when it is read."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from gatelab.model.decoder import Decoder
from gatelab.train.parallel.mesh import Ranks

_ON_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
_ON_ALL = StateDictOptions(full_state_dict=True)


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


def whole_optimizer_state(decoder: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter names, whole on the first rank; all ranks call this together."""
    return get_optimizer_state_dict(decoder, optimizer, options=_ON_FIRST)


def load_optimizer_state(decoder: Decoder, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore what :func:`whole_optimizer_state` gave, whatever part of the parameters this rank has."""
    set_optimizer_state_dict(decoder, optimizer, state, options=_ON_ALL)


def spread_state(
    whole: Decoder, whole_optimizer: torch.optim.Optimizer, decoder: Decoder, optimizer: torch.optim.Optimizer
) -> None:
    """Give a decoder that is spread over ranks, and its optimizer, this rank's part of a state that each rank read."""
    state = get_optimizer_state_dict(whole, whole_optimizer, options=_ON_ALL)
    set_model_state_dict(decoder, whole.state_dict(), options=_ON_ALL)
    load_optimizer_state(decoder, optimizer, state)
