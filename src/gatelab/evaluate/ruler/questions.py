"""Questions about documents: ``qa_1`` from SQuAD, ``qa_2`` from HotpotQA."""

from __future__ import annotations

import random
from typing import Any

from gatelab.evaluate.ruler.fitting import Draft, NoDraft, SampleBuilder
from gatelab.evaluate.ruler.prompts import QUESTION_ANSWERING, Prompt
from gatelab.evaluate.ruler.texts import QuestionSet


class QuestionBuilder(SampleBuilder):
    """Sizes are documents: those of the question, then of its article, then any other."""

    def __init__(self, prompt: Prompt, seed: int, questions: QuestionSet):
        self._prompt, self._seed, self._questions = prompt, seed, questions.questions
        self._documents = questions.documents
        self._random = random.Random(seed)
        self.step, self.overhead = 10, QUESTION_ANSWERING.generated
        self.limit = self.last_searched = len(self._documents)

    def draft(self, index: int, size: int) -> Draft:
        question = self._questions[index]
        if size < len(self._documents):
            shown = [self._documents[number] for number in self._chosen(question.documents, question.related, size)]
        else:
            shown = self._documents = list(self._documents)  # the reference shuffles all of them in place
        random.Random(self._seed).shuffle(shown)
        context = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(shown, start=1))
        text = QUESTION_ANSWERING.template.format(context=context, query=question.text)
        return Draft(self._prompt.wrap(text, QUESTION_ANSWERING.answer_prefix), list(question.answers))

    def probe(self, draft: Draft) -> str:
        return f"{draft.text} {draft.outputs}"

    def state(self) -> Any:
        return self._random.getstate(), self._documents

    def restore(self, state: Any) -> None:
        random_state, self._documents = state
        self._random.setstate(random_state)

    def _chosen(self, own: list[int], related: list[int], size: int) -> list[int]:
        """Numbers of ``size`` documents."""
        more = size - len(own)
        if more < 0:
            raise NoDraft
        if more <= len(related):
            return own + self._random.sample(related, more)
        used = sorted({*own, *related})
        others = len(self._documents) - len(used)
        drawn = self._random.sample(range(others), max(0, more - len(related)))
        return own + related + [_skipping(used, number) for number in drawn]


def _skipping(used: list[int], number: int) -> int:
    """The ``number``-th document that is not among the sorted ``used`` ones."""
    for skipped in used:
        if skipped > number:
            break
        number += 1
    return number
