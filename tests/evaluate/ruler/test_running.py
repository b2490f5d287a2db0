"""Asking a model RULER's tasks: what it reads, what is kept, how an evaluation goes on, what is refused."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_decoder, train_backend
from typer.testing import CliRunner

from gatelab.cli.long_context import ruler_commands
from gatelab.data.tokenizer import Tokenizer
from gatelab.evaluate.model_tokenizer import from_gatelab
from gatelab.evaluate.models import OpenedModel
from gatelab.evaluate.ruler import running
from gatelab.evaluate.ruler.page import ruler_page
from gatelab.evaluate.ruler.progress import ProgressLines
from gatelab.evaluate.ruler.results import (
    comparison_note,
    depth_rows,
    interval_of,
    mean_of_intervals,
    mean_rows,
    score_table,
    write_results,
)
from gatelab.evaluate.ruler.running import Progress, RulerResult, RulerSettings, evaluate_ruler
from gatelab.evaluate.ruler.sample_sets import sample_set
from gatelab.evaluate.ruler.tasks import ALL_TASKS, make_samples
from gatelab.evaluate.ruler.texts import Texts
from gatelab.report.page import Figure, render

LENGTH, LONGER, CONTEXT = 448, 512, 512
SETTINGS: dict[str, Any] = {
    "tasks": "mini_single,mini_multi_value",
    "lengths": (LENGTH,),
    "samples": 5,
    "batch_size": 2,
}
Generate = Callable[..., list[list[int]]]


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    return Texts(tmp_path / "cache", allow_download=False)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> OpenedModel:
    """What the name ``tiny`` opens."""
    tokenizer = from_gatelab(Tokenizer(train_backend(), "<s>"))
    decoder = tiny_decoder(max_context=CONTEXT)
    model = OpenedModel("tiny", "gatelab", decoder, tokenizer, CONTEXT, description={"dtype": "float32"})
    monkeypatch.setattr(running, "open_model", lambda name, dtype: model)
    return model


class Answers:
    """Stands in for generation: answers every second sample of a batch, and notes what it was given."""

    def __init__(self, opened: OpenedModel, texts: Texts, monkeypatch: pytest.MonkeyPatch):
        self.inputs: list[list[int]] = []
        self.calls: list[tuple[int, int]] = []
        self.stop_after: int | None = None
        self._decode = opened.tokenizer.decode
        self._encode = opened.tokenizer.encode
        self._references = {
            sample.input: sample.outputs
            for name in ("mini_single", "mini_multi_value")
            for length in (LENGTH, LONGER)
            for sample in make_samples(ALL_TASKS[name], opened.tokenizer, length, 42, 5, texts)
        }
        monkeypatch.setattr(running, "generate", self)

    def __call__(
        self, opened: OpenedModel, prompts: Sequence[list[int]], max_new_tokens: int, stop_ids: Collection[int]
    ) -> list[list[int]]:
        if self.stop_after is not None and len(self.calls) == self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((len(prompts), max_new_tokens))
        self.inputs += prompts
        references = [self._references[self._decode(prompt[1:])] for prompt in prompts]
        return [self._encode(" ".join(one)) if not place % 2 else [] for place, one in enumerate(references)]


@pytest.fixture
def answers(opened: OpenedModel, texts: Texts, monkeypatch: pytest.MonkeyPatch) -> Answers:
    return Answers(opened, texts, monkeypatch)


def ask(texts: Texts, out: Path, watch: Any = None, **changes: Any) -> RulerResult:
    return evaluate_ruler("tiny", RulerSettings.parse(SETTINGS | changes), texts, out, watch)


def test_an_input_is_one_bos_and_the_sample(
    opened: OpenedModel, texts: Texts, answers: Answers, tmp_path: Path
) -> None:
    result = ask(texts, tmp_path / "out")
    samples = [sample for cell in result.cells for sample in cell.asked.samples]
    generated = [4] * 5 + [24] * 5
    assert answers.inputs == [[0, *opened.tokenizer.encode(sample.input)] for sample in samples]
    for ids, sample, more in zip(answers.inputs, samples, generated, strict=True):
        assert len(ids) - 1 + more == sample.length <= LENGTH
    assert answers.calls == [(2, 4), (2, 4), (1, 4), (2, 24), (2, 24), (1, 24)]
    assert [cell.score.mean for cell in result.cells] == [60.0, 60.0]
    assert [cell.score.empty for cell in result.cells] == [2, 2]
    assert (result.context["stop_ids"], result.context["bos"]) == ([0], "<s>")
    assert result.context["rope"]["base"] == 10_000.0


def test_what_a_model_really_generates_is_kept(opened: OpenedModel, texts: Texts, tmp_path: Path) -> None:
    """The whole way with a decoder, in batches of other sizes."""
    settings = {"tasks": "mini_single", "samples": 3}
    first, second = (ask(texts, tmp_path / str(size), **settings, batch_size=size).cells[0].record for size in (1, 3))
    assert first.predictions == second.predictions and first.seconds > 0
    (cell,) = ask(texts, tmp_path / "1", **settings).cells
    model: Any = opened.model
    ids = [0, *opened.tokenizer.encode(cell.asked.samples[0].input)]
    with torch.no_grad():
        for _ in range(4):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert cell.record.predictions[0].text == opened.tokenizer.decode(ids[-4:])


@pytest.mark.parametrize("stop_after", [0, 1, 2, 4])
def test_a_stopped_evaluation_goes_on_with_the_next_batch(
    stop_after: int, texts: Texts, answers: Answers, tmp_path: Path
) -> None:
    whole = ask(texts, tmp_path / "whole")
    expected, calls = list(answers.inputs), list(answers.calls)
    answers.inputs, answers.calls, answers.stop_after = [], [], stop_after
    with pytest.raises(KeyboardInterrupt):
        ask(texts, tmp_path / "stopped")
    answers.stop_after = None
    resumed = ask(texts, tmp_path / "stopped")
    assert answers.inputs == expected and answers.calls == calls
    assert [cell.record.predictions for cell in resumed.cells] == [cell.record.predictions for cell in whole.cells]
    assert [cell.score for cell in resumed.cells] == [cell.score for cell in whole.cells]
    answers.stop_after = len(answers.calls)
    ask(texts, tmp_path / "stopped")


def test_more_tasks_and_lengths_may_be_asked_in_the_same_folder(texts: Texts, answers: Answers, tmp_path: Path) -> None:
    ask(texts, tmp_path / "out", tasks="mini_single")
    seen = len(answers.inputs)
    result = ask(texts, tmp_path / "out", lengths=(LONGER, LENGTH, LENGTH))
    assert len(answers.inputs) == seen + 3 * 5
    assert [(cell.task.name, cell.asked.length) for cell in result.cells] == [
        (name, length) for name in ("mini_single", "mini_multi_value") for length in (LENGTH, LONGER)
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 43}, "seed=42, not 43"),
        ({"samples": 4}, "samples=5, not 4"),
        ({"dtype": "bfloat16"}, "dtype=float32, not bfloat16"),
    ],
)
def test_a_folder_with_other_settings_is_refused(
    change: dict[str, Any], message: str, texts: Texts, answers: Answers, tmp_path: Path
) -> None:
    ask(texts, tmp_path)
    seen, made = len(answers.calls), {path.name for path in (texts.cache / "ruler").iterdir()}
    message = f"{tmp_path} holds an evaluation with {message}; name another folder with --out"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ask(texts, tmp_path, **change)
    assert len(answers.calls) == seen
    assert {path.name for path in (texts.cache / "ruler").iterdir()} == made, "no samples were made for it"


def test_another_model_is_refused(
    opened: OpenedModel, texts: Texts, answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(texts, tmp_path)
    opened.model.get_parameter("model.norm.weight").data[0] += 1e-3
    with pytest.raises(ValueError, match=r" holds an evaluation with sha256=\w+, not \w+; name another folder"):
        ask(texts, tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"task": 3}'])
def test_a_damaged_file_is_named(content: str, texts: Texts, answers: Answers, tmp_path: Path) -> None:
    ask(texts, tmp_path)
    file = tmp_path / "predictions" / f"mini_single-{LENGTH}.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))} is damaged; delete it to ask mini_single again$"):
        ask(texts, tmp_path)


def test_predictions_for_other_samples_are_refused(texts: Texts, answers: Answers, tmp_path: Path) -> None:
    ask(texts, tmp_path)
    file = tmp_path / "predictions" / f"mini_single-{LENGTH}.json"
    file.write_text(file.read_text().replace('"samples_sha256": "', '"samples_sha256": "0'))
    with pytest.raises(ValueError, match=r"mini_single-448\.json has predictions for other samples; delete it to ask"):
        ask(texts, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": "mini_singel"}, "there is no task 'mini_singel'; did you mean 'mini_single'?"),
        (
            {"lengths": (LENGTH, 640)},
            "length=640 is beyond the 512 tokens that tiny was made for; take a smaller one, or extend the model with "
            "gatelab extend",
        ),
        ({"lengths": (100,)}, "mini_single at length=100 is too short; it is made from 128"),
        ({"prompt": "chat"}, "prompt=chat needs a tokenizer with a chat template"),
        ({"lengths": ()}, "lengths cannot be ()"),
        ({"device": "qpu"}, "device=qpu can't take tiny ("),
    ],
)
def test_bad_input_is_refused_before_any_work(
    change: dict[str, Any], message: str, texts: Texts, answers: Answers, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ask(texts, tmp_path / "out", **change)
    assert not answers.calls and not (tmp_path / "out").exists()


def test_a_tokenizer_without_bos_is_refused(
    opened: OpenedModel, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    object.__setattr__(opened.tokenizer, "bos_id", None)
    with pytest.raises(ValueError, match=r"^the tokenizer of tiny has no BOS, with which RULER's inputs begin; give"):
        ask(texts, tmp_path / "out")


def test_a_sample_above_its_length_is_refused_when_the_context_ends_there(
    opened: OpenedModel, texts: Texts, answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def longer(*arguments: Any) -> Any:
        return replace(sample_set(*arguments), longest=520)

    monkeypatch.setattr(running, "sample_set", longer)
    with pytest.raises(
        ValueError, match=r"^mini_single at length=512 has a sample of 520 tokens, and tiny was made for 512; t"
    ):
        ask(texts, tmp_path / "out", lengths=(CONTEXT,))


def test_progress_is_told_after_every_batch(texts: Texts, answers: Answers, tmp_path: Path) -> None:
    seen: list[Progress] = []
    ask(texts, tmp_path, seen.append, tasks="mini_single")
    assert [(one.task, one.length, one.done, one.samples) for one in seen] == [
        ("mini_single", LENGTH, done, 5) for done in (2, 4, 5)
    ]
    lines: list[str] = []
    now = iter([0.0, 1.0, 16.0, 16.0, 17.0])
    watch = ProgressLines(lines.append, clock=lambda: next(now))
    for one in seen:
        watch(one._replace(tokens_per_second=1234.5))
    assert lines == [
        "mini_single at 448: 4 of 5 samples, 1,234 tokens/s",
        "mini_single at 448: 5 of 5 samples, 1,234 tokens/s",
    ]


def test_the_files_hold_every_figure_and_prediction(texts: Texts, answers: Answers, tmp_path: Path) -> None:
    result = ask(texts, tmp_path, lengths=(LENGTH, LONGER))
    write_results(result, tmp_path)
    content = json.loads((tmp_path / "results.json").read_text())
    with (tmp_path / "results.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["task"], int(row["length"]), float(row["score"])) for row in rows] == [
        (row["task"], row["length"], row["score"]) for row in content["results"]
    ]
    assert {row["comparable"] for row in rows} == {"False"}
    assert content["note"] == "Not comparable with RULER: tasks of our own."
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert len(lines) == 4 * 5
    for cell in result.cells:
        own = [line for line in lines if (line["task"], line["length"]) == (cell.task.name, cell.asked.length)]
        assert [line["score"] for line in own] == cell.score.per_sample
        assert [line["outputs"] for line in own] == [sample.outputs for sample in cell.asked.samples]
        assert [line["prediction"] == "" for line in own] == [False, True, False, True, False]


def test_the_depth_map_counts_every_sample_of_tasks_with_one_needle(
    texts: Texts, answers: Answers, tmp_path: Path
) -> None:
    result = ask(texts, tmp_path)
    rows = depth_rows(result.cells)
    assert {row["task"] for row in rows} == {"mini_single"} and len(rows) == 10
    assert sum(row["samples"] for row in rows) == 5
    (cell,) = (cell for cell in result.cells if cell.task.name == "mini_single")
    for row in rows:
        low, high = (int(part) / 100 for part in re.findall(r"\d+", row["depth"]))
        scores = [
            score
            for sample, score in zip(cell.asked.samples, cell.score.per_sample, strict=True)
            if low <= sample.input.rindex(sample.outputs[0]) / len(sample.input) < high
        ]
        assert row["score"] == (sum(scores) / len(scores) if scores else None)


def test_table_and_page_say_what_the_scores_are(texts: Texts, answers: Answers, tmp_path: Path) -> None:
    result = ask(texts, tmp_path, lengths=(LENGTH, LONGER))
    table = score_table(result.cells)
    interval = interval_of(60.0, 5)
    assert [row["task"] for row in table.rows] == ["mini_single", "mini_multi_value", "mean of 2 of 6 mini tasks"]
    assert table.rows[0][str(LENGTH)] == f"60.0 [{interval.low:.1f}, {interval.high:.1f}]"
    assert "Not comparable with RULER" in table.caption
    page = ruler_page(result, "gatelab ruler tiny")
    assert page.title == "Mini needles (not RULER) on tiny"
    assert [section.title for section in page.sections] == ["Scores", "Needles by depth", "Answers", "Context"]
    (figure,) = (item for item in page.sections[1].content if isinstance(item, Figure))
    drawn = figure.chart.to_dict()["encoding"]
    assert drawn["y"]["scale"]["domain"] == [f"{10 * tenth} to {10 * tenth + 10} %" for tenth in range(10)]
    assert drawn["x"]["scale"]["domain"] == [LENGTH, LONGER]
    html = render(page)
    assert html.count("Not comparable with RULER") >= 5 and "gatelab ruler tiny" in html


def test_tasks_without_a_fault_compare_with_ruler(texts: Texts, answers: Answers, tmp_path: Path) -> None:
    cells = ask(texts, tmp_path).cells
    ruler = [
        cell._replace(task=ALL_TASKS["vt"], asked=replace(cell.asked, comparable=True, reason="")) for cell in cells
    ]
    assert comparison_note(ruler) == "Comparable with RULER at equal lengths and prompts."
    stand_in = [cell._replace(task=ALL_TASKS["qa_1"], asked=replace(cell.asked, reason="made up")) for cell in cells]
    exceptions = "mini_single, mini_multi_value (tasks of our own); qa_1 (made up)."
    assert comparison_note([*cells, *stand_in]) == f"Not comparable with RULER: {exceptions}"
    assert comparison_note([*cells, *ruler, *stand_in]) == (
        f"Comparable with RULER at equal lengths and prompts, except {exceptions}"
    )


def test_wilson_s_interval_has_the_shares_at_whose_border_the_score_is() -> None:
    for score, number in ((0.0, 20), (35.0, 20), (62.5, 500), (100.0, 7)):
        interval = interval_of(score, number)
        for end in (interval.low, interval.high):
            share = end / 100
            if 0 < share < 1:
                distance = abs(score / 100 - share) / (share * (1 - share) / number) ** 0.5
                assert distance == pytest.approx(1.959964, abs=1e-5)
        assert 0 <= interval.low <= score <= interval.high <= 100
    assert interval_of(0.0, 20).high == pytest.approx(16.11, abs=0.01)


def test_a_mean_of_equal_tasks_is_as_certain_as_all_their_samples() -> None:
    one = interval_of(50.0, 400)
    mean = mean_of_intervals([one] * 4)
    assert mean.score == 50.0
    assert mean.high - mean.score == pytest.approx((one.high - 50.0) / 2)
    assert mean_of_intervals([one]) == pytest.approx(one)


def test_means_are_those_of_one_family_and_length(texts: Texts, answers: Answers, tmp_path: Path) -> None:
    cells = ask(texts, tmp_path, lengths=(LENGTH, LONGER)).cells
    ruler = [cell._replace(task=ALL_TASKS["vt"]) for cell in cells if cell.task.name == "mini_single"]
    rows = mean_rows([*cells, *ruler])
    assert [(row["tasks"], row["length"]) for row in rows] == [
        ("mean of 1 of 13 RULER tasks", LENGTH),
        ("mean of 1 of 13 RULER tasks", LONGER),
        ("mean of 2 of 6 mini tasks", LENGTH),
        ("mean of 2 of 6 mini tasks", LONGER),
    ]


def test_the_command_asks_reports_and_leaves_make_alone(
    texts: Texts, answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--lengths", str(LENGTH), "tiny", "--tasks", "mini_single", "--samples", "5", "--batch-size", "2"]
    done = CliRunner().invoke(
        ruler_commands, [*words, "--stand-in", "--out", str(tmp_path / "out"), "--cache", str(tmp_path)]
    )
    assert done.exception is None, done.output
    assert "mini_single at 448: 5 of 5 samples" in done.output and "60.0" in done.output
    names = {"page.html", "results.json", "results.csv", "predictions.jsonl", "predictions", "settings.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert "--tokenizer" in CliRunner().invoke(ruler_commands, ["make", "--help"]).output
