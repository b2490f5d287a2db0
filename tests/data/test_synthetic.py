from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from gatelab.data.settings import BigramBackcopySettings
from gatelab.data.synthetic import BOS_ID, BigramBackcopy, bigram_table

TINY = BigramBackcopySettings(vocab_size=6, num_triggers=2, seed=5)


def make_task(settings: BigramBackcopySettings = TINY, **changes: int) -> BigramBackcopy:
    return BigramBackcopy(settings, **{"context": 13, "sequences_per_step": 6, "seed": 7, **changes})


def probability(task: BigramBackcopy, sequence: tuple[int, ...]) -> float:
    """The rule of the task, token by token."""
    triggers, plain = set(task.triggers), set(range(task.triggers.stop, task.vocab_size))
    if sequence[0] != BOS_ID:
        return 0.0
    product = 1 / len(plain) if sequence[1] in plain else 0.0
    for before, last, token in zip(sequence, sequence[1:], sequence[2:], strict=False):
        product *= float(token == before) if last in triggers else float(task.table[last, token])
    return product


@pytest.mark.parametrize("context", [1, 2, 3, 5])
def test_the_entropy_floor_is_the_expected_surprise_over_all_sequences(context: int):
    task = make_task(context=context)
    tails = itertools.product(range(task.vocab_size), repeat=context)
    chances = [probability(task, (BOS_ID, *tail)) for tail in tails]
    assert sum(chances) == pytest.approx(1.0)
    entropy = -sum(chance * math.log(chance) for chance in chances if chance > 0)
    assert task.entropy_floor() == pytest.approx(entropy / context, rel=1e-12)


def test_samples_follow_the_rule_and_their_frequencies():
    task = make_task(context=4, sequences_per_step=20_000)
    batch = task.batch(0)
    sequences = torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1)
    found, counts = torch.unique(sequences, dim=0, return_counts=True)
    chances = torch.tensor([probability(task, tuple(row)) for row in found.tolist()])
    assert (chances > 0).all()
    spread = (20_000 * chances * (1 - chances)).sqrt()
    assert ((counts - 20_000 * chances).abs() < 5 * spread + 1).all()


def test_query_sets_part_the_queries_from_the_fifth_on():
    task = make_task()
    tokens = task.batch(0).inputs
    sets = task.query_sets(tokens)
    for row, sequence in enumerate(tokens.tolist()):
        for position, token in enumerate(sequence):
            assert sets["trigger"][row, position] == (position >= 4 and token in (1, 2))
            assert sets["other"][row, position] == (position >= 4 and token not in (1, 2))
    assert sets["trigger"].any() and sets["other"].any()


def test_triggers_stand_between_two_equal_plain_tokens():
    task = BigramBackcopy(BigramBackcopySettings(), context=64, sequences_per_step=32, seed=0)
    batch = task.batch(3)
    assert (batch.inputs[:, 0] == BOS_ID).all() and not (batch.inputs[:, 1:] == BOS_ID).any()
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    triggers = task.is_trigger(batch.inputs)
    assert set(batch.inputs[triggers].tolist()) == {1, 2, 3}
    assert 0.2 < triggers.float().mean() < 0.6
    before = torch.cat([batch.inputs[:, :1], batch.inputs[:, :-1]], dim=1)
    assert torch.equal(batch.targets[triggers], before[triggers])
    assert not task.is_trigger(before[triggers]).any() and not triggers[:, :2].any()


def test_default_figures_of_the_docstring():
    task = BigramBackcopy(BigramBackcopySettings(), context=256, sequences_per_step=64, seed=1)
    assert task.entropy_floor() == pytest.approx(0.815, abs=0.001)
    assert task.is_trigger(task.batch(0).inputs).float().mean() == pytest.approx(0.39, abs=0.01)


def test_the_table_is_a_distribution_over_characters_and_fixed_by_its_seed():
    table = bigram_table(TINY)
    assert table.shape == (6, 6) and (table[:, BOS_ID] == 0).all()
    np.testing.assert_allclose(table.sum(axis=1), 1)
    assert make_task().fingerprint == make_task(seed=8).fingerprint
    assert make_task(TINY.model_copy(update={"seed": 6})).fingerprint != make_task().fingerprint


def test_batches_are_a_function_of_seed_and_step_for_any_number_of_ranks():
    task = make_task()
    whole = task.batch(4)
    assert whole.inputs.shape == whole.targets.shape == (6, 13) and whole.documents is None
    for num_ranks in (2, 3, 6):
        parts = [task.batch(4, rank, num_ranks) for rank in range(num_ranks)]
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    assert torch.equal(make_task().batch(4).inputs, whole.inputs)
    assert not torch.equal(task.batch(5).inputs, whole.inputs)
    assert not torch.equal(make_task(seed=8).batch(4).inputs, whole.inputs)
    with pytest.raises(ValueError, match="6 sequences can't be split evenly over 4 ranks"):
        task.batch(0, 0, 4)


def test_heldout_draws_are_not_training_draws():
    task = make_task()
    heldout = list(task.heldout_batches(3))
    assert len(heldout) == 3
    for number, batch in enumerate(heldout):
        assert not torch.equal(batch.inputs, task.batch(number).inputs)
        assert torch.equal(batch.inputs, list(task.heldout_batches(3))[number].inputs)
