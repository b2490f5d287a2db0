"""Interactions in the report of a study, and the curves of what was measured inside its models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_studies import synthetic_study
from typer.testing import CliRunner

from gatelab.cli import app
from gatelab.report.page import Figure, Page
from gatelab.report.tables import MISSING, Table
from gatelab.study.findings import Findings, read_findings
from gatelab.study.report import study_report, write_study_report
from gatelab.study.report_interactions import TITLE, interaction_table, interactions_section
from gatelab.study.report_tables import result_table
from gatelab.study.runner import conduct
from gatelab.study.statistics import t_interval
from gatelab.train.metrics import read_metrics

COLD, GATE = "train.optimizer.learning_rate=1e-5", "gate=sdpa_elementwise"
ARMS = {"ungated": [], "gated": [GATE], "ungated_cold": [COLD], "gated_cold": [GATE, COLD]}
COLD_OR_NOT = {"name": "cold", "changed": ["gated_cold", "ungated_cold"], "plain": ["gated", "ungated"]}
WORDS = ("train.steps=2", "train.schedule.warmup_steps=0", "train.evaluation.measure_every=1")
RANK, ENTROPY = "gated_output_effective_rank", "attention_entropy"
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two arms with and without a change, three seeds each, with its report."""
    study, arms = tmp_path_factory.mktemp("studies") / "study", [{"name": n, "assignments": w} for n, w in ARMS.items()]
    planned = synthetic_study(*WORDS, arms=arms, seeds=SEEDS, metric=RANK, interactions=[COLD_OR_NOT])
    conduct(planned, study, tmp_path_factory.mktemp("cache"))
    write_study_report(study)
    return study


def content(page: Page, title: str) -> list[Any]:
    (found,) = [section for section in page.sections if section.title == title]
    return list(found.content)


def by_first(table: Table | None) -> dict[str, dict[str, str]]:
    """The text of each cell, by first cell and column."""
    assert table is not None
    keys = [column.key for column in table.columns]
    return {cells[0]: dict(zip(keys, cells, strict=True)) for cells in table.cells()}


def gains(folder: Path, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Gated less ungated in a figure by seed, cold and not, from the runs' own files."""

    def read(arm: str, seed: int) -> float:
        result = json.loads((folder / arm / f"seed_{seed}" / "result.json").read_text())
        return result["heldout"]["synthetic"]["loss"] if key == "heldout_loss" else result["measurement"][key]

    of: Mapping[str, np.ndarray] = {arm: np.array([read(arm, seed) for seed in SEEDS]) for arm in ARMS}
    return of["gated_cold"] - of["ungated_cold"], of["gated"] - of["ungated"]


def test_the_interaction_is_worked_out_from_the_runs_own_files(folder: Path) -> None:
    cold, warm = gains(folder, RANK)
    table, figure, others = content(study_report(folder), TITLE)
    row = by_first(table)["cold"]
    for key, numbers in (("changed", cold), ("plain", warm), ("difference", cold - warm)):
        interval = t_interval(numbers)
        assert row[key] == f"{interval.value:+.2f}"
        assert row[f"{key}_interval"] == f"[{interval.low:+.2f}, {interval.high:+.2f}]"
    assert "reads: cold, gated_cold less ungated_cold against gated less ungated. Intervals" in table.caption
    assert "seeds" not in row
    assert isinstance(figure, Figure)
    cold, warm = gains(folder, "heldout_loss")
    loss, shown = t_interval(cold - warm), by_first(others)
    assert shown["held-out loss"]["cold"] == f"{loss.value:+.4f} [{loss.low:+.4f}, {loss.high:+.4f}]"
    assert "mean gate score" not in shown, "two of the four arms have no gate"
    assert "effective rank of what the output projection reads" not in shown


def test_the_interactions_are_written_beside_the_page(folder: Path) -> None:
    written = json.loads((folder / "comparisons.json").read_text())["interactions"]
    (one,) = [one for one in written if one["figure"] == ENTROPY]
    cold, warm = gains(folder, ENTROPY)
    assert (one["name"], one["difference"]) == ("cold", pytest.approx(t_interval(cold - warm)._asdict()))
    assert one["changed"]["value"] == pytest.approx(cold.mean()) and one["plain"]["value"] == pytest.approx(warm.mean())


def test_the_terminal_shows_the_interactions(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["study", "compare", str(folder)])
    assert shown.exit_code == 0 and "with it" in shown.output and "cold" in shown.output


def of_runs(findings: Findings, *kept: tuple[str, int]) -> Findings:
    return replace(findings, results=[one for one in findings.results if (one.arm, one.seed) in kept])


def test_only_seeds_of_all_four_arms_count(folder: Path) -> None:
    findings, (cold, warm) = read_findings(folder), gains(folder, RANK)
    two = of_runs(findings, *((arm, seed) for arm in ARMS for seed in (0, 2)), ("gated", 1))
    row = by_first(interaction_table(two))["cold"]
    assert (row["seeds"], row["difference"]) == ("2 of 3", f"{(cold - warm)[[0, 2]].mean():+.2f}")
    table, *rest = interactions_section(of_runs(findings, *((arm, 1) for arm in ARMS))).content
    assert isinstance(table, Table) and all(isinstance(one, Table) for one in rest), "one seed has no interval to draw"
    row = by_first(table)["cold"]
    assert (row["difference"], row["difference_interval"]) == (f"{(cold - warm)[1]:+.2f}", MISSING)
    assert not interactions_section(of_runs(findings, *((arm, 0) for arm in ARMS if arm != "ungated_cold"))).content


def test_a_run_that_diverged_leaves_no_interaction(folder: Path) -> None:
    findings = read_findings(folder)
    lost = [one._replace(measurement=None) if (one.arm, one.seed) == ("gated", 1) else one for one in findings.results]
    assert interaction_table(replace(findings, results=lost)) is None


def test_a_study_without_interactions_has_no_such_section(folder: Path) -> None:
    findings = read_findings(folder)
    none = replace(findings, study=findings.study.model_copy(update={"interactions": ()}))
    assert not interactions_section(none).content


def test_rank_and_entropies_are_drawn_over_training(folder: Path) -> None:
    """A point for each measurement on the way, mean over seeds, of every arm that has the figure."""
    page = study_report(folder)
    for title, key, section, num_arms in (
        ("Effective rank of what the output projection reads", RANK, "What heads write", 4),
        ("Attention entropy, nats", ENTROPY, "What heads write", 4),
        ("Entropy of a score, nats", "gate_binary_entropy", "Gates", 2),
        ("Correlation of score and attention entropy", "gate_attention_entropy_correlation", "Gates", 2),
        ("Mean gate score", "gate_mean", "Gates", 2),
    ):
        charts = [item.chart.to_dict() for item in content(page, section) if isinstance(item, Figure)]
        (chart,) = [one for one in charts if one["title"] == f"{title}, while training"]
        rows = [row for rows in chart["datasets"].values() for row in rows if "step" in row]
        assert {(row["arm"], row["step"]) for row in rows} == {
            (arm, step) for arm in ARMS if num_arms == 4 or arm.startswith("gated") for step in (0, 1, 2)
        }
        logs = [read_metrics(folder / "gated" / f"seed_{seed}" / "metrics.jsonl", "measurement") for seed in SEEDS]
        value = next(row["value"] for row in rows if (row["arm"], row["step"]) == ("gated", 2))
        assert value == pytest.approx(np.mean([log[-1][key] for log in logs]))
    entropies = by_first(content(page, "Gates")[1])
    assert entropies["ungated"]["gate_histogram_entropy"] == MISSING != entropies["gated"]["gate_histogram_entropy"]


def test_a_metric_that_describes_has_no_better(folder: Path) -> None:
    findings = read_findings(folder)
    of_loss = replace(findings, study=findings.study.model_copy(update={"metric": "heldout_loss"}))
    captions = [result_table(one).caption for one in (findings, of_loss)]
    assert captions[0].startswith("Effective rank of what the output projection reads, mean over 3 seeds.")
    assert ["lower is better" in caption for caption in captions] == [False, True]
