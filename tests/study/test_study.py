"""What a study refuses, and what its arms share."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_studies import synthetic_study

from gatelab.settings import difference
from gatelab.study.presets import DEMO
from gatelab.study.study import Arm, Study


def test_arms_differ_by_what_they_declare_alone() -> None:
    one, two = (DEMO.settings_of(arm) for arm in DEMO.arms[:2])
    assert {path.split(".")[1] for path in difference(one, two)} == {"gates", "drawn_feedforward_width"}


def test_demo_arms_have_matched_parameters() -> None:
    from gatelab.model.accounting import count_parameters

    totals = [count_parameters(DEMO.settings_of(arm).model).total for arm in DEMO.arms]
    assert max(totals) / min(totals) < 1.003


INTERACTION = {"name": "cold", "changed": ["ungated", "gated"], "plain": ["gated", "ungated"]}
FIVE = {"seeds": [0, 1, 2, 3, 4], "smallest_difference": 0.02}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "ungatd"}, "baseline 'ungatd' is no arm of study tiny; did you mean 'ungated'?"),
        ({"arms": [{"name": "a"}, {"name": "a"}]}, "two arms of study tiny have the same name"),
        ({"arms": [{"name": "ungated"}, {"name": "b", "assignments": ["gate=none"]}]}, "have equal settings; drop one"),
        ({"arms": [{"name": "ungated"}]}, "at least 2"),
        ({"arms": [{"name": "ungated"}, {"name": "../b"}]}, "arms.1.name cannot be '../b'"),
        ({"arms": [{"name": "ungated"}, {"name": ".."}]}, "arms.1.name cannot be '..'"),
        ({"recipe": "backcpy"}, "did you mean 'backcopy'?"),
        (
            {"arms": [{"name": "ungated"}, {"name": "b", "assignments": ["train.seed=3"]}]},
            "'train.seed=3' assigns what seeds of study tiny decides; drop the word",
        ),
        (
            {"assignments": ["train.optimizer.learning_rate=1"], "learning_rates": [1, 2, 3]},
            "assigns what learning_rates of study tiny decides",
        ),
        ({"seeds": [0, 0]}, "seeds=[0, 0] names one of them twice; once is possible"),
        ({"seeds": []}, "seeds cannot be []"),
        ({"metric": "heldout_los"}, "did you mean 'heldout_loss'?"),
        ({"metric": "attention_entrop"}, "did you mean 'attention_entropy'?"),
        (
            {**FIVE, "confirmatory": ["gated"], "metric": "gated_output_effective_rank"},
            "metric gated_output_effective_rank describes what a model does, so no arm of study tiny can be better or",
        ),
        (
            {"interactions": [{**INTERACTION, "changed": ["gatd", "ungated"]}]},
            "interaction cold of study tiny names 'gatd', which is no arm; did you mean 'gated'?",
        ),
        (
            {"interactions": [{**INTERACTION, "changed": INTERACTION["plain"]}]},
            "interaction cold of study tiny compares gated with ungated and gated with ungated; name two pairs of two",
        ),
        ({"interactions": [{**INTERACTION, "plain": ["gated", "gated"]}]}, "name two pairs of two arms"),
        ({"interactions": 2 * [INTERACTION]}, "interactions=['cold', 'cold'] names one of them twice; once is"),
        ({"confirmatory": ["gatd"]}, "confirmatory names 'gatd', which is no arm to compare; did you mean 'gated'?"),
        ({"confirmatory": ["ungated"]}, "confirmatory names 'ungated', which is no arm to compare"),
        (
            {**FIVE, "confirmatory": ["gated"], "seeds": [0, 1, 2]},
            "study tiny has 3 seeds, and a confirmatory comparison needs at least 5; add seeds or leave",
        ),
        (
            {**FIVE, "confirmatory": ["gated"], "smallest_difference": None},
            "study tiny has confirmatory comparisons and no smallest_difference to judge them by; state one",
        ),
        ({"learning_rates": [1e-3, 2e-3]}, "is no grid that can hold an optimum inside: give at least 3 rates"),
        ({"learning_rates": [1e-3, 4e-3, 2e-3]}, "each above the one before"),
        (
            {"learning_rates": [1e-3, 2e-3, 4e-3], "tuning_seeds": [0, 7]},
            "seed 0 is both in seeds and in tuning_seeds; compare on seeds that tuned nothing",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        synthetic_study(**changes)
    assert message in str(error.value)


def test_a_declared_comparison_is_accepted() -> None:
    study = synthetic_study(**FIVE, confirmatory=["gated"])
    assert study.confirmatory == ("gated",) and study.warnings == []


def test_one_seed_is_warned_of() -> None:
    assert synthetic_study().warnings == [
        "One seed: differences come without an interval over seeds, and no verdict can be given."
    ]


def test_a_study_survives_its_file() -> None:
    study = synthetic_study(**FIVE, learning_rates=[1e-5, 2e-3, 4e-3], scale="micro", interactions=[INTERACTION])
    assert Study.from_yaml(study.to_yaml()) == study
    assert isinstance(study.arms[0], Arm)


def test_seed_and_rate_are_the_jobs() -> None:
    study = synthetic_study()
    settings = study.settings_of(study.arm("gated"), 7, 1e-05)
    assert (settings.train.seed, settings.train.optimizer.learning_rate) == (7, 1e-5)
    changed = difference(study.settings_of(study.arm("gated")), settings)
    assert set(changed) == {"train.seed", "train.optimizer.learning_rate"}
