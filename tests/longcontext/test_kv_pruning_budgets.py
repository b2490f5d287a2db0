"""Budgets: whole numbers with the right sum, by the gates, and never more than there is."""

from __future__ import annotations

import pytest
import torch

from gatelab.longcontext.kv_pruning.budgets import ALLOCATIONS, allocate, require_allocation

LAYERS = torch.tensor([0, 0, 1, 1, 2, 2])
GATES = torch.tensor([0.1, 0.3, 0.2, 0.2, 0.8, 0.4])


def test_uniform_takes_what_there_is() -> None:
    held = torch.tensor([9, 4, 9, 9, 9, 9])
    assert allocate("uniform", None, held, LAYERS, 5).tolist() == [5, 4, 5, 5, 5, 5]


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("num_keys", [1, 2, 5, 17, 50, 100])
def test_the_sum_is_the_budget(allocation: str, num_keys: int) -> None:
    counts = allocate(require_allocation(allocation), GATES, torch.full((6,), 100), LAYERS, num_keys)
    assert int(counts.sum()) == 6 * num_keys
    assert counts.min() >= 0 and counts.max() <= 100


def test_heads_share_what_their_layer_has() -> None:
    counts = allocate("heads", GATES, torch.full((6,), 1000), LAYERS, 50)
    # A fifth of 50 each, then 80 keys of each layer in proportion to its gates.
    assert counts.tolist() == [10 + 20, 10 + 60, 10 + 40, 10 + 40, 63, 37]


def test_layers_share_equally_within() -> None:
    counts = allocate("layers", GATES, torch.full((6,), 1000), LAYERS, 50)
    assert counts.tolist() == [34, 34, 34, 34, 82, 82]


def test_both_share_all() -> None:
    counts = allocate("both", GATES, torch.full((6,), 1000), LAYERS, 50)
    assert counts.tolist() == [22, 46, 34, 34, 106, 58]


def test_what_a_full_head_leaves_goes_to_the_others() -> None:
    counts = allocate("both", GATES, torch.tensor([90, 90, 90, 90, 60, 90]), LAYERS, 50)
    # 190 keys beyond the floors for gates of 1.2 together: 15.8, 47.5, 31.7, 31.7, and 63.3 for the last.
    assert counts.tolist() == [26, 57, 42, 42, 60, 73]


def test_everything_fits_when_the_budget_is_all() -> None:
    held = torch.tensor([9, 4, 9, 9, 9, 9])
    for allocation in ALLOCATIONS:
        assert allocate(allocation, GATES, held, LAYERS, 9).tolist() == held.tolist()


def test_shut_gates_leave_the_floor() -> None:
    counts = allocate("both", torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.5]), torch.full((6,), 100), LAYERS, 20)
    assert counts.tolist() == [4, 4, 4, 4, 52, 52]


def test_ungated_models_are_refused() -> None:
    with pytest.raises(ValueError, match="allocation 'heads' divides the budget by mean gate scores, and the model la"):
        allocate("heads", None, torch.full((6,), 9), LAYERS, 5)


def test_unknown_allocations_get_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="there is no allocation 'head'; did you mean 'heads'"):
        require_allocation("head")
