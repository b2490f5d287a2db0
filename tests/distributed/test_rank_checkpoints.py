"""Checkpoints that ranks write together: read by any number of ranks, in any layout, with the same bits."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_parity import on_ranks, spread_model, train_settings
from test_parallel_runs import MIXTURE, rows_of, run_settings, train_on_rank, whole_state

from gatelab.files import remove_leftovers
from gatelab.interop.loading import load
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import ModelSettings
from gatelab.train import saver as saver_module
from gatelab.train.checkpoint import checkpoints, load_checkpoint, load_decoder, step_of
from gatelab.train.loop import train
from gatelab.train.optimizer import build_optimizer, set_learning_rate
from gatelab.train.parallel.mesh import running_ranks
from gatelab.train.parallel.placement import place
from gatelab.train.saver import CheckpointSaver
from gatelab.train.settings import CheckpointSettings, ParallelSettings

KEEPS_ALL = CheckpointSettings(keep=99)


def save_and_load(
    rank: int, model: ModelSettings, parallel: dict[str, Any], folder: Path, save_as: int, asynchronous: bool = False
) -> None:
    """Load the newest checkpoint, or take one step with made-up gradients, and save what this rank has of it."""
    settings = train_settings(parallel=parallel)
    with running_ranks(settings.parallel) as ranks:
        decoder = Decoder(model).double()
        initialize(decoder, 0)
        saved = checkpoints(folder)
        if saved:
            with torch.no_grad():
                for parameter in decoder.parameters():
                    parameter.fill_(torch.nan)
        place(decoder, settings, ranks, compiled=False)
        optimizer = build_optimizer(decoder, settings.optimizer)
        if saved:
            assert load_checkpoint(saved[-1], decoder, optimizer, ranks) == step_of(saved[-1])
        else:
            set_learning_rate(optimizer, 1.0)
            for parameter in decoder.parameters():
                parameter.grad = parameter.detach().cos()
            optimizer.step()
        saver = CheckpointSaver(folder, KEEPS_ALL.model_copy(update={"asynchronous": asynchronous}), ranks)
        saver.save(save_as, decoder, optimizer)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.zero_()
        saver.close()


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (spread_model("sdpa_elementwise"), [{"shard": 2}, {"shard": 2, "tensor": 2}, {}, {"tensor": 2}]),
        pytest.param(
            spread_model("sdpa_head_shared", width=39),
            [{"tensor": 4}, {"shard": 4}, {"replicate": 2}],
            marks=pytest.mark.long,
        ),
        pytest.param(
            spread_model("sdpa_input_independent", sink={"kind": "learned_key_value"}),
            [{"shard": 4}, {}, {"tensor": 4}],
            marks=pytest.mark.long,
        ),
        pytest.param(
            spread_model(mixture=MIXTURE),
            [{"shard": 2, "expert": 2}, {"replicate": 2, "shard": 2}, {"tensor": 2}],
            marks=pytest.mark.long,
        ),
    ],
    ids=["elementwise", "head-shared, odd width", "few heads and a sink", "mixture"],
)
def test_any_layout_reads_any_other(tmp_path: Path, model: ModelSettings, layouts: list[dict[str, Any]]) -> None:
    for number, parallel in enumerate(layouts, start=1):
        sizes = ParallelSettings.parse(parallel)
        num_ranks = sizes.replicate * int(sizes.shard) * sizes.tensor
        if num_ranks == 1:
            save_and_load(0, model, parallel, tmp_path, number)
        else:
            on_ranks(num_ranks, save_and_load, model, parallel, tmp_path, number)
    expected, *others = map(whole_state, checkpoints(tmp_path))
    names = {name for name, _ in Decoder(model).named_parameters()}
    assert expected.keys() == names | {
        f"optimizer.{n}.{key}" for n in names for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert len(others) == len(layouts) - 1
    for state in others:
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_an_asynchronous_save_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    """The weights are zeroed right after both saves return."""
    for name, asynchronous in (("now", False), ("later", True)):
        for num_ranks, parallel in ((1, {}), (2, {"shard": 2})):
            folder = tmp_path / name / str(num_ranks)
            if num_ranks == 1:
                save_and_load(0, spread_model(), parallel, folder, 1, asynchronous)
            else:
                on_ranks(2, save_and_load, spread_model(), parallel, folder, 1, asynchronous)
    states = [whole_state(tmp_path / name / n / "step_00000001") for name in ("now", "later") for n in ("1", "2")]
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items())
    assert not list(tmp_path.rglob("*.tmp"))


def fail_on_the_last_rank(rank: int, folder: Path, asynchronous: bool) -> None:
    """The disk of one rank is full."""
    settings = train_settings(parallel={"shard": 2})
    with running_ranks(settings.parallel) as ranks:
        decoder = Decoder(spread_model())
        initialize(decoder, 0)
        place(decoder, settings, ranks, compiled=False)
        optimizer = build_optimizer(decoder, settings.optimizer)
        saver = CheckpointSaver(folder, CheckpointSettings(asynchronous=asynchronous), ranks)
        saver.save(1, decoder, optimizer)
        saver.wait()

        def is_full(path: Path) -> str:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        if rank == 1:
            from gatelab.train.parallel import shard_files

            shard_files.sha256 = is_full  # type: ignore[assignment]
        with pytest.raises(OSError, match="No space left on device") as error:
            saver.save(2, decoder, optimizer)
            saver.close()
        assert error.value.errno == errno.ENOSPC


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_on_one_rank_is_heard_on_all_and_leaves_the_one_before(tmp_path: Path, asynchronous: bool) -> None:
    on_ranks(2, fail_on_the_last_rank, tmp_path, asynchronous)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two ranks, which saved asynchronously."""
    folder = tmp_path_factory.mktemp("ranks")
    settings = run_settings("train.parallel.shard=2", "train.checkpoint.asynchronous=true")
    on_ranks(2, train_on_rank, settings, folder / "run", folder / "cache")
    return folder / "run"


def test_the_decoder_of_ranks_is_read_in_one_piece(run: Path) -> None:
    path = checkpoints(run / "checkpoints")[-1]
    weights, whole = load_decoder(path).state_dict(), whole_state(path)
    assert all(torch.equal(weights[name].double(), whole[name].float().double()) for name in weights)
    converted = load(path).state_dict()
    assert all(torch.equal(converted[name].float(), weights[name]) for name in weights)
    assert {file.name for file in path.iterdir()} == {
        "model.json",
        "manifest.json",
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    }


@pytest.mark.parametrize("where", [0.0, 0.003, 0.3, 0.9999])
def test_a_flipped_byte_of_any_file_is_reported_with_its_name(run: Path, tmp_path: Path, where: float) -> None:
    for file in checkpoints(run / "checkpoints")[-1].iterdir():
        path = Path(shutil.copytree(file.parent, tmp_path / file.name / file.parent.name))
        content = bytearray(file.read_bytes())
        content[int(where * len(content))] ^= 1
        (path / file.name).write_bytes(content)
        with pytest.raises(ValueError, match=file.name.replace(".", r"\.")):
            load_decoder(path)
        (path / file.name).write_bytes(content[:-1])
        with pytest.raises(ValueError, match=file.name.replace(".", r"\.")):
            load_decoder(path)
        (path / file.name).unlink()
        with pytest.raises(ValueError, match=file.name.replace(".", r"\.")):
            load_decoder(path)


def test_what_ranks_left_half_written_is_never_chosen(run: Path, tmp_path: Path) -> None:
    """A kill before the manifest leaves the temporary name, which a run that goes on removes."""
    folder = Path(shutil.copytree(run / "checkpoints", tmp_path / "checkpoints"))
    *_, before, last = checkpoints(folder)
    half = last.rename(folder / f".{last.name}.00000000.tmp")
    (half / "manifest.json").unlink()
    assert checkpoints(folder)[-1] == before
    remove_leftovers(folder)
    assert not half.exists()


def test_saving_while_training_changes_no_bit(run: Path, tmp_path: Path) -> None:
    on_ranks(2, train_on_rank, run_settings("train.parallel.shard=2"), tmp_path / "run", tmp_path / "cache")
    losses = [[row["loss"] for row in rows_of(folder) if row["kind"] == "step"] for folder in (run, tmp_path / "run")]
    assert losses[0] == losses[1]
    states = [whole_state(folder / "checkpoints" / "step_00000006") for folder in (run, tmp_path / "run")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_one_process_saves_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files, and an error of the thread ends the run at the next save."""
    for name, word in (("now", "false"), ("later", "true")):
        train(run_settings(f"train.checkpoint.asynchronous={word}"), tmp_path / name, tmp_path / "cache")
    states = [whole_state(tmp_path / name / "checkpoints" / "step_00000006") for name in ("now", "later")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    def is_full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(saver_module, "save_state", is_full)
    with pytest.raises(OSError, match="No space left on device; there is no checkpoint yet"):
        train(run_settings("train.checkpoint.asynchronous=true"), tmp_path / "full", tmp_path / "cache")
