"""Windows of a text in which some tokens are hidden, to be found from both sides (BERT, Devlin et al. 1810.04805).

Notation: T the context, V the model's vocabulary. A window is [CLS], T - 2 tokens of the stream, [SEP]; each document's
start in the stream is read as [SEP] too, so that documents are packed as RoBERTa packs them (Liu et al. 1907.11692,
"full sentences"). [CLS] is the tokenizer's BOS. [SEP] and [MASK] are the last two ids of the vocabulary, V - 2 and
V - 1, which the tokenizer leaves free.

Each token of the text is chosen with one probability, independently; of a window without a chosen token the one with
the least draw is. Of the chosen ones, which alone are targets, a share is read as [MASK], a share as a token drawn
evenly from those of the tokenizer without BOS, and the rest as it is.

We differ from BERT: there are no pairs of sentences and no prediction of the next one, and BERT chooses an exact share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from gatelab.data.loader import IGNORED, Batch, MixedLoader, TrainLoader, rows_in_pieces
from gatelab.data.settings import MaskingSettings
from gatelab.data.shards import TokenShards
from gatelab.data.tokenizer import Tokenizer

_TRAINING, _HELDOUT = 0, 1  # what draws are for


class Vocabulary(NamedTuple):
    """The ids that masked windows are made of: ``cls`` is BOS; a text's tokens are below ``num_text_ids``."""

    cls: int
    sep: int
    mask: int
    num_text_ids: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
        """The ids in a model's vocabulary; ``ValueError`` when the tokenizer leaves none for [SEP] and [MASK]."""
        needed = tokenizer.vocab_size + 2
        if vocab_size < needed:
            raise ValueError(
                f"model.vocab_size={vocab_size} is smaller than {needed}: the tokenizer's {tokenizer.vocab_size}, "
                "[SEP] and [MASK]; raise model.vocab_size, or take a smaller tokenizer"
            )
        return cls(tokenizer.bos_id, vocab_size - 2, vocab_size - 1, tokenizer.vocab_size)


class MaskedLoader:
    """Training batches of masked windows: ``batch(step)`` depends on the data, the seed and the step alone.

    The text of each window is that of ``texts``, a loader whose context is T - 2. What is chosen is drawn from (seed,
    step, row of the batch), so that every epoch hides other tokens and neither ranks nor a resumed run change any.
    """

    def __init__(self, texts: TrainLoader | MixedLoader, settings: MaskingSettings, ids: Vocabulary, seed: int):
        self.context = texts.context + 2
        self.sequences_per_step = texts.sequences_per_step
        self._texts = texts
        self._settings = settings
        self._ids = ids
        self._seed = seed

    def batch(self, step: int, rank: int = 0, num_ranks: int = 1, pieces: int = 1) -> Batch:
        """The sequences of one rank at one step, as :meth:`TrainLoader.batch` gives them."""
        rows = rows_in_pieces(self.sequences_per_step, rank, num_ranks, pieces)
        texts = self._texts.batch(step, rank, num_ranks, pieces).targets.numpy()
        windows = [
            masked_window(text, self._settings, self._ids, [_TRAINING, self._seed, step, row])
            for row, text in zip(rows, texts, strict=True)
        ]
        return _stacked(windows)


def masked_heldout_batches(
    tokens: TokenShards, settings: MaskingSettings, ids: Vocabulary, *, context: int, sequences: int
) -> Iterator[Batch]:
    """All whole windows in reading order, in batches of one fixed shape (sequences, context).

    What is chosen is drawn from the number of the window alone: all runs, whatever their seed, are asked for the same
    tokens. The last batch is filled up with windows that score nothing; text that fills no window is left out.
    """
    size = context - 2
    num_windows = len(tokens) // size
    for first in range(0, num_windows, sequences):
        windows, document_ids = [], np.full((sequences, context), -1)
        for row in range(sequences):
            number = min(first + row, num_windows - 1)
            start, stop = number * size, (number + 1) * size
            text = tokens[start:stop].astype(np.int64)
            inputs, targets = masked_window(text, settings, ids, [_HELDOUT, number])
            if first + row < num_windows:
                of_text = np.where(targets[1:-1] == IGNORED, -1, tokens.document_ids(start, stop))
                document_ids[row, 1:-1] = of_text
            else:
                targets[:] = IGNORED
            windows.append((inputs, targets))
        batch = _stacked(windows)
        yield Batch(batch.inputs, batch.targets, document_ids=torch.from_numpy(document_ids))


def masked_window(
    text: np.ndarray, settings: MaskingSettings, ids: Vocabulary, seed: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, int64 of T entries, of the window around T - 2 tokens of a stream."""
    draws = np.random.default_rng(seed)
    is_text = text != ids.cls
    lots, kinds = draws.random((2, len(text)))
    replacements = draws.integers(ids.num_text_ids - 1, size=len(text))
    replacements += replacements >= ids.cls
    chosen = is_text & (lots <= max(settings.probability, lots[is_text].min(initial=1.0)))
    plain = np.where(is_text, text, ids.sep)
    replaced = np.where(kinds < settings.masked + settings.random, replacements, plain)
    replaced = np.where(kinds < settings.masked, ids.mask, replaced)
    inputs = np.concatenate([[ids.cls], np.where(chosen, replaced, plain), [ids.sep]])
    targets = np.concatenate([[IGNORED], np.where(chosen, text, IGNORED), [IGNORED]])
    return inputs, targets


def _stacked(windows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batch:
    inputs, targets = (torch.from_numpy(np.stack(parts)) for parts in zip(*windows, strict=True))
    return Batch(inputs, targets)
