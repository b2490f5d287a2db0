"""Twenty kills of runs, text preparation and studies, and that the comparison behind them would notice a difference."""

from __future__ import annotations

import json
from pathlib import Path

import kills
import pytest
import torch
from safetensors.torch import save_file


@pytest.mark.long
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    found = json.loads(json.dumps(kills.kill(20, 1, tmp_path)))
    assert found["kills"] == 20 and found["differing_files"] == [] and found["passed"]
    by_work = found["kills_by_work_and_phase"]
    assert all(sum(by_work[kind].values()) > 0 for kind in ("run", "text", "study"))
    assert len({phase for phases in by_work.values() for phase in phases}) >= 3
    assert min(found["files_compared_in_a_round"].values()) >= 9


def write_round(folder: Path, **changes: object) -> None:
    """The files of work whose figures are given."""
    loss, seconds, weight, rate = ({"loss": 1.0, "seconds": 2.0, "weight": 3.0, "rate": 4.0} | changes).values()
    (folder / "checkpoints" / "step_00000002").mkdir(parents=True)
    rows = [{"kind": "step", "step": 1, "loss": loss, "seconds": seconds}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file({"w": torch.tensor([weight])}, folder / "checkpoints" / "step_00000002" / "model.safetensors")
    state = {"optimizer.w.step": torch.tensor(rate)}
    save_file(state, folder / "checkpoints" / "step_00000002" / "optimizer.safetensors")


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"seconds": 9.0}, []),
        ({"loss": 1.0000001}, ["metrics.jsonl"]),
        ({"weight": 3.000001}, ["checkpoints/step_00000002/model.safetensors"]),
        ({"rate": 5.0}, ["checkpoints/step_00000002/optimizer.safetensors"]),
    ],
)
def test_differences_are_noticed(changes: dict[str, object], differing: list[str], tmp_path: Path) -> None:
    write_round(tmp_path / "one")
    write_round(tmp_path / "two", **changes)
    assert kills.differences(tmp_path / "one", tmp_path / "two") == differing


def test_leftovers_and_rows_written_twice_are_noticed(tmp_path: Path) -> None:
    write_round(tmp_path / "one")
    write_round(tmp_path / "two")
    rows = (tmp_path / "two" / "metrics.jsonl").read_text()
    (tmp_path / "two" / "metrics.jsonl").write_text(rows * 2)
    (tmp_path / "two" / ".result.json.0a1b2c3d.tmp").touch()
    assert kills.differences(tmp_path / "one", tmp_path / "two") == [".result.json.0a1b2c3d.tmp", "metrics.jsonl"]
