"""How much text fits: the haystack size of a task, and samples of that size, as NVIDIA's generators find them.

They make one text after another, and draw random numbers for each, so every text that they make must be made here too.
Texts are made some way ahead and counted together; the random state goes back to where the reference stopped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from gatelab.evaluate.ruler.sample import Sample
from gatelab.evaluate.ruler.tokens import CountTokens

SIZES_AHEAD = 4
SAMPLES_AHEAD = 32
MOST_TRIES = 100  # of one sample, at the least size; the reference tries forever


class Draft(NamedTuple):
    """A sample's text before it is known to fit."""

    text: str
    outputs: list[str]


class NoDraft(Exception):  # noqa: N818
    """There is no text of that size."""


class DoesNotFit(Exception):  # noqa: N818
    """No text fits; ``needed`` tokens might."""

    def __init__(self, needed: int):
        super().__init__(needed)
        self.needed = needed


class SampleBuilder(ABC):
    """The texts of one task at one length and seed.

    ``step`` is the first size and the difference to the next; sizes above ``last_searched`` are not tried: there the
    size is ``limit``. ``overhead`` counts tokens that belong to a sample beside its text: those to generate, and an
    example that is counted once. ``shrinks`` says whether a sample that is too long is tried again with less.
    """

    step: int
    overhead: int
    limit: int | None = None
    last_searched: int | None = None
    shrinks: bool = True

    @abstractmethod
    def draft(self, index: int, size: int) -> Draft:
        """The text of a sample; raises :class:`NoDraft`."""

    @abstractmethod
    def probe(self, draft: Draft) -> str:
        """What is counted when the size is searched: the text with its answer."""

    def finish(self, draft: Draft) -> str:
        """The sample's input, once the text fits."""
        return draft.text

    @abstractmethod
    def state(self) -> Any:
        """Everything that later texts depend on."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Go back to a state."""


def fit_samples(
    builder: SampleBuilder, length: int, count: int, count_tokens: CountTokens, tries: int = MOST_TRIES
) -> list[Sample]:
    """``count`` samples of at most ``length`` tokens, those to generate included; raises :class:`DoesNotFit` when one
    is too long at the least size ``tries`` times."""
    size, needed = _search_size(builder, length, count_tokens)
    samples: list[Sample] = []
    while len(samples) < count:
        ahead = []
        for index in range(len(samples), min(count, len(samples) + SAMPLES_AHEAD)):
            draft = _try_draft(builder, index, size)
            drafted = builder.state()
            if draft is None:
                ahead.append((index, None, "", drafted))
                break
            ahead.append((index, draft, builder.finish(draft), drafted))
        tokens = count_tokens([draft.text for _, draft, _, _ in ahead if draft is not None])
        for (index, draft, text, drafted), total in zip(ahead, [*tokens, length + 1], strict=False):
            if draft is not None and total + builder.overhead <= length:
                samples.append(Sample(index, text, draft.outputs, total + builder.overhead))
                continue
            builder.restore(drafted)
            samples.append(_retry(builder, index, size, length, count_tokens, tries, needed))
            break
    return samples


def _search_size(builder: SampleBuilder, length: int, count_tokens: CountTokens) -> tuple[int, int]:
    """The size at which the reference's search ends, and the tokens of the least text that it tried."""
    if builder.overhead >= length:
        raise DoesNotFit(builder.overhead + 1)
    size, least = builder.step, None
    while True:
        ahead = []
        for tried in range(size, size + SIZES_AHEAD * builder.step, builder.step):
            if builder.last_searched is None or tried <= builder.last_searched:
                draft = _try_draft(builder, 0, tried)
                if draft is None:
                    raise ValueError("with this seed the reference's own generator fails; take another seed")
                ahead.append((tried, builder.probe(draft), builder.state()))
        for (tried, _, state), tokens in zip(ahead, count_tokens([probe for _, probe, _ in ahead]), strict=True):
            total = tokens + builder.overhead
            least = total if least is None else least
            following = tried + builder.step
            if total > length:
                builder.restore(state)
                return tried - builder.step, least
            if builder.last_searched is not None and following > builder.last_searched:
                assert builder.limit is not None
                builder.restore(state)
                return builder.limit, least
            if total == length:
                builder.restore(state)
                return following, least
        size += SIZES_AHEAD * builder.step


def _retry(
    builder: SampleBuilder, index: int, size: int, length: int, count_tokens: CountTokens, tries: int, needed: int
) -> Sample:
    """A sample that did not fit at ``size``, made anew with less each time, as the reference does."""
    shortest = None
    for _ in range(size // builder.step + tries):
        if size > builder.step and builder.shrinks:
            size -= builder.step
        draft = _try_draft(builder, index, size)
        if draft is None:
            continue
        total = count_tokens([draft.text])[0] + builder.overhead
        if total <= length:
            return Sample(index, builder.finish(draft), draft.outputs, total)
        shortest = total if shortest is None else min(total, shortest)
    raise DoesNotFit(max(length + 1, needed if shortest is None else shortest))


def _try_draft(builder: SampleBuilder, index: int, size: int) -> Draft | None:
    try:
        return builder.draft(index, size)
    except NoDraft:
        return None
