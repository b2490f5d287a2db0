"""Whole evaluations on local stand-ins: figures, cache, resuming, the suites, what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness_stand_ins import LONG_CONTEXT, local_task, long_run, questions, write_rows

from gatelab.evaluate import domains, harness, task_plan, task_running
from gatelab.evaluate.evaluation import Evaluation
from gatelab.evaluate.harness import evaluate_tasks
from gatelab.evaluate.models import open_model
from gatelab.evaluate.task_results import TaskResult
from gatelab.model.decoder import Decoder
from gatelab.train import throughput
from gatelab.train.loop import train

pytest.importorskip("lm_eval")
datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module", autouse=True)
def own_data_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "measure_peak", lambda dtype, **_: 1e12)
        train(long_run(folder / "corpus.jsonl"), folder / "run", folder / "cache")
    return str(folder / "run")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    local_task(folder, "gates_quiz", questions(7))
    local_task(folder, "sinks_quiz", questions(5))
    return folder


def evaluate(model: str, place: Path, *names: str, **settings: Any) -> list[TaskResult]:
    evaluation = Evaluation.parse({"tasks": names, "task_folder": str(place / "tasks"), "batch_size": 3, **settings})
    return evaluate_tasks(model, evaluation, place / "out", place / "cache")


def samples_of(place: Path, name: str) -> list[dict[str, Any]]:
    (folder,) = (place / "out" / "tasks").glob(f"{name}-*")
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def log_likelihood(decoder: Decoder, context: list[int], continuation: list[int]) -> float:
    """The sum of ln p of each token of the continuation, one forward pass for each."""
    total = 0.0
    for number, token in enumerate(continuation):
        logits = decoder(torch.tensor([context + continuation[:number]]))[0, -1]
        total += float(logits.double().log_softmax(-1)[token])
    return total


@torch.no_grad()
def test_figures_are_those_of_our_own_decoder(model: str, tmp_path: Path, tasks: Path) -> None:
    (result,) = evaluate(model, tmp_path, "gates_quiz")
    opened = open_model(model)
    assert isinstance(opened.model, Decoder) and opened.tokenizer.bos_id is not None
    hits = []
    for sample in samples_of(tmp_path, "gates_quiz"):
        scores = []
        for (context, continuation), ((found, _),) in zip(sample["arguments"], sample["resps"], strict=True):
            ids = opened.tokenizer.encode(context)
            rest = opened.tokenizer.encode(context + continuation)[len(ids) :]
            scores.append(log_likelihood(opened.model, [opened.tokenizer.bos_id, *ids], rest))
            assert found == pytest.approx(scores[-1], abs=1e-4)
        hits.append(float(scores.index(max(scores)) == sample["doc"]["answer"]))
    (figure,) = result.figures
    mean = sum(hits) / 7
    error = (sum((hit - mean) ** 2 for hit in hits) / 6 / 7) ** 0.5
    assert (result.samples, result.version, result.shots, result.truncated) == (7, "1.5", 0, 0)
    assert (figure.metric, figure.value, figure.stderr) == ("acc", pytest.approx(mean), pytest.approx(error))


def test_generated_text_is_that_of_our_own_decoder(model: str, tmp_path: Path, tasks: Path) -> None:
    local_task(
        tasks,
        "continue",
        [{"question": f"The gate{' number' * n}", "answer": "7"} for n in range(4)],
        output_type="generate_until",
        doc_to_choice=None,
        generation_kwargs={"until": ["\n\n\n"], "max_gen_toks": 300, "do_sample": False},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    (result,) = evaluate(model, tmp_path, "continue", max_new_tokens=6)
    opened = open_model(model)
    for sample in samples_of(tmp_path, "continue"):
        ids = [opened.tokenizer.bos_id, *opened.tokenizer.encode(sample["doc"]["question"])]
        new: list[int] = []
        while len(new) < 6:
            with torch.no_grad():
                token = int(opened.model(torch.tensor([ids + new]))[0, -1].argmax())
            if token == opened.tokenizer.bos_id:
                break
            new.append(token)
        assert sample["resps"] == [[opened.tokenizer.decode(new)]]
    assert result.figures[0].value == 0


def test_a_hugging_face_model_is_asked_alike(llama: Path, tmp_path: Path, tasks: Path) -> None:
    (result,) = evaluate(str(llama), tmp_path, "gates_quiz", limit=2)
    assert result.samples == 2 and result.figures[0].metric == "acc"


def test_what_is_known_is_not_asked_again(
    model: str, tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluate(model, tmp_path, "gates_quiz")
    asked: list[str] = []
    run_task = task_running.run_task

    def counted(lm: Any, name: str, *arguments: Any) -> Any:
        asked.append(name)
        return run_task(lm, name, *arguments)

    monkeypatch.setattr(task_running, "run_task", counted)
    assert evaluate(model, tmp_path, "gates_quiz") == first
    assert evaluate(model, tmp_path, "gates_quiz", batch_size=5) == first and asked == []
    for number, change in enumerate(({"limit": 3}, {"shots": 1}, {"seed": 5}, {"dtype": "float64"}), start=1):
        evaluate(model, tmp_path, "gates_quiz", **change)
        assert len(asked) == number, change
    local_task(tasks, "gates_quiz", questions(6))
    assert evaluate(model, tmp_path, "gates_quiz")[0].samples == 6


def test_a_killed_evaluation_goes_on(model: str, tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_task = task_running.run_task
    asked: list[str] = []

    def killed(lm: Any, name: str, *arguments: Any) -> Any:
        asked.append(name)
        if asked == ["gates_quiz", "sinks_quiz"]:
            raise KeyboardInterrupt
        return run_task(lm, name, *arguments)

    monkeypatch.setattr(task_running, "run_task", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, tmp_path, "gates_quiz", "sinks_quiz")
    assert not (tmp_path / "out" / "results.json").exists()
    told: list[str] = []
    evaluation = Evaluation(tasks=("gates_quiz", "sinks_quiz"), task_folder=str(tasks), batch_size=3)
    results = evaluate_tasks(
        model, evaluation, tmp_path / "out", tmp_path / "cache", lambda result: told.append(result.task)
    )
    assert asked == ["gates_quiz", "sinks_quiz", "sinks_quiz"]
    assert told == [result.task for result in results] == ["gates_quiz", "sinks_quiz"]
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [one["samples"] for one in content["results"]] == [7, 5]
    assert content["model"]["step"] == 1 and len(content["model"]["sha256"]) == 64


def test_texts_that_do_not_fit_are_counted(llama: Path, tmp_path: Path, tasks: Path) -> None:
    rows = questions(3)
    rows[1]["question"] = "The gate opens and the sink stays dry. " * 20
    local_task(tasks, "long", rows)
    (result,) = evaluate(str(llama), tmp_path, "long")
    assert result.truncated == 1


def choices(letter: str) -> dict[str, str]:
    return {"A": "one", "B": "two", "C": "three", "D": "four", letter: "B"}


def paper_stand_ins(data: Path) -> list[str]:
    """Files of a few rows for one task of each benchmark of the suite."""
    endings = [" opens.", " closes.", " stays dry.", " [title] runs."]
    hellaswag = {"activity_label": "Gates", "ctx_a": "The gate", "ctx_b": "number", "endings": endings, "label": "2"}
    mmlu = {"question": "Which gate? ", "choices": ["one", "two", "three", "four"], "answer": 1}
    problem = {
        "prompt": "def two():\n",
        "test": "def check(candidate):\n    assert candidate() == 2\n",
        "entry_point": "two",
    }
    files = {
        "Rowan/hellaswag": {
            "train": [{**hellaswag, "ctx_b": f"number {n}"} for n in range(11)],
            "validation": [hellaswag] * 2,
        },
        "cais/mmlu/astronomy": {"dev": [mmlu] * 5, "test": [mmlu] * 2},
        "openai/gsm8k/main": {
            "train": [{"question": f"{n} gates?", "answer": f"#### {n}"} for n in range(6)],
            "test": [{"question": "7 gates?", "answer": "#### 7"}] * 2,
        },
        "openai/openai_humaneval": {"test": [problem] * 2},
        "ceval/ceval-exam/accountant": {
            "dev": [{"question": "哪个门？", **choices("answer")}] * 5,
            "val": [{"question": "哪个门？", **choices("answer")}] * 2,
        },
        "haonan-li/cmmlu/agronomy": {
            "dev": [{"Question": "哪个门？", **choices("Answer")}] * 5,
            "test": [{"Question": "哪个门？", **choices("Answer")}] * 2,
        },
    }
    for name, splits in files.items():
        for split, rows in splits.items():
            write_rows(data / name / f"{split}.jsonl", rows)
    return ["hellaswag", "mmlu_astronomy", "gsm8k", "gatelab_humaneval", "ceval-valid_accountant", "cmmlu_agronomy"]


def test_the_paper_suite_runs_on_stand_ins(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = paper_stand_ins(tmp_path / "data")
    plan_tasks = task_plan.plan_tasks
    monkeypatch.setattr(
        task_plan, "plan_tasks", lambda *arguments: [part for part in plan_tasks(*arguments) if part.name in kept]
    )
    settings = {"tasks": ("paper",), "data_folder": str(tmp_path / "data"), "max_new_tokens": 5}
    arguments = (tmp_path / "out", tmp_path / "cache")
    results = evaluate_tasks(model, Evaluation.parse(settings), *arguments)
    found = {result.task: result for result in results}
    assert list(found) == kept
    assert [found[name].shots for name in kept] == [10, 5, 5, None, 5, 5]
    assert [found[name].version for name in kept] == ["1.0", "1.0", "3.0", "", "2.0", "1.0"]
    assert [figure.metric for figure in found["hellaswag"].figures] == ["acc", "acc_norm"]
    assert [figure.metric for figure in found["gsm8k"].figures] == [
        "exact_match[strict-match]",
        "exact_match[flexible-extract]",
    ]
    assert found["gatelab_humaneval"].missing == task_plan.NOT_ALLOWED
    prompt = samples_of(tmp_path, "mmlu_astronomy")[0]["arguments"][0][0]
    assert prompt.count("Which gate?") == 6 and prompt.count("Answer: B") == 5 and prompt.endswith("Answer:")
    prompt = samples_of(tmp_path, "ceval-valid_accountant")[0]["arguments"][0][0]
    assert prompt.count("哪个门？") == 6 and prompt.count("答案： B") + prompt.count("答案：B") == 5
    results = evaluate_tasks(model, Evaluation.parse({**settings, "allow_code_execution": True}), *arguments)
    humaneval = next(result for result in results if result.task == "gatelab_humaneval")
    assert [(figure.metric, figure.value) for figure in humaneval.figures] == [("pass@1", 0.0)]
    assert (humaneval.samples, humaneval.shots, humaneval.version) == (2, 0, "1.0")


@pytest.mark.slow  # lm-eval sorts some million pairs of words before the first of them
@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_fwe"])
def test_rulers_offline_tasks_run(model: str, tmp_path: Path, name: str) -> None:
    for package in ("wonderwords", "nltk", "scipy"):
        pytest.importorskip(package)
    settings = {"tasks": (name,), "limit": 2, "max_new_tokens": 4, "lengths": (LONG_CONTEXT,)}
    (result,) = evaluate_tasks(model, Evaluation.parse(settings), tmp_path / "out", tmp_path / "cache")
    assert [(figure.metric, figure.value, figure.stderr) for figure in result.figures] == [
        (f"{LONG_CONTEXT}", 0.0, 0.0)
    ]
    assert result.samples == 2
    lengths = [sample["doc"]["length"] for sample in samples_of(tmp_path, name)]
    assert all(LONG_CONTEXT / 2 < length <= LONG_CONTEXT + 50 for length in lengths)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ruler_vt", "ruler_cwe"])
def test_rulers_texts_that_can_not_be_made_are_refused(model: str, tmp_path: Path, name: str) -> None:
    for package in ("wonderwords", "nltk", "scipy"):
        pytest.importorskip(package)
    settings = Evaluation.parse({"tasks": (name,), "max_new_tokens": 4, "lengths": (300,)})
    with pytest.raises(ValueError, match=rf"{name} needs texts of about \d+ tokens .* asked for 300; set --lengths"):
        evaluate_tasks(model, settings, tmp_path / "out", tmp_path / "cache")


def test_more_shots_than_there_are_examples(llama: Path, tmp_path: Path, tasks: Path) -> None:
    with pytest.raises(ValueError, match="gates_quiz has 7 examples, and 8 shots need 8; take fewer shots"):
        evaluate(str(llama), tmp_path, "gates_quiz", shots=8)


def test_a_task_that_leaves_no_room_for_its_prompt(llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    paper_stand_ins(data)
    settings = Evaluation(tasks=("gsm8k",), data_folder=str(data))
    with pytest.raises(ValueError, match=r"gsm8k generates up to 256 tokens, and .* reads 97 in all.*--max-new-tokens"):
        evaluate_tasks(str(llama), settings, tmp_path / "out", tmp_path / "cache")


def test_a_data_set_that_can_not_be_had(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: Any, **keywords: Any) -> None:
        raise ConnectionError("Couldn't reach 'Rowan/hellaswag' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"needs the data set 'Rowan/hellaswag', which can't be had .* network"):
        evaluate_tasks(str(llama), Evaluation(tasks=("hellaswag",)), tmp_path / "out", tmp_path / "cache")


def test_the_code_of_a_metric_is_never_downloaded(llama: Path, tmp_path: Path) -> None:
    import evaluate as metrics_library

    load = metrics_library.load
    settings = Evaluation(tasks=("humaneval",), allow_code_execution=True, max_new_tokens=4)
    with pytest.raises(ValueError, match="humaneval can't be loaded: it scores with 'code_eval', code to download"):
        evaluate_tasks(str(llama), settings, tmp_path / "out", tmp_path / "cache")
    assert metrics_library.load is load


def test_a_damaged_definition_is_one_sentence(llama: Path, tmp_path: Path, tasks: Path) -> None:
    local_task(tasks, "broken", questions(2), doc_to_text="{{unknown | nofilter}}")
    with pytest.raises(ValueError, match="the task broken can't be loaded: "):
        evaluate(str(llama), tmp_path, "broken")


@torch.no_grad()
def test_six_domains_and_their_average(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    local = {name: str(text) for name in domains.DOMAINS if name != "law"}
    monkeypatch.setitem(domains.DOMAINS, "law", domains.DOMAINS["law"].model_copy(update={"path": "owner/nowhere"}))

    def unreachable(*arguments: Any, **keywords: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    settings = {"tasks": ("paper_perplexity",), "limit": 2}
    results = evaluate_tasks(
        model, Evaluation.parse({**settings, "texts": local}), tmp_path / "out", tmp_path / "cache"
    )
    found = {result.task.rpartition("/")[2]: result for result in results}
    assert list(found) == ["english", "chinese", "code", "mathematics", "law", "literature", "paper_perplexity"]
    assert "owner/nowhere" in (found["law"].missing or "") and not found["law"].figures
    assert found["paper_perplexity"].missing == "no average, because of paper_perplexity/law"
    opened = open_model(model)
    ids = opened.tokenizer.encode(text.read_text())
    means = []
    for start in (0, LONG_CONTEXT - 1):
        row = [opened.tokenizer.bos_id, *ids[start : start + LONG_CONTEXT - 1]]
        log_p = opened.model(torch.tensor([row]))[0].double().log_softmax(-1)
        means.append(-sum(float(log_p[t, row[t + 1]]) for t in range(LONG_CONTEXT - 1)) / (LONG_CONTEXT - 1))
    perplexity, nats = found["english"].figures
    assert nats.value == pytest.approx(sum(means) / 2, rel=1e-6)
    assert perplexity.value == pytest.approx(float(torch.tensor(sum(means) / 2).exp()), rel=1e-5)
    assert nats.stderr == pytest.approx(abs(means[0] - means[1]) / 2, rel=1e-3)
    assert not list((tmp_path / "out" / "tasks").glob("*law*"))
    monkeypatch.undo()
    scored: list[int] = []
    score_windows = domains.score_windows
    monkeypatch.setattr(domains, "score_windows", lambda *given: scored.append(1) or score_windows(*given))
    settings |= {"texts": {**local, "law": str(text)}}
    results = evaluate_tasks(model, Evaluation.parse(settings), tmp_path / "out", tmp_path / "cache")
    assert scored == [1]
    average = results[-1].figures[0]
    values = [result.figures[0].value for result in results[:-1]]
    assert average.value == pytest.approx(sum(value or 0 for value in values) / 6)


def test_a_domain_that_is_not_there(model: str, tmp_path: Path) -> None:
    settings = Evaluation(tasks=("paper_perplexity",), texts={"laws": "x.txt"})
    with pytest.raises(ValueError, match="no domain 'laws' to give a text for; did you mean 'law'"):
        harness.evaluate_tasks(model, settings, tmp_path / "out", tmp_path / "cache")
