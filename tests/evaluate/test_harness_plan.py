"""Names, groups and suites become tasks, and what runs foreign code is refused."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness_stand_ins import local_task, questions, write_rows, write_task

from gatelab.evaluate.task_plan import (
    NOT_ALLOWED,
    PlannedGroup,
    PlannedTask,
    TaskSource,
    code_checksums,
    data_checksums,
    plan_tasks,
)

pytest.importorskip("lm_eval")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    local_task(folder, "gates_quiz", questions(3), tag="dry_tag")
    local_task(folder, "sinks_quiz", questions(4), tag="dry_tag")
    return folder


def names(plan: list[Any]) -> list[str]:
    return [part.name for part in plan]


def test_the_paper_suite_has_its_six_benchmarks() -> None:
    plan = plan_tasks(["paper"], TaskSource())
    tasks = [part for part in plan if isinstance(part, PlannedTask)]
    kinds = Counter(task.name.partition("_")[0] for task in tasks)
    assert kinds == {"hellaswag": 1, "mmlu": 57, "gsm8k": 1, "gatelab": 1, "ceval-valid": 52, "cmmlu": 67}
    shots = {task.name.partition("_")[0]: task.config["num_fewshot"] for task in tasks}
    assert shots == {"hellaswag": 10, "mmlu": 5, "gsm8k": 5, "gatelab": 0, "ceval-valid": 5, "cmmlu": 5}
    groups = {part.name: part for part in plan if isinstance(part, PlannedGroup)}
    assert {"mmlu", "mmlu_stem", "ceval-valid", "cmmlu"} <= groups.keys() and "paper" not in groups
    assert len(groups["mmlu"].members) == 57 and groups["mmlu"].version == "2"
    assert {task.name: task.missing for task in tasks if task.missing} == {"gatelab_humaneval": NOT_ALLOWED}


def test_code_runs_only_when_it_was_allowed_to() -> None:
    (task,) = plan_tasks(["gatelab_humaneval"], TaskSource(allow_code_execution=True))
    assert isinstance(task, PlannedTask) and task.missing is None
    with pytest.raises(ValueError, match=r"gatelab_humaneval is not run: it runs code .* --allow-code-execution"):
        plan_tasks(["gatelab_humaneval"], TaskSource())


def test_rulers_offline_tasks() -> None:
    plan = plan_tasks(["ruler_offline"], TaskSource())
    assert names(plan) == ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe"]


def test_an_unknown_name_brings_the_nearest() -> None:
    with pytest.raises(ValueError, match="no task, group or tag 'helaswag'; the nearest names are hellaswag, "):
        plan_tasks(["helaswag"], TaskSource())
    with pytest.raises(ValueError, match="no name is near"):
        plan_tasks(["%%%%%%%%%"], TaskSource())


def test_own_definitions_by_name_tag_and_group(tasks: Path) -> None:
    member = {"task": "sinks_quiz", "num_fewshot": 2}
    inline = {"group": "inner", "task": ["gates_quiz"], "aggregate_metric_list": [{"metric": "acc"}]}
    write_task(tasks, group="both", task=[member, inline], description="Think. ")
    source = TaskSource(definitions=tasks)
    assert names(plan_tasks(["gates_quiz", "gates_quiz"], source)) == ["gates_quiz"]
    assert names(plan_tasks(["dry_tag"], source)) == ["gates_quiz", "sinks_quiz"]
    plan = plan_tasks(["both"], source)
    assert names(plan) == ["sinks_quiz", "gates_quiz", "inner"]
    assert [part.config.get("num_fewshot") for part in plan if isinstance(part, PlannedTask)] == [2, None]
    assert all(part.config["description"] == "Think. " for part in plan if isinstance(part, PlannedTask))


def test_a_definition_inside_a_group(tasks: Path) -> None:
    definition = {"task": "nameless", "dataset_path": "json", "output_type": "multiple_choice"}
    write_task(tasks, group="inline", task=[definition])
    (task,) = plan_tasks(["inline"], TaskSource(definitions=tasks))
    assert isinstance(task, PlannedTask) and task.file is None and task.config == definition


def test_a_suite_of_other_versions_is_refused(tasks: Path) -> None:
    write_task(tasks, group="strict", task=["gates_quiz"], metadata={"versions": {"gates_quiz": 2.0}})
    with pytest.raises(ValueError, match=r"strict means version 2\.0 of gates_quiz, but .* has 1\.5"):
        plan_tasks(["strict"], TaskSource(definitions=tasks))


def test_code_that_comes_with_data_is_refused(tasks: Path) -> None:
    local_task(tasks, "remote", questions(3), dataset_kwargs={"trust_remote_code": True})
    with pytest.raises(ValueError, match="remote asks with trust_remote_code for code that comes with the data set"):
        plan_tasks(["remote"], TaskSource(definitions=tasks))


@pytest.mark.parametrize("metric", [{"metric": "acc", "hf_evaluate": True}, {"metric": "code_eval"}])
def test_code_of_a_metric_is_refused(tasks: Path, metric: dict[str, Any]) -> None:
    local_task(tasks, "scored", questions(3), metric_list=[metric])
    with pytest.raises(ValueError, match=f"scored scores with {metric['metric']!r}, code that lm-eval would download"):
        plan_tasks(["scored"], TaskSource(definitions=tasks))


def test_a_folder_of_definitions_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no folder .*nowhere of task definitions"):
        plan_tasks(["gates_quiz"], TaskSource(definitions=tmp_path / "nowhere"))


def test_local_files_take_the_place_of_a_data_set(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "cais" / "mmlu" / "astronomy" / "test.jsonl", [{"question": "?"}])
    for name, is_local in (("mmlu_astronomy", True), ("mmlu_anatomy", False)):
        (task,) = plan_tasks([name], TaskSource(data=tmp_path))
        assert isinstance(task, PlannedTask)
        assert (task.config["dataset_path"] == "json") == is_local
        assert list(data_checksums(task.config)) == [str(file)] * is_local
        assert ("dataset_kwargs" in task.overrides) == is_local
    (tmp_path / "cais" / "mmlu" / "astronomy" / "dev.csv").write_text("question\n?\n")
    with pytest.raises(ValueError, match=r"data files of several kinds \(csv, json\)"):
        plan_tasks(["mmlu_astronomy"], TaskSource(data=tmp_path))


def test_code_beside_a_definition_is_known_by_checksum() -> None:
    (task,) = plan_tasks(["hellaswag"], TaskSource())
    assert isinstance(task, PlannedTask) and list(code_checksums(task)) == ["utils.py"]


def test_without_lm_eval_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    with pytest.raises(ValueError, match=r"tasks need the package lm_eval .*: install gatelab\[eval\]"):
        plan_tasks(["hellaswag"], TaskSource())
