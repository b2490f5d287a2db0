"""Training on two and four gloo ranks against one: losses, norms and weights of ten steps, first gradients."""

from __future__ import annotations

from typing import Any

import pytest
from parallel_parity import layout_cases, measured, variant_cases

DIVIDED_OUT = ("query_headwise_before_norm", "key_headwise_before_norm")
"""q/k norm divides a score that scales a whole head out again: the gradient of such a gate is rounding alone."""


def assert_equal_to_one_rank(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert max(row["loss"], row["norm"], row["weights"]) < 1e-9, row
        assert row["float32 gradients"] < (1e-4 if row["model"] in DIVIDED_OUT else 1e-5), row


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_layout_trains_as_one_rank_does(num_ranks: int) -> None:
    cases = [case for case in layout_cases() if case.num_ranks == num_ranks]
    rows = measured(cases)
    assert len(rows) == len(cases) > 5
    assert_equal_to_one_rank(rows)


@pytest.mark.long
def test_every_gate_on_more_ranks_than_key_value_heads() -> None:
    cases = variant_cases()
    assert len(cases) > 50
    assert_equal_to_one_rank(measured(cases))
