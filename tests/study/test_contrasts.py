"""Verdicts on declared contrasts, and none on the rest."""

import itertools
import json
import math

import numpy as np
import pytest
from student_by_loops import mean_and_deviation, student_quantile

from gatelab.study.contrasts import compare_arms, difference_of_differences, holm
from gatelab.study.power import minimum_detectable_difference, seeds_for_verdict
from gatelab.study.statistics import difference_p_values, equality_p_values, t_interval

BASELINE = np.array([3.45, 3.44, 3.46, 3.41, 3.52])
SPREAD = np.array([0.004, -0.006, 0.001, -0.002, 0.003])


def metric(**means):
    """Arms whose paired differences have the given means and the same spread."""
    return {"ungated": BASELINE, **{arm: BASELINE + mean + SPREAD for arm, mean in means.items()}}


def by_name(*arguments, **options):
    return {one.arm: one for one in compare_arms(*arguments, **options)}


@pytest.mark.parametrize(
    "p_values", [[0.01, 0.04, 0.03, 0.005], [0.2], [0.5, 0.001, 0.5], [0.02, 0.02, 0.9, 0.011, 0.03]]
)
def test_holm_is_bonferroni_on_every_subset(p_values):
    """A hypothesis is rejected when every subset that has it is (Marcus, Peritz and Gabriel 1976)."""
    numbers = range(len(p_values))
    subsets = [s for size in range(1, len(p_values) + 1) for s in itertools.combinations(numbers, size)]
    expected = [max(min(1, len(s) * min(p_values[i] for i in s)) for s in subsets if one in s) for one in numbers]
    assert holm(np.array(p_values)) == pytest.approx(expected)


def test_holm_takes_many_families_at_once():
    rows = np.random.default_rng(3).random((4, 5, 3))
    assert (holm(rows)[2, 4] == holm(rows[2, 4])).all() and holm(rows).shape == rows.shape


def test_the_four_verdicts():
    noisy = BASELINE + np.array([0.05, -0.04, 0.03, -0.05, 0.02])
    arms = metric(good=-0.05, bad=0.04, same=0.001) | {"noisy": noisy}
    found = by_name(arms, "ungated", ["good", "bad", "same", "noisy"], 0.02)
    assert {arm: one.judgement.verdict for arm, one in found.items()} == {
        "good": "better",
        "bad": "worse",
        "same": "equal",
        "noisy": "can't tell",
    }
    low, middle, high = (found["noisy"].judgement.seeds_needed[index] for index in (1, 0, 2))
    assert found["good"].sentence() == "better" and found["bad"].sentence() == "worse"
    assert found["same"].sentence() == "equal within 0.02"
    assert found["noisy"].sentence() == f"can't tell: needs {middle:,} seeds ({low:,} to {high:,})"
    assert middle == seeds_for_verdict(float((noisy - BASELINE).std(ddof=1)), 0.02, 0.05 / 4) > 5
    assert low < middle < high


def test_a_small_difference_that_is_certain_is_equal():
    """Shown not to be 0, and shown to matter to nobody."""
    found = by_name(metric(gated=-0.012), "ungated", ["gated"], 0.02)["gated"]
    assert found.judgement.p_value < 0.01 and found.judgement.verdict == "equal"


def test_p_values_and_intervals_are_adjusted_for_the_family_alone():
    arms = metric(one=-0.006, two=0.001, three=-0.02, four=0.1)
    family = ["three", "one", "two"]
    found = by_name(arms, "ungated", family, 0.01)
    differences = np.stack([arms[arm] - BASELINE for arm in family])
    different, equal = holm(difference_p_values(differences)), holm(equality_p_values(differences, 0.01))
    for index, arm in enumerate(family):
        judged = found[arm].judgement
        assert (judged.p_value, judged.p_value_of_equality) == (different[index], equal[index])
        assert judged.interval == t_interval(differences[index], 0.05 / 3)
        assert found[arm].seeds.p_value == difference_p_values(differences[index])
        deviation = float(differences[index].std(ddof=1))
        assert found[arm].detectable.value == minimum_detectable_difference(deviation, 5, 0.05 / 3)
    assert found["four"].judgement is None and found["four"].sentence() == "exploratory: no verdict"
    assert found["four"].detectable.value == pytest.approx(minimum_detectable_difference(SPREAD.std(ddof=1), 5))
    assert found["four"].detectable.low < found["four"].detectable.value < found["four"].detectable.high
    assert list(found) == ["one", "two", "three", "four"]


def test_three_seeds_and_fourteen_arms_would_ask_for_nearly_ten_standard_deviations():
    values = np.array([-1.0, 0.0, 1.0])
    assert t_interval(values, 0.05 / 14).high == pytest.approx(9.6, abs=0.05)


def test_an_arm_that_diverged_stays_in_its_family():
    arms = metric(good=-0.05, second=-0.008)
    lost = BASELINE + 0.01
    lost[[1, 3]] = np.nan, np.inf
    found = by_name(arms | {"lost": lost}, "ungated", ["good", "lost", "second"], 0.004)
    assert found["lost"].sentence() == "diverged at 2 of 5 seeds" and found["lost"].seeds is None
    assert found["lost"].judgement[:4] == ("diverged", 0.004, 1.0, 1.0) and found["lost"].judgement.interval is None
    alone = difference_p_values(arms["good"] - BASELINE)
    assert found["good"].judgement.p_value == pytest.approx(3 * alone)
    explored = by_name(arms | {"lost": lost}, "ungated")["lost"]
    assert explored.sentence() == "diverged at 2 of 5 seeds" and explored.judgement is None


def test_a_baseline_that_diverged_leaves_nothing_to_compare():
    arms = metric(good=-0.05)
    arms["ungated"] = np.append(BASELINE[:4], np.nan)
    found = by_name(arms, "ungated", ["good"], 0.02)["good"]
    assert found.judgement.verdict == "diverged" and found.num_diverged == 1


def test_what_can_not_be_told_needs_more_seeds_than_there_were():
    rng = np.random.default_rng(9)
    open_questions = 0
    for _ in range(300):
        losses = {name: rng.standard_normal(6) + mean for name, mean in (("a", 0.0), ("b", 0.4), ("c", -1.1))}
        for one in compare_arms(losses, "a", ["b", "c"], 1.5):
            if one.judgement is not None and one.judgement.seeds_needed is not None:
                open_questions += 1
                assert one.judgement.verdict == "can't tell" and one.judgement.seeds_needed.value > 6
    assert open_questions > 100


def test_a_contrast_can_be_written_as_json():
    found = by_name(metric(gated=-0.012, other=0.01), "ungated", ["gated"], 0.02)
    read = json.loads(json.dumps(found["gated"].to_mapping(), allow_nan=False))
    assert read["seeds"]["difference"]["value"] == pytest.approx(-0.012)
    assert (read["sentence"], read["judgement"]["verdict"]) == ("equal within 0.02", "equal")
    assert read["judgement"]["interval"]["low"] < read["judgement"]["interval"]["high"]
    assert found["other"].to_mapping()["judgement"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "ungatd"}, "'ungatd' is no arm with results; did you mean 'ungated'?"),
        ({"confirmatory": ["gatd"]}, "'gatd' is no arm with results; did you mean 'gated'?"),
        ({"confirmatory": ["ungated"]}, "confirmatory names the baseline 'ungated', which is not compared with itself"),
        ({"confirmatory": ["gated", "gated"]}, "confirmatory=gated, gated names an arm twice; name each once"),
        ({"smallest_difference": None}, "confirmatory=gated has no verdict with smallest_difference=None; declare"),
        ({"smallest_difference": 0.0}, "no verdict with smallest_difference=0.0; declare the smallest difference that"),
    ],
)
def test_contradictions_are_refused(options, message):
    values = {"baseline": "ungated", "confirmatory": ["gated"], "smallest_difference": 0.02} | options
    with pytest.raises(ValueError) as error:
        compare_arms(metric(gated=0.0), **values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("num_seeds", "message"),
    [
        (4, "confirmatory=gated takes at least 5 seeds, not 4; add seeds or leave it empty"),
        (1, "1 seed says nothing about other seeds; train with at least 2"),
    ],
)
def test_too_few_seeds_are_refused(num_seeds, message):
    arms = {arm: values[:num_seeds] for arm, values in metric(gated=0.0).items()}
    with pytest.raises(ValueError, match=message):
        compare_arms(arms, "ungated", ["gated"], 0.02)


def test_arms_with_other_numbers_of_seeds_are_refused():
    arms = metric(gated=0.0)
    arms["gated"] = arms["gated"][:4]
    with pytest.raises(ValueError, match="arm gated has 4 seeds and ungated 5; give one value a seed"):
        compare_arms(arms, "ungated")


def two_by_two():
    """Gated and ungated, warm and cold: seeds and cold move both arms alike, and each run has a little of its own."""
    rng = np.random.default_rng(5)
    shared, cold = rng.normal(0, 0.5, 7), rng.normal(0, 0.2, 7)
    arms = {"gated_cold": 3.05 + cold, "ungated_cold": 3.3 + cold, "gated": 3.0, "ungated": 3.1}
    return {arm: values + shared + rng.normal(0, 0.003, 7) for arm, values in arms.items()}


CHANGED, PLAIN = ("gated_cold", "ungated_cold"), ("gated", "ungated")


def test_a_difference_of_differences_is_that_of_a_loop_over_seeds():
    arms = two_by_two()
    numbers = []
    for seed in range(7):
        with_change = arms["gated_cold"][seed] - arms["ungated_cold"][seed]
        numbers.append(with_change - (arms["gated"][seed] - arms["ungated"][seed]))
    mean, deviation = mean_and_deviation(numbers)
    half = student_quantile(6, 0.975) * deviation / math.sqrt(7)
    found = difference_of_differences(arms, CHANGED, PLAIN)
    assert found.difference == pytest.approx((mean, mean - half, mean + half), rel=1e-6)
    assert found.num_seeds == 7 and found.standard_deviation == pytest.approx(deviation)
    assert found.difference.high < -0.1 < -half, "a gain of 0.25 cold and of 0.1 warm, and what seeds share is gone"
    assert difference_of_differences(arms, PLAIN, CHANGED).difference.value == pytest.approx(-mean)


def test_an_arm_that_diverged_leaves_no_difference_of_differences():
    for lost in (math.nan, math.inf):
        arms = two_by_two()
        arms["ungated_cold"][3] = arms["gated_cold"][3] = lost
        assert difference_of_differences(arms, CHANGED, PLAIN) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gated": None}, "'gated' is no arm with results; did you mean 'ungated'?"),
        ({"gated_cold": np.ones(4)}, "arm gated_cold has 4 seeds and ungated 7; give one value a seed"),
        (dict.fromkeys(two_by_two(), np.ones(1)), "1 seed says nothing about other seeds; train with at least 2"),
    ],
)
def test_arms_without_four_times_the_same_seeds_are_refused(changes, message):
    arms = {arm: values for arm, values in {**two_by_two(), **changes}.items() if values is not None}
    with pytest.raises(ValueError) as error:
        difference_of_differences(arms, CHANGED, PLAIN)
    assert message in str(error.value)
