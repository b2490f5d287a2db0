"""What running a study refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from gatelab.study.runner import compare_with_baseline, read_arm, run_study
from gatelab.study.study import Study
from gatelab.train.loop import train

TINY = [
    "model.width=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_size=8",
    "model.feedforward_width=24",
    "data.context=16",
    "train.steps=2",
    "train.schedule.warmup_steps=1",
]


@pytest.fixture
def study() -> Study:
    return Study.parse(
        {
            "name": "tiny",
            "question": "?",
            "recipe": "backcopy",
            "assignments": TINY,
            "arms": [{"name": "ungated"}, {"name": "gated", "assignments": ["gate=sdpa_elementwise"]}],
            "baseline": "ungated",
        }
    )


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_arms_without_documents_are_read_and_not_compared(study: Study, tmp_path: Path) -> None:
    runs = run_study(study, tmp_path / "study", tmp_path / "cache")
    assert [run.name for run in runs] == ["ungated", "gated"] and runs[0].documents == {}
    with pytest.raises(ValueError, match="arm ungated has no held-out documents to compare on: a synthetic task has"):
        compare_with_baseline(study, runs)
    with pytest.raises(ValueError, match="holds a study, whose runs are in folders of their own; choose another"):
        train(study.settings_of(study.arms[0]), tmp_path / "study", tmp_path / "cache")
    assert names(tmp_path / "study") == {"study.yaml", "ungated", "gated"}
    (tmp_path / "study" / "gated" / "data.json").write_text("[]")
    with pytest.raises(ValueError, match=r"data\.json is unreadable: it holds no mapping"):
        read_arm(tmp_path / "study" / "gated")


def test_a_folder_with_a_run_is_refused(study: Study, tmp_path: Path) -> None:
    train(study.settings_of(study.arms[0]), tmp_path / "run", tmp_path / "cache")
    before = names(tmp_path / "run")
    with pytest.raises(ValueError, match="run holds a run, not a study; choose another folder"):
        run_study(study, tmp_path / "run", tmp_path / "cache")
    assert names(tmp_path / "run") == before


def test_files_in_place_of_folders_are_refused(study: Study, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, cache in (("file", "cache"), ("new", "file"), ("file/new", "cache")):
        with pytest.raises(ValueError, match="/file is a file where a folder is needed; choose another path"):
            run_study(study, tmp_path / folder, tmp_path / cache)
    assert names(tmp_path) == {"file"}


def test_a_study_whose_first_arm_is_refused_leaves_nothing(study: Study, tmp_path: Path) -> None:
    words = ("data.synthetic=null", "data.train={name: files, path: nowhere}", "model.vocab_size=4096")
    refused = study.model_copy(update={"assignments": (*study.assignments, *words)})
    with pytest.raises(ValueError, match=r"no \.txt, \.jsonl, \.parquet file at 'nowhere'"):
        run_study(refused, tmp_path / "new" / "study", tmp_path / "cache")
    assert names(tmp_path) == set()
