"""Common words, ``cwe``, and frequent words, ``fwe``."""

from __future__ import annotations

import random
import string
from typing import Any

import numpy as np
from scipy.special import zeta

from gatelab.evaluate.ruler.fitting import DoesNotFit, Draft, NoDraft, SampleBuilder
from gatelab.evaluate.ruler.needles import LONG
from gatelab.evaluate.ruler.prompts import COMMON_WORDS, FREQUENT_WORDS, Prompt
from gatelab.evaluate.ruler.sample import Sample
from gatelab.evaluate.ruler.tokens import CountTokens

NUM_COMMON = 10
LETTERS = 6
ALPHA = 2.0
SHORTEST_FREQUENT = 200  # below, the coded text has less than three words to ask for


class CommonWordBuilder(SampleBuilder):
    """Sizes are different words. An example with its answer stands in front of each question."""

    def __init__(self, prompt: Prompt, length: int, seed: int, words: list[str]):
        self._prompt, self._seed, self._words = prompt, seed, words
        self._random = random.Random(seed)
        self.step, self.overhead = 10, COMMON_WORDS.generated
        self.limit = self.last_searched = len(words)
        self._example_repeats = (40, 10, 3) if length >= LONG else (20, 3, 1)
        self._repeats = (30, 3) if length >= LONG else (6, 1)

    def draft(self, index: int, size: int) -> Draft:
        if size < NUM_COMMON:
            raise NoDraft
        example, example_answer = self._list(*self._example_repeats)
        listed, answer = self._list(size, *self._repeats)
        example = f"{_common_question(example)}{COMMON_WORDS.answer_prefix}{_numbered(example_answer)}"
        text = self._prompt.wrap(f"{example}\n{_common_question(listed)}", COMMON_WORDS.answer_prefix)
        return Draft(text, answer)

    def probe(self, draft: Draft) -> str:
        return f"{draft.text} {_numbered(draft.outputs)}"

    def state(self) -> Any:
        return self._random.getstate()

    def restore(self, state: Any) -> None:
        self._random.setstate(state)

    def _list(self, size: int, common_repeats: int, other_repeats: int) -> tuple[str, list[str]]:
        words = self._random.sample(self._words, size)
        common, others = words[:NUM_COMMON], words[NUM_COMMON:]
        listed = common * common_repeats + others * other_repeats
        random.Random(self._seed).shuffle(listed)
        return _numbered(listed), common


def frequent_word_samples(
    prompt: Prompt, length: int, seed: int, count: int, count_tokens: CountTokens
) -> list[Sample]:
    """Samples of ``fwe``; raises :class:`DoesNotFit`.

    As in the reference only the prompt is held to ``length``: with the tokens to generate a sample may be up to 50
    tokens longer.
    """
    if length < SHORTEST_FREQUENT:
        raise DoesNotFit(SHORTEST_FREQUENT)
    source = random.Random(seed)
    num_coded, step = length // 50, length // 32
    first = _coded_words(source, num_coded, seed)
    num_words = length // LETTERS
    while count_tokens([_coded_text(prompt, first, num_words, seed)])[0] < length:
        num_words += step
    num_words -= step
    vocabularies = [_coded_words(source, num_coded, seed) for _ in range(count)]
    texts = [_coded_text(prompt, words, num_words, seed) for words in vocabularies]
    samples = []
    for index, (text, tokens) in enumerate(zip(texts, count_tokens(texts), strict=True)):
        fewer = num_words
        while tokens > length:
            fewer -= step
            if fewer <= 0:
                raise DoesNotFit(tokens)
            text = _coded_text(prompt, vocabularies[index], fewer, seed)
            tokens = count_tokens([text])[0]
        samples.append(Sample(index, text, vocabularies[index][1:4], tokens + FREQUENT_WORDS.generated))
    return samples


def _coded_words(source: random.Random, number: int, seed: int) -> list[str]:
    """Made-up words by falling frequency; the first is shown as dots."""
    words = {_letters(source) for _ in range(number)}
    while len(words) < number:
        words.add(_letters(source))
    coded = sorted(words)
    random.Random(seed).shuffle(coded)
    return ["...", *coded[1:]]


def _coded_text(prompt: Prompt, words: list[str], size: int, seed: int) -> str:
    """About ``size`` words, of which the k-th stands size / (k^alpha zeta(alpha)) times, rounded down."""
    repeats = (size * np.arange(1, len(words) + 1) ** -ALPHA / zeta(ALPHA)).astype(int)
    listed = [word for word, repeat in zip(words, repeats.tolist(), strict=True) for _ in range(repeat)]
    random.Random(seed).shuffle(listed)
    question = FREQUENT_WORDS.template.format(context=" ".join(listed))
    return prompt.wrap(question, FREQUENT_WORDS.answer_prefix)


def _common_question(listed: str) -> str:
    return COMMON_WORDS.template.format(context=listed)


def _letters(source: random.Random) -> str:
    return "".join(source.choices(string.ascii_lowercase, k=LETTERS))


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
