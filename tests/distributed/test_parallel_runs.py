"""Whole runs on ranks: the folder that one rank writes, unequal targets, and what is refused before any work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_parity import on_ranks, spread_model, train_settings
from safetensors import safe_open

from gatelab.data.loader import IGNORED, Batch
from gatelab.data.settings import BigramBackcopySettings, DataSettings
from gatelab.data.synthetic import BigramBackcopy
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.perplexity import token_nats
from gatelab.model.settings import MixtureSettings
from gatelab.train.loop import train
from gatelab.train.optimizer import build_optimizer
from gatelab.train.parallel.mesh import mesh_shape, require_divisible, running_ranks
from gatelab.train.parallel.placement import place
from gatelab.train.settings import ParallelSettings, RunSettings, TrainSettings
from gatelab.train.step import take_step
from gatelab.train.watch import Unwatched

MIXTURE = MixtureSettings(num_experts=6, experts_per_token=2, expert_width=24)


def run_settings(*overrides: str) -> RunSettings:
    train = {
        "steps": 6,
        "sequences_per_step": 4,
        "precision": "float64",
        "threads": 1,
        "schedule": {"warmup_steps": 2},
        "evaluation": {"every": 3, "windows": 3, "measure_every": 3, "final_measured_windows": 5},
        "checkpoint": {"every": 3},
    }
    settings = RunSettings(
        model=spread_model("sdpa_headwise"),
        data=DataSettings(synthetic=BigramBackcopySettings(vocab_size=29), context=19),
        train=TrainSettings.parse(train),
    )
    return settings.with_overrides(overrides)


def train_on_rank(rank: int, settings: RunSettings, folder: Path, cache: Path) -> None:
    train(settings, folder, cache)


def whole_state(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, put together from the parts that its files say they are."""
    state: dict[str, torch.Tensor] = {}
    for name, offset, part in parts_in(path):
        size = [start + length for start, length in zip(offset, part.shape, strict=True)]
        if name in state:
            size = [max(pair) for pair in zip(size, state[name].shape, strict=True)]
        grown = torch.full(size, torch.nan, dtype=part.dtype)
        if name in state:
            grown[tuple(map(slice, state[name].shape))] = state[name]
        grown[tuple(slice(start, start + length) for start, length in zip(offset, part.shape, strict=True))] = part
        state[name] = grown
    assert not any(value.isnan().any() for value in state.values())
    return state


def parts_in(path: Path) -> Iterator[tuple[str, list[int], torch.Tensor]]:
    """(name, offset in the whole, part) of all that a checkpoint's files hold."""
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            where = json.loads((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_tensor(name)
                yield name, where[name]["saved_offsets"] if where else [0] * part.ndim, part


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_ranks_leaves_the_folder_of_one_rank(tmp_path: Path) -> None:
    one, many, cache = tmp_path / "one", tmp_path / "many", tmp_path / "cache"
    train(run_settings(), one, cache)
    on_ranks(2, train_on_rank, run_settings("train.parallel.shard=2"), many, cache)
    assert {path.name for path in one.iterdir()} == {path.name for path in many.iterdir()}
    for expected, found in zip(rows_of(one), rows_of(many), strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            if name != "seconds":
                assert found[name] == (pytest.approx(value, abs=1e-9) if isinstance(value, float) else value), name
    weights = [whole_state(folder / "checkpoints" / "step_00000006") for folder in (one, many)]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] - weights[1][name]).abs().max() < 1e-9 for name in weights[0])


@pytest.mark.long
@pytest.mark.compile
@pytest.mark.parametrize("word", ["train.parallel.shard=2", "train.parallel.tensor=2"])
def test_compiled_layers_train_on_ranks(tmp_path: Path, word: str) -> None:
    one, many, cache = tmp_path / "one", tmp_path / "many", tmp_path / "cache"
    train(run_settings("train.precision=float32"), one, cache)
    on_ranks(2, train_on_rank, run_settings("train.precision=float32", "train.compile=true", word), many, cache)
    assert json.loads((many / "environment.json").read_text())["compiled"]
    losses = [[row["loss"] for row in rows_of(folder) if row["kind"] == "step"] for folder in (one, many)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class Stopping(Unwatched):
    """Ends the run after its fourth step, as an interrupt would."""

    def update(self, step: int, loss: float, tokens_per_second: float, peak_share: float) -> None:
        if step == 4:
            raise KeyboardInterrupt


def test_ranks_go_on_from_the_checkpoint_of_one(tmp_path: Path) -> None:
    one, moved, cache = tmp_path / "one", tmp_path / "moved", tmp_path / "cache"
    train(run_settings(), one, cache)
    with pytest.raises(KeyboardInterrupt):
        train(run_settings(), moved, cache, Stopping())
    on_ranks(2, train_on_rank, run_settings("train.parallel.tensor=2"), moved, cache)
    losses = [[row["loss"] for row in rows_of(folder) if row["kind"] == "step"] for folder in (one, moved)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    paths = [folder / "checkpoints" / "step_00000006" for folder in (one, moved)]
    states = [whole_state(path) for path in paths]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, atol=1e-9, rtol=0)


def loss_of_unequal_ranks(rank: int) -> None:
    """One rank has 5 targets, the other 1."""
    settings = train_settings(parallel={"shard": 2}, sequences_per_step=2)
    ids = torch.arange(2 * 7).view(2, 7)
    targets = torch.full((2, 7), IGNORED)
    targets[0, :5], targets[1, :1] = ids[0, :5] + 3, ids[1, :1] + 3
    decoder = Decoder(spread_model()).double()
    initialize(decoder, 0)
    expected = token_nats(decoder(ids), targets).sum() / 6
    with running_ranks(settings.parallel) as ranks:
        place(decoder, settings, ranks, compiled=False)
        batch = Batch(ids[rank : rank + 1], targets[rank : rank + 1])

        def nats(state: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return token_nats(decoder.logits(state), wanted).sum()

        optimizer = build_optimizer(decoder, settings.optimizer)
        figures = take_step(decoder, optimizer, batch, nats, settings, ranks)
    assert figures.loss == pytest.approx(float(expected), abs=1e-12)


def test_the_loss_is_a_mean_over_all_targets_of_all_ranks() -> None:
    on_ranks(2, loss_of_unequal_ranks)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_read_the_rows_of_one_global_batch(num_ranks: int, pieces: int) -> None:
    task = BigramBackcopy(BigramBackcopySettings(vocab_size=29), context=11, sequences_per_step=8, seed=3)
    whole = task.batch(5)
    for piece, expected in enumerate(whole.inputs.chunk(pieces)):
        parts = [task.batch(5, rank, num_ranks, pieces).inputs.chunk(pieces)[piece] for rank in range(num_ranks)]
        assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "message"),
    [
        ({"shard": 2}, 1, r"replicate=1 x shard=2 x tensor=1 = 2 ranks, but 1 run; start 2 with torchrun"),
        ({}, 4, r"= 1 ranks, but 4 run"),
        ({"shard": "all", "tensor": 3}, 4, r"tensor=3 does not divide the 4 ranks that were started"),
        ({"shard": "all", "expert": 3}, 4, r"expert=3 does not divide shard=4"),
    ],
)
def test_a_wrong_number_of_ranks_is_refused(parallel: dict[str, Any], num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh_shape(ParallelSettings.parse(parallel), num_ranks)


def test_all_shards_are_what_is_left() -> None:
    assert mesh_shape(ParallelSettings(replicate=2, shard="all", tensor=2), 16) == (2, 4, 2)


@pytest.mark.parametrize(
    ("parallel", "model", "message"),
    [
        ({"tensor": 3}, {}, "tensor=3 does not divide the 8 query heads of layer 0"),
        ({"tensor": 4}, {"num_heads": 12, "num_kv_heads": 6}, "num_kv_heads=6: neither divides the other"),
        ({"tensor": 8}, {"feedforward_width": 60}, "tensor=8 does not divide model.feedforward_width=60"),
        ({"tensor": 4}, {"mixture": MIXTURE}, "tensor=4 does not divide model.mixture.num_experts=6"),
        ({"shard": 4, "expert": 4}, {"mixture": MIXTURE}, "expert=4 does not divide model.mixture.num_experts=6"),
        ({"shard": 2, "expert": 2}, {}, "expert=2 shares experts, and the model has none"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(
    parallel: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        require_divisible(spread_model(**model), ParallelSettings.parse(parallel))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"context": 2}, "context=2 is not possible: windows, document masks, sinks .* need every key of a sequence"),
        ({"expert": 2, "tensor": 2}, "tensor ranks share the experts already"),
        ({"shard": 3, "expert": 2}, "expert=2 does not divide shard=3"),
        ({"shard": 0}, "shard=0 is no number of ranks"),
    ],
)
def test_impossible_settings_are_refused(parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelSettings.parse(parallel)


def test_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="but 1 run; start 2 with torchrun"):
        train(run_settings("train.parallel.tensor=2"), tmp_path / "run", tmp_path / "cache")
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_torchrun_starts_the_command(tmp_path: Path) -> None:
    """Two processes of ``gatelab train``: one prints the result, and the folder is complete."""
    words = ["dense_tiny", "gate=sdpa_headwise", "data.synthetic={vocab_size: 29}", "train.parallel.tensor=2"]
    words += ["train.steps=2", "train.schedule.warmup_steps=1", "train.evaluation.windows=8", "model.num_layers=1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "gatelab", "train", *words, "--out", str(tmp_path / "run"), "--cache", str(tmp_path / "c")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Run folder:") == 1
    assert (tmp_path / "run" / "result.json").is_file()
