"""Checkpoints are complete or absent, any damage is named, and nothing is unpickled."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_runs import MIXTURE, tiny_model

from gatelab.files import remove_leftovers
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import ModelSettings
from gatelab.train import checkpoint
from gatelab.train.checkpoint import (
    checkpoints,
    load_checkpoint,
    load_decoder,
    save_checkpoint,
    step_of,
    training_state,
)
from gatelab.train.optimizer import build_optimizer, set_learning_rate
from gatelab.train.settings import OptimizerSettings

FILES = ["model.safetensors", "optimizer.safetensors", "model.json", "manifest.json"]


class Trained(NamedTuple):
    decoder: Decoder
    optimizer: torch.optim.AdamW


def make_trained(settings: ModelSettings | None = None, seed: int = 0, steps: int = 1) -> Trained:
    """A decoder with an optimizer that has taken steps with random gradients."""
    decoder = Decoder(settings or tiny_model("sdpa_elementwise"))
    initialize(decoder, seed)
    optimizer = build_optimizer(decoder, OptimizerSettings())
    set_learning_rate(optimizer, 0.5)
    for step in range(steps):
        for parameter in decoder.parameters():
            generator = torch.Generator().manual_seed(step + 100 * seed)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(decoder, optimizer)


def assert_same_state(left: Trained, right: Trained) -> None:
    weights, expected = left.decoder.state_dict(), right.decoder.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    state, wanted = left.optimizer.state_dict(), right.optimizer.state_dict()
    assert state["state"].keys() == wanted["state"].keys()
    for number, values in wanted["state"].items():
        assert all(torch.equal(state["state"][number][name], value) for name, value in values.items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint for all tests that leave it as it was."""
    trained = make_trained()
    return save_checkpoint(tmp_path_factory.mktemp("saved"), 7, *trained, keep=2)


@pytest.fixture
def own(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / saved.name))


@pytest.mark.parametrize(
    "model",
    [
        tiny_model(),
        tiny_model("sdpa_and_value", mixture=MIXTURE, tied_head=False),
        tiny_model("sdpa_input_independent"),
    ],
    ids=["ungated", "mixture", "input-independent"],
)
def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path, model: ModelSettings) -> None:
    trained, fresh = make_trained(model, steps=3), make_trained(model, seed=1, steps=0)
    path = save_checkpoint(tmp_path, 3, *trained, keep=1)
    assert load_checkpoint(path, *fresh) == step_of(path) == 3
    assert_same_state(fresh, trained)


def test_a_checkpoint_is_four_files_of_open_formats(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == sorted(FILES)
    with safe_open(saved / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
        assert set(file.keys()) == set(Decoder(tiny_model("sdpa_elementwise")).state_dict())
    assert metadata["gate_layout"] == "L1"
    assert ModelSettings.parse(json.loads(metadata["model"])) == tiny_model("sdpa_elementwise")
    names = [name for name, _ in make_trained().decoder.named_parameters()]
    kept = {f"optimizer.{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    assert load_file(saved / "optimizer.safetensors").keys() == kept
    model = json.loads((saved / "model.json").read_text())
    assert model["gate_layout"] == "L1" and ModelSettings.parse(model["settings"]) == make_trained().decoder.settings
    manifest = json.loads((saved / "manifest.json").read_text())
    assert manifest["step"] == 7 and sorted(manifest["sha256"]) == sorted(FILES[:3])


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    for tied in (True, False):
        path = save_checkpoint(tmp_path, 1 + tied, *make_trained(tiny_model(tied_head=tied), steps=0), keep=2)
        assert ("lm_head.weight" in load_file(path / "model.safetensors")) is not tied


def test_the_decoder_of_a_checkpoint_needs_no_settings(saved: Path) -> None:
    decoder, expected = load_decoder(saved), make_trained().decoder
    ids = torch.arange(12).view(2, 6)
    assert not decoder.training and torch.equal(decoder(ids), expected(ids))


@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
@example(name="manifest.json", place=0.60546875, flip=7)  # a line feed becomes a carriage return
@settings(max_examples=150, deadline=None)
def test_any_flipped_byte_is_reported_with_the_file(saved: Path, name: str, place: float, flip: int) -> None:
    file, fresh = saved / name, make_trained(seed=1, steps=0)
    whole = file.read_bytes()
    position = int(place * len(whole))
    damaged = bytearray(whole)
    damaged[position] ^= flip
    file.write_bytes(damaged)
    try:
        with pytest.raises(ValueError) as error:
            load_checkpoint(saved, *fresh)
    finally:
        file.write_bytes(whole)
    assert str(saved) in str(error.value) and name in str(error.value)
    assert_same_state(fresh, make_trained(seed=1, steps=0))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_truncated_file_is_reported(own: Path, name: str, length: int) -> None:
    (own / name).write_bytes((own / name).read_bytes()[:length])
    way_out = "take the checkpoint before it, as a run does once .*step_00000007 is"
    with pytest.raises(ValueError, match=rf"{name} is (missing or )?damaged.*; {way_out}"):
        load_checkpoint(own, *make_trained(steps=0))
    with pytest.raises(ValueError, match=name):
        load_decoder(own)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_reported(own: Path, name: str) -> None:
    (own / name).unlink()
    assert checkpoints(own.parent) == [own], "it is not passed over in silence"
    with pytest.raises(
        ValueError, match=rf"{name} is missing.*; take the checkpoint before it, as a run does once .*step_00000007 is"
    ):
        load_checkpoint(own, *make_trained(steps=0))


def test_a_renamed_checkpoint_is_not_taken_for_another_step(own: Path) -> None:
    renamed = own.rename(own.with_name("step_00000009"))
    with pytest.raises(
        ValueError, match=r"step_00000009/manifest\.json is damaged or of another folder: it says step 7"
    ):
        load_checkpoint(renamed, *make_trained(steps=0))


def rewrite(path: Path, **changes: object) -> None:
    """Change the manifest as another version of this program would have written it."""
    manifest = {**json.loads((path / "manifest.json").read_text()), **changes}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def test_another_schema_is_refused(own: Path) -> None:
    rewrite(own, schema_version=1)
    with pytest.raises(ValueError, match=r"manifest\.json has schema version 1, this GateLab reads 2"):
        load_checkpoint(own, *make_trained(steps=0))


def test_another_layout_is_refused_whatever_its_shapes(own: Path) -> None:
    model = own / "model.json"
    model.write_text(model.read_text().replace('"L1"', '"L2"'))
    rewrite(own, sha256={name: checkpoint.sha256(own / name) for name in FILES[:3]})
    with pytest.raises(ValueError, match=r"model\.json has gate layout L2, this GateLab trains on with L1"):
        load_checkpoint(own, *make_trained(steps=0))


def test_a_file_that_the_manifest_does_not_list_is_not_read(own: Path) -> None:
    shutil.copy(own / "model.safetensors", own / "shard-00002-model-00001-of-00001.safetensors")
    with pytest.raises(ValueError, match=r"manifest\.json does not list .*shard-00002"):
        load_checkpoint(own, *make_trained(steps=0))


def test_another_model_is_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"step_00000007 does not fit the model: .*mlp.* has another shape"):
        load_checkpoint(saved, *make_trained(tiny_model("sdpa_elementwise", feedforward_width=44), steps=0))


@pytest.mark.parametrize(
    ("saved_as", "loaded_as", "message"),
    [
        ("sdpa_elementwise", "none", "the model has no .*gates"),
        ("none", "sdpa_elementwise", "it has no .*gates"),
    ],
)
def test_a_model_with_other_gates_is_refused(tmp_path: Path, saved_as: str, loaded_as: str, message: str) -> None:
    path = save_checkpoint(tmp_path, 1, *make_trained(tiny_model(saved_as)), keep=1)
    with pytest.raises(ValueError, match=f"does not fit the model: .*{message}|no such parameter"):
        load_checkpoint(path, *make_trained(tiny_model(loaded_as)))


class TestSaving:
    def test_only_the_newest_are_kept(self, tmp_path: Path) -> None:
        trained = make_trained(steps=0)
        for step in (5, 10, 15, 20):
            save_checkpoint(tmp_path, step, *trained, keep=2)
            assert len(checkpoints(tmp_path)) == min(2, step // 5)
        assert [path.name for path in checkpoints(tmp_path)] == ["step_00000015", "step_00000020"]
        assert len(list(tmp_path.iterdir())) == 2

    @pytest.mark.parametrize(
        "writer",
        ["train.checkpoint.save_file", "train.checkpoint.sha256", "manifest.write_atomically", "manifest.sha256"],
    )
    def test_an_interrupted_save_leaves_the_one_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
    ) -> None:
        first, second = make_trained(), make_trained(steps=2)
        path = save_checkpoint(tmp_path, 1, *first, keep=1)

        def interrupt(*arguments: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(f"gatelab.{writer}", interrupt)
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(tmp_path, 2, *second, keep=1)
        assert list(tmp_path.iterdir()) == [path], "nothing half-written"
        fresh = make_trained(seed=1, steps=0)
        assert load_checkpoint(path, *fresh) == 1
        assert_same_state(fresh, first)

    def test_a_kill_while_an_old_one_is_removed_leaves_only_what_is_cleaned_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trained = make_trained(steps=0)
        save_checkpoint(tmp_path, 1, *trained, keep=1)

        def killed(path: Path) -> None:
            (path / "model.safetensors").unlink()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", killed)
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(tmp_path, 2, *trained, keep=1)
        assert [path.name for path in checkpoints(tmp_path)] == ["step_00000002"]
        assert len(list(tmp_path.iterdir())) == 2
        remove_leftovers(tmp_path)
        assert list(tmp_path.iterdir()) == checkpoints(tmp_path)

    def test_a_disk_with_too_little_room_is_one_sentence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trained = make_trained(steps=0)
        path = save_checkpoint(tmp_path, 1, *trained, keep=1)
        needed = sum(4 * value.numel() for value in training_state(*trained).values())
        for free in (needed, needed - 1):
            monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(1, 1, free))
            if free == needed:
                path = save_checkpoint(tmp_path, 2, *trained, keep=1)
                continue
            with pytest.raises(OSError, match=r"a checkpoint needs about .* MB but only .* MB are free under"):
                save_checkpoint(tmp_path, 3, *trained, keep=1)
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("num_bytes", [0, 4096, 100_000], ids=["at once", "in the weights", "in the optimizer"])
    def test_a_write_that_fails_half_way_leaves_nothing(self, tmp_path: Path, num_bytes: int) -> None:
        """The system refuses to let files grow, as it does when a disk runs full in the middle."""
        path = save_checkpoint(tmp_path, 1, *make_trained(), keep=1)
        assert (path / "model.safetensors").stat().st_size < 100_000 < (path / "optimizer.safetensors").stat().st_size
        done = subprocess.run(
            [sys.executable, "-c", SAVE_UNDER_A_LIMIT, str(Path(__file__).parent), str(tmp_path), str(num_bytes)],
            capture_output=True,
            text=True,
        )
        assert re.search(r"^OSError: .*step_00000002", done.stderr, re.MULTILINE), done.stderr
        assert list(tmp_path.iterdir()) == [path]


SAVE_UNDER_A_LIMIT = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_checkpoint import make_trained, save_checkpoint
trained = make_trained()
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
save_checkpoint(Path(sys.argv[2]), 2, *trained, keep=1)
"""
