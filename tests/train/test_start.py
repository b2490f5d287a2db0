"""Runs that start from given weights: from which, from which not, and that they stay theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_runs import Recording, assert_same_run, tiny_model, tiny_run

from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.settings import Settings
from gatelab.train.checkpoint import checkpoints
from gatelab.train.evaluation import score
from gatelab.train.loop import build, train
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings
from gatelab.train.source import open_source
from gatelab.train.start import require_start, save_start, start_checksum


def saved(folder: Path, seed: int = 41, **changes: Any) -> Path:
    """A folder with weights that no seed of the runs below draws."""
    decoder = Decoder(tiny_model("sdpa_elementwise", **changes))
    initialize(decoder, seed)
    save_start(folder, decoder)
    return folder


def starting_from(folder: Path, *overrides: str) -> RunSettings:
    return tiny_run(f"train.start_from={folder}", *overrides)


def same_weights(decoder: Decoder, folder: Path) -> bool:
    weights = load_file(folder / "model.safetensors")
    return all(torch.equal(tensor, weights[name]) for name, tensor in decoder.state_dict().items())


@pytest.fixture(scope="module")
def begun_from(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, Path]:
    """Start folder and a run from it that was never stopped."""
    folder = tmp_path_factory.mktemp("start")
    train(starting_from(saved(folder / "start")), folder / "run", cache)
    return folder / "start", folder / "run"


def test_the_first_step_and_all_that_is_logged_before_stand_on_these_weights(
    begun_from: tuple[Path, Path], cache: Path
) -> None:
    start, run = begun_from
    settings = starting_from(start)
    decoder, _ = build(settings, compiled=False)
    assert same_weights(decoder, start)
    assert not same_weights(build(tiny_run(), compiled=False)[0], start)
    rows = read_metrics(RunFolder(run).metrics)
    before = next(row for row in rows if row["kind"] == "evaluation")
    domain = open_source(settings, cache).heldout["synthetic"]
    # The run may have scored on another number of threads.
    assert before["step"] == 0
    assert before["loss"] == pytest.approx(score(decoder, domain, 3).figures()["loss"], rel=1e-6)
    batch = open_source(settings, cache).train.batch(0)
    loss = torch.nn.functional.cross_entropy(decoder(batch.inputs).flatten(0, 1), batch.targets.flatten())
    assert next(row for row in rows if row["kind"] == "step")["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert RunFolder(run).data["start_weights"] == start_checksum(start)


@pytest.mark.parametrize("stop", [2, 7])
def test_stopped_and_continued_it_ends_with_the_same_bits(
    begun_from: tuple[Path, Path], tmp_path: Path, cache: Path, stop: int
) -> None:
    start, whole = begun_from
    with pytest.raises(KeyboardInterrupt):
        train(starting_from(start), tmp_path / "run", cache, Recording(stop))
    train(starting_from(start), tmp_path / "run", cache)
    assert_same_run(tmp_path / "run", whole)


def test_a_run_from_random_weights_says_nothing_of_a_start(tmp_path: Path, cache: Path) -> None:
    train(tiny_run("train.steps=3"), tmp_path, cache)
    assert set(RunFolder(tmp_path).data) == {"fingerprint", "heldout", "attributions"}
    assert all(row["step"] > 0 for row in read_metrics(RunFolder(tmp_path).metrics) if row["kind"] == "evaluation")


def test_a_checkpoint_is_a_start(begun_from: tuple[Path, Path]) -> None:
    newest = checkpoints(RunFolder(begun_from[1]).checkpoints)[-1]
    assert same_weights(build(starting_from(newest), compiled=False)[0], newest)


def test_a_folder_with_a_configuration_is_a_start(tmp_path: Path) -> None:
    """Another GateLab form: the settings are in config.json, and the weights' metadata has the layout alone."""
    start = saved(tmp_path / "start")
    weights = load_file(start / "model.safetensors")
    save_file(weights, start / "model.safetensors", {"format": "pt", "gate_layout": "L1"})
    with pytest.raises(ValueError, match="does not say what model its weights are of"):
        require_start(start, tiny_run().model)
    (start / "config.json").write_text(json.dumps({"gatelab": tiny_run().model.to_mapping()}))
    require_start(start, tiny_run().model)
    assert same_weights(build(starting_from(start), compiled=False)[0], start)
    (start / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match=r"config\.json has no settings of a GateLab model; convert the model"):
        require_start(start, tiny_run().model)


def test_weights_come_in_the_dtype_of_the_run(tmp_path: Path) -> None:
    decoder = Decoder(tiny_run().model).double()
    initialize(decoder, 41)
    decoder.model.norm.weight.data += 1e-12
    save_start(tmp_path / "wide", decoder)
    wide, _ = build(starting_from(tmp_path / "wide", "train.precision=float64"), compiled=False)
    assert same_weights(wide, tmp_path / "wide"), "not by way of float32"
    narrow, _ = build(starting_from(tmp_path / "wide"), compiled=False)
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.float32}


def test_what_decides_a_draw_may_differ(tmp_path: Path) -> None:
    start = saved(tmp_path / "start")
    changes = ["init_std=0.3", "matching_multiple=64", "drawn_feedforward_width=99", "gates.0.initialization=zeros"]
    require_start(start, tiny_run().model.with_overrides(changes))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("rope.base=500.0", r"  model\.rope\.base: 10000\.0 there, 500\.0 here"),
        ("gates.0.activation=silu", r"  model\.gates\.0\.activation: 'sigmoid' there, 'silu' here"),
        ("width=32", r"  model\.width: 24 there, 32 here"),
    ],
)
def test_weights_of_another_model(tmp_path: Path, cache: Path, change: str, line: str) -> None:
    start = saved(tmp_path / "start")
    with pytest.raises(ValueError, match=rf"start holds the weights of another model:\n{line}$"):
        train(starting_from(start, f"model.{change}"), tmp_path / "run", cache)
    assert not (tmp_path / "run").exists()


def test_folders_without_usable_weights(tmp_path: Path, cache: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message) as error:
            train(starting_from(tmp_path / "start"), tmp_path / "run", cache)
        assert "\n" not in str(error.value) and not (tmp_path / "run").exists()

    refused(r"start has no model\.safetensors; name a checkpoint, such as RUN/checkpoints/step_00000200, or another")
    start = saved(tmp_path / "start")
    metadata = {"gate_layout": "L2", "model": tiny_run().model.model_dump_json()}
    save_file(load_file(start / "model.safetensors"), start / "model.safetensors", metadata)
    refused("has gate layout L2, this GateLab trains on with L1")
    (start / "model.safetensors").write_bytes(b"no tensors")
    refused(r"model\.safetensors is no readable safetensors file")


def _metadata(start: Path, note: str) -> dict[str, str]:
    with safe_open(start / "model.safetensors", framework="pt") as file:
        return {**file.metadata(), "note": note}


def test_a_run_goes_on_from_its_own_weights_only(tmp_path: Path, cache: Path) -> None:
    start = saved(tmp_path / "start")
    with pytest.raises(KeyboardInterrupt):
        train(starting_from(start), tmp_path / "run", cache, Recording(7))
    save_file(load_file(start / "model.safetensors"), start / "model.safetensors", _metadata(start, "note"))
    train(starting_from(start), tmp_path / "run", cache)
    (start / "model.safetensors").unlink()
    start.rmdir()
    saved(tmp_path / "start", seed=42)
    message = (
        "run holds a run with other start weights; restore the weights that it was begun with, or choose another "
        "folder:\n  start_weights: "
    )
    with pytest.raises(ValueError, match=message):
        train(starting_from(start), tmp_path / "run", cache)


def test_the_checksum_is_of_names_dtypes_shapes_and_values(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.ones((), dtype=torch.bfloat16)}
    variants = [
        tensors,
        {"a": torch.zeros(2, 3), "c": tensors["b"]},
        {**tensors, "a": torch.zeros(3, 2)},
        {**tensors, "a": torch.zeros(2, 3, dtype=torch.int32)},
        {**tensors, "b": tensors["b"] + 1},
    ]
    checksums = []
    for number, variant in enumerate(variants):
        (tmp_path / str(number)).mkdir()
        save_file(variant, tmp_path / str(number) / "model.safetensors")
        checksums.append(start_checksum(tmp_path / str(number)))
    assert len(set(checksums)) == len(variants)


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    start = saved(tmp_path / "start")
    with pytest.raises(OSError):
        saved(tmp_path / "start", seed=42)
    assert load_file(start / "model.safetensors") and [path.name for path in tmp_path.iterdir()] == ["start"]


def test_the_field_is_part_of_the_settings_file() -> None:
    settings = starting_from(Path("somewhere"))
    assert isinstance(settings, Settings) and RunSettings.from_yaml(settings.to_yaml()) == settings
    with pytest.raises(ValueError, match=r"train\.start_from cannot be ''"):
        tiny_run("train.start_from=''")
