"""Made-up retrieval tasks that a model of a few million parameters can learn: needles, variables, common words.

The ideas are RULER's (arXiv 2404.06654), the words few: 64 nouns, 32 adjectives, three-digit numbers, eight sentences
of noise. A task is a pure function of kind, seed, split, index and size: training never meets one that is held out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from gatelab.data.text_files import Document

RetrievalKind = Literal["single", "multi_key", "multi_value", "multi_query", "variables", "common_words"]
KINDS: tuple[RetrievalKind, ...] = get_args(RetrievalKind)
VERSION = 2
NUM_FURTHER = 16
NUM_ASKED = 3  # values of one key, keys asked for, names in a chain, common words
SHORTEST_CHARACTERS = 400

_NOUNS = """
apple arrow badge basket bell boat bottle bridge brush bucket button candle carpet castle chain clock cloud coat
corn desk dish door drum engine feather fence flag flute forest glove hammer hill horse island jacket kettle kite
ladder lamp lemon letter market mirror mountain needle oven paper pencil piano pillow pocket river rope saddle sail
shovel spoon table tent tower train wagon whistle window
"""
_ADJECTIVES = """
big blue bold brave bright calm clean cold dark deep dry early fair fast flat green heavy high late light long loud
new old quiet red round sharp small soft warm white
"""
NOUNS: list[str] = list(_NOUNS.split())
ADJECTIVES: list[str] = list(_ADJECTIVES.split())
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

    ``further`` has more questions about the same text with their answers, for training: one answer in hundreds of
    tokens is too little to learn from.
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
        return _among_keys(source, size) if 0 < size < len(NOUNS) * len(ADJECTIVES) else None
    return _among_noise(source, kind, size) if size >= NUM_ASKED else None


def retrieval_documents(seed: int, longest: int) -> Iterator[Document]:
    """Documents to train on, without end: the kinds in turn, sizes spread evenly in the logarithm of their characters,
    from 400 to ``longest``."""
    index = 0
    while True:
        kind = KINDS[index % len(KINDS)]
        wanted = SHORTEST_CHARACTERS * (longest / SHORTEST_CHARACTERS) ** random.Random(f"{seed}/{index}").random()
        yield Document(f"retrieval {index}", _of_characters(kind, seed, index, int(wanted)))
        index += 1


def _of_characters(kind: RetrievalKind, seed: int, index: int, wanted: int) -> str:
    """The longest document of at most so many characters, or the shortest that there is."""
    least = 8 * NUM_ASKED if kind == "common_words" else 2 * NUM_ASKED
    first = _document(kind, seed, index, least)
    per_size = max(1, (len(_document(kind, seed, index, 2 * least)) - len(first)) // least)
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
    values = [str(value) for value in source.sample(range(100, 1000), num_keys * num_values)]
    needles = [f"The code of {keys[number // num_values]} is {value}." for number, value in enumerate(values)]
    order = list(range(len(needles)))
    if kind == "multi_query":
        source.shuffle(order)
    context = _scattered(source, [needles[number] for number in order], size)
    asked = keys[0] if num_keys == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    if len(values) == 1:
        return Retrieval(f"{context} What is the code of {asked}?", f" The code of {asked} is", values)
    return Retrieval(f"{context} What are the codes of {asked}?", f" The codes of {asked} are", values)


def _among_keys(source: random.Random, size: int) -> Retrieval:
    """One key among others, each with a value of its own; up to 16 of those are asked for in training."""
    pairs = source.sample(range(len(NOUNS) * len(ADJECTIVES)), size + 1)
    keys = [f"{ADJECTIVES[pair % len(ADJECTIVES)]} {NOUNS[pair // len(ADJECTIVES)]}" for pair in pairs]
    value = source.randint(100, 999)
    others = [number for number in range(100, 1000) if number != value]
    values = [value, *source.choices(others, k=size)]
    needles = [f"The code of {key} is {number}." for key, number in zip(keys, values, strict=True)]
    source.shuffle(needles)
    further = "".join(
        f" What is the code of {key}? The code of {key} is {number}."
        for key, number in zip(keys[1 : 1 + NUM_FURTHER], values[1:], strict=False)
    )
    question = f"{' '.join(needles)} What is the code of {keys[0]}?"
    return Retrieval(question, f" The code of {keys[0]} is", [str(value)], further)


def _variables(source: random.Random, size: int) -> Retrieval:
    """Names that take their value from one another, and a second chain that does not matter."""
    names = source.sample(NOUNS, 2 * NUM_ASKED)
    values = source.sample(range(100, 1000), 2)
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
