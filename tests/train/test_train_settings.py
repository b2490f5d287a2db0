"""What a run's settings refuse."""

from __future__ import annotations

import pytest
from tiny_runs import tiny_run

from gatelab.train.settings import TrainSettings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.causal=false"],
            r"^model.causal=False can't be trained to predict the next token.*; set model",
        ),
        (
            ["model.vocab_size=28", "data.tokenizer.path=anywhere"],
            "model.vocab_size=28 is smaller than the data's vocabulary of 29",
        ),
        (["data.synthetic=null"], "model.vocab_size=29 is smaller than the data's vocabulary of 4096"),
    ],
)
def test_contradictions(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_run(*overrides)


def test_a_model_that_sees_ahead_is_legal_by_itself() -> None:
    assert not tiny_run().model.with_overrides(["causal=false"]).causal


def test_accumulation_says_what_it_does_to_a_mixture() -> None:
    description = TrainSettings.model_fields["accumulation"].description
    assert description is not None and "Qiu et al. 2501.11873" in description and "exact with 1" in description
