"""Variable tracking: ``vt``."""

from __future__ import annotations

import random
import string
from itertools import pairwise
from typing import Any

import numpy as np

from gatelab.evaluate.ruler.fitting import DoesNotFit, Draft, NoDraft, SampleBuilder, fit_samples
from gatelab.evaluate.ruler.needles import NOISE
from gatelab.evaluate.ruler.prompts import VARIABLE_TRACKING, Prompt
from gatelab.evaluate.ruler.tokens import CountTokens

HOPS = 4
EXAMPLE_LENGTH = 500


class VariableBuilder(SampleBuilder):
    """Sizes are lines of noise. The example in front of each question is one, made first, with other names each time.

    The reference draws a text that is too long again, but not shorter.
    """

    shrinks = False

    def __init__(self, prompt: Prompt, seed: int, count_tokens: CountTokens):
        self._prompt = prompt
        self._random = random.Random(seed)
        self._numbers = np.random.RandomState(seed)
        self._example: str | None = None
        self.step, self.overhead = 5, VARIABLE_TRACKING.generated
        try:
            example = fit_samples(self, EXAMPLE_LENGTH, 1, count_tokens)[0]
        except DoesNotFit as error:
            raise ValueError(
                f"vt can't be made: its example may have {EXAMPLE_LENGTH} tokens and takes {error.needed} with this "
                "tokenizer; use one with a larger vocabulary"
            ) from None
        self._example = f"{example.input} {' '.join(example.outputs)}\n\n"
        self.step, self.overhead = 10, self.overhead + count_tokens([self._example])[0]

    def draft(self, index: int, size: int) -> Draft:
        names, number = self._chain(letters=3 if self._example is None else 5)
        statements = [f"VAR {names[0]} = {number}"]
        statements += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
        lines = [f"{NOISE}\n"] * size
        if len(lines) <= len(statements):
            pieces = [piece for line in lines for piece in line.split(".")]
            lines = [f"{piece}." if piece.strip() else piece for piece in pieces]
        if len(lines) <= len(statements):
            raise NoDraft
        places = sorted(self._random.sample(range(len(lines)), len(statements)))
        for earlier, (place, statement) in enumerate(zip(places, statements, strict=True)):
            lines.insert(place + earlier, statement)
        context = " ".join(lines).replace(". \n", ".\n")
        fields = {"context": context, "query": number, "num_v": len(names)}
        question = VARIABLE_TRACKING.template.format(**fields)
        answer_prefix = VARIABLE_TRACKING.answer_prefix.format(**fields)
        prompt = Prompt() if self._example is None else self._prompt
        return Draft(prompt.wrap(question, answer_prefix), names)

    def probe(self, draft: Draft) -> str:
        return f"{draft.text} {draft.outputs}"

    def finish(self, draft: Draft) -> str:
        if self._example is None:
            return draft.text
        beginning = len(self._prompt.before)
        return f"{draft.text[:beginning]} {self._renamed(self._example)}\n\n{draft.text[beginning:]}"

    def state(self) -> Any:
        return self._random.getstate(), self._numbers.get_state()

    def restore(self, state: Any) -> None:
        self._random.setstate(state[0])
        self._numbers.set_state(state[1])

    def _chain(self, letters: int) -> tuple[list[str], str]:
        """The names of a chain and the value of the first.

        The reference replaces a name that came twice by more names, and then fails over a second chain that is too
        short.
        """
        names = [self._name(letters) for _ in range(HOPS + 1)]
        while len(set(names)) <= HOPS:
            names.append(self._name(letters))
        number = str(self._numbers.randint(10000, 99999))
        if len(names) > HOPS + 1:
            self._numbers.randint(10000, 99999)
            raise NoDraft
        return names, number

    def _renamed(self, example: str) -> str:
        names = example[example.index(VARIABLE_TRACKING.answer_prefix[-10:]) + 10 :].split()
        for name in names:
            example = example.replace(name, self._name(len(name)))
        return example

    def _name(self, letters: int) -> str:
        return "".join(self._random.choices(string.ascii_uppercase, k=letters))
