"""Made-up questions with answers that are right by construction, from reasoning-gym's generators, as chats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gatelab.data.chats import ASSISTANT
from gatelab.files import write_atomically
from gatelab.settings import nearest


def write_reasoning_chats(path: Path, tasks: Sequence[str], count: int, seed: int) -> int:
    """Write ``count`` chats of each task, the tasks in turn, each with one question and its answer; their number.

    Equal arguments give equal bytes (with the same version of reasoning-gym). Raises ``ValueError`` for a task that
    reasoning-gym does not have, or whose answers are no text, for a count below 1, and without the package.
    """
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("made-up questions need the package reasoning-gym: install gatelab[reasoning]") from None
    if count < 1:
        raise ValueError(f"{count} chats of a task are none; give 1 or more")
    if not tasks:
        raise ValueError("no tasks are named; give names of reasoning-gym, such as chain_sum")
    for task in tasks:
        if task not in DATASETS:
            raise ValueError(f"reasoning-gym has no task {task!r}; {nearest(task, sorted(DATASETS))}")
    sources = {task: reasoning_gym.create_dataset(task, size=count, seed=seed) for task in dict.fromkeys(tasks)}
    lines = [json.dumps(chat, ensure_ascii=False) + "\n" for chat in _chats(sources, count)]
    write_atomically(path, "".join(lines))
    return len(lines)


def _chats(sources: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        for task, source in sources.items():
            question, answer = source[number]["question"], source[number]["answer"]
            if not isinstance(answer, str) or not answer.strip():
                raise ValueError(f"reasoning-gym's task {task} has an answer that is no text: {answer!r}; leave it out")
            turns = {"user": question, ASSISTANT: answer}
            yield {"messages": [{"role": role, "content": content} for role, content in turns.items()], "task": task}
