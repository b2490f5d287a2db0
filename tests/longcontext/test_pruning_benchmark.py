"""What the benchmark makes of judged models: means over seeds, and differences that are paired by seed."""

from statistics import fmean
from typing import Any

import numpy as np
import pytest
from pruning import summarised, without_gates
from pruning_page import answers_table, differences_table, pruning_page, table_of
from scipy.stats import ttest_1samp

SETTINGS = {"stage": "extended", "context": 768, "continuation": 256, "samples": 2}
VALUES = {
    "random": {0: (0.3, 0.5), 1: (0.4, 0.8), 2: (0.2, 0.2)},
    "self_gate": {0: (0.2, 0.5), 1: (0.5, 0.6), 2: (0.1, 0.0)},
    "h2o": {0: (0.1, 0.1), 1: (0.2, 0.1), 2: (0.3, 0.1)},
    "h2o@heads": {0: (0.1, 0.0), 1: (0.1, 0.1), 2: (0.2, 0.2)},
}
FIGURES = [(use, metric) for use in ("prefill", "decoding") for metric in ("loss_difference", "kl")]
ROWS = [
    {"arm": arm, "seed": seed, "press": press, "use": use, "budget": 0.25, "metric": metric}
    | {"sample": sample, "value": value}
    for arm in ("ungated", "headwise")
    for press, of_seeds in VALUES.items()
    if arm == "headwise" or press in ("random", "h2o")
    for seed, values in of_seeds.items()
    for sample, value in enumerate(values)
    for use, metric in (*FIGURES, ("answers", "mini_single"))
]


def one(arm: str, press: str, rows: list[dict[str, Any]] = ROWS) -> dict[str, Any]:
    """The loss of one press in prefill."""
    wanted = (arm, press, "prefill", "loss_difference")
    (row,) = (row for row in summarised(rows) if (row["arm"], row["press"], row["use"], row["metric"]) == wanted)
    return row


@pytest.mark.parametrize(
    ("press", "key", "other"),
    [
        ("self_gate", "less_random", "random"),
        ("self_gate", "less_same_without_gates", "random"),
        ("h2o@heads", "less_random", "random"),
        ("h2o@heads", "less_same_without_gates", "h2o"),
        ("h2o", "less_random", "random"),
    ],
)
def test_differences_are_means_of_samples_paired_by_seed(press: str, key: str, other: str) -> None:
    differences = [fmean(VALUES[press][seed]) - fmean(VALUES[other][seed]) for seed in range(3)]
    row = one("headwise", press)[key]
    low, high = ttest_1samp(differences, 0).confidence_interval(0.95)
    assert row["press"] == other and row["seeds"] == 3
    assert np.allclose([row["mean"], row["low"], row["high"]], [fmean(differences), low, high], atol=1e-12)


def test_a_press_is_not_compared_with_itself_nor_with_what_is_not_there():
    assert "less_random" not in one("headwise", "random")
    assert "less_same_without_gates" not in one("headwise", "h2o")
    assert [row["arm"] for row in summarised(ROWS) if row["press"] == "self_gate"] == ["headwise"] * 5


def test_what_a_press_is_without_its_gates():
    pairs = {"gated_attention": "attention_value", "self_gate": "random", "h2o@both": "h2o", "tova": "tova"}
    assert {press: without_gates(press) for press in pairs} == pairs
    assert without_gates("gated_attention@heads") == "gated_attention"


def test_one_seed_has_no_interval():
    row = one("ungated", "h2o", [row for row in ROWS if row["seed"] == 1])
    assert row["mean"] == pytest.approx(0.15) and row["seeds"] == 1 and "low" not in row


def test_tables_and_page_hold_every_press():
    summary = list(summarised(ROWS))
    assert [row["press"] for row in table_of(summary, "headwise", "prefill").rows] == list(VALUES)
    assert table_of(summary, "headwise", "prefill").rows[1]["0.25"].startswith("+0.317 [")
    pairs = [row["difference"] for row in differences_table(summary, "less_same_without_gates", "").rows]
    assert pairs == ["self_gate - random", "self_gate - random", "h2o@heads - h2o", "h2o@heads - h2o"]
    assert len(answers_table(summary, "mini_single").rows) == 6
    page = pruning_page(summary, SETTINGS)
    assert "--continuation 256" in (page.command or "") and "3 seeds" in page.lead
