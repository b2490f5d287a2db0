"""Masks of transformers as a Visibility: equal to the whole mask that transformers itself makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

masking = pytest.importorskip("transformers.masking_utils")

from gatelab.interop.masks import visibility_mask  # noqa: E402

BATCH, TOKENS, LOCAL = 2, 17, 5
PADDING = torch.tensor([3, 0])
REAL = torch.arange(TOKENS) >= PADDING[:, None]
DOCUMENTS = torch.tensor([[0] * 6 + [1] * 11, [0] * 9 + [1] * 2 + [2] * 6])
PACKED = masking.packed_sequence_mask_function(DOCUMENTS)
NOTHING_ON_THE_LEFT = torch.zeros(BATCH, dtype=torch.int64)
BLOCK = torch.tensor([[-1] * 10 + [0] * 2 + [-1] * 5] * BATCH)

# Name -> mask function, local size, the kind of visibility that is expected.
PATTERNS: dict[str, tuple[Any, int | None, tuple[bool, int | None, bool]]] = {
    "causal": (masking.causal_mask_function, None, (True, None, False)),
    "sliding": (masking.sliding_window_causal_mask_function(LOCAL), LOCAL, (True, LOCAL, False)),
    "sliding_by_one": (masking.sliding_window_causal_mask_function(1), 1, (True, None, True)),
    "sliding_beyond": (masking.sliding_window_causal_mask_function(40), 40, (True, None, False)),
    "chunked": (masking.chunked_causal_mask_function(LOCAL, NOTHING_ON_THE_LEFT), LOCAL, (True, None, True)),
    "chunked_padded": (masking.chunked_causal_mask_function(LOCAL, PADDING), LOCAL, (True, None, True)),
    "packed": (masking.and_masks(masking.causal_mask_function, PACKED), None, (True, None, True)),
    "packed_sliding": (
        masking.and_masks(masking.sliding_window_causal_mask_function(LOCAL), PACKED), LOCAL, (True, LOCAL, True),
    ),
    "bidirectional": (masking.bidirectional_mask_function, None, (False, None, False)),
}  # fmt: skip


def arguments(pattern: str, real: Tensor | None = None, **changes: Any) -> dict[str, Any]:
    function, local_size, _ = PATTERNS[pattern]
    sizes = {"batch_size": BATCH, "q_length": TOKENS, "kv_length": TOKENS, "q_offset": 0, "kv_offset": 0}
    given = {"mask_function": function, "attention_mask": real, "local_size": local_size, "device": "cpu"}
    return sizes | given | {"dtype": torch.float32, "config": None, "use_vmap": False} | changes


def whole_mask(given: dict[str, Any]) -> Tensor:
    return masking.sdpa_mask(**given, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)


@pytest.mark.parametrize("real", [None, REAL], ids=["unpadded", "left_padded"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equals_the_whole_mask(pattern: str, real: Tensor | None) -> None:
    given = arguments(pattern, real)
    visibility = visibility_mask(**given)
    assert torch.equal(visibility.rows(0, TOKENS).expand(BATCH, -1, -1, -1), whole_mask(given))
    found = (visibility.causal, visibility.window, visibility.documents is not None)
    assert found == PATTERNS[pattern][2]


@pytest.mark.parametrize("pattern", ["causal", "sliding"])
def test_queries_after_earlier_keys(pattern: str) -> None:
    given = arguments(pattern, REAL, q_length=6, q_offset=11)
    assert torch.equal(visibility_mask(**given).rows(0, 6), whole_mask(given))


def test_a_sliding_cache_has_forgotten_keys() -> None:
    given = arguments("sliding", REAL, q_length=6, q_offset=11, kv_length=10, kv_offset=7)
    assert torch.equal(visibility_mask(**given).rows(0, 6).expand(BATCH, -1, -1, -1), whole_mask(given))


def test_no_padding_leaves_no_mask() -> None:
    assert visibility_mask(**arguments("causal", torch.ones(BATCH, TOKENS, dtype=torch.bool))).is_plain


@pytest.mark.parametrize(
    "function",
    [
        lambda batch, head, query, key: (key <= query) & (query - key != 4),
        masking.sliding_window_bidirectional_mask_function(3),
        masking.or_masks(masking.causal_mask_function, lambda batch, head, query, key: key < 4),
        masking.or_masks(masking.causal_mask_function, masking.blockwise_overlay(BLOCK)),
    ],
    ids=["hole", "both_sides", "prefix", "block"],
)
def test_other_patterns_are_refused(function: Any) -> None:
    with pytest.raises(ValueError, match="neither causal, sliding, chunked nor packed"):
        visibility_mask(**arguments("causal", mask_function=function, local_size=3))


def test_a_static_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="6 queries from position 0 and 17 keys from position 0 do not end together"):
        visibility_mask(**arguments("causal", q_length=6))
