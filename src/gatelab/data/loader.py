"""Batches from token shards: training batches as a pure function of seed and step, held-out ones in reading order.

Notation: B sequences, T the context, s the stream of tokens, in which each document begins with BOS.

With BOS in every window, window w reads inputs [BOS, s_wT, ..., s_wT+T-2] and targets [s_wT, ..., s_wT+T-1]; without,
inputs [s_wT, ..., s_wT+T-1] and targets [s_wT+1, ..., s_wT+T]. Either way neighbouring windows share no target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from gatelab.data.shards import TokenShards
from gatelab.data.window_order import Mixture, window_order

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Sequences for one pass. ``targets`` hold ``IGNORED`` (-100) where nothing is scored.

    ``documents`` numbers the documents inside each window 0, 1, 2, ... for attention masks (``None``: no masks).
    ``document_ids`` says for each target of held-out data to which document of the whole set it belongs, -1 where
    nothing is scored (``None`` in training).
    """

    inputs: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    documents: Int[Tensor, "B T"] | None = None
    document_ids: Int[Tensor, "B T"] | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def rows(self, rows: Sequence[int]) -> Batch:
        """These of its sequences."""
        return self._each(lambda tensor: tensor[list(rows)])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(**{name: change(tensor) for name, tensor in vars(self).items() if tensor is not None})


class Epochs:
    """The endless sequence of epochs, each of which has every window once, in an order drawn from (seed, epoch)."""

    def __init__(self, num_windows: int, seed: int):
        self._num_windows = num_windows
        self._seed = seed
        self._orders: dict[int, Sequence[int] | np.ndarray] = {}

    def windows_at(self, positions: list[int]) -> list[int]:
        """The numbers of the windows at rising positions."""
        size = self._num_windows
        epochs = range(positions[0] // size, positions[-1] // size + 1)
        kept = {epoch: order for epoch, order in self._orders.items() if epoch in epochs}
        drawn = {epoch: window_order(size, self._seed, epoch) for epoch in epochs if epoch not in kept}
        self._orders = kept | drawn
        return [int(self._orders[position // size][position % size]) for position in positions]


class TrainLoader:
    """Training batches: ``batch(step)`` depends on the data, the seed and the step, and on nothing that came before.

    Each epoch reads every whole window once, in an order drawn from (seed, epoch); a step may end one epoch and begin
    the next. Tokens that don't fill a last window are left out. Memory: see :func:`window_order`. BOS targets are
    learned: they are the ends of documents.

    ``bos_id`` is the token put before every window, ``None`` for windows without one. With ``document_masks`` that
    token belongs to the window's first document. Raises ``ValueError`` when the data has less than one window.
    """

    def __init__(
        self,
        tokens: TokenShards,
        *,
        context: int,
        sequences_per_step: int,
        seed: int,
        bos_id: int | None,
        document_masks: bool = False,
    ):
        self.context = context
        self.sequences_per_step = sequences_per_step
        self.num_windows = (len(tokens) if bos_id is not None else len(tokens) - 1) // context
        if self.num_windows < 1:
            raise ValueError(
                f"the training split has {len(tokens)} tokens, less than one window of context={context}; "
                "take more text or a smaller context"
            )
        self._tokens = tokens
        self._epochs = Epochs(self.num_windows, seed)
        self._bos_id = bos_id
        self._document_masks = document_masks

    def batch(self, step: int, rank: int = 0, num_ranks: int = 1, pieces: int = 1) -> Batch:
        """The sequences of one rank at one step (from 0), those of each of the step's ``pieces`` after another.

        The ranks' sequences of a piece in order are that piece of the one-rank batch. Raises ``ValueError`` when a
        piece's sequences can't be split evenly over the ranks.
        """
        rows = rows_in_pieces(self.sequences_per_step, rank, num_ranks, pieces)
        first = step * self.sequences_per_step
        return self.windows([first + row for row in rows])

    def windows(self, positions: list[int]) -> Batch:
        """The windows at rising positions of the endless sequence of epochs."""
        numbers = self._epochs.windows_at(positions)
        windows = [_window(self._tokens, number, self.context, self._bos_id) for number in numbers]
        documents = [window.documents for window in windows] if self._document_masks else None
        return Batch(
            inputs=_stack([window.inputs for window in windows]),
            targets=_stack([window.targets for window in windows]),
            documents=None if documents is None else _stack(documents),
        )


class MixedLoader:
    """Training batches from several sources by weight; ``batch`` is as pure a function as that of one source.

    Position n of the endless sequence of windows belongs to the source that :class:`Mixture` draws for it, and is that
    source's next window: each source has epochs of its own. The sources agree in context, sequences and masks.
    """

    def __init__(self, sources: Mapping[str, TrainLoader], weights: Sequence[float], seed: int):
        self._sources = dict(sources)
        self._mixture = Mixture(list(self._sources), weights, seed)
        first = next(iter(self._sources.values()))
        self.context = first.context
        self.sequences_per_step = first.sequences_per_step

    def batch(self, step: int, rank: int = 0, num_ranks: int = 1, pieces: int = 1) -> Batch:
        """The sequences of one rank at one step, as :meth:`TrainLoader.batch` gives them."""
        rows = rows_in_pieces(self.sequences_per_step, rank, num_ranks, pieces)
        drawn = [self._mixture.at(step * self.sequences_per_step + row) for row in rows]
        found: list[Batch] = []
        order: list[int] = []
        for number, source in enumerate(self._sources.values()):
            own = [row for row, (which, _) in enumerate(drawn) if which == number]
            if own:
                found.append(source.windows([drawn[row][1] for row in own]))
                order += own
        back = torch.tensor(order).argsort()
        documents = [batch.documents for batch in found if batch.documents is not None]
        return Batch(
            inputs=torch.cat([batch.inputs for batch in found])[back],
            targets=torch.cat([batch.targets for batch in found])[back],
            documents=torch.cat(documents)[back] if documents else None,
        )

    def epochs(self, num_steps: int) -> dict[str, float]:
        """How often each source has been read through after so many steps, exactly."""
        counts = self._mixture.counts(num_steps * self.sequences_per_step)
        return {
            name: count / source.num_windows
            for (name, source), count in zip(self._sources.items(), counts, strict=True)
        }


def heldout_batches(
    tokens: TokenShards,
    *,
    context: int,
    sequences: int,
    bos_id: int | None,
    document_masks: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
) -> Iterator[Batch]:
    """All tokens in reading order, each scored exactly once, in batches of one fixed shape (sequences, context).

    BOS is not scored: it stands for a document's beginning, not for text. The last batch is filled up with windows
    that score nothing. Ranks get equally many batches, whose rows in order are the one-rank batch. Raises
    ``ValueError`` when the sequences can't be split evenly over the ranks.
    """
    rows = rows_of_rank(sequences, rank, num_ranks)
    num_windows = -(-(len(tokens) if bos_id is not None else len(tokens) - 1) // context)
    for first in range(0, num_windows, sequences):
        windows = [_window(tokens, first + row, context, bos_id) for row in rows]
        for window in windows:
            window.targets[window.is_bos] = IGNORED
            window.document_ids[window.is_bos] = -1
        yield Batch(
            inputs=_stack([window.inputs for window in windows]),
            targets=_stack([window.targets for window in windows]),
            documents=_stack([window.documents for window in windows]) if document_masks else None,
            document_ids=_stack([window.document_ids for window in windows]),
        )


def rows_of_rank(sequences: int, rank: int, num_ranks: int) -> range:
    """The rows of a batch that one rank has; ``ValueError`` when they can't be split evenly."""
    assert 0 <= rank < num_ranks, f"rank {rank} of {num_ranks}"
    if sequences % num_ranks:
        raise ValueError(
            f"{sequences} sequences can't be split evenly over {num_ranks} ranks; choose a multiple of {num_ranks}"
        )
    share = sequences // num_ranks
    return range(rank * share, (rank + 1) * share)


def rows_in_pieces(sequences: int, rank: int, num_ranks: int, pieces: int) -> list[int]:
    """The rows that one rank has of each of a batch's equal pieces; ``ValueError`` when they can't be split evenly."""
    size = sequences // pieces
    rows = rows_of_rank(size, rank, num_ranks)
    return [piece * size + row for piece in range(pieces) for row in rows]


@dataclass(frozen=True)
class _Window:
    """One window as int64 arrays of T entries; ``is_bos`` marks the targets that are BOS."""

    inputs: np.ndarray
    targets: np.ndarray
    is_bos: np.ndarray
    documents: np.ndarray
    document_ids: np.ndarray


def _window(tokens: TokenShards, number: int, context: int, bos_id: int | None) -> _Window:
    """Window ``number`` of the stream; whatever lies past the stream's end is filled up and never scored."""
    lead = 0 if bos_id is None else 1
    start, stop = number * context, min(number * context + context + 1 - lead, len(tokens))
    stream = tokens[start:stop].astype(np.int64)
    is_bos = tokens.starts_document(start, stop)
    ids = tokens.document_ids(start, stop)
    if bos_id is not None:
        stream = np.concatenate([[bos_id], stream])
        is_bos = np.concatenate([[True], is_bos])
        ids = np.concatenate([ids[:1], ids])
    return _Window(
        inputs=_filled(stream[:-1], context, 0),
        targets=_filled(stream[1:], context, IGNORED),
        is_bos=_filled(is_bos[1:], context, False),
        documents=_filled(ids[:-1] - ids[:1], context, int(ids[-1] - ids[0]) if len(ids) else 0),
        document_ids=_filled(ids[1:], context, -1),
    )


def _filled(values: np.ndarray, length: int, filling: int) -> np.ndarray:
    return np.concatenate([values, np.full(length - len(values), filling, dtype=values.dtype)])


def _stack(rows: list[np.ndarray]) -> Int[Tensor, "B T"]:
    return torch.from_numpy(np.stack(rows))
