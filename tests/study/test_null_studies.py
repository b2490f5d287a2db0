"""How often verdicts are wrong: ten thousand simulated studies, and what the benchmark makes of trained ones."""

import json

import numpy as np
import pytest
from null_studies import ARMS, NullRun, Scored, plan, redraw, settings_of, summarize, table
from scipy.stats import binom
from simulated_studies import JUST_TOO_LARGE, NO_DIFFERENCE, Case, count_any, differences, judge, rate, simulate

from gatelab.settings import difference
from gatelab.study.contrasts import compare_arms
from gatelab.study.power import power_of_difference, power_of_equality
from gatelab.study.statistics import DocumentScores, difference_p_values

STUDIES = 10_000
FEWEST, MOST = binom.interval(0.999, STUDIES, 0.05)


@pytest.mark.parametrize("case", [NO_DIFFERENCE[0], JUST_TOO_LARGE[0]], ids=lambda case: case.counted)
def test_one_contrast_errs_at_the_stated_rate(case):
    assert FEWEST <= count_any(case, STUDIES, seed=0) <= MOST


@pytest.mark.parametrize(
    "case", [*NO_DIFFERENCE[1:], *JUST_TOO_LARGE[1:]], ids=lambda case: f"{case.counted}, {case.name}"
)
def test_a_family_errs_anywhere_at_most_at_the_stated_rate(case):
    """Contrasts share their baseline, so a family errs a little less often; far less would be lost power."""
    assert 0.02 * STUDIES < count_any(case, STUDIES, seed=0) <= MOST


def test_without_holm_a_family_errs_too_often():
    p_values = difference_p_values(differences(NO_DIFFERENCE[1], STUDIES, seed=0))
    assert (p_values <= 0.05).any(axis=1).sum() > 1.8 * MOST


def test_verdicts_err_no_more_often_than_their_tests():
    wrong = np.isin(judge(NO_DIFFERENCE[1], STUDIES, seed=0).verdict, ["better", "worse"]).any(axis=1).sum()
    assert wrong <= MOST
    assert (judge(JUST_TOO_LARGE[1], STUDIES, seed=0).verdict == "equal").any(axis=1).sum() <= MOST


def test_a_difference_is_found_as_often_as_computed_and_with_its_sign():
    verdict = judge(Case("better", (-1.7,), "different", smallest_difference=1.0), STUDIES, seed=1).verdict
    expected = power_of_difference(-1.7, 1.0, 5)
    assert 0.75 < expected < 0.85
    assert (verdict == "better").mean() == pytest.approx(expected, abs=0.015)
    assert (verdict == "worse").sum() <= 2 and (verdict == "equal").mean() < 0.05


def test_equality_is_shown_as_often_as_computed():
    verdict = judge(Case("equal", (0.0,), "equal", smallest_difference=2.0), STUDIES, seed=1).verdict
    assert (verdict == "equal").mean() == pytest.approx(power_of_equality(2.0, 1.0, 5), abs=0.015)


def test_arrays_of_studies_are_judged_as_one_study_is():
    case = NO_DIFFERENCE[1]._replace(truth=(-2.0, 0.3, 2.0))
    together, rows = judge(case, 60, seed=2), differences(case, 60, seed=2)
    for verdict, p_value, row in zip(together.verdict, together.p_value, rows, strict=True):
        losses = {"base": np.zeros(5)} | {str(index): values for index, values in enumerate(row)}
        found = [one.judgement for one in compare_arms(losses, "base", ["0", "1", "2"], case.smallest_difference)]
        assert [one.verdict for one in found] == verdict.tolist()
        assert [one.p_value for one in found] == p_value.tolist()
    assert set(together.verdict.flatten().tolist()) == {"better", "worse", "equal", "can't tell"}


def test_a_rate_has_the_exact_interval():
    assert rate(2, 40) == pytest.approx((0.05, 0.0061, 0.1692), abs=1e-4)
    assert rate(0, 40) == pytest.approx((0.0, 0.0, 0.0881), abs=1e-4)


def test_no_two_runs_share_a_seed_and_they_differ_in_nothing_else():
    runs = plan(3, 5)
    assert len(runs) == 30 and len({run.seed for run in runs}) == 30
    assert plan(2, 5) == runs[:20]
    assert {(run.pair, run.arm) for run in runs} == {(pair, arm) for pair in range(3) for arm in ARMS}
    assert set(difference(settings_of(runs[0]), settings_of(runs[7]))) == {"train.seed"}


def scored(seed, loss):
    """A run with 50 documents, whose losses scatter little around the run's."""
    tokens = np.full(50, 100.0)
    nats = tokens * (loss + 0.01 * np.random.default_rng(seed).standard_normal(50))
    return Scored(loss, DocumentScores(nats, tokens, tokens * 3))


def test_false_differences_are_counted():
    losses = {
        0: ([3.0, 3.1, 3.2, 3.3, 3.4], [3.4, 3.1, 3.3, 3.0, 3.2]),
        1: ([3.0, 3.1] * 2 + [3.2], [4.0, 4.1] * 2 + [4.21]),
    }
    runs = {
        NullRun(pair, arm, 100 * pair + 10 * index + number): scored(100 * pair + 10 * index + number, loss)
        for pair, arms in losses.items()
        for index, (arm, values) in enumerate(zip(ARMS, arms, strict=True))
        for number, loss in enumerate(values)
    }
    found = summarize(runs, 200)
    assert (found["over_seeds"]["false"], found["over_seeds"]["of"]) == (1, 2)
    assert found["verdicts"] == {"can't tell": 1, "worse": 1}
    assert (found["over_documents"]["false"], found["over_documents"]["of"]) == (9, 10)
    assert found["redrawn"]["of"] == 200
    assert found["pairs"][1]["losses"]["second"][4] == 4.21
    json.dumps(found, allow_nan=False)
    shown = table({"trained": found, "simulated": simulate(50)})
    assert shown.row_count == 3 + len(simulate(50))


def test_redrawn_pairs_of_normal_losses_differ_at_the_stated_rate():
    losses = 5 + 0.03 * np.random.default_rng(11).standard_normal(400)
    assert FEWEST * 0.9 <= redraw(losses, 5, STUDIES) <= MOST * 1.1
