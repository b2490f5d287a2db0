"""Diagnosing by name: the files, their round trips, and what is refused before any work."""

from __future__ import annotations

import csv
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from tiny_models import write_text

from command_line import Command
from gatelab.diagnose.page import diagnosis_page
from gatelab.diagnose.results import COLUMNS, NamedResult
from gatelab.evaluate.diagnosis import Diagnosis, Examination, diagnose, write_diagnosis
from gatelab.evaluate.texts import file_text
from gatelab.report import folder as report_folder
from gatelab.report.page import render


@pytest.fixture(scope="module")
def found(run: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Diagnosis]:
    cache = tmp_path_factory.mktemp("cache")
    examination = Examination(file_text(text), cache, samples=3, full=True, clamp=True, precision=True)
    return diagnose([str(run)], examination)


@pytest.fixture(scope="module")
def written(found: list[Diagnosis], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_diagnosis(tmp_path_factory.mktemp("out") / "new", found, "gatelab diagnose run").parent


def test_the_folder_holds_page_numbers_and_every_figure_three_times(written: Path) -> None:
    assert sorted(path.name for path in written.iterdir()) == ["figures", "metrics.csv", "metrics.json", "report.html"]
    html = (written / "report.html").read_text()
    figures = sorted(path.name for path in (written / "figures").iterdir())
    assert len(figures) == 3 * html.count("data-chart=") > 3 * 15
    assert figures[:3] == ["01-every-head.pdf", "01-every-head.png", "01-every-head.svg"]
    assert "gatelab diagnose run" in html


def test_every_row_comes_back_from_the_csv(found: list[Diagnosis], written: Path) -> None:
    with (written / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == COLUMNS
    wanted = found[0].result.rows
    assert len(rows) == len(wanted) > 500
    for row, want in zip(rows, wanted, strict=True):
        assert {key: "" if value is None else str(value) for key, value in want.items()} == row
        assert float(row["value"]) == want["value"]


def test_the_json_is_strict_and_comes_back(found: list[Diagnosis], written: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    metrics = json.loads((written / "metrics.json").read_text(), parse_constant=refuse)
    assert list(metrics) == ["schema_version", "command", "models"]
    assert (metrics["schema_version"], metrics["command"]) == (1, "gatelab diagnose run")
    (model,) = metrics["models"]
    assert model == json.loads(json.dumps(found[0].mapping))
    assert model["name"] == "run" and model["verdict"]["sink"]["answer"] == "no"
    context = model["context"]
    assert (context["num_sequences"], context["tokens_per_sequence"]) == (3, 131)
    assert context["bos"].startswith("one, ") and context["dtype"] == "float32" and context["step"] == 2


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time of writing."""
    monkeypatch.setattr(report_folder, "save_chart", lambda chart, stem: None)


@pytest.mark.usefixtures("without_figures")
def test_numbers_that_json_does_not_have_become_null(found: list[Diagnosis], tmp_path: Path) -> None:
    mapping = {"a": [float("nan"), 1.5], "b": {"c": float("inf")}}
    folder = write_diagnosis(tmp_path / "new", [found[0]._replace(mapping=mapping)], "command").parent
    assert json.loads((folder / "metrics.json").read_text())["models"] == [{"a": [None, 1.5], "b": {"c": None}}]


def test_probes_and_histogram_are_rows_of_the_same_table(found: list[Diagnosis]) -> None:
    result = found[0].result
    assert result.arguments("clamped_perplexity")[0] == "as_trained"
    assert result.arguments("logits_error") == ["bfloat16_against_float32"]
    bins = result.select("gate_histogram[sdpa_output]")
    assert {row["channel"] for row in bins} == set(range(20))
    assert sum(row["value"] for row in bins if row["layer"] == 0) == bins[0]["n"]
    assert all(row["model"] == "run" and row["step"] == 2 for row in result.rows)


def test_two_models_are_measured_at_one_length(run: Path, llama: Path, text: Path, tmp_path: Path) -> None:
    examination = Examination(file_text(text), tmp_path, samples=1, clamp=True)
    both = diagnose([str(run), str(llama)], examination)
    lengths = {one.result.context["tokens_per_sequence"] for one in both}
    assert lengths == {min(131, both[1].result.context["length"])}
    assert len({one.result.name for one in both}) == 2
    assert both[0].result.arguments("clamped_perplexity") and not both[1].result.arguments("clamped_perplexity")


def test_a_failure_leaves_the_earlier_diagnosis(
    found: list[Diagnosis], written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "old"
    shutil.copytree(written, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def fail(*arguments: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(report_folder, "save_chart", fail)
    with pytest.raises(OSError, match="the disk is full"):
        write_diagnosis(folder, found, "other command")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.usefixtures("without_figures")
def test_an_earlier_diagnosis_is_replaced_whole(found: list[Diagnosis], tmp_path: Path) -> None:
    (tmp_path / "out" / "figures").mkdir(parents=True)
    (tmp_path / "out" / "figures" / "99-old.svg").touch()
    write_diagnosis(tmp_path / "out", found, "command")
    assert not (tmp_path / "out" / "figures" / "99-old.svg").exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_folder_with_other_files_is_refused(found: list[Diagnosis], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"holds other files \(thesis\.tex\); name a new folder with --out"):
        write_diagnosis(tmp_path, found, "command")
    with pytest.raises(ValueError, match="is a file; name a folder with --out"):
        write_diagnosis(tmp_path / "thesis.tex", found, "command")
    assert list(tmp_path.iterdir()) == [tmp_path / "thesis.tex"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples=0 measures nothing; take at least 1"),
        ({"dtype": "int8"}, "dtype=int8 is unknown; take one of float32, bfloat16, float16, float64"),
    ],
)
def test_an_examination_without_a_meaning_is_refused(changes: dict, message: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        Examination(file_text(text), tmp_path, **changes)
    assert str(caught.value) == message


def test_clamping_needs_gates(llama: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no gates of GateLab's to clamp; leave out --clamp"):
        diagnose([str(llama)], Examination(file_text(text), tmp_path, clamp=True))


@pytest.fixture
def diagnose_command(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """``gatelab diagnose`` without its charts as files."""
    monkeypatch.setattr(report_folder, "save_chart", lambda chart, stem: None)
    return partial(command, "diagnose")


def test_the_command_prints_the_verdict_the_floor_and_the_page(
    run: Path, text: Path, tmp_path: Path, diagnose_command: Command
) -> None:
    code, output, errors = diagnose_command(str(run), "--text", str(text), "--samples", "1")
    assert code == 0, errors
    lines = output.splitlines()
    assert lines[0] == "run" and lines[1].startswith("Sink: no, 0 % of heads above 0.3; mean ")
    assert any("uniform floor" in line for line in lines)
    page = Path(lines[-1].removeprefix("Report: "))
    assert page == tmp_path / "runs" / "diagnosis" / "run" / "report.html"
    assert f"gatelab diagnose {run} --text {text} --samples 1" in page.read_text()


def test_bad_input_is_one_sentence_and_exit_code_2(
    run: Path, text: Path, tmp_path: Path, diagnose_command: Command
) -> None:
    short = write_text(tmp_path / "short.txt", num_sentences=1)
    cases = {
        (str(run), "--compare", str(run), "--text", str(text)): "would be compared with itself",
        (str(run), "--text", str(text), "--corpus", "files"): "are two texts; give one of them",
        (str(run), "--text", str(tmp_path / "none.txt")): "no .txt, .jsonl, .parquet file at",
        (str(run), "--text", str(text), "--length", "132"): "length=132 is above the 131 tokens",
        (str(run), "--text", str(short)): "give one of at least 64",
        (str(tmp_path / "nothing"), "--text", str(text)): "GateLab run folder",
    }
    for words, message in cases.items():
        code, output, errors = diagnose_command(*words)
        assert (code, output) == (2, "")
        assert message in errors and len(errors.strip().splitlines()) == 1, errors
    assert not (tmp_path / "runs").exists()


def test_the_page_needs_no_more_than_rows_and_context(written: Path) -> None:
    with (written / "metrics.csv").open(newline="") as stream:
        rows = [
            {
                **row,
                **{key: int(row[key]) if row[key] else None for key in ("layer", "head", "channel")},
                **{key: float(row[key]) if row[key] else None for key in ("value", "floor")},
            }
            for row in csv.DictReader(stream)
        ]
    context = json.loads((written / "metrics.json").read_text())["models"][0]["context"]
    again = diagnosis_page([NamedResult("run", rows, context)], "gatelab diagnose run")
    assert render(again) == (written / "report.html").read_text()


def test_every_metric_and_key_is_documented(found: list[Diagnosis], written: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    names = {metric.partition("[")[0].removesuffix("_token") for metric in found[0].result.metrics}
    metrics = json.loads((written / "metrics.json").read_text())
    names |= {*metrics, *metrics["models"][0]}
    names -= {"output_stable_rank", "gated_output_stable_rank"}  # written as `..._stable_rank`
    assert [name for name in sorted(names) if f"`{name}" not in text] == []
