"""The judgement on a tiny model: what is scored, what is written, and what is refused before any work."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pruned_models import VOCABULARY, build_decoder, whole_logits

from gatelab.data.settings import CorpusSettings
from gatelab.evaluate.intervals import mean_interval
from gatelab.evaluate.model_tokenizer import ModelTokenizer
from gatelab.evaluate.models import OpenedModel
from gatelab.evaluate.texts import file_text
from gatelab.longcontext.kv_pruning import judge as judging
from gatelab.longcontext.kv_pruning.judge import Verdict, judge, parse_budgets, parse_presses
from gatelab.longcontext.kv_pruning.report import (
    ablation_rows,
    figure_rows,
    pruning_table,
    write_pruning,
)
from gatelab.longcontext.kv_pruning.trial import (
    ANSWERS,
    DECODING,
    DIVERGENCE,
    FOUND,
    LOSS,
    PREFILL,
    Arm,
    Score,
    Trial,
)
from gatelab.report import folder as report_folder

CONTEXT, CONTINUATION, SAMPLES = 64, 11, 2
PRESSES = ("random", "attention_value", "gated_attention", "gated_attention@heads", "oracle")


def make_trial(text: CorpusSettings, folder: Path, **changes: Any) -> Trial:
    arguments: dict[str, Any] = {
        "presses": PRESSES, "budgets": (1.0, 0.25), "context": CONTEXT, "continuation": CONTINUATION,
        "samples": SAMPLES, "step": 16, "num_recent": 4, "dtype": torch.float64,
    }  # fmt: skip
    return Trial(text, folder, **arguments | changes)


def open_tiny(name: str, dtype: torch.dtype) -> OpenedModel:
    tokenizer = ModelTokenizer(
        encode=lambda text: [3 + ord(letter) % (VOCABULARY - 3) for letter in text],
        decode=lambda ids: "".join(chr(97 + number % 26) for number in ids),
        bos_id=1,
        num_bos_added=0,
        vocab_size=VOCABULARY,
    )
    return OpenedModel(name, "gatelab", build_decoder(name), tokenizer, 96, description={"class": "Decoder"})


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "open_model", open_tiny)


def write_text(folder: Path) -> CorpusSettings:
    letters = torch.randint(97, 123, (900,), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "text.txt").write_text("".join(map(chr, letters)), encoding="utf-8")
    return file_text(folder / "text.txt")


@pytest.fixture
def text(tmp_path: Path) -> CorpusSettings:
    return write_text(tmp_path)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Verdict:
    folder, said = tmp_path_factory.mktemp("judged"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "open_model", open_tiny)
        verdict = judge("sdpa_elementwise", make_trial(write_text(folder), folder), said.append)
    assert len(verdict.losses) == len(said) == SAMPLES and verdict.found == []
    return verdict


def test_every_way_is_judged(judged: Verdict) -> None:
    for arm in judged.trial.arms:
        uses = (PREFILL,) if arm.press == "oracle" else (PREFILL, DECODING)
        for metric in (LOSS, DIVERGENCE):
            assert judged.values(arm, PREFILL, 1.0, metric) == pytest.approx([0.0] * SAMPLES, abs=1e-9)
        for use in uses:
            divergences = judged.values(arm, use, 0.25, DIVERGENCE)
            assert len(divergences) == SAMPLES and min(divergences) > 1e-6
    assert judged.values(Arm("oracle", "uniform"), DECODING, 0.25, LOSS) == []
    assert all(row["samples"] == SAMPLES for row in figure_rows(judged))


def test_what_is_written(judged: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_folder, "save_chart", lambda chart, path: path.with_suffix(".png").touch())
    answers = [
        Score(arm, ANSWERS, budget, sample, FOUND, 50.0 * sample)
        for arm in judged.trial.arms[:2]
        for budget in judged.trial.budgets
        for sample in range(SAMPLES)
    ]
    verdict = judged._replace(found=[100.0] * SAMPLES, scores=judged.scores + answers)
    page = write_pruning(tmp_path / "out", verdict, "gatelab prune sdpa_elementwise")
    written = json.loads((tmp_path / "out" / "pruning.json").read_text(encoding="utf-8"))
    assert written["context"]["trial"]["keys_re_rotated"] is False
    assert written["unpruned_losses"] == verdict.losses and written["unpruned_found"] == verdict.found
    assert len(written["figures"]) == (4 * 2 + 1) * 2 * 2 + 2 * 2
    assert {row["keys"] for row in written["figures"] if row["use"] == ANSWERS} == {None}
    assert {row["keys"] for row in written["figures"] if row["use"] == PREFILL} == {CONTEXT, CONTEXT // 4}
    with (tmp_path / "out" / "samples.csv").open(encoding="utf-8") as stream:
        assert len(list(csv.DictReader(stream))) == len(verdict.scores)
    names = sorted(path.name for path in (tmp_path / "out" / "figures").glob("*.png"))
    assert len(names) == 5 and names[-1] == "05-references-found-in-the-mini-tasks.png"
    text = page.read_text(encoding="utf-8")
    assert "gated_attention@heads" in text and "references found, %" in text
    assert [row["press"] for row in pruning_table(verdict).rows][:3] == ["random", "random", "attention_value"]


def test_losses_are_those_of_the_scored_tokens(judged: Verdict) -> None:
    letters = Path(str(judged.trial.text.path)).read_text(encoding="utf-8")[: CONTEXT + CONTINUATION - 1]
    ids = torch.tensor([[1, *(3 + ord(letter) % (VOCABULARY - 3) for letter in letters)]])
    log_probabilities = whole_logits(build_decoder("sdpa_elementwise"), ids).log_softmax(-1)[0]
    places = range(CONTEXT, CONTEXT + CONTINUATION - 1)
    expected = -sum(float(log_probabilities[place, ids[0, place + 1]]) for place in places) / len(places)
    assert judged.losses[0] == pytest.approx(expected, abs=1e-9)


def test_gates_are_compared_with_the_same_way_without(judged: Verdict) -> None:
    rows = ablation_rows(judged)
    pairs = {row["pair"] for row in rows}
    assert pairs == {"gated_attention - attention_value", "gated_attention@heads - gated_attention"}
    row = next(row for row in rows if row["pair"].startswith("gated_attention -") and row["budget"] == 0.25)
    gated, plain = (judged.values(Arm(name, "uniform"), PREFILL, 0.25, LOSS) for name in row["pair"].split(" - "))
    differences = [one - other for one, other in zip(gated, plain, strict=True)]
    assert row["mean"] == pytest.approx(sum(differences) / SAMPLES)


def test_intervals_are_students() -> None:
    interval = mean_interval([1.0, 2.0, 4.0])
    assert interval.mean == pytest.approx(7 / 3)
    assert interval.high - interval.mean == pytest.approx(4.302653 * (7 / 3) ** 0.5 / 3**0.5)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"budgets": (0.5, 1.5)}, "budget 1.5 is no share of the cache; take one above 0, and 1 at most"),
        ({"budgets": (0.0,)}, "budget 0 is no share"),
        ({"budgets": (0.5, 0.1, 0.5)}, "budget 0.5 is given twice; give each budget once"),
        ({"presses": ("",)}, "there is no press ''"),
        ({"budgets": (float("nan"),)}, "budget nan is no share"),
        ({"presses": ("h20",)}, "there is no press 'h20'; did you mean 'h2o'"),
        ({"presses": ("h2o@head",)}, "there is no allocation 'head'; did you mean 'heads'"),
        ({"presses": ()}, "nothing would be pruned"),
        ({"context": 20}, "context=20 is below 64 tokens"),
        ({"samples": 1}, "samples=1 is too little; take at least 2"),
        ({"continuation": 1}, "continuation=1 is too little; take at least 2"),
    ],
)
def test_bad_trials_are_refused(text: CorpusSettings, tmp_path: Path, changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        make_trial(text, tmp_path, **changes)


def test_presses_are_names_with_commas(text: CorpusSettings, tmp_path: Path) -> None:
    assert parse_presses("h2o, snapkv") == ("h2o", "snapkv")
    assert "random" in parse_presses(None) and parse_presses("") == ("",)
    assert make_trial(text, tmp_path, presses=("h2o", "h2o@uniform", "h2o")).arms == [Arm("h2o", "uniform")]


def test_budgets_are_read_as_numbers() -> None:
    assert parse_budgets("0.5,.1") == (0.5, 0.1)
    with pytest.raises(ValueError, match="are not numbers with commas between them, such as"):
        parse_budgets("0.5,half")


def test_what_the_model_cannot_is_refused_before_the_work(text: CorpusSettings, tmp_path: Path) -> None:
    wanted = "context 90 and continuation 11 are 101 tokens, above the 96 that sdpa_elementwise was made for"
    with pytest.raises(ValueError, match=wanted):
        judge("sdpa_elementwise", make_trial(text, tmp_path, context=90))
    with pytest.raises(ValueError, match="press value_gate needs a gate on the value"):
        judge("sdpa_elementwise", make_trial(text, tmp_path, presses=("value_gate",)))
    with pytest.raises(ValueError, match="allocation 'heads' divides the budget by mean gate scores"):
        judge("value_elementwise", make_trial(text, tmp_path, presses=("h2o@heads",)))
    Path(str(text.path)).write_text("a" * 120, encoding="utf-8")
    with pytest.raises(ValueError, match="is too short for two samples of 75 tokens; give a longer one"):
        judge("sdpa_elementwise", make_trial(text, tmp_path))
