"""A study's archive: the same findings from fewer files."""

import json
from pathlib import Path

import pytest
from tiny_studies import text_study

from gatelab.study.archive import archive_study
from gatelab.study.executors import Serial
from gatelab.study.findings import read_findings
from gatelab.study.runner import conduct
from gatelab.study.status import status


def test_an_archive_tells_the_same(tmp_path: Path) -> None:
    study = text_study(tmp_path, "train.steps=7", seeds=[0, 1])
    conduct(study, tmp_path / "study", tmp_path / "cache", Serial())
    page = archive_study(tmp_path / "study", tmp_path / "kept", every=3)
    assert page == tmp_path / "kept" / "report.html" and page.exists()
    assert status(tmp_path / "kept").summary() == status(tmp_path / "study").summary()
    kept, whole = read_findings(tmp_path / "kept"), read_findings(tmp_path / "study")
    assert kept.results and repr(kept.results) == repr(whole.results)
    run = tmp_path / "kept" / "gated" / "seed_1"
    assert {path.name for path in run.iterdir()} == {
        "data.json",
        "environment.json",
        "heldout_documents.safetensors",
        "measurement.json",
        "metrics.jsonl",
        "result.json",
        "settings.yaml",
    }
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    original = (tmp_path / "study" / "gated" / "seed_1" / "metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 3, 6, 7]
    assert [row for row in rows if row["kind"] != "step"] == [
        row for row in map(json.loads, original) if row["kind"] != "step"
    ]


def test_an_archive_is_never_overwritten_and_needs_a_study(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    with pytest.raises(ValueError, match="holds no study"):
        archive_study(tmp_path / "none", tmp_path / "new")
    conduct(text_study(tmp_path), tmp_path / "study", tmp_path / "cache", Serial())
    with pytest.raises(ValueError, match=r"kept exists already; choose a new folder to archive"):
        archive_study(tmp_path / "study", tmp_path / "kept")
    assert not (tmp_path / "new").exists()
