"""The tasks by name, and the samples of each: a pure function of tokenizer, length, seed, texts and prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from gatelab.data.retrieval import RetrievalKind
from gatelab.evaluate.model_tokenizer import ModelTokenizer
from gatelab.evaluate.ruler.fitting import MOST_TRIES, DoesNotFit, SampleBuilder, fit_samples
from gatelab.evaluate.ruler.mini import MINI_GENERATED, MINIMUM_LENGTHS, MiniBuilder
from gatelab.evaluate.ruler.needles import NeedleBuilder, NeedleSettings
from gatelab.evaluate.ruler.prompts import (
    COMMON_WORDS,
    FREQUENT_WORDS,
    NIAH,
    QUESTION_ANSWERING,
    VARIABLE_TRACKING,
    Prompt,
)
from gatelab.evaluate.ruler.questions import QuestionBuilder
from gatelab.evaluate.ruler.sample import Sample
from gatelab.evaluate.ruler.texts import TextName, Texts
from gatelab.evaluate.ruler.tokens import CountTokens, counter
from gatelab.evaluate.ruler.variables import VariableBuilder
from gatelab.evaluate.ruler.word_counts import CommonWordBuilder, frequent_word_samples
from gatelab.evaluate.ruler.words import listed_words, needle_words
from gatelab.settings import nearest

LENGTH_SHARE = 64  # a least length is found to one of so many parts


@dataclass(frozen=True)
class Making:
    """What the samples of a task are made from."""

    count_tokens: CountTokens
    length: int
    seed: int
    count: int
    texts: Texts
    prompt: Prompt
    tries: int = MOST_TRIES

    def fit(self, builder: SampleBuilder) -> list[Sample]:
        return fit_samples(builder, self.length, self.count, self.count_tokens, self.tries)


@dataclass(frozen=True)
class Task:
    """``generated`` tokens may follow a prompt. ``match`` says what share of the references counts: all, or any.

    ``text`` is the text that the task needs, ``minimum_length`` the least length that it makes sense at.
    """

    name: str
    generated: int
    make: Callable[[Making], list[Sample]]
    match: Literal["all", "part"] = "all"
    text: TextName | None = None
    minimum_length: int = 1


def make_samples(
    task: Task,
    tokenizer: ModelTokenizer,
    length: int,
    seed: int,
    count: int,
    texts: Texts,
    prompt: Prompt | None = None,
) -> list[Sample]:
    """The first ``count`` samples of a task, of at most ``length`` tokens each with those to generate (``fwe`` and
    ``vt`` may exceed it by a few, as in the reference), without BOS.

    With the base prompt they are those of NVIDIA's generators, byte for byte. Raises ``ValueError`` naming task, length
    and the least length that fits, when a sample can't be made so short; and when words, texts or questions are
    missing.
    """
    if count < 1:
        raise ValueError(f"samples={count}: make at least one")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is none that NVIDIA's generators take; give one from 0 to {2**32 - 1}")
    making = Making(counter(tokenizer), length, seed, count, texts, prompt or Prompt())
    if length < task.minimum_length:
        raise ValueError(f"{task.name} at length={length} is too short; it is made from {task.minimum_length} on")
    try:
        return task.make(making)
    except DoesNotFit as error:
        least = _least_length(task, making, error.needed)
    raise ValueError(
        f"{task.name} does not fit into length={length} with this tokenizer; the least that fits is about {least}"
    )


def find_tasks(names: str) -> list[Task]:
    """Tasks by names with commas; ``all`` are the 13 of RULER, ``mini`` those of our own."""
    found: dict[str, Task] = {}
    for name in names.split(","):
        if name in ("all", "mini"):
            found |= RULER_TASKS if name == "all" else MINI_TASKS
        elif name in ALL_TASKS:
            found[name] = ALL_TASKS[name]
        else:
            raise ValueError(f"there is no task {name!r}; {nearest(name, [*ALL_TASKS, 'all', 'mini'])}")
    return list(found.values())


def _least_length(task: Task, making: Making, needed: int) -> int:
    """About the least length at which all the samples can be made: each failure says what its sample needed, and the
    next try gives it some more, so that there are few."""
    while True:
        try:
            task.make(replace(making, length=needed, tries=3))
        except DoesNotFit as error:
            needed = max(error.needed, needed + 1 + needed // LENGTH_SHARE)
        else:
            return needed


def _needles(settings: NeedleSettings) -> Callable[[Making], list[Sample]]:
    def make(making: Making) -> list[Sample]:
        words = needle_words() if settings.key_kind == "words" else None
        essays = making.texts.essays() if settings.haystack == "essay" else None
        builder = NeedleBuilder(settings, making.prompt, making.length, making.seed, words, essays)
        return making.fit(builder)

    return make


def _variables(making: Making) -> list[Sample]:
    builder = VariableBuilder(making.prompt, making.seed, making.count_tokens)
    return making.fit(builder)


def _common_words(making: Making) -> list[Sample]:
    builder = CommonWordBuilder(making.prompt, making.length, making.seed, listed_words(making.seed))
    return making.fit(builder)


def _frequent_words(making: Making) -> list[Sample]:
    return frequent_word_samples(making.prompt, making.length, making.seed, making.count, making.count_tokens)


def _questions(name: Literal["squad", "hotpotqa"]) -> Callable[[Making], list[Sample]]:
    def make(making: Making) -> list[Sample]:
        questions = making.texts.questions(name)
        available = len(questions.questions)
        if making.count > available:
            raise ValueError(f"{name} has {available} questions, and samples={making.count}; ask for no more than that")
        builder = QuestionBuilder(making.prompt, making.seed, questions)
        return making.fit(builder)

    return make


def _mini(kind: RetrievalKind) -> Callable[[Making], list[Sample]]:
    def make(making: Making) -> list[Sample]:
        builder = MiniBuilder(kind, making.prompt, making.seed)
        return making.fit(builder)

    return make


NEEDLE_TASKS = {
    "niah_single_1": NeedleSettings("noise"),
    "niah_single_2": NeedleSettings("essay"),
    "niah_single_3": NeedleSettings("essay", value_kind="uuids"),
    "niah_multikey_1": NeedleSettings("essay", keys=4),
    "niah_multikey_2": NeedleSettings("needles"),
    "niah_multikey_3": NeedleSettings("needles", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": NeedleSettings("essay", values=4),
    "niah_multiquery": NeedleSettings("essay", queries=4),
}
RULER_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *(
            Task(name, NIAH.generated, _needles(settings), text="essays" if settings.haystack == "essay" else None)
            for name, settings in NEEDLE_TASKS.items()
        ),
        Task("vt", VARIABLE_TRACKING.generated, _variables),
        Task("cwe", COMMON_WORDS.generated, _common_words),
        Task("fwe", FREQUENT_WORDS.generated, _frequent_words),
        Task("qa_1", QUESTION_ANSWERING.generated, _questions("squad"), "part", "squad"),
        Task("qa_2", QUESTION_ANSWERING.generated, _questions("hotpotqa"), "part", "hotpotqa"),
    )
}
MINI_TASKS: dict[str, Task] = {
    f"mini_{kind}": Task(f"mini_{kind}", MINI_GENERATED[kind], _mini(kind), minimum_length=length)
    for kind, length in MINIMUM_LENGTHS.items()
}
ALL_TASKS = RULER_TASKS | MINI_TASKS
