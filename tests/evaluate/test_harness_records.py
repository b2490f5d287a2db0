"""Figures, standard errors, averages, and the folder that keeps them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gatelab.evaluate.task_plan import PlannedGroup
from gatelab.evaluate.task_results import (
    Figure,
    ResultFolder,
    TaskResult,
    missing_sentences,
    result_table,
    standard_error,
)
from gatelab.evaluate.task_running import average_members, figures_of

KEY = "5" * 64


def result(task: str = "gates_quiz", **changes: Any) -> TaskResult:
    content = {"task": task, "figures": [Figure(metric="acc", value=0.25, stderr=0.125)], "samples": 7, "key": KEY}
    return TaskResult(**{**content, **changes})


def sample(metric: str, value: float, filter_name: str = "none") -> dict[str, Any]:
    return {"filter": filter_name, metric: value}


def test_the_standard_error_of_a_mean() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    mean = sum(values) / 5
    squares = 0.0
    for value in values:
        squares += (value - mean) ** 2
    assert standard_error(values) == pytest.approx(math.sqrt(squares / 4) / math.sqrt(5), rel=1e-12)
    assert standard_error([1.0]) is None


def test_figures_take_lm_evals_values_and_only_means_have_an_error() -> None:
    samples = [sample("acc", value) for value in (0.0, 1.0, 1.0)] + [sample("acc", 0.0, "strict")] * 3
    samples += [{"filter": "none", "word_perplexity": (-3.5, 4)}] * 3
    results = {"alias": "quiz", "sample_len": 3, "acc,none": 2 / 3, "acc_stderr,none": "N/A", "acc,strict": 0.0}
    results |= {"word_perplexity,none": 2.4}
    found = {figure.metric: figure for figure in figures_of(results, samples, {"acc": True})}
    assert list(found) == ["acc", "acc[strict]", "word_perplexity"]
    assert found["acc"].value == 2 / 3 and found["acc"].stderr == pytest.approx(1 / 3)
    assert found["acc[strict]"].stderr == 0
    assert found["word_perplexity"].stderr is None and found["word_perplexity"].higher_is_better is None
    assert found["acc"].higher_is_better is True


def test_a_median_is_not_taken_for_a_mean() -> None:
    samples = [sample("acc", value) for value in (0.0, 1.0, 1.0)]
    (figure,) = figures_of({"acc,none": 1.0}, samples, {})
    assert figure.stderr is None


def test_rulers_lengths_count_their_own_samples() -> None:
    samples = [{"filter": "none", "4096": -1.0, "256": 0.5}, {"filter": "none", "4096": -1.0, "256": 1.0}]
    (figure,) = figures_of({"4096,none": -1.0, "256,none": 0.75}, samples, {})
    assert (figure.metric, figure.value, figure.stderr) == ("256", 0.75, 0.25)


def test_a_groups_average_is_that_of_all_its_samples() -> None:
    members = {
        "one": [0.0, 1.0, 1.0, 0.0, 1.0],
        "two": [1.0, 1.0, 0.0],
    }
    results = {
        name: TaskResult(
            task=name,
            figures=(Figure(metric="acc", value=sum(v) / len(v), stderr=standard_error(v), higher_is_better=True),),
            samples=len(v),
            shots=5,
        )
        for name, v in members.items()
    }
    group = PlannedGroup("both", ("one", "two"), [{"metric": "acc", "weight_by_size": True}], "2")
    average = average_members(group, results)
    assert average.figures[0].value == pytest.approx(5 / 8)
    assert (average.samples, average.shots, average.version, average.subtasks) == (8, 5, "2", ("one", "two"))
    within = sum((value - sum(v) / len(v)) ** 2 for v in members.values() for value in v) / (8 - 2)
    assert average.figures[0].stderr == pytest.approx(math.sqrt(within / 8))
    plain = average_members(group._replace(aggregates=[{"metric": "acc", "weight_by_size": False}]), results)
    assert plain.figures[0].value == pytest.approx((3 / 5 + 2 / 3) / 2)


def test_a_result_is_kept_with_its_samples_and_found_by_its_key(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path / "out")
    assert folder.find("gates_quiz", KEY) is None
    folder.keep(result(), [{"doc_id": 0, "text": "门"}, {"doc_id": 1}])
    assert folder.find("gates_quiz", KEY) == result()
    assert folder.find("gates_quiz", "6" * 64) is None
    (place,) = (tmp_path / "out" / "tasks").iterdir()
    assert place.name == "gates_quiz-555555555555"
    lines = (place / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["text"] == "门" and len(lines) == 2


def test_nothing_is_kept_of_a_task_whose_log_breaks_off(tmp_path: Path) -> None:
    def broken() -> Iterator[dict[str, int]]:
        yield {"doc_id": 0}
        raise KeyboardInterrupt

    folder = ResultFolder(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        folder.keep(result(), broken())
    assert folder.find("gates_quiz", KEY) is None
    assert list((tmp_path / "tasks").iterdir()) == []


@pytest.mark.parametrize("content", ["", "[]", '{"schema_version": 1}', '{"schema_version": 1, "task": "x", "a": 1}'])
def test_a_damaged_result_is_named(tmp_path: Path, content: str) -> None:
    folder = ResultFolder(tmp_path)
    folder.keep(result(), [])
    file = tmp_path / "tasks" / "gates_quiz-555555555555" / "result.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"result\.json is damaged; delete .* to evaluate gates_quiz again"):
        folder.find("gates_quiz", KEY)


def test_a_result_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path)
    folder.keep(result(), [])
    file = tmp_path / "tasks" / "gates_quiz-555555555555" / "result.json"
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(ValueError, match="another version or key"):
        folder.find("gates_quiz", KEY)


def test_a_file_can_not_be_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="is a file where a folder is needed"):
        ResultFolder(tmp_path / "out")


def test_the_table_leaves_out_members_and_names_what_is_missing() -> None:
    results = [
        result("one"),
        result("two", truncated=3),
        result("both", subtasks=("one", "two")),
        TaskResult(task="law", missing="no text"),
    ]
    table = result_table(results)
    assert [column.key for column in table.columns][-1] == "truncated"
    assert [cells[0] for cells in table.cells()] == ["both", "law"]
    assert table.cells()[0][:5] == ["both", "acc", "0.2500", "0.1250", "7"]
    assert missing_sentences(results) == ["law is missing: no text"]


def test_all_results_stand_in_two_files(tmp_path: Path) -> None:
    results = [result("one"), TaskResult(task="law", missing="no text")]
    ResultFolder(tmp_path).finish(results, {"model": {"name": "m"}})
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["model"] == {"name": "m"} and len(content["results"]) == 2
    with (tmp_path / "results.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["task"], row["value"], row["note"]) for row in rows] == [("one", "0.25", ""), ("law", "", "no text")]
