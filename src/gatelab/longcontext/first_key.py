"""What a decoder loses when no query may see the first key: the question of what a sink is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from gatelab.model.attention import AttentionKernel, GatedAttention
from gatelab.model.decoder import Decoder
from gatelab.model.masks import suffix_mask
from gatelab.model.sink import Sink


@contextmanager
def masked_first_key(decoder: Decoder) -> Iterator[None]:
    """While it lasts, the key of the first token is hidden on every layer from all queries but its own.

    The mask has T x S signs, a byte each.
    """
    layers = [module for module in decoder.modules() if isinstance(module, GatedAttention)]
    kernels = [layer.kernel for layer in layers]
    for layer, kernel in zip(layers, kernels, strict=True):
        layer.kernel = _without_first_key(kernel)
    try:
        yield
    finally:
        for layer, kernel in zip(layers, kernels, strict=True):
            layer.kernel = kernel


def _without_first_key(kernel: AttentionKernel) -> AttentionKernel:
    def masked(
        query: Float[Tensor, "B T H C"],
        key: Float[Tensor, "B S K C"],
        value: Float[Tensor, "B S K Cv"],
        mask: Tensor | None,
        causal: bool,
        sink: Sink | None = None,
    ) -> Float[Tensor, "B T H Cv"]:
        num_queries, num_keys = query.shape[1], key.shape[1]
        if mask is None and causal:
            mask = suffix_mask(num_queries, num_keys, query.device)
        elif mask is None:
            mask = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=query.device)
        visible = mask.clone()
        visible[..., num_keys == num_queries :, 0] = False
        return kernel(query, key, value, visible, causal, sink)

    return masked
