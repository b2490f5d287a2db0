"""The choice of each arm's rate."""

from __future__ import annotations

import pytest
from tiny_studies import synthetic_study

from gatelab.study.jobs import JobResult
from gatelab.study.learning_rates import choose_learning_rates
from gatelab.study.study import Study

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
Losses = dict[float, tuple[float | None, float | None]]
GOOD: Losses = {1e-3: (3.0, 3.2), 2e-3: (2.0, 2.6), 4e-3: (2.5, 2.2), 8e-3: (9.0, None)}


def study() -> Study:
    return synthetic_study(learning_rates=RATES, tuning_seeds=(10, 11))


def results(ungated: Losses, gated: Losses) -> list[JobResult]:
    found = []
    for arm, losses in (("ungated", ungated), ("gated", gated)):
        for rate, pair in losses.items():
            for seed, loss in zip((10, 11), pair, strict=True):
                step = 5 if loss is None else None
                found.append(JobResult(arm, seed, rate, "tuning", "", loss, None, None, step, 1.0, 1, 1, 1.0))
    return found[::-1]


def test_the_least_mean_loss_is_chosen() -> None:
    """Means of ungated: 3.1, 2.3, 2.35; the least single loss is at another rate for gated."""
    gated = {**GOOD, 2e-3: (1.0, 4.0), 4e-3: (2.2, 2.4)}
    chosen = choose_learning_rates(study(), results(GOOD, gated))
    assert {arm: one.best for arm, one in chosen.items()} == {"ungated": 2e-3, "gated": 4e-3}
    assert chosen["ungated"].losses[8e-3] == [9.0, None] and list(chosen["ungated"].losses) == list(RATES)
    assert chosen["gated"].to_mapping()["losses"][1] == [2e-3, [1.0, 4.0]]  # type: ignore[index]


def test_a_rate_at_which_a_seed_diverged_is_never_chosen() -> None:
    chosen = choose_learning_rates(study(), results(GOOD, {**GOOD, 2e-3: (0.1, None)}))
    assert chosen["gated"].best == 4e-3


def test_an_optimum_beside_a_rate_that_diverged_is_inside() -> None:
    gated: Losses = {**GOOD, 4e-3: (1.0, 1.0), 8e-3: (None, None)}
    assert choose_learning_rates(study(), results(GOOD, gated))["gated"].best == 4e-3


def test_optima_at_the_edge_are_refused_together() -> None:
    low: Losses = {**GOOD, 1e-3: (1.0, 1.0)}
    high: Losses = {**GOOD, 8e-3: (1.0, 1.0)}
    with pytest.raises(ValueError) as error:
        choose_learning_rates(study(), results(low, high))
    assert str(error.value) == (
        "the grid of learning_rates holds no optimum of some arms; extend it, what was run is kept:\n"
        "  ungated: the best rate is the lowest, 0.001; add one below it\n"
        "  gated: the best rate is the highest, 0.008; add one above it"
    )


def test_an_arm_that_always_diverged_is_refused() -> None:
    nothing: Losses = dict.fromkeys(RATES, (2.0, None))
    with pytest.raises(ValueError, match=r"  gated: every rate diverged with some seed; add rates below 0\.001"):
        choose_learning_rates(study(), results(GOOD, nothing))
