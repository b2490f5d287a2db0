"""Studies of encoders: their metrics come from the runs' own files, and the report shows them beside their floors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_studies import synthetic_study, text_study

from gatelab.report.tables import Table
from gatelab.study.findings import read_findings
from gatelab.study.presets import find_preset
from gatelab.study.report import study_report
from gatelab.study.runner import conduct, read_results
from gatelab.study.scales import find_scale
from gatelab.study.study import Study

ENCODER = ("model.causal=false", "data.masking={}", "model.vocab_size=302")
SEP = "delimiter_attention[SEP]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("encoders")
    study = text_study(where, *ENCODER, metric="heldout_error", seeds=[3, 4])
    conduct(study, where / "study", where / "cache")
    return where / "study"


def result_of(folder: Path, arm: str, seed: int) -> dict:
    return json.loads((folder / arm / f"seed_{seed}" / "result.json").read_text())


def test_the_error_is_what_is_left_of_accuracy(folder: Path) -> None:
    for one in read_results(folder):
        figures = result_of(folder, one.arm, one.seed)["heldout"]["documents.jsonl"]
        assert one.value("heldout_error") == 1 - figures["accuracy"]
        assert one.value("heldout_loss") == figures["loss"]
    findings = read_findings(folder)
    assert (findings.metric.key, findings.metric.title) == ("heldout_error", "held-out error")
    assert findings.comparisons["gated"].num_pairs == 2


def test_attention_to_separators_stands_beside_its_floor(folder: Path) -> None:
    findings = read_findings(folder)
    quantity = next(one for one in findings.quantities if one.key == SEP)
    measured = result_of(folder, "gated", 3)["measurement"]
    assert quantity.title == "attention to SEP"
    (run, _) = findings.compared["gated"]
    assert quantity.of(run) == measured[SEP] and quantity.floor(run) == measured["delimiter_attention_floor[SEP]"]
    assert findings.floors(quantity) == [pytest.approx(measured["delimiter_attention_floor[SEP]"])]
    assert quantity.over_floor.of(run) == pytest.approx(measured[SEP] / measured["delimiter_attention_floor[SEP]"])


def test_the_report_has_attention_outliers_and_loss(folder: Path) -> None:
    sections = {section.title: section for section in study_report(folder).sections}

    def titles(section: str) -> set[str]:
        tables = [item for item in sections[section].content if isinstance(item, Table)]
        return {column.title for table in tables for column in table.columns}

    assert "attention to SEP" in titles("First-token attention")
    assert {"largest |h| in medians", "kurtosis of h, mean over layers"} <= titles("Hidden states")
    assert "held-out loss" in titles("Result")


def test_a_run_from_before_accuracy_was_kept_is_still_read(folder: Path) -> None:
    file = folder / "gated" / "seed_4" / "result.json"
    kept = file.read_text()
    result = json.loads(kept)
    del result["heldout"]["documents.jsonl"]["accuracy"]
    file.write_text(json.dumps(result))
    old = next(one for one in read_results(folder) if (one.arm, one.seed) == ("gated", 4))
    file.write_text(kept)
    assert old.heldout_loss == result["heldout"]["documents.jsonl"]["loss"]
    with pytest.raises(ValueError, match="the runs measured no heldout_error: the task names the sets of queries"):
        old.value("heldout_error")


@pytest.mark.parametrize("metric", ["heldout_error", SEP, "delimiter_attention[background]"])
def test_metrics_of_encoders_are_known(metric: str) -> None:
    assert synthetic_study(metric=metric).metric == metric
    with pytest.raises(ValueError, match=r"metric '.*' is unknown; did you mean"):
        synthetic_study(metric=metric.replace("a", "o") + "s")


@pytest.mark.parametrize("preset", ["open/encoder_text", "open/encoder_vision"])
def test_the_presets_compare_encoders_with_equal_parameters(preset: str) -> None:
    study: Study = find_preset(preset)(find_scale("micro"))
    assert [arm.name for arm in study.arms] == ["ungated", "sdpa_headwise", "sdpa_elementwise"]
    runs = [study.settings_of(arm) for arm in study.arms]
    assert not any(run.model.causal for run in runs)
    assert (len(study.seeds), study.confirmatory) == (5, ("sdpa_headwise", "sdpa_elementwise"))
    if preset == "open/encoder_text":
        assert all(run.data.masking is not None and run.data.masking.probability == 0.15 for run in runs)
        assert runs[0].model.vocab_size == runs[0].data.tokenizer.vocab_size + 2
        assert (study.metric, study.smallest_difference) == ("heldout_loss", 0.01)
    else:
        assert all(run.data.images is not None and run.data.context == 65 for run in runs)
        assert (study.metric, study.smallest_difference) == ("heldout_error", 0.01)
