"""Mini needles, ``mini_*``: our own small tasks in the manner of RULER's, from 256 tokens on. They are not RULER.

The texts are those of :mod:`gatelab.data.retrieval`, in draws that training never makes.
"""

from __future__ import annotations

from typing import Any

from gatelab.data.retrieval import RetrievalKind, retrieval_task
from gatelab.evaluate.ruler.fitting import Draft, NoDraft, SampleBuilder
from gatelab.evaluate.ruler.prompts import Prompt

MINI_GENERATED: dict[RetrievalKind, int] = {
    "single": 4,
    "multi_key": 4,
    "multi_value": 24,
    "multi_query": 24,
    "variables": 24,
    "common_words": 24,
}
MINIMUM_LENGTHS: dict[RetrievalKind, int] = {
    "single": 128,
    "multi_key": 128,
    "multi_value": 160,
    "multi_query": 192,
    "variables": 224,
    "common_words": 128,
}


class MiniBuilder(SampleBuilder):
    """Sizes are sentences, or words of ``common_words``. Nothing is drawn in sequence, so there is no state."""

    def __init__(self, kind: RetrievalKind, prompt: Prompt, seed: int):
        self._kind: RetrievalKind = kind
        self._prompt, self._seed = prompt, seed
        self.step = 24 if kind == "common_words" else 6
        self.overhead = MINI_GENERATED[kind]

    def draft(self, index: int, size: int) -> Draft:
        task = retrieval_task(self._kind, self._seed, index, size)
        if task is None:
            raise NoDraft
        return Draft(self._prompt.wrap(task.question, task.answer_prefix), task.answers)

    def probe(self, draft: Draft) -> str:
        return draft.text

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        assert state is None
