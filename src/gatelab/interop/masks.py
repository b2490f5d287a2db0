"""Masks of transformers as a ``Visibility``: what a model asks for, without a T x T map.

transformers describes a mask by a function of indices, "does query i see key j?". Ours asks it for direct
neighbours and a few whole rows, which settles the pattern, and returns a ``Visibility``, which the model hands
on to the attention function unread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gatelab.diagnose.calls import Visibility

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def visibility_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    mask_function: MaskFunction,
    attention_mask: Bool[Tensor, "B S"] | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Visibility:
    """A mask function for transformers' ``AttentionMaskInterface``, whose contract the parameter names are.

    Knows causal and bidirectional attention, windows and chunks of ``local_size``, packed documents and padding.
    Raises ValueError for any other pattern and for a cache with room after the last query.
    """
    if q_offset + q_length != kv_offset + kv_length:
        raise ValueError(
            f"{q_length} queries from position {q_offset} and {kv_length} keys from position {kv_offset} do not end "
            "together; measure whole sequences without a static cache"
        )
    batch = torch.arange(batch_size, device=device)[:, None, None]
    keys = torch.arange(kv_length, device=device)

    def sees(queries: Int[Tensor, "R #S"], keys: Int[Tensor, "#R S"]) -> Bool[Tensor, "B R S"]:
        visible = mask_function(batch, torch.zeros_like(batch), queries + kv_offset, keys + kv_offset)
        return visible.expand(batch_size, *torch.broadcast_shapes(queries.shape, keys.shape))

    causal = not bool(sees(keys[None, :-1], keys[None, 1:]).any())
    sees_previous = sees(keys[None, 1:], keys[None, :-1])[:, 0]
    documents = None if bool(sees_previous.all()) else _documents(sees_previous)
    plain = Visibility(q_length, kv_length, causal, documents=documents)
    rows = _checked_rows(q_length, kv_length, local_size)
    asked = sees(torch.tensor(rows, device=device)[:, None], keys[None])
    for candidate in (plain, replace(plain, window=local_size)):
        if torch.equal(asked, _rows(candidate, rows, batch_size, device)):
            break
    else:
        raise ValueError("the model's mask is neither causal, sliding, chunked nor packed; it cannot be measured")
    if attention_mask is None:
        return candidate
    real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    return candidate if bool(real.all()) else replace(candidate, real=real)


def _documents(sees_previous: Bool[Tensor, "B pairs"]) -> Int[Tensor, "B S"]:
    """Documents, or chunks, numbered from 0: one begins where a token does not see the token before it."""
    return torch.nn.functional.pad((~sees_previous).cumsum(-1), (1, 0))


def _checked_rows(num_queries: int, num_keys: int, local_size: int | None) -> list[int]:
    """Positions of queries where patterns differ: the ends, the middle, and around the first ``local_size`` keys."""
    first, last = num_keys - num_queries, num_keys - 1
    around = [] if local_size is None else [local_size - 1, local_size, local_size + 1, 2 * local_size]
    return sorted({row for row in (first, first + 1, (first + last) // 2, last, *around) if first <= row <= last})


def _rows(visibility: Visibility, rows: list[int], batch_size: int, device: torch.device | str) -> Tensor:
    """The visible keys (B R S) of the queries at some positions among the keys."""
    first = visibility.num_keys - visibility.num_queries
    parts = [visibility.rows(row - first, row - first + 1, device)[:, 0].expand(batch_size, -1, -1) for row in rows]
    return torch.cat(parts, dim=1)
