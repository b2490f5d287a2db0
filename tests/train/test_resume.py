"""Stopped anywhere and started again, a run ends with the same bits as one that never stopped."""

from __future__ import annotations

import pkgutil
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import MIXTURE, Recording, assert_same_run, final_weights, tiny_run, tiny_text_run

from gatelab.train.checkpoint import checkpoints
from gatelab.train.loop import train
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings

RUNS = {
    "float32": tiny_run(),
    "bfloat16, ungated": tiny_run("train.precision=bfloat16", gate="none"),
    "float64, recomputed": tiny_run("train.precision=float64", "train.recompute=true", gate="sdpa_and_value"),
    "mixture in pieces": tiny_run("train.accumulation=2", "train.precision=bfloat16", mixture=MIXTURE),
    "stable decay, rate of gates": tiny_run(
        "train.schedule={kind: warmup_stable_decay, warmup_steps: 2, decay_steps: 3}",
        "train.optimizer.gate_learning_rate=0.01",
        gate="sdpa_headwise",
    ),
}


def train_with_stops(settings: RunSettings, folder: Path, cache: Path, *stops: int) -> Recording:
    """Start the run again after each interrupt, until it is finished."""
    watch = Recording(*stops)
    for _ in stops:
        with pytest.raises(KeyboardInterrupt):
            train(settings, folder, cache, watch)
        assert RunFolder(folder).result is None
    train(settings, folder, cache, watch)
    assert not watch.stops
    return watch


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The run in float32, never stopped."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(RUNS["float32"], folder, cache)
    return folder


@pytest.mark.parametrize("stops", [(1,), (4, 5, 6), (3, 10, 11, 12), (12,)], ids=str)
def test_stopped_at_chosen_steps(uninterrupted: Path, tmp_path: Path, cache: Path, stops: tuple[int, ...]) -> None:
    watch = train_with_stops(RUNS["float32"], tmp_path / "run", cache, *stops)
    assert_same_run(tmp_path / "run", uninterrupted)
    assert watch.starts == [0, *((stop - 1) // 5 * 5 for stop in stops)], "each start is from the last checkpoint"


@pytest.mark.parametrize("name", [name for name in RUNS if name != "float32"])
def test_every_kind_of_run(name: str, tmp_path: Path, cache: Path) -> None:
    train(RUNS[name], tmp_path / "whole", cache)
    train_with_stops(RUNS[name], tmp_path / "stopped", cache, 7, 11)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize("overrides", [[], ["data.document_masks=true", "data.bos_in_every_window=false"]])
def test_a_run_on_text(corpus: Path, cache: Path, tmp_path: Path, overrides: list[str]) -> None:
    settings = tiny_text_run(corpus, *overrides)
    result = train(settings, tmp_path / "whole", cache)
    train_with_stops(settings, tmp_path / "stopped", cache, 8)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    figures = result["heldout"]["gates.jsonl"]
    assert 0 < figures["bits_per_byte"] < 10 and result["mean_perplexity"] == figures["perplexity"]


@pytest.mark.parametrize(
    ("part", "call"),
    [
        ("gatelab.train.loop.initialize", 1),
        ("gatelab.train.loop.take_step", 7),
        ("gatelab.train.loop.score", 2),
        ("gatelab.train.loop.measure_heldout", 4),
        ("gatelab.train.checkpoint.save_file", 2),
        ("gatelab.train.checkpoint.save_file", 2),
        ("gatelab.train.checkpoint.sha256", 3),
        ("gatelab.train.checkpoint.shutil.rmtree", 1),
        ("gatelab.train.result.score", 1),
        ("gatelab.train.result.measure_heldout", 1),
        ("gatelab.train.result.save_file", 1),
        ("gatelab.train.run_folder.RunFolder.finish", 1),
    ],
)
def test_stopped_inside_each_part(
    uninterrupted: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, part: str, call: int
) -> None:
    """An interrupt in place of the given call of one part, and whatever it leaves behind."""
    calls = []
    owner, _, name = part.rpartition(".")
    original = getattr(pkgutil.resolve_name(owner), name)

    def interrupting(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(part, interrupting)
        with pytest.raises(KeyboardInterrupt):
            train(RUNS["float32"], tmp_path / "run", cache)
    train(RUNS["float32"], tmp_path / "run", cache)
    assert_same_run(tmp_path / "run", uninterrupted)
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert len(checkpoints(tmp_path / "run" / "checkpoints")) == 2


def test_a_torn_row_and_half_a_checkpoint_are_swept_away(uninterrupted: Path, tmp_path: Path, cache: Path) -> None:
    """What a power cut or SIGKILL can leave: half a row, half a folder, a half-written file."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(RUNS["float32"], folder, cache, Recording(9))
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "step", "step": 10, "lo')
    half = folder / "checkpoints" / ".step_00000010.0badcafe.tmp"
    shutil.copytree(checkpoints(folder / "checkpoints")[-1], half)
    (half / "manifest.json").unlink()
    (folder / ".settings.yaml.0badcafe.tmp").write_text("schema_ver")
    train(RUNS["float32"], folder, cache)
    assert_same_run(folder, uninterrupted)
    assert not list(folder.rglob("*.tmp"))


def test_every_step_has_one_row(uninterrupted: Path) -> None:
    rows = read_metrics(RunFolder(uninterrupted).metrics)
    by_kind = {
        kind: [row["step"] for row in rows if row["kind"] == kind] for kind in ("step", "evaluation", "measurement")
    }
    assert by_kind == {"step": list(range(1, 13)), "evaluation": [4, 8, 12], "measurement": [0, 3, 6, 9, 12]}


def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on(
    uninterrupted: Path, tmp_path: Path, cache: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(RUNS["float32"], folder, cache, Recording(11))
    newest = checkpoints(folder / "checkpoints")[-1]
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(
        ValueError, match=rf"{weights} is damaged.*; take the checkpoint before it, as a run does once {newest} is"
    ):
        train(RUNS["float32"], folder, cache)
    shutil.rmtree(newest)
    watch = Recording()
    train(RUNS["float32"], folder, cache, watch)
    assert watch.starts == [5]
    assert_same_run(folder, uninterrupted)


def test_what_is_watched_may_change_on_the_way(uninterrupted: Path, tmp_path: Path, cache: Path) -> None:
    """Evaluations and checkpoints have no part in what is trained."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(RUNS["float32"], folder, cache, Recording(7))
    changed = tiny_run("train.evaluation.every=5", "train.evaluation.measure_every=100", "train.checkpoint.every=1")
    train(changed, folder, cache)
    assert RunFolder(folder).settings == changed
    weights, expected = final_weights(folder), final_weights(uninterrupted)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_saved_settings_run_again(uninterrupted: Path, tmp_path: Path, cache: Path) -> None:
    train(RunFolder(uninterrupted).settings, tmp_path / "again", cache)
    assert_same_run(tmp_path / "again", uninterrupted)
    text = (uninterrupted / "settings.yaml").read_text()
    assert RunSettings.from_yaml(text).to_yaml() == text == (tmp_path / "again" / "settings.yaml").read_text()
