"""What a student would write in an afternoon: a gated decoder of this shape from PyTorch's own layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contenders.training import cross_entropy, training_step


class PlainLayer(nn.Module):
    """One layer with grouped queries, q/k norm, rotation, an elementwise gate and SwiGLU."""

    def __init__(self, shape: Mapping[str, Any], gated: bool):
        super().__init__()
        width, size, wide = shape["width"], shape["head_size"], shape["feedforward_width"]
        self.heads, self.kv_heads, self.size = shape["num_heads"], shape["num_kv_heads"], size
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_norm, self.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        self.q, self.o = (
            nn.Linear(n, m, bias=False) for n, m in ((width, self.heads * size), (self.heads * size, width))
        )
        self.k, self.v = (nn.Linear(width, self.kv_heads * size, bias=False) for _ in range(2))
        self.gate = nn.Linear(width, self.heads * size, bias=False) if gated else None
        self.ff_gate, self.ff_up = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.ff_down = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        q = self.q_norm(self.q(y).view(batch, length, self.heads, self.size)).transpose(1, 2)
        k = self.k_norm(self.k(y).view(batch, length, self.kv_heads, self.size)).transpose(1, 2)
        v = self.v(y).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        q, k = (turned(z, cos, sin) for z in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        if self.gate is not None:
            out = out * torch.sigmoid(self.gate(y))
        x = x + self.o(out)
        y = self.norm2(x)
        return x + self.ff_down(F.silu(self.ff_gate(y)) * self.ff_up(y))


class PlainDecoder(nn.Module):
    """Embedding, layers, norm, tied head."""

    def __init__(self, shape: Mapping[str, Any], gated: bool):
        super().__init__()
        self.embed = nn.Embedding(shape["vocab_size"], shape["width"])
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(PlainLayer(shape, gated) for _ in range(shape["num_layers"]))
        self.norm = nn.RMSNorm(shape["width"])
        half = torch.arange(0, shape["head_size"], 2) / shape["head_size"]
        angles = torch.outer(torch.arange(shape["context"]), 10_000.0**-half).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed.weight)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation of half-split pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def prepare(settings: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
    """A training step of this model."""
    model = PlainDecoder(settings["shape"], settings["gated"])
    return training_step(model, cross_entropy(model), settings)
