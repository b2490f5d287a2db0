"""The demo's path at toy size: three arms, kill and resume, one table, one page."""

import json

import pytest

from gatelab.report.page import write_page
from gatelab.report.tables import MISSING
from gatelab.study.page import result_table, study_page
from gatelab.study.runner import compare_with_baseline, run_study
from gatelab.study.study import Study
from gatelab.train.watch import Unwatched


@pytest.fixture(scope="module")
def tiny_study(tmp_path_factory):
    """Three arms of a two-layer model on a few local documents."""
    text = tmp_path_factory.mktemp("text") / "documents.jsonl"
    lines = [{"text": f"Document {n} says {n * n} and {n % 7}, then rests. " * (1 + n % 5)} for n in range(300)]
    text.write_text("\n".join(json.dumps(line) for line in lines))
    return Study.parse(
        {
            "name": "tiny",
            "question": "Does the page hold <script>alert(1)</script>?",
            "recipe": "demo",
            "assignments": [
                f"data.train={{name: files, path: {text}, heldout_fraction: 0.2}}",
                "data.tokenizer.vocab_size=300",
                "data.context=32",
                "model.width=24",
                "model.num_layers=2",
                "model.num_heads=3",
                "model.num_kv_heads=3",
                "model.head_size=8",
                "model.feedforward_width=40",
                "model.drawn_feedforward_width=null",
                "train.steps=6",
                "train.schedule.warmup_steps=2",
                "train.evaluation.every=3",
                "train.evaluation.measure_every=2",
                "train.checkpoint.every=2",
            ],
            "arms": [
                {"name": "ungated"},
                {"name": "headwise", "assignments": ["gate=sdpa_headwise"]},
                {"name": "elementwise", "assignments": ["gate=sdpa_elementwise"]},
            ],
            "baseline": "ungated",
        }
    )


class StopAt(Unwatched):
    """Stops the driver after so many updates."""

    def __init__(self, updates):
        self.left = updates

    def update(self, step, loss, tokens_per_second, peak_share):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def finished(tiny_study, tmp_path_factory):
    folder, cache = tmp_path_factory.mktemp("study"), tmp_path_factory.mktemp("cache")
    return folder, cache, run_study(tiny_study, folder, cache)


def test_interrupted_and_started_again_gives_the_same_figures(tiny_study, finished, tmp_path):
    _, cache, whole = finished
    for updates in (3, 5, 9):
        with pytest.raises(KeyboardInterrupt):
            run_study(tiny_study, tmp_path, cache, StopAt(updates))
    resumed = run_study(tiny_study, tmp_path, cache)
    for left, right in zip(whole, resumed, strict=True):
        assert left.result["heldout"] == right.result["heldout"]
        assert left.measurement == right.measurement


def test_a_finished_study_trains_nothing(tiny_study, finished):
    folder, cache, whole = finished
    again = run_study(tiny_study, folder, cache, StopAt(1))
    assert [run.result for run in again] == [run.result for run in whole]


def test_another_study_in_the_folder_is_refused(tiny_study, finished):
    folder, cache, _ = finished
    changed = tiny_study.model_copy(update={"question": "another"})
    with pytest.raises(ValueError, match=r"holds another study; choose another folder:\n  question: "):
        run_study(changed, folder, cache)


def test_the_table_and_the_page_hold_every_arm(tiny_study, finished, tmp_path):
    _, _, runs = finished
    differences = compare_with_baseline(tiny_study, runs)
    table = result_table(runs, differences)
    assert [column.heading for column in table.columns[1:]] == ["ungated", "headwise", "elementwise"]
    gates = next(cells for cells in table.cells() if cells[0] == "mean gate")
    assert gates[1] == MISSING and 0.3 < float(gates[2]) < 0.7
    page = tmp_path / "report.html"
    write_page(study_page(tiny_study, runs, differences, "gatelab demo"), page)
    html = page.read_text()
    assert "<script>alert(1)" not in html
    for expected in ("gatelab demo", "First-token attention", "Hidden-state maxima", "All gate scores", "One seed"):
        assert expected in html


def test_arms_start_from_equal_weights_and_read_equal_batches(finished):
    _, _, runs = finished
    first_losses = [next(row["loss"] for row in run.metrics if row["kind"] == "step") for run in runs]
    assert first_losses[0] == pytest.approx(first_losses[1], abs=0.05)
    assert len({json.dumps(run.environment) for run in runs}) == 1
