"""Visibility and positions against loops over rows, queries and keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gatelab.model.masks import PADDING, document_mask, positions_in_documents, suffix_mask


def visible_by_loops(documents: Tensor, num_queries: int, causal: bool, window: int | None = None) -> Tensor:
    num_rows, num_keys = documents.shape
    mask = torch.zeros(num_rows, 1, num_queries, num_keys, dtype=torch.bool)
    for b in range(num_rows):
        for t in range(num_queries):
            query = num_keys - num_queries + t
            for key in range(num_keys):
                same = documents[b, query] == documents[b, key] and documents[b, key] != PADDING
                in_window = window is None or query - key < window
                mask[b, 0, t, key] = key == query or (bool(same) and in_window and (key <= query or not causal))
    return mask


def positions_by_loops(documents: Tensor) -> Tensor:
    positions = torch.zeros_like(documents)
    for b in range(documents.shape[0]):
        for t in range(1, documents.shape[1]):
            if documents[b, t] == documents[b, t - 1]:
                positions[b, t] = positions[b, t - 1] + 1
    return positions


@st.composite
def packed_rows(draw: st.DrawFn) -> Tensor:
    """Rows of documents, numbered upwards with gaps, with padding on either side."""
    num_tokens, num_rows = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    rows = []
    for _ in range(num_rows):
        left = draw(st.integers(0, num_tokens))
        steps = [draw(st.sampled_from([0, 0, 1, 3])) for _ in range(draw(st.integers(0, num_tokens - left)))]
        numbers = torch.tensor(steps, dtype=torch.int64).cumsum(0).tolist()
        rows.append([PADDING] * left + numbers + [PADDING] * (num_tokens - left - len(numbers)))
    return torch.tensor(rows)


@settings(deadline=None)
@given(packed_rows(), st.data(), st.booleans(), st.none() | st.integers(1, 13))
def test_document_mask_equals_loops(documents: Tensor, data: st.DataObject, causal: bool, window: int | None) -> None:
    num_queries = data.draw(st.integers(1, documents.shape[1]))
    mask = document_mask(documents, num_queries, causal, window)
    assert torch.equal(mask, visible_by_loops(documents, num_queries, causal, window))
    assert mask.any(-1).all(), "every query sees a key, so no softmax is empty"


@settings(deadline=None)
@given(packed_rows())
def test_positions_equal_loops(documents: Tensor) -> None:
    assert torch.equal(positions_in_documents(documents), positions_by_loops(documents))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 9), (4, 9), (9, 9)])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 20])
def test_suffix_mask_is_the_end_of_the_triangle(num_queries: int, num_keys: int, window: int | None) -> None:
    one_document = torch.zeros(1, num_keys, dtype=torch.int64)
    mask = suffix_mask(num_queries, num_keys, torch.device("cpu"), window)
    assert torch.equal(mask, visible_by_loops(one_document, num_queries, True, window))
