"""Runs that start from weights: each seed from its own, and what became of them in the study's report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_studies import synthetic_study

from gatelab.model.decoder import Decoder
from gatelab.report.page import Page
from gatelab.study.report import study_report, write_study_report
from gatelab.study.report_start import TITLE
from gatelab.study.runner import conduct
from gatelab.study.statistics import t_interval
from gatelab.study.study import Study
from gatelab.train.metrics import read_metrics
from gatelab.train.start import save_start

SEEDS = (0, 1, 2)
ARMS = ("ungated", "gated")
WORDS = ("train.steps=2", "train.schedule.warmup_steps=0", "train.evaluation.measure_every=1")
LARGEST = "largest_activation"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two arms and three seeds, of which each begins with weights of its own, with its report."""
    starts = tmp_path_factory.mktemp("starts")
    fresh = synthetic_study(*WORDS)
    arms = []
    for arm in fresh.arms:
        for seed in SEEDS:
            torch.manual_seed(seed)
            save_start(starts / arm.name / f"seed_{seed}", Decoder(fresh.settings_of(arm).model))
        words = [*arm.assignments, f"train.start_from={starts}/{arm.name}/seed_{{seed}}"]
        arms.append({"name": arm.name, "assignments": words})
    study = tmp_path_factory.mktemp("studies") / "study"
    conduct(synthetic_study(*WORDS, arms=arms, seeds=SEEDS), study, tmp_path_factory.mktemp("cache"))
    write_study_report(study)
    return study


def tables_of(page: Page) -> dict[str, dict[str, dict[str, str]]]:
    """Of each table of the section, by the first words of its caption: cells by arm and column."""
    found = [section for section in page.sections if section.title == TITLE]
    return {
        table.caption.partition(", mean over seeds")[0]: {
            cells[0]: dict(zip([column.key for column in table.columns], cells, strict=True)) for cells in table.cells()
        }
        for section in found
        for table in section.content
    }


def ends(folder: Path, arm: str, kind: str, key: str) -> np.ndarray:
    """The figure at step 0 and at the last step, (2 S), from the runs' own lines."""
    runs = [read_metrics(folder / arm / f"seed_{seed}" / "metrics.jsonl") for seed in SEEDS]
    return (
        np.array(
            [[row[key] for row in run if row["kind"] == kind and row["step"] == at] for run in runs for at in (0, 2)]
        )
        .reshape(-1, 2)
        .T
    )


def test_each_seed_begins_with_its_own_weights(folder: Path) -> None:
    study = Study.from_yaml((folder / "study.yaml").read_text())
    assert "{seed}" in study.arms[0].assignments[-1]
    named = [study.settings_of(arm, seed).train.start_from for arm in study.arms for seed in SEEDS]
    assert [str(path).split("/")[-2:] for path in named] == [[arm, f"seed_{seed}"] for arm in ARMS for seed in SEEDS]
    for arm in ARMS:
        before, _ = ends(folder, arm, "measurement", LARGEST)
        assert len(set(before.tolist())) == len(SEEDS)


@pytest.mark.parametrize(
    ("title", "kind", "key", "format"),
    [
        ("Largest |h|", "measurement", LARGEST, ",.1f"),
        ("Held-out loss", "evaluation", "loss", ".4f"),
        ("First-token attention, worst layer", "measurement", "first_token_attention_worst_layer", ".4f"),
    ],
)
def test_before_and_after_are_the_runs_first_and_last_figures(
    title: str, kind: str, key: str, format: str, folder: Path
) -> None:
    table, of_arms = tables_of(study_report(folder))[title], {arm: ends(folder, arm, kind, key) for arm in ARMS}
    for arm, (before, after) in of_arms.items():
        moved = t_interval(after - before)
        assert table[arm]["movement"] == f"{moved.value:+{format}}"
        assert table[arm]["movement_interval"] == f"[{moved.low:+{format}}, {moved.high:+{format}}]"
        for name, values in (("before", before), ("after", after)):
            assert table[arm][name].startswith(f"{values.mean():{format}} ± ")
    (base_before, base_after), (before, after) = of_arms.values()
    beyond = t_interval((after - before) - (base_after - base_before))
    assert table["gated"]["beyond_baseline"] == f"{beyond.value:+{format}}"
    assert table["ungated"]["beyond_baseline"] == "–"


def test_the_movements_are_written_beside_the_page(folder: Path) -> None:
    written = json.loads((folder / "comparisons.json").read_text())["before_and_after"]
    before, after = ends(folder, "gated", "measurement", LARGEST)
    found: dict[str, Any] = written[LARGEST]["gated"]
    assert found["movement"]["value"] == pytest.approx((after - before).mean())
    assert written[LARGEST]["ungated"]["beyond_baseline"] is None
    assert written["gate_mean"]["ungated"]["before"] is None and written["gate_mean"]["gated"]["before"] is not None


def test_runs_from_fresh_weights_have_no_such_section(tmp_path: Path) -> None:
    conduct(synthetic_study(*WORDS, seeds=SEEDS), tmp_path / "study", tmp_path / "cache")
    write_study_report(tmp_path / "study")
    assert tables_of(study_report(tmp_path / "study")) == {}
    assert "before_and_after" not in json.loads((tmp_path / "study" / "comparisons.json").read_text())
