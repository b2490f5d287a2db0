"""Running a study: what is refused, what is written, tuning and then comparing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_studies import synthetic_study, text_study

from gatelab.data.tokenizer import train_tokenizer
from gatelab.model.decoder import Decoder
from gatelab.study import conditions, runner
from gatelab.study.conditions import Conditions
from gatelab.study.executors import Serial
from gatelab.study.inputs import require_inputs
from gatelab.study.jobs import JobResult
from gatelab.study.presets import plan
from gatelab.study.runner import (
    Unobserved,
    compare_with_baseline,
    conduct,
    read_arm,
    read_conditions,
    read_results,
    run_study,
)
from gatelab.study.status import StudyStatus
from gatelab.study.study import Study
from gatelab.train.loop import train
from gatelab.train.metrics import read_metrics
from gatelab.train.start import save_start
from gatelab.train.watch import Unwatched

FILES = {"study.yaml", "conditions.json", ".lock"}
GRID = {"learning_rates": [1e-5, 1e-2, 1e3], "tuning_seeds": [10, 11], "seeds": [0, 1]}


class Stop(Unwatched):
    """Stops the driver after so many steps, and counts them."""

    def __init__(self, steps: int = 10**9):
        self.steps = 0
        self._last = steps

    def update(self, step: int, loss: float, tokens_per_second: float, peak_share: float) -> None:
        self.steps += 1
        if self.steps == self._last:
            raise KeyboardInterrupt


class Noted(Unobserved):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.begun: list[Sequence[Conditions]] = []
        self.seen: list[StudyStatus] = []
        self.messages: list[str] = []

    def begin(self, study: Study, conditions: Sequence[Conditions]) -> None:
        self.begun.append(conditions)

    def update(self, status: StudyStatus) -> None:
        self.seen.append(status)

    def message(self, text: str) -> None:
        self.messages.append(text)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def figures(results: Sequence[JobResult]) -> list[Any]:
    return [(one.folder, one.heldout_loss, one.measurement, one.diverged_at) for one in results]


def test_arms_without_documents_are_read_and_not_compared(tmp_path: Path) -> None:
    study = synthetic_study()
    runs = run_study(study, tmp_path / "study", tmp_path / "cache")
    assert [run.name for run in runs] == ["ungated", "gated"] and runs[0].documents == {}
    with pytest.raises(ValueError, match="arm ungated has no held-out documents to compare on: a synthetic task has"):
        compare_with_baseline(study, runs)
    with pytest.raises(ValueError, match="holds a study, whose runs are in folders of their own; choose another"):
        train(study.settings_of(study.arms[0]), tmp_path / "study", tmp_path / "cache")
    assert names(tmp_path / "study") == {*FILES, "ungated", "gated"}
    (tmp_path / "study" / "gated" / "data.json").write_text("[]")
    with pytest.raises(ValueError, match=r"data\.json is unreadable: it holds no mapping"):
        read_arm(tmp_path / "study" / "gated")


def fine_tuning_study(folder: Path) -> Study:
    """Two arms that start from weights in the folder and read its tokenizer and chats, all of them there."""
    study = synthetic_study("model.vocab_size=270")
    files = {name: folder / name for name in ("ungated", "gated", "tokenizer.json", "chats.jsonl")}
    for arm in study.arms:
        save_start(files[arm.name], Decoder(study.settings_of(arm).model))
    files["tokenizer.json"].write_text(train_tokenizer(["user: Gate?"], 270).to_text())
    chat = {"messages": [{"role": "user", "content": "Gate?"}, {"role": "assistant", "content": "Open."}]}
    files["chats.jsonl"].write_text(json.dumps(chat))
    words = (
        "data.synthetic=null",
        "data.document_masks=true",
        f"data.tokenizer.path={files['tokenizer.json']}",
        f"data.chats={{path: {files['chats.jsonl']}}}",
    )
    arms = [
        {"name": arm.name, "assignments": [*arm.assignments, f"train.start_from={files[arm.name]}"]}
        for arm in study.arms
    ]
    return Study.parse({**study.to_mapping(), "assignments": [*study.assignments, *words], "arms": arms})


def draws_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "initialize", lambda *arguments: pytest.fail("weights were drawn"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gated", r"^train\.start_from=.*gated has no model\.safetensors; name a checkpoint, such as [^;]*$"),
        ("tokenizer.json", r"^no tokenizer at .*tokenizer\.json: give a tokenizer\.json or a folder that has one$"),
        ("chats.jsonl", r"^there is no file of chats at .*chats\.jsonl; give a \.jsonl file with lines such as [^;]*$"),
    ],
)
def test_a_missing_file_is_refused_before_any_weights(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = fine_tuning_study(tmp_path)
    require_inputs([study.settings_of(arm) for arm in study.arms])
    (tmp_path / name).rename(tmp_path / "elsewhere")
    draws_no_weights(monkeypatch)
    with pytest.raises(ValueError, match=message):
        conduct(study, tmp_path / "study", tmp_path / "cache")
    assert not (tmp_path / "study").exists()


def test_what_another_study_leaves_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draws_no_weights(monkeypatch)
    with pytest.raises(ValueError, match=r"ungated/seed_0/checkpoints/step_\d+ has no model\.safetensors") as error:
        conduct(plan("open/sft", "micro"), tmp_path / "study", tmp_path / "cache")
    assert str(error.value).endswith("; it is made by: gatelab study open/quantisation --scale micro")
    study = synthetic_study("data.synthetic=null", "data.tokenizer.path=runs/study/dense-mini/gated/tokenizer.json")
    with pytest.raises(
        ValueError, match=r"^no tokenizer at .*; it is made by: gatelab study paper/dense --scale mini$"
    ):
        conduct(study, tmp_path / "study", tmp_path / "cache")


def test_a_finished_study_needs_no_start(tmp_path: Path) -> None:
    start, plain = tmp_path / "start", synthetic_study()
    save_start(start, Decoder(plain.settings_of(plain.arms[0]).model))
    arms = [{"name": name, "assignments": [f"train.steps={steps}"]} for name, steps in (("short", 1), ("long", 2))]
    study = synthetic_study(f"train.start_from={start}", arms=arms, baseline="short")
    results = conduct(study, tmp_path / "study", tmp_path / "cache")
    start.rename(tmp_path / "elsewhere")
    assert conduct(study, tmp_path / "study", tmp_path / "cache") == results


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    study = synthetic_study()
    train(study.settings_of(study.arms[0]), tmp_path / "run", tmp_path / "cache")
    before = names(tmp_path / "run")
    with pytest.raises(ValueError, match="run holds a run, not a study; choose another folder"):
        run_study(study, tmp_path / "run", tmp_path / "cache")
    assert names(tmp_path / "run") == before


def test_files_in_place_of_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, cache in (("file", "cache"), ("new", "file"), ("file/new", "cache")):
        with pytest.raises(ValueError, match="/file is a file where a folder is needed; choose another path"):
            run_study(synthetic_study(), tmp_path / folder, tmp_path / cache)
    assert names(tmp_path) == {"file"}


def test_a_study_whose_first_arm_is_refused_leaves_nothing(tmp_path: Path) -> None:
    words = ("data.synthetic=null", "data.train={name: files, path: nowhere}", "model.vocab_size=4096")
    with pytest.raises(ValueError, match=r"no \.txt, \.jsonl, \.parquet file at 'nowhere'"):
        run_study(synthetic_study(*words), tmp_path / "new" / "study", tmp_path / "cache")
    assert names(tmp_path) == set()


def test_two_seeds_give_a_folder_each(tmp_path: Path) -> None:
    study, observer = synthetic_study(seeds=[4, 5]), Noted()
    results = conduct(study, tmp_path / "study", tmp_path / "cache", observer=observer)
    assert [one.folder for one in results] == ["ungated/seed_4", "gated/seed_4", "ungated/seed_5", "gated/seed_5"]
    assert len({one.heldout_loss for one in results}) == 4 and all(one.learning_rate is None for one in results)
    assert results == read_results(tmp_path / "study")
    assert [one.arm for one in observer.begun[0]] == ["ungated", "gated"]
    assert list(observer.begun[0]) == read_conditions(tmp_path / "study")
    assert observer.seen[-1].count("done") == 4 and observer.seen[-1].seconds_left == 0 and not observer.messages
    first, gated = results[:2]
    assert (first.seed, first.tokens, first.purpose) == (4, 3 * 4 * 16, "comparison")
    assert gated.parameters - first.parameters == 16 * 16
    assert first.flops / first.tokens < gated.flops / gated.tokens and first.seconds > 0
    assert first.value("heldout_loss") == first.heldout_loss
    assert first.measurement and first.value("first_token_attention") == max(
        first.measurement[name] for name in ("first_token_attention_worst_layer", "first_token_attention")
    )


def test_stopped_anywhere_it_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    study = synthetic_study("train.checkpoint.every=1", seeds=[4, 5])
    whole = conduct(study, tmp_path / "whole", tmp_path / "cache")
    total = 0
    for last in (2, 3, 4):
        watch = Stop(last)
        with pytest.raises(KeyboardInterrupt):
            conduct(study, tmp_path / "cut", tmp_path / "cache", Serial(watch))
        total += watch.steps
    watch = Stop()
    results = conduct(study, tmp_path / "cut", tmp_path / "cache", Serial(watch))
    assert figures(results) == figures(whole)
    # Each stop comes before that step's checkpoint, so that one step is made again.
    assert total + watch.steps == 4 * 3 + 3
    watch = Stop()
    conduct(study, tmp_path / "cut", tmp_path / "cache", Serial(watch))
    assert watch.steps == 0


def test_rates_are_tuned_before_arms_are_compared(tmp_path: Path) -> None:
    """At the highest rate nothing is learned, at the lowest nothing either; the middle one is best."""
    study, observer = text_study(tmp_path, "train.steps=8", **GRID), Noted()
    results = conduct(study, tmp_path / "study", tmp_path / "cache", observer=observer)
    tuning, compared = results[:12], results[12:]
    assert {one.purpose for one in tuning} == {"tuning"} and {one.seed for one in tuning} == {10, 11}
    assert tuning[0].folder == "ungated/tuning/lr_1e-05_seed_10"
    assert [one.folder for one in compared] == [
        f"{arm}/lr_0.01_seed_{seed}" for seed in (0, 1) for arm in ("ungated", "gated")
    ]
    chosen = json.loads((tmp_path / "study" / "learning_rates.json").read_text())
    assert {arm: one["best"] for arm, one in chosen.items()} == {"ungated": 1e-2, "gated": 1e-2}
    assert {one.purpose for one in compared} == {"comparison"} and {one.seed for one in compared} == {0, 1}
    of_middle = [one.heldout_loss for one in tuning if (one.arm, one.learning_rate) == ("gated", 1e-2)]
    assert chosen["gated"]["losses"][1] == [1e-2, of_middle]
    assert observer.seen[0].tuning and not observer.seen[-1].tuning
    assert figures(results) == figures(conduct(study, tmp_path / "study", tmp_path / "cache", Serial(Stop(1))))


def test_validation_and_test_text_are_halves_of_the_held_out_documents(tmp_path: Path) -> None:
    study = text_study(tmp_path, **GRID)
    jobs = [runner.tuning_jobs(study)[0], runner.comparison_jobs(study, {"ungated": 1e-5, "gated": 1e-5})[0]]
    for job in jobs:
        train(job.settings, tmp_path / job.folder, tmp_path / "cache")
    whole = read_arm(tmp_path / jobs[0].folder).documents["documents.jsonl"]
    for job, first in zip(jobs, (0, 1), strict=True):
        scores = read_arm(tmp_path / job.folder).documents["documents.jsonl"]
        part = runner.read_result(job, tmp_path)
        nats = [scores.nats[n] for n in range(len(scores.nats)) if n % 2 == first]
        tokens = [scores.tokens[n] for n in range(len(scores.tokens)) if n % 2 == first]
        assert part.heldout_loss == pytest.approx(sum(nats) / sum(tokens), rel=1e-12)
        assert part.documents is not None and part.documents.tokens.tolist() == tokens
    assert len(whole.tokens) > 30
    without_grid = jobs[0]._replace(learning_rate=None)
    assert runner.read_result(without_grid, tmp_path).documents.tokens.tolist() == whole.tokens.tolist()  # type: ignore


def test_a_grid_without_its_optimum_inside_is_refused_and_can_be_extended(tmp_path: Path) -> None:
    rates = [1e-6, 1e-5, 1e-2]
    study = synthetic_study("train.steps=8", **{**GRID, "learning_rates": rates})
    with pytest.raises(ValueError, match=r"no optimum of some arms; extend it.*\n  ungated: the best rate is the hi.*"):
        conduct(study, tmp_path / "study", tmp_path / "cache")
    wider = synthetic_study("train.steps=8", **{**GRID, "learning_rates": [*rates, 1e3]})
    watch = Stop()
    results = conduct(wider, tmp_path / "study", tmp_path / "cache", Serial(watch))
    of_new_rate = [one.diverged_at or 8 for one in results if one.learning_rate == 1e3]
    assert watch.steps == sum(of_new_rate) + 4 * 8 and len(of_new_rate) == 4
    assert {one.learning_rate for one in results if one.purpose == "comparison"} == {1e-2}
    with pytest.raises(ValueError, match=r"holds another study; choose another folder:\n  learning_rates\.3: 1000\.0"):
        conduct(study, tmp_path / "study", tmp_path / "cache")


def test_arms_with_different_optima_are_compared_at_both_rates() -> None:
    study = synthetic_study(**GRID)
    jobs = runner.comparison_jobs(study, {"ungated": 1e-5, "gated": 1e-2})
    assert [job.folder for job in jobs[:3]] == [
        "ungated/lr_1e-05_seed_0",
        "gated/lr_0.01_seed_0",
        "gated/lr_1e-05_seed_0",
    ]
    assert [job.settings.train.optimizer.learning_rate for job in jobs[:3]] == [1e-5, 1e-2, 1e-5]
    assert len({job.folder for job in jobs}) == len(jobs) == 6


def test_divergence_is_a_result(tmp_path: Path) -> None:
    arms = [{"name": "ungated"}, {"name": "hot", "assignments": ["train.optimizer.learning_rate=1e19"]}]
    study = synthetic_study("train.schedule.warmup_steps=0", arms=arms, seeds=[0, 1])
    results = conduct(study, tmp_path / "study", tmp_path / "cache")
    assert [one.diverged_at for one in results] == [None, 1, None, 1]
    hot = results[1]
    assert (hot.heldout_loss, hot.documents, hot.measurement, hot.value("first_token_attention")) == (None,) * 4
    assert hot.tokens == 4 * 16 and hot.parameters == results[0].parameters and hot.flops > 0
    reason = json.loads((tmp_path / "study" / "hot" / "seed_0" / "diverged.json").read_text())["reason"]
    assert reason.startswith("step 2 has ")
    assert figures(conduct(study, tmp_path / "study", tmp_path / "cache", Serial(Stop(1)))) == figures(results)
    with pytest.raises(ValueError, match="seed_0 diverged after step 1; it has no final figures"):
        read_arm(tmp_path / "study" / "hot" / "seed_0")


def test_a_loss_that_rises_for_good_ends_the_run_at_the_same_step_however_often_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss 4 with a jump to 6 after step 30: 13 of the last 25 are high after step 43."""
    monkeypatch.setattr(
        "gatelab.train.loop.take_step", lambda *a: real(*a)._replace(loss=4.0 if _step(a[1]) <= 30 else 6.0)
    )
    from gatelab.train.step import take_step as real

    def _step(optimizer: Any) -> int:
        return int(next(iter(optimizer.state.values()))["step"])

    study = synthetic_study("train.steps=60", "train.checkpoint.every=7")
    whole = conduct(study, tmp_path / "whole", tmp_path / "cache")
    assert [one.diverged_at for one in whole] == [43, 43]
    for last in (20, 26):
        with pytest.raises(KeyboardInterrupt):
            conduct(study, tmp_path / "cut", tmp_path / "cache", Serial(Stop(last)))
    assert figures(conduct(study, tmp_path / "cut", tmp_path / "cache")) == figures(whole)
    rows = read_metrics(tmp_path / "cut" / "ungated" / "metrics.jsonl", "step")
    assert [row["step"] for row in rows] == list(range(1, 44))


class TestRefusals:
    def test_another_driver(self, tmp_path: Path) -> None:
        class Second(Unobserved):
            def begin(self, study: Study, conditions: Sequence[Conditions]) -> None:
                with pytest.raises(ValueError, match=r"another process is running the study in .*study; wait for"):
                    conduct(study, tmp_path / "study", tmp_path / "cache")

        conduct(synthetic_study(), tmp_path / "study", tmp_path / "cache", observer=Second())

    def test_more_seeds_after_a_look(self, tmp_path: Path) -> None:
        conduct(synthetic_study(), tmp_path / "study", tmp_path / "cache")
        with pytest.raises(ValueError, match=r"holds another study; choose another folder:\n  seeds\.1: None in the"):
            conduct(synthetic_study(seeds=[0, 1]), tmp_path / "study", tmp_path / "cache")

    def test_a_run_of_other_settings_in_a_jobs_folder(self, tmp_path: Path) -> None:
        study = synthetic_study()
        conduct(study, tmp_path / "study", tmp_path / "cache")
        file = tmp_path / "study" / "gated" / "settings.yaml"
        file.write_text(file.read_text().replace("weight_decay: 0.1", "weight_decay: 0.2"))
        with pytest.raises(ValueError, match=r"gated holds a run with other settings.*\n.*weight_decay: 0\.2 in the"):
            conduct(study, tmp_path / "study", tmp_path / "cache")

    def test_a_finished_run_on_other_data(self, tmp_path: Path) -> None:
        study = synthetic_study()
        conduct(study, tmp_path / "study", tmp_path / "cache")
        file = tmp_path / "study" / "gated" / "data.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"fingerprint": "0" * 64}))
        with pytest.raises(ValueError, match="gated holds a run with other data"):
            conduct(study, tmp_path / "study", tmp_path / "cache")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("conditions.json", "conditions.json is unreadable; delete it to have the conditions checked again"),
            ("study.yaml", "study.yaml is unreadable: a Study file holds a mapping"),
        ],
    )
    def test_damaged_files(self, tmp_path: Path, name: str, message: str) -> None:
        conduct(synthetic_study(), tmp_path / "study", tmp_path / "cache")
        (tmp_path / "study" / name).write_text("[1]")
        with pytest.raises(ValueError, match=message):
            conduct(synthetic_study(), tmp_path / "study", tmp_path / "cache")

    def test_a_damaged_divergence(self, tmp_path: Path) -> None:
        conduct(synthetic_study(), tmp_path / "study", tmp_path / "cache")
        (tmp_path / "study" / "gated" / "diverged.json").write_text("{}")
        with pytest.raises(ValueError, match=r"diverged\.json is unreadable; delete it to run the job again"):
            conduct(synthetic_study(), tmp_path / "study", tmp_path / "cache")


def test_runs_in_different_environments_are_told_of(tmp_path: Path) -> None:
    study, observer = synthetic_study(), Noted()
    conduct(study, tmp_path / "study", tmp_path / "cache")
    file = tmp_path / "study" / "gated" / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"threads": 99}))
    conduct(study, tmp_path / "study", tmp_path / "cache", observer=observer)
    assert len(observer.messages) == 1 and observer.messages[0].startswith("The runs differ in threads: ")
