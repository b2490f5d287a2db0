"""Causal attention by batched matrix products, for compiled training in bfloat16 on a CPU.

PyTorch's fused kernel for CPUs multiplies bfloat16 tiles slowly, most of all in its backward pass. Here a block of
queries meets all keys up to its own in one product over batch and heads, and torch.compile fuses what lies between
products. Logits and their gradients stay float32, as in the fused kernel; probabilities are rounded where they enter a
product. Gradients of keys and values are summed over the query heads that share them before they are rounded.
``benchmarks/training_step.py`` measures a step with both; ``fused_attention`` is the plain twin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gatelab.model.attention import fused_attention
from gatelab.model.sink import Sink

BLOCK = 128  # queries of a block: shorter ones compute fewer hidden logits, longer ones give fewer products to compile


def blocked_attention(
    query: Float[Tensor, "B T H C"],
    key: Float[Tensor, "B S K C"],
    value: Float[Tensor, "B S K Cv"],
    mask: Tensor | None,
    causal: bool,
    sink: Sink | None = None,
) -> Float[Tensor, "B T H Cv"]:
    """:func:`causal_attention_in_blocks` where it wins, else :func:`fused_attention`: the kernel of compiled layers.

    It wins in compiled code, in bfloat16 on a CPU; masks, sinks and caches are not its own.
    """
    is_triangle = causal and mask is None and sink is None and query.shape[1] == key.shape[1] > 1
    is_fast = torch.compiler.is_compiling() and query.dtype == torch.bfloat16 and query.device.type == "cpu"
    if is_triangle and is_fast:
        return causal_attention_in_blocks(query, key, value)
    return fused_attention(query, key, value, mask, causal, sink)


def causal_attention_in_blocks(
    query: Float[Tensor, "B T H C"], key: Float[Tensor, "B T K C"], value: Float[Tensor, "B T K Cv"]
) -> Float[Tensor, "B T H Cv"]:
    """softmax(q k^T / sqrt(C)) v over the causal triangle."""
    output = _BlockedAttention.apply(query, key, value)
    assert isinstance(output, Tensor)
    return output


class _BlockedAttention(torch.autograd.Function):
    """The log-sum-exp of each query is all that is kept for the backward pass beside inputs and output.

    Inside, N = B K, and the G = H / K query heads of a key head lie side by side: row t G + g is head g of token t.
    A block has R such rows.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        (num_rows, _, num_heads, _), num_kv_heads = query.shape, key.shape[2]
        queries, keys, values = (_by_key_head(tensor, num_kv_heads) for tensor in (query, key, value))
        turned = keys.to(_wide(keys)).transpose(1, 2)
        outputs, normalizers = [], []
        for block in _blocks(query.shape[1], num_heads // num_kv_heads):
            logits = block.logits(queries, turned)
            largest = logits.amax(dim=-1, keepdim=True)
            weights = torch.exp(logits - largest)
            total = weights.sum(dim=-1, keepdim=True)
            outputs.append((torch.bmm(weights.to(value.dtype), values[:, : block.stop]) / total).to(value.dtype))
            normalizers.append(largest + total.log())
        output = _by_token(torch.cat(outputs, dim=1), num_rows, num_heads)
        ctx.save_for_backward(query, key, value, output, torch.cat(normalizers, dim=1))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With P the probabilities: dV = P^T dO, dS = P * (dO V^T - sum_c dO O), dQ = dS K, dK = dS^T Q."""
        query, key, value, output, normalizer = ctx.saved_tensors
        (num_rows, num_tokens, num_heads, head_size), num_kv_heads = query.shape, key.shape[2]
        queries, keys, values, upstream = (
            _by_key_head(tensor, num_kv_heads) for tensor in (query, key, value, gradients[0])
        )
        wide = _wide(query)
        turned, turned_values = (tensor.to(wide).transpose(1, 2) for tensor in (keys, values))
        means = _by_key_head((gradients[0].to(wide) * output.to(wide)).sum(dim=-1, keepdim=True), num_kv_heads)
        of_queries = []
        of_keys, of_values = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
        for block in _blocks(num_tokens, num_heads // num_kv_heads):
            rows, seen, unseen = block.rows, block.stop, (0, 0, 0, num_tokens - block.stop)
            weights = torch.exp(block.logits(queries, turned) - normalizer[:, rows])
            of_weights = torch.bmm(upstream[:, rows].to(wide), turned_values[:, :, :seen])
            of_logits = (weights * (of_weights - means[:, rows]) * head_size**-0.5).to(query.dtype)
            of_queries.append(torch.bmm(of_logits, keys[:, :seen]))
            of_keys = of_keys + F.pad(torch.bmm(of_logits.transpose(1, 2), queries[:, rows]).to(wide), unseen)
            weighted = torch.bmm(weights.to(value.dtype).transpose(1, 2), upstream[:, rows])
            of_values = of_values + F.pad(weighted.to(wide), unseen)
        return (
            _by_token(torch.cat(of_queries, dim=1), num_rows, num_heads),
            _by_token(of_keys.to(key.dtype), num_rows, num_kv_heads),
            _by_token(of_values.to(value.dtype), num_rows, num_kv_heads),
        )


class _Block(NamedTuple):
    """Queries of the tokens from ``start`` to before ``stop``, of ``group`` heads each."""

    start: int
    stop: int
    group: int

    @property
    def rows(self) -> slice:
        """Where they are among all queries."""
        return slice(self.start * self.group, self.stop * self.group)

    def logits(self, queries: Float[Tensor, "N TG C"], turned: Float[Tensor, "N C T"]) -> Float[Tensor, "N R stop"]:
        """Scaled logits of these queries with the keys before ``stop``, -inf where the key is later."""
        logits = (
            torch.bmm(queries[:, self.rows].to(turned.dtype), turned[:, :, : self.stop]) * queries.shape[-1] ** -0.5
        )
        token = self.start + torch.arange(logits.shape[1], device=logits.device) // self.group
        is_later = torch.arange(self.stop, device=logits.device) > token[:, None]
        return logits.masked_fill(is_later, float("-inf"))


def _blocks(num_tokens: int, group: int) -> Iterator[_Block]:
    return (_Block(start, min(start + BLOCK, num_tokens), group) for start in range(0, num_tokens, BLOCK))


def _wide(tensor: Tensor) -> torch.dtype:
    """That of logits and sums: float32, or float64 for a float64 tensor."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _by_key_head(tensor: Float[Tensor, "B T H X"], num_kv_heads: int) -> Float[Tensor, "BK TG X"]:
    return tensor.unflatten(2, (num_kv_heads, -1)).transpose(1, 2).flatten(0, 1).flatten(1, 2)


def _by_token(tensor: Float[Tensor, "BK TG X"], num_rows: int, num_heads: int) -> Float[Tensor, "B T H X"]:
    num_kv_heads = len(tensor) // num_rows
    rows = tensor.unflatten(0, (num_rows, num_kv_heads)).unflatten(2, (-1, num_heads // num_kv_heads))
    return rows.transpose(1, 2).flatten(2, 3)
