"""Loss by position: how well a token is predicted from the p tokens before it.

Notation: N texts, T the length read of each; position p counts the tokens before a token, BOS included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from gatelab.data.shards import TokenShards
from gatelab.evaluate.models import OpenedModel
from gatelab.model.decoder import Decoder
from gatelab.model.perplexity import token_nats

RESAMPLES = 2000
HEAD_CHUNK = 1024
FEWEST_TEXTS = 2


class Texts(NamedTuple):
    """Rows of token ids, and whether each is the beginning of one document, or documents one after another."""

    rows: list[list[int]]
    are_documents: bool


class PositionLosses(NamedTuple):
    """``nats`` of the token at each position of each text, 0 where it is not ``scored``."""

    nats: Float64[Tensor, "N T"]
    scored: Bool[Tensor, "N T"]


class Bucket(NamedTuple):
    """A figure in nats per token over positions ``start`` to ``stop`` - 1, with its 95 % interval over texts.

    The interval is ``None`` with a single text.
    """

    start: int
    stop: int
    nats: float
    low: float | None
    high: float | None
    tokens: int


def held_out_texts(tokens: TokenShards, bos_id: int, length: int, count: int) -> Texts:
    """The beginnings of the first ``count`` documents of at least ``length`` tokens.

    Where fewer than two are that long, rows of documents one after another in reading order instead, each row starting
    with BOS as training windows do. Raises ``ValueError`` for a text shorter than one row.
    """
    if documents := _long_documents(tokens, length, count):
        return Texts(documents, are_documents=True)
    content = length - 1
    starts = range(0, min(count * content, len(tokens) - content + 1), content)
    rows = [[bos_id, *tokens[start : start + content].tolist()] for start in starts]
    if not rows:
        raise ValueError(
            f"the held-out text has {len(tokens)} tokens, less than one row of {length}; hold out more text, or take a "
            "smaller context"
        )
    return Texts(rows, are_documents=False)


@torch.no_grad()
def position_losses(opened: OpenedModel, texts: Sequence[Sequence[int]], length: int) -> PositionLosses:
    """Cross-entropy of each token of the first ``length`` tokens of each text; BOS, and what is not there, is not
    scored.

    Texts are read one by one, and logits are never held for more than ``HEAD_CHUNK`` tokens, but of a model with a
    recurrent state. Raises ``ValueError`` for a ``length`` beyond what the model was made for.
    """
    if opened.max_context is not None and length > opened.max_context:
        raise ValueError(
            f"{opened.name} was made for {opened.max_context} tokens, not {length}; take fewer, or extend its context"
        )
    nats = torch.zeros(len(texts), length, dtype=torch.float64)
    scored = torch.zeros(len(texts), length, dtype=torch.bool)
    device = next(opened.model.parameters()).device
    for number, text in enumerate(texts):
        ids = torch.tensor(text[:length], device=device)
        nats[number, 1 : len(ids)] = _nats(opened, ids)
        scored[number, 1 : len(ids)] = True if opened.tokenizer.bos_id is None else ids[1:] != opened.tokenizer.bos_id
    return PositionLosses(nats.where(scored, 0.0), scored)


def by_position(losses: PositionLosses, seed: int = 0) -> list[Bucket]:
    """Mean loss in buckets of positions [1, 2), [2, 4), [4, 8) ..., with a bootstrap over texts."""
    return list(_bootstrapped(losses, losses.nats, seed))


def difference_by_position(losses: PositionLosses, before: PositionLosses, seed: int = 0) -> list[Bucket]:
    """Mean difference of two models on the same texts, the second subtracted, in the same buckets, paired."""
    assert torch.equal(losses.scored, before.scored), "differences are taken on the same texts"
    return list(_bootstrapped(losses, losses.nats - before.nats, seed))


def _long_documents(tokens: TokenShards, length: int, count: int) -> list[list[int]]:
    """The first tokens of long documents; none where there are fewer than an interval needs."""
    starts = torch.from_numpy(tokens.starts_document(0, len(tokens))).nonzero()[:, 0].tolist()
    sizes = [stop - start for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True)]
    long = [start for start, size in zip(starts, sizes, strict=True) if size >= length][:count]
    if len(long) < min(count, FEWEST_TEXTS):
        return []
    return [tokens[start : start + length].tolist() for start in long]


def _nats(opened: OpenedModel, ids: Tensor) -> Float[Tensor, "P"]:
    """Cross-entropy of all tokens but the first."""
    inputs, targets = ids[None, :-1], ids[1:]
    nats, done = [], 0
    for logits in _logits(opened.model, inputs):
        nats.append(token_nats(logits, targets[None, done : done + logits.shape[1]]))
        done += logits.shape[1]
    return torch.cat(nats, dim=1)[0].double().cpu()


def _logits(model: Any, inputs: Int[Tensor, "1 P"]) -> Iterator[Float[Tensor, "1 _ V"]]:
    """Logits of piece after piece. A model of transformers reads by pieces, through its cache; a recurrent state would
    be lost between them (Jamba), so such a model reads all at once."""
    if isinstance(model, Decoder):
        for state in model.hidden(inputs).state.split(HEAD_CHUNK, dim=1):
            yield model.logits(state)
    elif inputs.shape[1] <= HEAD_CHUNK or model._is_stateful:
        yield model(inputs).logits
    else:
        cache = None
        for piece in inputs.split(HEAD_CHUNK, dim=1):
            output = model(piece, cache=cache, use_cache=True)
            cache = output.cache
            yield output.logits


def _bootstrapped(losses: PositionLosses, figures: Float64[Tensor, "N T"], seed: int) -> Iterator[Bucket]:
    """Sum of figures over scored tokens, of all texts and of texts drawn with replacement."""
    num_texts, length = figures.shape
    draws = torch.randint(num_texts, (RESAMPLES, num_texts), generator=torch.Generator().manual_seed(seed))
    start = 1
    while start < length:
        stop = min(2 * start, length)
        sums, counts = figures[:, start:stop].sum(1), losses.scored[:, start:stop].sum(1).double()
        if counts.any():
            means = sums[draws].sum(1) / counts[draws].sum(1)
            ends = means.nanquantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
            low, high = ends if num_texts > 1 else (None, None)
            yield Bucket(start, stop, float(sums.sum() / counts.sum()), low, high, int(counts.sum()))
        start = stop
