"""Chats from reasoning-gym: from a stand-in of the package always, from the package itself where it is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gatelab.data.chats import read_chats
from gatelab.data.reasoning_chats import write_reasoning_chats


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with two tasks of numbered questions, and one without answers."""
    package, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")

    def create_dataset(task: str, size: int, seed: int) -> list[dict[str, Any]]:
        answer = None if task == "mute" else f"{seed}!"
        return [{"question": f"{task} {seed} {number}?", "answer": answer} for number in range(size)]

    package.create_dataset, factory.DATASETS = create_dataset, {"sums": 0, "words": 0, "mute": 0}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


@pytest.mark.usefixtures("stand_in")
def test_tasks_take_turns_and_become_chats(tmp_path: Path) -> None:
    file = tmp_path / "new" / "chats.jsonl"
    assert write_reasoning_chats(file, ["sums", "words"], count=3, seed=7) == 6
    asked = [[message.content for message in chat.messages] for chat in read_chats(file)]
    assert asked == [[f"{task} 7 {number}?", "7!"] for number in range(3) for task in ("sums", "words")]
    assert json.loads(file.read_text().splitlines()[1])["task"] == "words"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("tasks", "count", "sentence"),
    [
        (["sum"], 3, "^reasoning-gym has no task 'sum'; did you mean 'sums'?"),
        (["sums"], 0, "^0 chats of a task are none; give 1 or more"),
        (["mute"], 3, "^reasoning-gym's task mute has an answer that is no text: None; leave it out"),
        ([], 3, "^no tasks are named; give names of reasoning-gym, such as chain_sum"),
    ],
)
def test_what_gives_no_chats_is_refused(tmp_path: Path, tasks: list[str], count: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        write_reasoning_chats(tmp_path / "chats.jsonl", tasks, count, seed=7)
    assert not list(tmp_path.iterdir())


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"need the package reasoning-gym: install gatelab\[reasoning\]$"):
        write_reasoning_chats(tmp_path / "chats.jsonl", ["chain_sum"], 3, seed=7)


def test_the_package_itself_gives_the_same_chats_for_a_seed(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for file, seed in zip(files, (7, 7, 8), strict=True):
        assert write_reasoning_chats(file, ["chain_sum", "basic_arithmetic"], count=5, seed=seed) == 10
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    assert len(read_chats(files[0])) == 10
