"""A run extended by training on and by YaRN, at toy size: the new run, its report, and what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gatelab.evaluate.conversion import convert_model
from gatelab.evaluate.diagnosis import Examination, diagnose
from gatelab.evaluate.models import open_model
from gatelab.evaluate.texts import file_text
from gatelab.interop.loading import load
from gatelab.longcontext.extend import Extended, Extension, extend, extended_settings, open_base_run
from gatelab.longcontext.extend_report import Findings, position_table, write_extension_report
from gatelab.model.settings import RopeScaling
from gatelab.recipes.table import resolve
from gatelab.train import throughput
from gatelab.train.checkpoint import checkpoints
from gatelab.train.loop import train
from gatelab.train.run_folder import RunFolder
from gatelab.train.watch import Unwatched

CONTEXT, LONGER = 24, 64


class StopAt(Unwatched):
    """Stops the training after so many steps."""

    def __init__(self, step: int):
        self.last = step

    def update(self, step: int, loss: float, tokens_per_second: float, peak_share: float) -> None:
        if step == self.last:
            raise KeyboardInterrupt


@pytest.fixture(scope="module", autouse=True)
def no_waiting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "measure_peak", lambda dtype, **_: 1e12)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    lines = [{"text": f"Document {n} says {n * n} and {n % 7}, then rests. " * (1 + n % 5)} for n in range(300)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def base(text: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gated run of a few steps; held-out documents have about 20 to 100 tokens."""
    words = [
        "gate=sdpa_elementwise", f"data.train={{name: files, path: {text}, heldout_fraction: 0.2}}",
        "data.tokenizer.vocab_size=300", f"data.context={CONTEXT}", f"model.max_context={CONTEXT}",
        "model.vocab_size=300", "model.width=24", "model.num_layers=2", "model.num_heads=3", "model.num_kv_heads=3",
        "model.head_size=8", "model.feedforward_width=40", "train.steps=20", "train.schedule.warmup_steps=2",
        "train.compile=false", "train.precision=float32", "train.threads=1", "train.sequences_per_step=8",
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("base") / "run"
    train(resolve("demo", words), folder, cache)
    return folder


@pytest.fixture(scope="module")
def by_yarn(base: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Extended]:
    folder = tmp_path_factory.mktemp("yarn") / "run"
    return folder, extend(str(base), Extension(context=LONGER, yarn=4.0, texts=5), folder, cache)


@pytest.fixture(scope="module")
def by_training(base: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Extended]:
    folder = tmp_path_factory.mktemp("trained") / "run"
    extension = Extension(context=LONGER, rope_base=50_000.0, train_tokens=1000, texts=5)
    return folder, extend(str(base), extension, folder, cache, ["train.schedule.final_fraction=0.5"])


def weights(folder: Path) -> dict[str, Any]:
    return load(checkpoints(RunFolder(folder).checkpoints)[-1]).state_dict()


def test_yarn_keeps_the_weights_and_changes_the_rotation(base: Path, by_yarn: tuple[Path, Extended]) -> None:
    folder, extended = by_yarn
    before, after = weights(base), weights(folder)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    opened = open_model(str(folder))
    assert opened.max_context == LONGER and opened.step == 20
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context=CONTEXT)
    assert RunFolder(folder).settings.model.rope.scaling == scaling
    ids = torch.randint(300, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(opened.model(ids), open_model(str(base)).model(ids), atol=1e-3)
    assert list(extended.models) == ["before", "YaRN 4"]


def test_training_on_starts_from_the_weights_with_another_base(base: Path, by_training: tuple[Path, Extended]) -> None:
    folder, extended = by_training
    settings = RunFolder(folder).settings
    assert settings.model.rope.base == 50_000.0 and settings.model.max_context == settings.data.context == LONGER
    assert settings.train.steps == 1000 // (3 * LONGER) and settings.train.sequences_per_step == 8 * CONTEXT // LONGER
    optimizer = RunFolder(base).settings.train.optimizer
    assert settings.train.optimizer.learning_rate == pytest.approx(0.1 * optimizer.learning_rate)
    assert settings.train.schedule.final_fraction == 0.5 and settings.train.seed == 1
    start, before, after = load(folder / "start").state_dict(), weights(base), weights(folder)
    assert all(torch.equal(start[name], before[name]) for name in before)
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert list(extended.models) == ["before", "before, YaRN 2.66667", "trained on at 64"]
    assert {model.max_context for model in extended.models.values()} == {LONGER}


def test_stopped_and_called_again_it_continues(
    base: Path, cache: Path, by_training: tuple[Path, Extended], tmp_path: Path
) -> None:
    extension = Extension(context=LONGER, rope_base=50_000.0, train_tokens=1000, texts=5)
    words = ["train.schedule.final_fraction=0.5", "train.checkpoint.every=1"]
    with pytest.raises(KeyboardInterrupt):
        extend(str(base), extension, tmp_path / "run", cache, words, StopAt(3))
    extend(str(base), extension, tmp_path / "run", cache, words)
    whole, again = weights(by_training[0]), weights(tmp_path / "run")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_called_again_yarn_is_the_same_run(base: Path, cache: Path, by_yarn: tuple[Path, Extended]) -> None:
    folder, _ = by_yarn
    before = checkpoints(folder / "checkpoints")[-1].stat().st_mtime_ns
    extend(str(base), Extension(context=LONGER, yarn=4.0), folder, cache)
    assert checkpoints(folder / "checkpoints")[-1].stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="holds a run with other settings"):
        extend(str(base), Extension(context=LONGER, yarn=5.0), folder, cache)


def test_the_report(by_training: tuple[Path, Extended]) -> None:
    folder, extended = by_training
    page = write_extension_report(folder, extended, "gatelab extend RUN").read_text()
    for expected in (
        "gatelab extend RUN",
        "Perplexity by position",
        "First-token attention",
        "Trained on for 960 tokens",
    ):
        assert expected in page
    numbers = json.loads((folder / "extension.json").read_text())
    assert numbers["changed_settings"]["model.rope.base"] == [10_000.0, 50_000.0]
    assert numbers["texts"] == {"number": 5, "are_documents": True}
    rows = numbers["loss_by_position"]
    assert {row["model"] for row in rows} == set(extended.models) and rows[-1]["stop"] == LONGER
    models = list(extended.models)
    by_place = {(row["model"], row["start"]): row for row in rows}
    for model in models[1:]:
        change = by_place[model, 32]["nats"] - by_place[models[0], 32]["nats"]
        assert by_place[model, 32]["difference"] == pytest.approx(change) and change != 0
    with (folder / "loss_by_position.csv").open(newline="") as stream:
        written = list(csv.DictReader(stream))
    assert [float(row["nats"]) for row in written] == pytest.approx([row["nats"] for row in rows])
    attention = numbers["first_token_attention"]
    assert {(row["length"], row["layer"]) for row in attention} == {(n, m) for n in (CONTEXT, LONGER) for m in (0, 1)}
    cells = position_table(Findings(rows, attention)).cells()
    assert len(cells) == 6 and len(cells[0]) == 2 + len(models)


def test_short_documents_are_put_one_after_another_and_the_report_says_so(
    base: Path, cache: Path, tmp_path: Path
) -> None:
    extended = extend(str(base), Extension(context=128, yarn=8.0, texts=3), tmp_path / "run", cache)
    assert not extended.texts.are_documents and len(extended.texts.rows) == 3
    page = write_extension_report(tmp_path / "run", extended, "gatelab extend RUN").read_text()
    assert "documents one after another" in page and "Nothing was trained" in page


def test_both_kinds_can_be_diagnosed_converted_and_extended_again(
    by_yarn: tuple[Path, Extended], by_training: tuple[Path, Extended], text: Path, cache: Path, tmp_path: Path
) -> None:
    ids = torch.randint(300, (2, LONGER), generator=torch.Generator().manual_seed(0))
    for number, (folder, _) in enumerate((by_yarn, by_training)):
        (found,) = diagnose([str(folder)], Examination(file_text(text), cache, length=LONGER, samples=1))
        assert found.mapping["context"]["length"] == LONGER
        convert_model(folder, tmp_path / str(number), "gatelab", None, 10**9, False)
        assert torch.equal(load(tmp_path / str(number))(ids), open_model(str(folder)).model(ids))
    trained, yarn = by_training[0], by_yarn[0]
    again = extend(str(trained), Extension(context=128, yarn=2.0, texts=3), tmp_path / "both", cache)
    rope = RunFolder(tmp_path / "both").settings.model.rope
    assert rope.base == 50_000.0 and rope.scaling == RopeScaling(kind="yarn", factor=2.0, original_context=LONGER)
    assert list(again.models) == ["before", "YaRN 2"]
    tuned = extend(str(yarn), Extension(context=LONGER, train_tokens=200, texts=3), tmp_path / "tuned", cache)
    assert tuned.settings.model.rope == RunFolder(yarn).settings.model.rope, "trained on with its scaling"
    assert list(tuned.models) == ["before", "trained on at 64"]


REFUSED: list[tuple[dict[str, Any], list[str], str]] = [
    ({"context": CONTEXT}, [], "--context 24 is not above the 24 tokens that the run was trained at"),
    ({"context": CONTEXT, "yarn": 2.0}, [], "--context 24 is not above the 24 tokens"),
    ({"context": LONGER, "yarn": 1.0}, [], "--yarn 1 stretches nothing; give a factor above 1, such as 2.66667"),
    ({"context": LONGER, "yarn": 2.0}, [], "--yarn 2 stretches 24 tokens to 48, less than --context 64; give --yarn"),
    ({"context": LONGER, "yarn": 4.0, "rope_base": 1e6}, [], "--yarn trains nothing; extend the run by training first"),
    ({"context": LONGER, "yarn": 4.0}, ["train.seed=3"], "--yarn trains nothing"),
    ({"context": LONGER, "train_tokens": 191}, [], "--train-tokens 191 is less than one step of 192 tokens; give more"),
    ({"context": LONGER, "train_tokens": 191}, ["train.sequences_per_step=4"], "less than one step of 256 tokens"),
    ({"context": LONGER}, ["train.steps=5"], r"'train.steps=5' can't be set: only train.\* can, without start_from"),
    ({"context": LONGER}, ["model.width=48"], "'model.width=48' can't be set"),
    ({"context": LONGER}, ["train.optimiser.clip_norm=1"], "did you mean 'optimizer'"),
]


@pytest.mark.parametrize(("asked", "words", "message"), REFUSED)
def test_what_is_refused_before_any_work(base: Path, asked: dict[str, Any], words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        extended_settings(open_base_run(str(base)), Extension.parse(asked), words)


def test_a_scaled_run_takes_no_second_scaling(by_yarn: tuple[Path, Extended]) -> None:
    with pytest.raises(ValueError, match="has yarn scaling by 4 already; extend the run that it was made from by a la"):
        extended_settings(open_base_run(str(by_yarn[0])), Extension(context=128, yarn=8.0))


def test_what_is_no_run_to_extend(base: Path, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no run folder of GateLab; a context is extended from what gatelab train"):
        open_base_run(str(tmp_path))
    with pytest.raises(ValueError, match="is the run that is extended; choose another folder"):
        extend(str(base), Extension(context=LONGER, yarn=4.0), base, cache)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files; choose another folder"):
        extend(str(base), Extension(context=LONGER, yarn=4.0), tmp_path / "full", cache)
    run = RunFolder(tmp_path / "empty")
    run.path.mkdir()
    run.begin(RunFolder(base).settings, RunFolder(base).environment, RunFolder(base).data, None)
    with pytest.raises(ValueError, match="has no checkpoint yet; train it until it has saved one"):
        open_base_run(str(run.path))
