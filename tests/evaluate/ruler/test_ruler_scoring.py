from __future__ import annotations

import pytest

from gatelab.evaluate.ruler.sample import Sample
from gatelab.evaluate.ruler.scoring import clean, score
from gatelab.evaluate.ruler.tasks import RULER_TASKS

SAMPLES = [Sample(0, "", ["France", "in France"], 0), Sample(1, "", ["1234567", "7654321"], 0), Sample(2, "", ["a"], 0)]


def test_all_counts_the_share_of_references_and_part_any_of_them():
    predictions = ["FRANCE it is", "It is 7654321", None]
    every = score(RULER_TASKS["niah_multivalue"], predictions, SAMPLES)
    assert every.per_sample == [50.0, 50.0, 0.0] and every.mean == pytest.approx(100 / 3) and every.empty == 1
    any_of = score(RULER_TASKS["qa_1"], predictions, SAMPLES)
    assert any_of.per_sample == [100.0, 100.0, 0.0] and any_of.mean == pytest.approx(200 / 3)


def test_only_qa_takes_any_reference():
    assert [name for name, task in RULER_TASKS.items() if task.match == "part"] == ["qa_1", "qa_2"]


def test_control_characters_become_newlines():
    assert clean(" a\x00b\tc\x1f ") == "a\nb\nc"
    assert clean(None) == clean("\x01") == ""


def test_a_missing_prediction_is_refused():
    with pytest.raises(ValueError, match="vt has 3 samples and 2 predictions"):
        score(RULER_TASKS["vt"], ["", ""], SAMPLES)
