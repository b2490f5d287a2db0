"""Needles in a haystack: ``niah_*``."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import Any, Literal

from gatelab.evaluate.ruler.fitting import Draft, NoDraft, SampleBuilder
from gatelab.evaluate.ruler.prompts import NIAH, Prompt
from gatelab.evaluate.ruler.texts import Essays
from gatelab.evaluate.ruler.words import WordPairs

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(step * 100 / 39) for step in range(40)]
LONG = 4096


@dataclass(frozen=True)
class NeedleSettings:
    """``haystack`` is noise, an essay or other needles; ``keys`` each have ``values``, and ``queries`` are asked."""

    haystack: Literal["noise", "essay", "needles"]
    key_kind: Literal["words", "uuids"] = "words"
    value_kind: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


class NeedleBuilder(SampleBuilder):
    """Sizes are words of an essay, or sentences of a haystack. ``essays`` is needed for the first alone."""

    def __init__(
        self,
        settings: NeedleSettings,
        prompt: Prompt,
        length: int,
        seed: int,
        words: WordPairs | None,
        essays: Essays | None,
    ):
        self._settings, self._prompt, self._seed = settings, prompt, seed
        self._random = random.Random(seed)
        self._words = words
        self._essays = essays
        self.overhead = NIAH.generated
        if essays is not None:
            self.step, self.limit = 500, len(essays.words)
            self.last_searched = self.limit + self.step
        else:
            self.step = 25 if length >= LONG else 5

    def draft(self, index: int, size: int) -> Draft:
        kinds, needles = self._settings, []
        keys: list[str] = []
        values: list[list[str]] = []
        for _ in range(max(kinds.keys, kinds.queries)):
            keys.append(self._draw(kinds.key_kind))
            values.append([])
            for _ in range(kinds.values):
                values[-1].append(self._draw(kinds.value_kind))
                needles.append(NEEDLE.format(kind=kinds.value_kind, key=keys[-1], value=values[-1][-1]))
        random.Random(self._seed).shuffle(needles)
        context = self._in_sentences(needles, size) if self._essays is None else self._in_essay(needles, size)
        asked = self._random.sample(range(len(keys)), kinds.queries)
        query = [keys[number] for number in asked]
        return Draft(
            self._ask(context, query[0] if len(query) == 1 else f"{', '.join(query[:-1])}, and {query[-1]}"),
            [value for number in asked for value in values[number]],
        )

    def probe(self, draft: Draft) -> str:
        return draft.text + " ".join(draft.outputs)

    def state(self) -> Any:
        return self._random.getstate()

    def restore(self, state: Any) -> None:
        self._random.setstate(state)

    def _draw(self, kind: Literal["words", "numbers", "uuids"]) -> str:
        if kind == "numbers":
            return str(self._random.randint(1_000_000, 9_999_999))
        if kind == "uuids":
            return str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        assert self._words is not None
        return self._random.choice(self._words)

    def _in_essay(self, needles: list[str], size: int) -> str:
        assert self._essays is not None
        sentences = self._essays.sentences(size)
        depths = sorted(int(len(sentences) * (depth / 100)) for depth in self._random.sample(DEPTHS, len(needles)))
        parts = []
        for start, end, needle in zip([0, *depths[:-1]], depths, needles, strict=True):
            parts += [" ".join(sentences[start:end]), needle]
        return " ".join([*parts, " ".join(sentences[depths[-1] :])])

    def _in_sentences(self, needles: list[str], size: int) -> str:
        kinds = self._settings
        if kinds.haystack == "noise":
            sentences = [NOISE] * size
        else:
            sentences = [
                NEEDLE.format(kind=kinds.value_kind, key=self._draw(kinds.key_kind), value=self._draw(kinds.value_kind))
                for _ in range(size)
            ]
        if size < len(needles):
            raise NoDraft
        places = sorted(self._random.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            sentences.insert(place, needle)
        return "\n".join(sentences)

    def _ask(self, context: str, query: str) -> str:
        kind, template, answer_prefix = self._settings.value_kind, NIAH.template, NIAH.answer_prefix
        if self._settings.values * self._settings.queries == 1:
            kind = kind.removesuffix("s")
            template, answer_prefix = _in_singular(template), _in_singular(answer_prefix)
        fields = {"type_needle_v": kind, "context": context, "query": query}
        return self._prompt.wrap(template.format(**fields), answer_prefix.format(**fields))


def _in_singular(text: str) -> str:
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is")
