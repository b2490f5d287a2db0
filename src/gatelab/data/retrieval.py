"""Made-up retrieval tasks that a model of a few million parameters can learn: needles, variables, common words.

The ideas are RULER's (arXiv 2404.06654), the words few: 64 nouns, two-digit numbers, eight sentences of noise. A task
is a pure function of kind, seed, split, index and size: training never meets one that is held out. What lets a few
million tokens teach it (experiments/LOG.md): a value right behind its key, documents from one key on, every key asked
for again, and lists whose parts are repeated, which teach to look behind an earlier occurrence.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from gatelab.data.text_files import Document

RetrievalKind = Literal["single", "multi_key", "multi_value", "multi_query", "variables", "common_words"]
KINDS: tuple[RetrievalKind, ...] = get_args(RetrievalKind)
VERSION = 3
NUM_KEYS = 8  # of multi_key
NUM_ASKED = 3  # values of one key, keys asked for, names in a chain, common words
NUM_ROUNDS = 2  # how often a training document repeats all it has told
MOST_LISTED = 32
LONGEST_PART = 8
SHORTEST_CHARACTERS = 80

_NOUNS = """
apple arrow badge basket bell boat bottle bridge brush bucket button candle carpet castle chain clock cloud coat
corn desk dish door drum engine feather fence flag flute forest glove hammer hill horse island jacket kettle kite
ladder lamp lemon letter market mirror mountain needle oven paper pencil piano pillow pocket river rope saddle sail
shovel spoon table tent tower train wagon whistle window
"""
NOUNS: list[str] = list(_NOUNS.split())
NOISE: tuple[str, ...] = (
    "The sky is blue.",
    "The grass is green.",
    "The sun is warm.",
    "Here we go.",
    "There and back again.",
    "The day is long.",
    "It rains a lot.",
    "All is well.",
)


class Retrieval(NamedTuple):
    """``question`` is the whole text with what is asked; ``answer_prefix`` begins the answer.

    ``further`` repeats all keys with their values, for training: one answer in hundreds of tokens is too little to
    learn from.
    """

    question: str
    answer_prefix: str
    answers: list[str]
    further: str = ""

    @property
    def document(self) -> str:
        """The task with its answer, to train on."""
        return f"{self.question}{self.answer_prefix} {', '.join(self.answers)}.{self.further}"


def retrieval_task(kind: RetrievalKind, seed: int, index: int, size: int, split: str = "heldout") -> Retrieval | None:
    """A task among ``size`` sentences, or for common words among as many words; ``None`` when none has that size."""
    source = random.Random(f"{kind}/{split}/{seed}/{index}")
    if kind == "common_words":
        return _common_words(source, size) if size >= 8 * NUM_ASKED else None
    if kind == "variables":
        return _variables(source, size) if size >= 2 * NUM_ASKED else None
    if kind == "multi_key":
        return _among_keys(source, size) if size > 0 else None
    return _among_noise(source, kind, size) if size >= NUM_ASKED else None


def retrieval_documents(seed: int, longest: int) -> Iterator[Document]:
    """Documents to train on, without end: of eight, five are lists repeated in parts, two ``multi_key``, and one of the
    kinds in turn. Tasks have 80 to ``longest`` characters, in every doubling of which there are as many bytes; those
    of a kind whose shortest is longer are that short."""
    index = 0
    while True:
        source = random.Random(f"{seed}/{index}")
        turn, place = divmod(index, 8)
        if place < 5:
            text = _repeated_list(source)
        else:
            kind = "multi_key" if place < 7 else KINDS[turn % len(KINDS)]
            wanted = SHORTEST_CHARACTERS / (1 - source.random() * (1 - SHORTEST_CHARACTERS / longest))
            text = _of_characters(kind, seed, index, int(wanted))
        yield Document(f"retrieval {index}", text)
        index += 1


def _repeated_list(source: random.Random) -> str:
    """Different nouns, then twice all of them in parts of up to eight, in any order."""
    words = source.sample(NOUNS, int(2 * (MOST_LISTED / 2) ** source.random()))
    told = [f"{' '.join(words)}."]
    for _ in range(NUM_ROUNDS):
        parts: list[list[str]] = []
        start = 0
        while start < len(words):
            parts.append(words[start : start + source.randint(2, LONGEST_PART)])
            start += len(parts[-1])
        source.shuffle(parts)
        told += [f"{' '.join(part)}." for part in parts]
    return " ".join(told)


def _of_characters(kind: RetrievalKind, seed: int, index: int, wanted: int) -> str:
    """The longest document of at most so many characters, or the shortest that there is."""
    least = {"multi_key": 1, "variables": 2 * NUM_ASKED, "common_words": 8 * NUM_ASKED}.get(kind, NUM_ASKED)
    first = _document(kind, seed, index, least)
    per_size = max(1, (len(_document(kind, seed, index, least + 64)) - len(first)) // 64)
    size = least + max(0, wanted - len(first)) // per_size
    while size > least and len(_document(kind, seed, index, size)) > wanted:
        size -= 1
    return _document(kind, seed, index, size)


def _document(kind: RetrievalKind, seed: int, index: int, size: int) -> str:
    task = retrieval_task(kind, seed, index, size, "train")
    assert task is not None
    return task.document


def _among_noise(source: random.Random, kind: RetrievalKind, size: int) -> Retrieval:
    """One key with one value or several, or several keys with one each."""
    num_keys = NUM_ASKED if kind == "multi_query" else 1
    num_values = NUM_ASKED if kind == "multi_value" else 1
    keys = source.sample(NOUNS, num_keys)
    values = [str(value) for value in source.sample(range(10, 100), num_keys * num_values)]
    told = [f"{keys[number // num_values]} {value}." for number, value in enumerate(values)]
    order = list(range(len(told)))
    if kind == "multi_query":
        source.shuffle(order)
    context = _scattered(source, [told[number] for number in order], size)
    if len(values) == 1:
        return Retrieval(context, f" {keys[0]}", values, f" {told[0]}" * NUM_ROUNDS)
    return Retrieval(f"{context} Codes {' '.join(keys)}?", " Codes:", values)


def _among_keys(source: random.Random, size: int) -> Retrieval:
    """One key among up to eight, each with a value of its own, in ``size`` sentences with those of noise."""
    num_keys = min(NUM_KEYS, size)
    keys = source.sample(NOUNS, num_keys)
    values = [str(value) for value in source.sample(range(10, 100), num_keys)]
    told = [f"{key} {value}." for key, value in zip(keys, values, strict=True)]
    further = told[1:]
    for _ in range(NUM_ROUNDS - 1):
        further += source.sample(told, num_keys)
    context = _scattered(source, source.sample(told, num_keys), size - num_keys)
    return Retrieval(context, f" {keys[0]}", values[:1], "".join(f" {sentence}" for sentence in further))


def _variables(source: random.Random, size: int) -> Retrieval:
    """Names that take their value from one another, and a second chain that does not matter."""
    names = source.sample(NOUNS, 2 * NUM_ASKED)
    values = source.sample(range(10, 100), 2)
    chains = [names[:NUM_ASKED], names[NUM_ASKED:]]
    statements = [
        [f"Let {first} be {given}." for first, given in zip(chain, [value, *chain[:-1]], strict=True)]
        for chain, value in zip(chains, values, strict=True)
    ]
    order = [0] * NUM_ASKED + [1] * NUM_ASKED
    source.shuffle(order)
    remaining = [iter(chain) for chain in statements]
    context = _scattered(source, [next(remaining[number]) for number in order], size)
    question = f"{context} Which names have the value {values[0]}?"
    return Retrieval(question, f" The names with the value {values[0]} are", chains[0])


def _common_words(source: random.Random, size: int) -> Retrieval:
    """Three words that are a sixth of the text each, asked for in the order of their first appearance."""
    words = source.sample(NOUNS, len(NOUNS))
    common, others = words[:NUM_ASKED], words[NUM_ASKED:]
    each = size // (2 * NUM_ASKED)
    rest = [others[number % len(others)] for number in range(size - NUM_ASKED * each)]
    listed = common * each + rest
    source.shuffle(listed)
    answers = sorted(common, key=listed.index)
    return Retrieval(
        f"Words: {' '.join(listed)}. Which three words are the most common?", " The most common words are", answers
    )


def _scattered(source: random.Random, statements: list[str], size: int) -> str:
    """The statements, in their order, among ``size`` sentences of noise."""
    sentences: list[str] = source.choices(NOISE, k=size)
    places = sorted(source.choices(range(size + 1), k=len(statements)), reverse=True)
    for place, statement in zip(places, reversed(statements), strict=True):
        sentences.insert(place, statement)
    return " ".join(sentences)
