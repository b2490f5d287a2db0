"""Steps of arms timed in turns: the interval against binomial sums, the file, what is refused."""

import json
from math import comb
from pathlib import Path

import pytest

from gatelab.report.page import render
from gatelab.study.overhead import (
    TIMES,
    measure_overhead,
    median_ratio,
    overhead_page,
    overhead_rows,
    read_overhead,
)
from gatelab.study.runner import conduct
from gatelab.study.study import Study

TINY = (
    "model.width=40",
    "model.num_layers=2",
    "model.num_heads=6",
    "model.num_kv_heads=2",
    "model.head_size=8",
    "model.feedforward_width=56",
    "data.context=17",
    "train.sequences_per_step=3",
    "train.schedule.warmup_steps=0",
    "train.precision=float32",
)


def study_of(**changes: object) -> Study:
    gated = {"name": "gated", "assignments": ["gate=sdpa_elementwise"]}
    fields = {
        "name": "overhead",
        "question": "What does a gate cost?",
        "recipe": "dense_tiny",
        "assignments": [*TINY, "train.steps=6"],
        "arms": [{"name": "ungated"}, gated],
        "baseline": "ungated",
        "metric": "step_seconds",
    }
    return Study.parse({**fields, **changes})


@pytest.mark.parametrize("number", [6, 7, 12, 40, 41])
def test_interval_of_the_median_holds_the_binomial_probability(number: int) -> None:
    arm = [1 + index / 100 for index in range(number)]
    estimate = median_ratio(list(reversed(arm)), [1.0] * number)
    rank = round((estimate.low - 1) * 100)
    outside = 2 * sum(comb(number, index) for index in range(rank + 1)) / 2**number
    one_more = 2 * sum(comb(number, index) for index in range(rank + 2)) / 2**number
    assert outside <= 0.05 < one_more
    assert estimate.high == arm[number - 1 - rank]
    assert estimate.value == pytest.approx((arm[(number - 1) // 2] + arm[number // 2]) / 2)


def test_ratios_are_of_the_same_round() -> None:
    base = [1.0, 5.0, 2.0, 8.0, 3.0, 4.0]
    estimate = median_ratio([1.1 * seconds for seconds in base], base)
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((1.1, 1.1, 1.1))


def test_every_round_is_kept_and_nothing_is_measured_twice(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    overhead = measure_overhead(study_of(), tmp_path, lambda done, rounds: seen.append((done, rounds)))
    assert seen == [(0, 6)] * 3 + [(done, 6) for done in range(1, 7)]
    assert [(times.arm, len(times.seconds)) for times in overhead.arms] == [("ungated", 6), ("gated", 6)]
    assert all(second > 0 for times in overhead.arms for second in times.seconds)
    content = (tmp_path / TIMES).read_bytes()
    assert measure_overhead(study_of(), tmp_path) == overhead == read_overhead(tmp_path)
    assert (tmp_path / TIMES).read_bytes() == content

    base, gated = overhead_rows(overhead)
    assert (base["ratio"], base["low"], base["high"], base["flops"]) == (1, 1, 1, 1)
    assert gated["parameters"] - base["parameters"] == 2 * 40 * 6 * 8
    tokens = 3 * 17
    assert (gated["flops"] - 1) * overhead.arms[0].flops == pytest.approx(6 * 2 * 40 * 48 * tokens)
    page = render(overhead_page(overhead, "gatelab study paper/overhead"))
    assert f"{gated['ratio']:.3f}" in page
    assert "17 random tokens, float32" in page


def test_what_cannot_be_timed_is_refused(tmp_path: Path) -> None:
    few = study_of(assignments=[*TINY, "train.steps=5"])
    with pytest.raises(ValueError, match=r"^train.steps=5 rounds give no interval of a median; take 6 or more$"):
        measure_overhead(few, tmp_path)
    arms = [{"name": "ungated"}, {"name": "wide", "assignments": ["train.precision=float64"]}]
    words = [word for word in study_of().assignments if "precision" not in word]
    with pytest.raises(ValueError, match=r"^study overhead times its arms in turns, and train.precision differs"):
        measure_overhead(study_of(arms=arms, assignments=[*words, "train.steps=6"]), tmp_path)
    with pytest.raises(ValueError, match=r"^study overhead times its arms in turns, not in runs"):
        conduct(study_of(), tmp_path / "study", tmp_path)
    assert not (tmp_path / "study").exists()


def test_a_folder_of_other_times_is_refused(tmp_path: Path) -> None:
    measure_overhead(study_of(), tmp_path)
    with pytest.raises(ValueError, match=r"holds the times of other arms or settings; choose another folder$"):
        measure_overhead(study_of(question="Why?"), tmp_path)
    (tmp_path / TIMES).write_text(json.dumps({"arms": []}))
    with pytest.raises(ValueError, match=r"step_times.json is unreadable .*; delete it to measure again$"):
        measure_overhead(study_of(), tmp_path)
