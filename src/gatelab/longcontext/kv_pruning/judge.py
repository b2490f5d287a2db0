"""What pruning costs: loss and KL against the unpruned model on the same continuations, at equal budgets.

Two uses are judged. ``prefill``: the context is read whole, its cache cut once, then the continuation is read and every
key of it stays. ``decoding``: context and continuation come a few tokens at a time and the cache never grows beyond the
same number of keys. Both score the same tokens of the continuation, so that differences are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gatelab.evaluate.models import OpenedModel, open_model, short_names
from gatelab.evaluate.texts import SHORTEST, read_windows
from gatelab.longcontext.kv_pruning.answers import ask, mini_questions
from gatelab.longcontext.kv_pruning.driver import PrunedReader, foresee, pruned
from gatelab.longcontext.kv_pruning.observed import Press
from gatelab.longcontext.kv_pruning.presses import ORACLE, build_press
from gatelab.longcontext.kv_pruning.trial import DECODING, DIVERGENCE, LOSS, PREFILL, Arm, Score, Trial
from gatelab.model.perplexity import token_nats

DEFAULT_PRESSES = "random,streaming_llm,key_norm,h2o,snapkv,tova,attention_value"
METRICS = {LOSS: "loss over the unpruned model's", DIVERGENCE: "KL from the unpruned model"}


class Verdict(NamedTuple):
    """All scores of one model; ``losses`` are the unpruned model's, nats a token, one for each sample.

    ``found`` are its shares of references found in the mini tasks, in percent; empty if these were not asked.
    """

    name: str
    trial: Trial
    context: dict[str, Any]
    losses: list[float]
    found: list[float]
    scores: list[Score]

    def values(self, arm: Arm, use: str, budget: float, metric: str) -> list[float]:
        """The figure of each sample, in their order."""
        wanted = (arm, use, budget, metric)
        return [score.value for score in self.scores if (score.arm, score.use, score.budget, score.metric) == wanted]


def parse_presses(words: str | None) -> tuple[str, ...]:
    """Names with commas between them; those that need no gate when there are no words."""
    return tuple(word.strip() for word in (DEFAULT_PRESSES if words is None else words).split(","))


def parse_budgets(words: str) -> tuple[float, ...]:
    """Numbers with commas between them; ``ValueError`` for a word that is no number."""
    try:
        return tuple(float(word) for word in words.split(","))
    except ValueError:
        raise ValueError(f"budgets {words!r} are not numbers with commas between them, such as 0.5,0.1") from None


def judge(name: str, trial: Trial, say: Callable[[str], object] = lambda sentence: None) -> Verdict:
    """Prune one model in all ways of the trial and score what that does; ``say`` is told of each
    sample and question.

    Raises ``ValueError`` before the long work for a context beyond the model's, a text with fewer than two samples, and
    a press or allocation that needs a gate which the model lacks.
    """
    opened = open_model(name, trial.dtype)
    length = trial.context + trial.continuation
    if opened.max_context is not None and length > opened.max_context:
        raise ValueError(
            f"context {trial.context} and continuation {trial.continuation} are {length} tokens, above the "
            f"{opened.max_context} that {name} was made for; take less, or extend it first"
        )
    windows = read_windows(trial.text, opened.tokenizer, trial.cache, length=length, samples=trial.samples)
    if windows.tokens.shape[1] < length or len(windows.tokens) < 2:
        raise ValueError(
            f"the text {trial.text.label} is too short for two samples of {length} tokens; give a longer one"
        )
    tokens = windows.tokens.to(next(opened.model.parameters()).device)
    for arm in trial.arms:
        _try(opened.model, arm, tokens[:1, :SHORTEST])
    questions = [] if trial.ruler_length is None else mini_questions(opened, trial, trial.ruler_length)
    losses, scores = [], []
    for sample, row in enumerate(tokens):
        loss, found = _judge_sample(opened.model, trial, sample, row[None])
        losses.append(loss)
        scores += found
        say(f"sample {sample + 1} of {len(tokens)}: {loss:.4f} nats a token unpruned")
    found, answered = ask(opened, trial, questions, say)
    context = {**windows.context, **_describe(opened), "trial": trial.to_mapping()}
    return Verdict(short_names([name])[0], trial, context, losses, found, scores + answered)


def _try(model: nn.Module, arm: Arm, tokens: Int[Tensor, "1 T"]) -> None:
    """Prune a few tokens, which raises what a model can't do."""
    with pruned(model, build_press(arm.press), arm.allocation) as reader:
        reader.read(tokens)
        reader.cut(tokens.shape[1] // 2)


def _judge_sample(model: nn.Module, trial: Trial, sample: int, tokens: Int[Tensor, "1 T"]) -> tuple[float, list[Score]]:
    context, continuation = tokens[:, : trial.context], tokens[:, trial.context :]
    with pruned(model, None) as reader:
        reader.read(context)
        reference = reader.read(continuation)
    loss = _nats(reference, continuation)
    scores = []
    for arm in trial.arms:
        for use, budget, logits in _pruned_logits(model, trial, arm, sample, context, continuation):
            values = {LOSS: _nats(logits, continuation) - loss, DIVERGENCE: _divergence(reference, logits)}
            scores += [Score(arm, use, budget, sample, metric, value) for metric, value in values.items()]
    return loss, scores


def _pruned_logits(
    model: nn.Module, trial: Trial, arm: Arm, sample: int, context: Tensor, continuation: Tensor
) -> Iterator[tuple[str, float, Float[Tensor, "1 T V"]]]:
    """The continuation's logits in each use and at each budget; the context of all budgets is read once."""

    def build() -> Press:
        return build_press(arm.press, trial.seed + sample)

    foresees = arm.press == ORACLE
    press = foresee(model, context, continuation) if foresees else build()
    with pruned(model, press, arm.allocation, trial.num_recent) as reader:
        reader.read(context)
        whole = reader.snapshot()
        for budget in trial.budgets:
            reader.restore(whole)
            reader.cut(trial.keys_at(budget))
            yield PREFILL, budget, reader.read(continuation, observe=False)
    for budget in () if foresees else trial.budgets:
        with pruned(model, build(), arm.allocation, trial.num_recent) as reader:
            yield DECODING, budget, _stream(reader, trial, budget, torch.cat((context, continuation), dim=1))


def _stream(reader: PrunedReader, trial: Trial, budget: float, tokens: Tensor) -> Float[Tensor, "1 T V"]:
    reader.stream(tokens[:, : trial.context], trial.keys_at(budget), trial.step)
    return reader.stream(tokens[:, trial.context :], trial.keys_at(budget), trial.step)


def _nats(logits: Float[Tensor, "1 T V"], continuation: Int[Tensor, "1 T"]) -> float:
    """Mean cross-entropy of all tokens of the continuation but the first, which was predicted before any cut."""
    return float(token_nats(logits[:, :-1], continuation[:, 1:]).double().mean())


def _divergence(reference: Float[Tensor, "1 T V"], logits: Float[Tensor, "1 T V"]) -> float:
    """Mean of sum_v p log(p / q) over the predictions that :func:`_nats` scores; p is the unpruned model's."""
    truth, found = (one[0, :-1].double().log_softmax(-1) for one in (reference, logits))
    return float((truth.exp() * (truth - found)).sum(-1).mean())


def _describe(opened: OpenedModel) -> dict[str, Any]:
    return {"family": opened.family, "step": opened.step, **opened.description}
