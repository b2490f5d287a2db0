"""What a study probes of its finished runs: against the probes by hand, resumed, and refused before any run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_studies import synthetic_study, text_study

from gatelab.evaluate.precision import probe_precision
from gatelab.evaluate.quantisation.schemes import SCHEMES
from gatelab.evaluate.quantisation.simulated import quantised
from gatelab.evaluate.rows import Subject
from gatelab.model.perplexity import token_nats
from gatelab.report.tables import MISSING, Linked, Table
from gatelab.study import probes, runner
from gatelab.study.findings import Findings, read_findings
from gatelab.study.report import study_report
from gatelab.study.report_tables import probed_tables, result_table
from gatelab.study.runner import conduct, read_results
from gatelab.study.statistics import t_interval
from gatelab.study.study import LOGITS_ERROR, PROBES, QUANTISATION_COST, Study
from gatelab.train.checkpoint import checkpoints, load_decoder
from gatelab.train.source import open_source

W8A8 = f"{QUANTISATION_COST}[w8a8]"
WINDOWS = "train.evaluation.final_measured_windows=3"


def test_probes_are_those_by_hand(tmp_path: Path) -> None:
    study, cache = text_study(tmp_path, WINDOWS, metric=f"{QUANTISATION_COST}[fp8_per_token]"), tmp_path / "cache"
    results = conduct(study, tmp_path / "study", cache)
    arm = results[1]
    settings = study.settings_of(study.arm("gated"), 0)
    inputs = open_source(settings, cache).measured_windows(6).inputs
    decoder = load_decoder(checkpoints(tmp_path / "study" / "gated" / "checkpoints")[-1])

    @torch.no_grad()
    def loss() -> float:
        nats = [float(token_nats(decoder(row[None])[:, :-1], row[None, 1:]).double().mean()) for row in inputs[:3]]
        return sum(nats) / 3

    assert arm.measurement is not None and len(inputs) == 6
    plain = loss()
    for scheme in (*probes.SCHEMES_PROBED, "fp8_per_token"):
        with quantised(decoder, SCHEMES[scheme], inputs[3:]):
            expected = loss() - plain
        assert arm.measurement[f"{QUANTISATION_COST}[{scheme}]"] == pytest.approx(expected, abs=1e-7) != 0
    rows = probe_precision(decoder, inputs[:1], Subject("gated"))
    error = next(row["value"] for row in rows if row["metric"] == LOGITS_ERROR)
    assert arm.measurement[LOGITS_ERROR] == pytest.approx(error)
    assert arm.value(study.metric) == arm.measurement[study.metric]


@pytest.mark.parametrize("metric", [W8A8, LOGITS_ERROR])
def test_verdicts_are_about_the_probe(metric: str, tmp_path: Path) -> None:
    study = synthetic_study(WINDOWS, metric=metric, seeds=[4, 5])
    results = conduct(study, tmp_path / "study", tmp_path / "cache")
    findings = read_findings(tmp_path / "study")
    values = {(one.arm, one.seed): one.measurement[metric] for one in results if one.measurement}
    difference = findings.comparisons["gated"].difference
    assert difference is not None
    expected = sum(values["gated", seed] - values["ungated", seed] for seed in (4, 5)) / 2
    assert difference.value == pytest.approx(expected)
    title = {
        W8A8: "nats per token that rounding adds, w8a8",
        LOGITS_ERROR: "error of the logits, bfloat16_against_float32",
    }
    assert findings.metric.title == title[metric]
    assert {one.key for one in findings.quantities} >= {LOGITS_ERROR, W8A8, f"{QUANTISATION_COST}[fp8]"}
    assert len(result_table(findings).rows) == 2
    shown = {f"{name}[{row['by']}]": row for name, table in by_kind(findings) for row in table.rows}
    assert set(shown) == {LOGITS_ERROR, *(f"{QUANTISATION_COST}[{one}]" for one in probes.SCHEMES_PROBED)} - {metric}


def by_kind(findings: Findings) -> list[tuple[str, Table]]:
    """The tables of probes, by what their first column is of."""
    names = {"scheme": QUANTISATION_COST, "dtypes": LOGITS_ERROR.partition("[")[0]}
    return [(names[table.columns[0].title], table) for table in probed_tables(findings)]


def test_the_page_has_every_probe_paired_by_seed(tmp_path: Path) -> None:
    study = synthetic_study(WINDOWS, metric=W8A8, seeds=[4, 5], smallest_difference=0.25)
    results = conduct(study, tmp_path / "study", tmp_path / "cache")
    page = study_report(tmp_path / "study")
    assert page.lead.startswith("Smallest difference that matters, set before the runs: 0.25 nats per token.\n\n")
    (section,) = [one for one in page.sections if one.title == "Rounding and precision"]
    assert "Exploratory" in section.text and "no verdicts" in section.text
    costs, errors = section.content
    assert isinstance(costs, Table) and isinstance(errors, Table)
    assert costs.caption.startswith("Nats per token that rounding adds, mean over 2 seeds; lower is better.")
    assert errors.caption.startswith("Error of the logits, mean over 2 seeds; lower is better.")
    assert "Intervals: Student's t over seeds of the paired differences" in costs.caption
    values = {(one.arm, one.seed): one.measurement[f"{QUANTISATION_COST}[w4a4]"] for one in results if one.measurement}
    gated, ungated = (np.array([values[arm, seed] for seed in (4, 5)]) for arm in ("gated", "ungated"))
    expected = t_interval(gated - ungated)
    base, row = (one for one in costs.rows if one["by"] == "w4a4")
    assert (base["arm"], row["arm"]) == ("ungated", "gated") and "difference" not in base
    assert row["mean"] == Linked(pytest.approx(gated.mean()), "comparisons.json")
    assert row["difference"].value == pytest.approx(expected.value)
    assert row["interval"] == pytest.approx((expected.low, expected.high))
    assert [cells[4] == MISSING for cells in costs.cells()] == [True, False] * (len(probes.SCHEMES_PROBED) - 1)


def test_one_seed_has_probes_without_differences(tmp_path: Path) -> None:
    conduct(synthetic_study(WINDOWS, metric=W8A8), tmp_path / "study", tmp_path / "cache")
    costs, errors = probed_tables(read_findings(tmp_path / "study"))
    assert [column.title for column in costs.columns] == ["scheme", "arm", "mean"]
    assert "mean over one seed" in errors.caption and "Intervals" not in errors.caption


def test_stopped_between_run_and_probe_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, folder, cache = synthetic_study(WINDOWS, metric=W8A8), tmp_path / "study", tmp_path / "cache"
    probe, probed = probes._probe, []

    def stopping(run: Any, *arguments: Any) -> dict[str, float]:
        probed.append(run.path.name)
        if probed == ["ungated", "gated"]:
            raise KeyboardInterrupt
        return probe(run, *arguments)

    monkeypatch.setattr(probes, "_probe", stopping)
    with pytest.raises(KeyboardInterrupt):
        conduct(study, folder, cache)
    assert [one.arm for one in read_results(folder)] == ["ungated"], "an unprobed run is no result yet"
    assert read_findings(folder).comparisons == {}
    monkeypatch.setattr("gatelab.study.executors.run_job", lambda *arguments: pytest.fail("a run was repeated"))
    assert [one.arm for one in conduct(study, folder, cache)] == ["ungated", "gated"]
    assert probed == ["ungated", "gated", "gated"]
    assert conduct(study, folder, cache) == read_results(folder) and len(probed) == 3
    (folder / "gated" / "probes.json").write_text('["w8a8"]')
    with pytest.raises(ValueError, match=r"gated/probes\.json is unreadable; delete it to probe the run again"):
        read_results(folder)
    (folder / "gated" / "probes.json").unlink()
    for path in (folder / "gated" / "checkpoints").glob("step_*"):
        path.rename(tmp_path / path.name)
    with pytest.raises(ValueError, match="gated has no checkpoint left to probe; restore it, or run the study in a"):
        conduct(study, folder, cache)


def test_other_studies_probe_nothing(tmp_path: Path) -> None:
    results = conduct(synthetic_study(WINDOWS), tmp_path / "study", tmp_path / "cache")
    assert not list((tmp_path / "study").rglob("probes.json"))
    assert "Rounding and precision" not in [one.title for one in study_report(tmp_path / "study").sections]
    assert all(one.measurement is not None and not set(PROBES) & set(one.measurement) for one in results)


def test_a_run_that_diverged_is_not_probed(tmp_path: Path) -> None:
    study = synthetic_study(WINDOWS, metric=W8A8, seeds=[3, 4])
    folder = tmp_path / "study"
    conduct(study.model_copy(update={"metric": "heldout_loss"}), folder, tmp_path / "cache")
    (folder / "study.yaml").write_text(study.to_yaml())
    (folder / "gated" / "seed_3" / "diverged.json").write_text(json.dumps({"step": 2, "reason": "it rose"}))
    results = conduct(study, folder, tmp_path / "cache")
    assert [one.diverged_at for one in results] == [None, 2, None, None]
    assert len(list(folder.rglob("probes.json"))) == 3
    assert read_findings(folder).comparisons["gated"].contrast.num_diverged == 1  # type: ignore[union-attr]


def test_what_cannot_be_probed_is_refused_before_any_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_conditions", lambda *arguments: pytest.fail("the study began"))

    def refused(study: Study) -> str:
        with pytest.raises(ValueError) as error:
            conduct(study, tmp_path / "study", tmp_path / "cache")
        return str(error.value)

    groups = synthetic_study(metric=f"{QUANTISATION_COST}[w4_group32]")
    assert "layer 0, self_attn.q_proj has 16 inputs, which groups of 32 don't divide" in refused(groups)
    long = text_study(tmp_path, "data.context=2600", "model.max_context=4000", metric=W8A8)
    assert "whole windows of context=2600; probes score one and calibrate on another, so hold out more" in refused(long)
    assert not (tmp_path / "study").exists()


def test_shapes_are_looked_at_before_the_text_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "probed_text", lambda *arguments: pytest.fail("a text was prepared"))
    study = text_study(tmp_path, metric=f"{QUANTISATION_COST}[w4_group32]")
    with pytest.raises(ValueError, match="which groups of 32 don't divide"):
        probes.require_probeable(study, tmp_path / "cache")


@pytest.mark.parametrize("metric", ["quantisation_cost[w8a9]", "quantisation_cost", "logits_error[bfloat16]"])
def test_metrics_that_are_no_probes_are_refused(metric: str) -> None:
    with pytest.raises(ValueError, match=r"metric '.*' is unknown; did you mean '(quantisation_cost|logits_error)\["):
        synthetic_study(metric=metric)
