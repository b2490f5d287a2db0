"""The report of a study: from files alone, at any moment, with an interval for every claim."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from tiny_studies import synthetic_study, text_study

from chromium import OpenedPage
from gatelab.report.page import Figure, Page
from gatelab.report.tables import MISSING, Linked, Table
from gatelab.study.conditions import Conditions
from gatelab.study.contrasts import Contrast, Judgement
from gatelab.study.executors import Serial
from gatelab.study.findings import Comparison, compare, mean_over_seeds, read_findings
from gatelab.study.jobs import JobResult, comparison_jobs
from gatelab.study.report import _lead, study_report, write_study_report
from gatelab.study.report_run_tables import events_table
from gatelab.study.report_tables import equal_rate_table
from gatelab.study.run_curves import RunCurve, bands, read_curve
from gatelab.study.runner import Unobserved, conduct
from gatelab.study.statistics import DocumentScores, Estimate, t_interval
from gatelab.study.study import Study
from gatelab.train.watch import Unwatched

OTHER = "first_token_attention[other]"
HOSTILE = "</script><script>alert(1)</script>"
ARMS = [
    {"name": "ungated", "paper": "T4 r1"},
    {"name": "gated", "assignments": ["gate=sdpa_elementwise"], "paper": "T4 r2"},
    {"name": "hot", "assignments": ["train.optimizer.learning_rate=1e19"]},
]
WORDS = ("train.schedule.warmup_steps=0", "train.evaluation.every=2", "train.evaluation.measure_every=1")


class StopAt(Unwatched):
    """Stops the driver after so many steps."""

    def __init__(self, steps: int):
        self.left = steps

    def update(self, step: int, loss: float, tokens_per_second: float, peak_share: float) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def planned(**changes: Any) -> Study:
    values = {"arms": ARMS, "seeds": [0, 1, 2, 3, 4], "metric": OTHER, "question": HOSTILE}
    judged = {"confirmatory": ["gated"], "smallest_difference": 1e-6}
    return synthetic_study(*WORDS, **{**values, **judged, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A confirmatory study of five seeds, one arm of which diverges at each, with its report."""
    study = tmp_path_factory.mktemp("studies") / "study"
    conduct(planned(), study, tmp_path_factory.mktemp("cache"))
    write_study_report(study)
    return study


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study on text whose arms are tuned."""
    texts, study = tmp_path_factory.mktemp("texts"), tmp_path_factory.mktemp("studies") / "tuned"
    grid = {"learning_rates": [1e-5, 1e-2, 1e3], "tuning_seeds": [10, 11], "seeds": [0, 1]}
    conduct(text_study(texts, "train.steps=8", **grid), study, tmp_path_factory.mktemp("cache"))
    return study


def titles(page: Page) -> list[str]:
    return [section.title for section in page.sections]


def tables(page: Page, title: str) -> list[Table]:
    (section,) = [section for section in page.sections if section.title == title]
    return [item for item in section.content if isinstance(item, Table)]


def figures(page: Page) -> list[Figure]:
    return [item for section in page.sections for item in section.content if isinstance(item, Figure)]


def by_arm(table: Table) -> dict[str, dict[str, str]]:
    """The text of each cell, by arm and column."""
    keys = [column.key for column in table.columns]
    return {cells[0]: dict(zip(keys, cells, strict=True)) for cells in table.cells()}


def value_in(folder: Path, run: str) -> float:
    return json.loads((folder / run / "result.json").read_text())["measurement"][OTHER]


def result(arm: str, seed: int, loss: float | None, documents: DocumentScores | None = None) -> JobResult:
    step = 5 if loss is None else None
    return JobResult(arm, seed, None, "comparison", "", loss, documents, None, step, 1.0, 1, 1, 1.0)


def runs_of(**losses: list[float | None]) -> dict[str, list[JobResult]]:
    return {arm: [result(arm, seed, loss) for seed, loss in enumerate(values)] for arm, values in losses.items()}


def test_every_section_is_there(folder: Path) -> None:
    assert titles(study_report(folder)) == [
        "Result",
        "What the seeds can tell",
        "The paper's numbers beside ours",
        "Learning",
        "First-token attention",
        "Hidden states",
        "What heads write",
        "Gates",
        "Stability",
        "Cost",
        "Equal conditions",
        "Runs",
    ]


def test_the_result_is_what_the_files_hold(folder: Path) -> None:
    """Means and the t interval of paired differences, worked out from the runs' own files."""
    values = {arm: np.array([value_in(folder, f"{arm}/seed_{n}") for n in range(5)]) for arm in ("ungated", "gated")}
    rows = by_arm(tables(study_report(folder), "Result")[0])
    expected = t_interval(values["gated"] - values["ungated"])
    assert rows["ungated"]["mean"] == f"{values['ungated'].mean():.4f}"
    assert rows["gated"]["difference"] == f"{expected.value:+.4f}"
    assert rows["gated"]["interval"] == f"[{expected.low:+.4f}, {expected.high:+.4f}]"
    assert rows["hot"]["verdict"] == "diverged at 5 of 5 seeds"
    assert (rows["hot"]["mean"], rows["hot"]["difference"]) == (MISSING, MISSING)
    sizes = by_arm(tables(study_report(folder), "Result")[1])
    assert list(sizes) == ["ungated", "gated"] and sizes["gated"]["parameters_more"].startswith("+")


def test_the_declared_contrast_has_a_verdict_with_an_interval(folder: Path) -> None:
    page = study_report(folder)
    verdict = by_arm(tables(page, "Result")[0])["gated"]["verdict"]
    assert verdict.startswith(("better", "worse", "can't tell", "equal within"))
    pattern = r"gated: .*\. Its first-token attention of other queries differs .* by [+−][\d.]+ \(.* to .*, 5 seeds"
    assert re.search(pattern, page.lead)
    judged = tables(page, "What the seeds can tell")[0]
    assert list(by_arm(judged)) == ["gated"] and "adjusted by Holm" in judged.caption


def test_the_smallest_difference_that_matters_stands_once_under_the_question(folder: Path) -> None:
    sentence = "Smallest difference that matters, set before the runs: 1e-06 of a query's attention."
    assert study_report(folder).lead.startswith(f"{sentence}\n\n")
    assert (folder / "report.md").read_text().count("1e-06") == 1
    undeclared = replace(read_findings(folder), study=planned(confirmatory=[], smallest_difference=None))
    assert "Smallest" not in _lead(undeclared)


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        ("heldout_loss", "nats per token"),
        ("quantisation_cost[w8a8]", "nats per token"),
        ("heldout_error", "of the held-out targets"),
        ("first_token_attention", "of a query's attention"),
        ("attention_entropy", "nats"),
        ("logits_error[bfloat16_against_float32]", "in error of the logits, bfloat16_against_float32"),
    ],
)
def test_a_difference_has_the_unit_of_its_metric(metric: str, unit: str, folder: Path) -> None:
    assert replace(read_findings(folder), study=synthetic_study(metric=metric)).metric.unit == unit


def test_kurtosis_is_shown_and_explained_where_it_was_measured(tmp_path: Path) -> None:
    study = tmp_path / "study"
    conduct(synthetic_study(*WORDS), study, tmp_path / "cache")
    measured = tables(study_report(study), "Hidden states")[0]
    assert {"largest_activation", "activation_kurtosis"} <= set(by_arm(measured)["gated"])
    assert "kurtosis" in measured.caption
    for path in study.rglob("result.json"):
        result = json.loads(path.read_text())
        del result["measurement"]["activation_kurtosis"]
        path.write_text(json.dumps(result))
    older = tables(study_report(study), "Hidden states")[0]
    assert "activation_kurtosis" not in by_arm(older)["gated"] and "kurtosis" not in older.caption


def test_the_papers_numbers_stand_beside_ours(folder: Path) -> None:
    shown = {table.caption: by_arm(table) for table in tables(study_report(folder), "The paper's numbers beside ours")}
    attention, gate = shown["First-token attention."], shown["Mean gate score."]
    loss = shown["Held-out loss, nats per token (the paper's: ln of its perplexity)."]
    assert (attention["ungated"]["paper"], attention["gated"]["paper_difference"]) == ("0.467", "-0.419")
    assert loss["gated"]["paper_difference"] == f"{math.log(5.761 / 6.026):+.3f}" and "hot" not in loss
    assert (gate["gated"]["paper"], gate["gated"]["row"]) == ("0.116", "T4\u00a0r2")
    assert "direction" not in gate["gated"]
    assert attention["gated"]["direction"] in ("agrees", "disagrees", "can't tell")


def test_every_link_leads_to_a_file(folder: Path) -> None:
    page = study_report(folder)
    linked = [
        cell
        for section in page.sections
        for item in section.content
        if isinstance(item, Table)
        for row in item.rows
        for cell in row.values()
        if isinstance(cell, Linked)
    ]
    assert len(linked) > 5 * 2 * 3
    for cell in linked:
        assert (folder / unquote(cell.href)).is_file(), cell
    links = re.findall(r'href="(\./[^"]+)"', (folder / "report.html").read_text())
    assert len(links) == len(linked)
    runs = tables(page, "Runs")[0]
    assert len(runs.rows) == 15 and runs.rows[2]["diverged"] == Linked("after step 1", "hot/seed_0/diverged.json")
    assert runs.rows[0]["metric"] == Linked(value_in(folder, "ungated/seed_0"), "ungated/seed_0/result.json")


def test_the_numbers_are_written_beside_the_page(folder: Path) -> None:
    written = json.loads((folder / "comparisons.json").read_text())
    gated = written["arms"]["gated"]
    mean = np.mean([value_in(folder, f"gated/seed_{n}") for n in range(5)])
    assert written["metric"] == OTHER and gated["mean"][OTHER]["value"] == pytest.approx(mean)
    assert gated["contrast"]["judgement"]["smallest_difference"] == 1e-6
    assert gated["runs"] == [f"gated/seed_{n}" for n in range(5)]
    assert written["arms"]["hot"]["mean"]["heldout_loss"] is None


def test_the_differences_of_settings_are_shown(folder: Path) -> None:
    equal, declared = tables(study_report(folder), "Equal conditions")
    assert by_arm(equal)["gated"]["weights"] == "equal"
    rows = by_arm(declared)
    assert rows["gated"]["words"] == "gate=sdpa_elementwise"
    assert "model.gates.0: schema_version 1, position sdpa_output" in rows["gated"]["changes"]
    assert rows["hot"]["changes"] == "train.optimizer.learning_rate: 0.003 → 1e+19"


def test_divergence_and_spikes_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of three steps are too short for the count of spikes, which begins at step 2,000."""
    rows = by_arm(tables(study_report(folder), "Stability")[0])
    assert (rows["hot"]["runs"], rows["hot"]["diverged"], rows["hot"]["steps"]) == ("5", "5", "1, 1, 1, 1, 1")
    assert (rows["gated"]["diverged"], rows["gated"]["spikes"]) == ("0", MISSING)
    monkeypatch.setattr("gatelab.study.run_curves.SPIKE_FIRST_STEP", 2)
    assert by_arm(tables(study_report(folder), "Stability")[0])["gated"]["spikes"] == "0"


def test_the_page_in_a_browser(folder: Path, open_page: Callable[..., OpenedPage]) -> None:
    for width, dark in ((1280, False), (390, True)):
        opened = open_page(folder / "report.html", width=width, dark=dark)
        drawn = "[...document.querySelectorAll('.chart')].filter(c => c.querySelector('svg path')).length"
        assert opened.evaluate(drawn) == len(figures(study_report(folder)))
        assert (opened.console_errors, opened.requests, opened.dialogs) == ([], [], [])
        assert opened.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert opened.evaluate("document.title") == HOSTILE


def test_markdown_holds_every_table_and_no_markup_of_names(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    page = study_report(folder)
    num_tables = sum(isinstance(item, Table) for section in page.sections for item in section.content)
    assert len(re.findall(r"^\| :?---", text, re.MULTILINE)) == num_tables
    assert "<script>" not in text and "[0" in text and "](./gated/seed_0/result.json)" in text


def test_the_command_redoes_it_unless_another_is_given(folder: Path) -> None:
    assert study_report(folder).command == "gatelab study study/study.yaml --out study_again"
    assert study_report(folder, "gatelab study mechanism").command == "gatelab study mechanism"


def test_a_study_goes_on_where_a_report_was_written(folder: Path, tmp_path: Path) -> None:
    conduct(planned(), folder, tmp_path / "cache", Serial(StopAt(1)))


def test_a_half_finished_study_has_a_page_and_no_verdict(tmp_path: Path) -> None:
    study = tmp_path / "study"
    with pytest.raises(KeyboardInterrupt):
        conduct(planned(), study, tmp_path / "cache", Serial(StopAt(2 * (3 + 3 + 1) + 2)))
    page = study_report(study)
    assert "\n\nNot finished. tiny: 4 done, 2 diverged, 0 running, 9 waiting of 15 jobs" in page.lead
    assert "No verdict yet: gated were declared in advance, and get one when all 5 seeds are done." in page.lead
    rows = by_arm(tables(page, "Result")[0])
    assert rows["gated"]["seeds"] == "2 of 5" and rows["gated"]["verdict"] == "not before all seeds are done"
    assert rows["gated"]["interval"] != MISSING
    curves = [item for item in figures(page) if "loss" in item.chart.to_dict()["title"].lower()]
    assert curves


def test_before_the_first_run_there_is_a_page(tmp_path: Path) -> None:
    class Look(Unobserved):
        def begin(self, study: Study, conditions: Sequence[Conditions]) -> None:
            seen.append(study_report(tmp_path / "study"))
            raise KeyboardInterrupt

    seen: list[Page] = []
    with pytest.raises(KeyboardInterrupt):
        conduct(planned(), tmp_path / "study", tmp_path / "cache", observer=Look())
    (page,) = seen
    assert titles(page) == ["Result", "Equal conditions"]
    assert {cells["verdict"] for cells in by_arm(tables(page, "Result")[0]).values()} == {"baseline", "not finished"}


def test_a_tuned_study_shows_its_rates(tuned: Path) -> None:
    page = study_report(tuned)
    rows = by_arm(tables(page, "Learning rates")[0])
    tuning = {
        rate: [
            one.heldout_loss
            for one in read_findings(tuned).results
            if (one.arm, one.purpose, one.learning_rate) == ("gated", "tuning", rate)
        ]
        for rate in (1e-5, 1e-2, 1e3)
    }
    assert rows["gated"]["best"] == "0.01" and rows["gated"]["rate_1"] == f"{np.mean(tuning[1e-2]):.4f}"
    untrained = math.log(300)
    costs = [[min(tuning[rate][n] or 1e9, untrained) for rate in tuning] for n in (0, 1)]
    expected = mean_over_seeds([np.mean(np.array(one) - min(one)) for one in costs])
    assert expected is not None
    assert rows["gated"]["sensitivity"] == f"{expected.value:.4f} ± {expected.high - expected.value:.4f}"
    drawn = [one for one in figures(page) if one.chart.to_dict()["title"] == "Loss by learning rate"]
    assert len(drawn) == 1


def test_arms_of_other_rates_are_compared_at_the_baselines_too(tuned: Path) -> None:
    findings = read_findings(tuned)
    assert findings.at_equal_rate is None and equal_rate_table(findings) is None
    moved = replace(findings, rates={"ungated": 1e-2, "gated": 1e3})
    table = equal_rate_table(moved)
    assert moved.compared["gated"] == [] and table is not None
    assert by_arm(table)["gated"]["own"] == "1000" and by_arm(table)["gated"]["interval"] != MISSING


def test_one_seed_has_the_interval_of_its_documents_and_no_direction(tmp_path: Path) -> None:
    arms = [{**ARMS[0], "paper": "T2 r1"}, {**ARMS[1], "paper": "T2 r2"}]
    conduct(text_study(tmp_path, arms=arms), tmp_path / "study", tmp_path / "cache")
    page = study_report(tmp_path / "study")
    result = tables(page, "Result")[0]
    row = by_arm(result)["gated"]
    assert row["interval"] != MISSING and row["verdict"] == "one seed: no verdict" and row["direction"] == "can't tell"
    assert "says how far the choice of text moves the difference, and nothing about other seeds" in result.caption
    assert "One seed: the intervals are of the held-out text alone." in page.lead
    assert "What the seeds can tell" not in titles(page)
    assert any("no verdict can be given" in note for note in page.notes)


def test_arms_are_drawn_by_six_beside_the_baseline(tmp_path: Path) -> None:
    words = [f"train.optimizer.learning_rate={1e-4 * (n + 1)}" for n in range(8)]
    rates = [{"name": f"rate_{n}", "assignments": [word]} for n, word in enumerate(words)]
    conduct(synthetic_study(arms=[ARMS[0], *rates]), tmp_path / "study", tmp_path / "cache")
    charts = [one.chart.to_dict() for one in figures(study_report(tmp_path / "study"))]
    lines = [one for one in charts if one["title"].startswith("Training loss")]
    assert [one["title"] for one in lines] == ["Training loss, 1 of 2", "Training loss, 2 of 2"]
    series = [next(c for c in one["usermeta"]["columns"] if c["key"] == "arm")["names"] for one in lines]
    assert series == [["ungated", *(f"rate_{n}" for n in range(6))], ["ungated", "rate_6", "rate_7"]]
    dots = next(one for one in charts if one["title"] == "Largest hidden value")
    names = next(c for c in dots["usermeta"]["columns"] if c["key"] == "arm")["names"]
    assert names.index("rate_6") % 7 == 1 and names.index("rate_5") == 6  # the colours of the lines


def test_arms_of_other_contexts_are_measured_by_their_own_floors(tmp_path: Path) -> None:
    """The loss is that of the longer text too; 8 tokens a window have the higher floor."""
    short = {"name": "short", "assignments": ["data.context=8"]}
    conduct(text_study(tmp_path, arms=[ARMS[0], short]), tmp_path / "study", tmp_path / "cache")
    page = study_report(tmp_path / "study")
    rows = by_arm(tables(page, "First-token attention")[0])
    for arm in ("ungated", "short"):
        measured = json.loads((tmp_path / "study" / arm / "result.json").read_text())["measurement"]
        times = measured["first_token_attention_worst_layer"] / measured["first_token_attention_floor"]
        assert rows[arm]["first_token_attention_worst_layer_over_floor"] == f"{times:.2f}"
    floors = [rows["uniform attention"][f"first_token_attention_worst_layer{end}"] for end in ("", "_over_floor")]
    assert re.fullmatch(r"0\.\d{4} to 0\.\d{4}", floors[0]) and floors[1] == "1.00"
    drawn = [one for one in figures(page) if "after training" in one.chart.to_dict()["title"]]
    assert ["uniform attention: 1.00" in json.dumps(one.chart.to_dict()) for one in drawn] == [False, True]


def judged(verdict: Any, d: float = 0.1) -> Comparison:
    judgement = Judgement(verdict, d, 1.0, 1.0, None, None)
    contrast = Contrast("gated", None, 0, 5, None, judgement)
    return Comparison("gated", 5, 5, Estimate(-0.5, -1.0, 0.5), "seeds", contrast)


@pytest.mark.parametrize(
    ("verdict", "of_paper", "direction"),
    [
        ("better", -0.4, "agrees"),
        ("better", 0.4, "disagrees"),
        ("worse", -0.4, "disagrees"),
        ("worse", 0.4, "agrees"),
        ("equal", -0.4, "disagrees"),
        ("equal", 0.05, "agrees"),
        ("can't tell", -0.4, "can't tell"),
        ("diverged", -0.4, "can't tell"),
        ("better", None, None),
    ],
)
def test_a_verdict_decides_the_direction(verdict: str, of_paper: float | None, direction: str | None) -> None:
    assert judged(verdict).direction(of_paper) == direction


@pytest.mark.parametrize(
    ("interval", "direction"), [((-1, -2, -0.1), "agrees"), ((1, 0.1, 2), "disagrees"), ((-1, -2, 0.1), "can't tell")]
)
def test_without_a_verdict_the_interval_over_seeds_decides(
    interval: tuple[float, float, float], direction: str
) -> None:
    one = Comparison("gated", 3, 3, Estimate(*interval), "seeds", None)
    assert one.direction(-0.3) == direction and one._replace(over="documents").direction(-0.3) == "can't tell"


def test_arms_are_paired_by_the_seeds_that_both_have() -> None:
    study = synthetic_study(seeds=[0, 1, 2])
    runs = runs_of(ungated=[1.0, 2.0, 4.0], gated=[0.5, 1.0])
    one = compare(study, runs, lambda result: result.heldout_loss)["gated"]
    assert (one.num_pairs, one.num_seeds, one.over) == (2, 3, "seeds")
    assert one.difference is not None and one.difference.value == pytest.approx(-0.75)
    diverged = compare(study, runs_of(ungated=[1.0, 2.0], gated=[0.5, None]), lambda result: result.heldout_loss)
    assert diverged["gated"].difference is None and diverged["gated"].contrast.num_diverged == 1  # type: ignore
    assert compare(study, runs_of(ungated=[], gated=[1.0]), lambda result: result.heldout_loss) == {}


def test_verdicts_wait_for_every_seed_of_the_family() -> None:
    study = synthetic_study(seeds=range(5), confirmatory=["gated"], smallest_difference=0.1)
    losses = [1.0, 1.1, 1.2, 1.3, 1.5]
    for num_done in (4, 5):
        runs = runs_of(ungated=losses, gated=[loss - 0.4 - 0.01 * n for n, loss in enumerate(losses[:num_done])])
        one = compare(study, runs, lambda result: result.heldout_loss, judge=True)["gated"]
        assert one.is_judged == (num_done == 5)
    assert one.contrast is not None and one.contrast.sentence() == "better"
    assert not compare(study, runs, lambda result: result.heldout_loss)["gated"].is_judged


def test_one_seed_without_documents_has_no_interval() -> None:
    runs = runs_of(ungated=[1.0], gated=[0.5])
    one = compare(synthetic_study(), runs, lambda result: result.heldout_loss)["gated"]
    assert (one.difference, one.over, one.contrast) == (None, None, None)


def test_the_document_interval_is_of_nats_per_token() -> None:
    rng = np.random.default_rng(0)
    tokens = np.full(30, 10.0)
    base = DocumentScores(rng.normal(20, 2, 30), tokens, tokens)
    other = base._replace(nats=base.nats - rng.normal(3, 0.5, 30))
    runs = {
        "ungated": [result("ungated", 0, float(base.nats.sum() / 300), base)],
        "gated": [result("gated", 0, float(other.nats.sum() / 300), other)],
    }
    one = compare(synthetic_study(), runs, lambda result: result.heldout_loss)["gated"]
    assert one.over == "documents" and one.difference is not None
    assert one.difference.value == pytest.approx((other.nats - base.nats).sum() / 300)
    assert one.difference.low < one.difference.value < one.difference.high
    assert compare(synthetic_study(), runs, lambda result: 1.0)["gated"].difference is None


def test_steps_that_were_passed_over_are_shown(tmp_path: Path) -> None:
    (job, other) = comparison_jobs(synthetic_study("train.steps=300"))
    events = [
        {"kind": "event", "step": 5, "action": "skip", "loss": "nan", "gradient_norm": "inf"},
        {"kind": "event", "step": 9, "action": "rollback", "loss": "inf", "gradient_norm": "nan", "checkpoint": 8},
    ]
    for one, rows in ((job, events), (other, [])):
        (tmp_path / one.folder).mkdir(parents=True)
        (tmp_path / one.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = events_table([read_curve(one, tmp_path) for one in (job, other)])
    assert table is not None
    assert [(row["arm"], row["step"], row["action"], row["checkpoint"]) for row in table.rows] == [
        (job.arm, 5, "skip", None),
        (job.arm, 9, "rollback", 8),
    ]
    assert events_table([read_curve(other, tmp_path)]) is None


def test_bands_reach_over_the_seeds_that_have_a_step() -> None:
    def curve(seed: int, losses: list[float]) -> RunCurve:
        rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
        return RunCurve("gated", seed, rows, [], [], 0, [])

    rows = bands([curve(0, [4.0, 3.0]), curve(1, [2.0])], lambda one: one.training, "loss")
    assert rows == [
        {"arm": "gated", "step": 1, "value": 3.0, "low": 2.0, "high": 4.0},
        {"arm": "gated", "step": 2, "value": 3.0, "low": 3.0, "high": 3.0},
    ]


def test_a_long_run_is_thinned_to_medians_of_equal_parts(tmp_path: Path) -> None:
    study = synthetic_study("train.steps=300")
    (job, _) = comparison_jobs(study)
    run = tmp_path / job.folder
    run.mkdir(parents=True)
    rows = [{"kind": "step", "step": step, "loss": float(step % 7)} for step in range(1, 251)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = read_curve(job, tmp_path).training
    edges = [0, *(row["step"] for row in training)]
    assert len(training) == 66 and edges[1:4] == [4, 8, 12] and edges[-1] == 248
    for start, row in zip(edges, training, strict=False):
        assert row["loss"] == np.median([step % 7 for step in range(start + 1, row["step"] + 1)])
