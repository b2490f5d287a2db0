"""Which key each query may see, when that is not simply the causal triangle."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

PADDING = -1


def positions_in_documents(documents: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """Index of each token within its run of equal document numbers, from 0."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_start = torch.ones_like(documents, dtype=torch.bool)
    is_start[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(is_start, index, 0).cummax(dim=1).values


def document_mask(
    documents: Int[Tensor, "B S"], num_queries: int, causal: bool, window: int | None = None
) -> Bool[Tensor, "B 1 T S"]:
    """True where one of the last ``num_queries`` tokens may see a key: same document, and not later if causal.

    With a ``window`` the key is also less than so many tokens back. Documents are numbered; :data:`PADDING` tokens are
    seen by none. A padding token sees itself, so that no row of the softmax is empty.
    """
    keys = torch.arange(documents.shape[1], device=documents.device)
    queries = keys[-num_queries:, None]
    query_documents = documents[:, -num_queries:, None]
    visible = (query_documents == documents[:, None, :]) & (documents[:, None, :] != PADDING)
    if causal:
        visible &= keys <= queries
    if window is not None:
        visible &= queries - keys < window
    return (visible | (keys == queries))[:, None]


def suffix_mask(
    num_queries: int, num_keys: int, device: torch.device, window: int | None = None
) -> Bool[Tensor, "1 1 T S"]:
    """The causal triangle when the queries are the last ``num_queries`` of the keys, as in decoding with a cache.

    With a ``window`` each query sees only keys less than so many tokens back.
    """
    keys = torch.arange(num_keys, device=device)
    queries = keys[-num_queries:, None]
    visible = keys <= queries
    if window is not None:
        visible &= queries - keys < window
    return visible[None, None]
