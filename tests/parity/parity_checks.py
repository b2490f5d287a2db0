"""Comparing a decoder of ours with one of transformers: logits and the gradients of all parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, T, V = 3, 17, 97
SIZES = {
    "vocab_size": V,
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
}
TOLERANCE = 1e-5


def token_ids() -> Tensor:
    """Random token ids (B T)."""
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Wide random weights, so that attention is far from flat; norm weights differ from channel to channel."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = 0.2 * torch.randn(parameter.shape, generator=generator)
        parameter.copy_(parameter + noise if "norm" in name else noise)


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    """Gradients of the mean next-token loss, for every parameter."""
    model.zero_grad()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), token_ids()[:, 1:].flatten()).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in found.values())
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def assert_all_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Equal names and values."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: f"{name}: {m}")  # noqa: B023
