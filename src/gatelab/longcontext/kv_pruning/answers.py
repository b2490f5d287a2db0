"""Whether a pruned model still finds what it is asked for: the mini tasks, in the manner of RULER, and not RULER.

The prompt without its last token is read, then the cache is cut, once; the last token and the answer are read with what
is left, and their keys all stay. So every token of an answer has come through the cut, the first one too. A press that
looks at the newest queries knows what the prompt asked before its last token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatelab.evaluate.generation import stop_ids_of
from gatelab.evaluate.models import OpenedModel
from gatelab.evaluate.ruler.sample import Sample
from gatelab.evaluate.ruler.sample_sets import sample_set
from gatelab.evaluate.ruler.scoring import score
from gatelab.evaluate.ruler.tasks import MINI_TASKS, Task
from gatelab.evaluate.ruler.texts import Texts
from gatelab.evaluate.ruler.tokens import encode_prompt
from gatelab.longcontext.kv_pruning.driver import PrunedReader, pruned
from gatelab.longcontext.kv_pruning.presses import ORACLE, build_press
from gatelab.longcontext.kv_pruning.trial import ANSWERS, FOUND, Score, Trial


class Question(NamedTuple):
    """One sample of a mini task, and its input (1 T) with one BOS."""

    task: Task
    sample: Sample
    ids: Tensor

    def share(self, answer: str) -> float:
        """The share of the references that an answer holds, in percent."""
        return score(self.task, [answer], [self.sample]).mean


def mini_questions(opened: OpenedModel, trial: Trial, length: int) -> list[Question]:
    """The samples of all mini tasks; ``ValueError`` for a length that a task or the model does not hold."""
    bos_id, device = opened.tokenizer.bos_id, next(opened.model.parameters()).device
    if bos_id is None:
        raise ValueError(f"the tokenizer of {opened.name} has no BOS, with which the mini tasks begin")
    if opened.max_context is not None and length > opened.max_context:
        raise ValueError(
            f"mini tasks of {length} tokens are beyond the {opened.max_context} that {opened.name} was made for; take "
            "a smaller ruler_length, or extend it first"
        )
    texts, questions = Texts(trial.cache, {}, allow_download=False), []
    for task in MINI_TASKS.values():
        samples = sample_set(task, opened.tokenizer, length, trial.seed, trial.ruler_samples, texts).samples
        for sample in samples:
            ids = [bos_id, *encode_prompt(opened.tokenizer, sample.input, "base")]
            questions.append(Question(task, sample, torch.tensor([ids], device=device)))
    return questions


def ask(
    opened: OpenedModel,
    trial: Trial,
    questions: Sequence[Question],
    say: Callable[[str], object] = lambda sentence: None,
) -> tuple[list[float], list[Score]]:
    """What the unpruned model finds of each question, and what every arm but the oracle finds at every budget.

    ``say`` is told of each question.
    """
    whole, scores = [], []
    for number, question in enumerate(questions):
        with pruned(opened.model, None) as reader:
            reader.read(question.ids[:, :-1])
            whole.append(question.share(_answer(opened, reader, question)))
        for arm in trial.arms:
            if arm.press == ORACLE:
                continue
            press = build_press(arm.press, trial.seed + number)
            with pruned(opened.model, press, arm.allocation, trial.num_recent) as reader:
                reader.read(question.ids[:, :-1])
                read = reader.snapshot()
                for budget in trial.budgets:
                    reader.restore(read)
                    reader.cut(trial.keys_at(budget, question.ids.shape[1] - 1))
                    share = question.share(_answer(opened, reader, question))
                    scores.append(Score(arm, ANSWERS, budget, number, FOUND, share))
        say(f"question {number + 1} of {len(questions)}: {whole[-1]:.0f} % of its answers found unpruned")
    return whole, scores


def _answer(opened: OpenedModel, reader: PrunedReader, question: Question) -> str:
    """What a reader that has read all of the prompt but its last token goes on with, greedily."""
    stop_ids, last = stop_ids_of(opened), question.ids[:, -1:]
    written: list[int] = []
    while len(written) < question.task.generated:
        token = reader.read(last, observe=False)[0, -1].argmax()
        if int(token) in stop_ids:
            break
        written.append(int(token))
        last = token.view(1, 1)
    return opened.tokenizer.decode(written)
