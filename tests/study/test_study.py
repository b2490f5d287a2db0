"""What a study refuses, and what its arms share."""

import pytest

from gatelab.settings import difference
from gatelab.study.presets import DEMO
from gatelab.study.study import Arm, Study


def study(**changes):
    values = {
        "name": "tiny",
        "question": "?",
        "recipe": "backcopy",
        "arms": [{"name": "ungated"}, {"name": "gated", "assignments": ["gate=sdpa_elementwise"]}],
        "baseline": "ungated",
    }
    return Study.parse({**values, **changes})


def test_arms_differ_by_what_they_declare_alone():
    one, two = (DEMO.settings_of(arm) for arm in DEMO.arms[:2])
    assert {path.split(".")[1] for path in difference(one, two)} == {"gates", "drawn_feedforward_width"}


def test_demo_arms_have_matched_parameters():
    from gatelab.model.accounting import count_parameters

    totals = [count_parameters(DEMO.settings_of(arm).model).total for arm in DEMO.arms]
    assert max(totals) / min(totals) < 1.003


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "ungatd"}, "baseline 'ungatd' is no arm of study tiny; did you mean 'ungated'?"),
        ({"arms": [{"name": "a"}, {"name": "a"}]}, "two arms of study tiny have the same name"),
        ({"arms": [{"name": "ungated"}, {"name": "b", "assignments": ["gate=none"]}]}, "have equal settings; drop one"),
        ({"arms": [{"name": "ungated"}]}, "at least 2"),
        ({"arms": [{"name": "ungated"}, {"name": "../b"}]}, "arms.1.name cannot be '../b'"),
        ({"recipe": "backcpy"}, "did you mean 'backcopy'?"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError) as error:
        study(**changes)
    assert message in str(error.value)


def test_a_study_survives_its_file():
    assert Study.from_yaml(study().to_yaml()) == study()
    assert isinstance(study().arms[0], Arm)
