"""Bigram-Backcopy (Guo et al., arXiv 2410.13835, section 2): a task in which one attention head must be able to rest.

A sequence is BOS, then a plain token drawn uniformly, then each token from the one before it: after a plain token x the
next is drawn from row x of a fixed bigram table, after a trigger t it is a copy of the token before t. A trigger
therefore always stands between two equal plain tokens, and only trigger queries need attention; on plain tokens a head
that copies does harm unless it attends to BOS or is gated shut.

We differ from the paper in the table. Theirs holds the character bigrams of tiny Shakespeare. Ours is drawn from a
seed, so that no text is needed: row x is Dirichlet(concentration * w), where w are Zipf weights w_i ~ 1 / i that all
rows share. At the defaults and T = 256, 39 % of the queries are triggers and the floor is 0.81 nats; the character
bigrams of the State of the Union addresses, measured in the same way, give 40 % and 0.72 nats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gatelab.data.loader import Batch, rows_in_pieces
from gatelab.data.settings import BigramBackcopySettings

BOS_ID = 0
FIRST_MEASURED_QUERY = 4


class BigramBackcopy:
    """Batches of the task, a pure function of seed and step, and the loss that no model can beat.

    Inputs are positions 0 to T-1 of a sequence of T+1 tokens, targets positions 1 to T; every target is scored.
    """

    def __init__(self, settings: BigramBackcopySettings, *, context: int, sequences_per_step: int, seed: int):
        self.settings = settings
        self.context = context
        self.sequences_per_step = sequences_per_step
        self.triggers = range(1, 1 + settings.num_triggers)
        self.table = bigram_table(settings)
        self._seed = seed

    @property
    def vocab_size(self) -> int:
        return self.settings.vocab_size

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the bigram table and the triggers."""
        return hashlib.sha256(self.table.astype("<f8").tobytes() + bytes(self.triggers)).hexdigest()

    def batch(self, step: int, rank: int = 0, num_ranks: int = 1, pieces: int = 1) -> Batch:
        """The sequences of one rank at one training step, those of each of its ``pieces`` after another.

        The ranks' sequences of a piece in order are that piece of the one-rank batch.
        """
        return self._batch([self._seed, 0, step], rows_in_pieces(self.sequences_per_step, rank, num_ranks, pieces))

    def heldout_batches(self, num_batches: int, rank: int = 0, num_ranks: int = 1) -> Iterator[Batch]:
        """Batches from draws that no training step uses."""
        for number in range(num_batches):
            yield self._batch([self._seed, 1, number], rows_in_pieces(self.sequences_per_step, rank, num_ranks, 1))

    def is_trigger(self, tokens: Int[Tensor, "*B T"]) -> Bool[Tensor, "*B T"]:
        """Where the token is a trigger; of the inputs: the queries that must copy back."""
        return (tokens >= self.triggers.start) & (tokens < self.triggers.stop)

    def query_sets(self, tokens: Int[Tensor, "B T"]) -> dict[str, Bool[Tensor, "B T"]]:
        """The queries from the fifth on that must copy (``trigger``), and those that need nothing (``other``).

        The first four see so few keys that the first token gets much of anyone's attention.
        """
        is_late = torch.arange(tokens.shape[1], device=tokens.device) >= FIRST_MEASURED_QUERY
        triggers = self.is_trigger(tokens)
        return {"trigger": triggers & is_late, "other": ~triggers & is_late}

    def entropy_floor(self) -> float:
        """The mean entropy of a target given everything before it, over a window's T targets, in nats.

        Exact. With P the table, p_n(x) the probability that position n holds the plain token x, and t(x) the mass of
        triggers in row x: p_n+1(y) = sum_x p_n(x) P(x, y) + p_n-1(y) t(y), and position n+1 adds
        sum_x p_n(x) H(P(x, .)); copies add nothing, and the first plain token adds the logarithm of their number.
        """
        plain = slice(self.triggers.stop, None)
        rows = self.table[plain]
        to_plain, to_trigger = rows[:, plain], rows[:, self.triggers.start : self.triggers.stop].sum(axis=1)
        row_entropy = -(rows * np.log(rows, out=np.zeros_like(rows), where=rows > 0)).sum(axis=1)
        num_plain = len(rows)
        before, now = np.zeros(num_plain), np.full(num_plain, 1 / num_plain)
        total = np.log(num_plain)
        for _ in range(self.context - 1):
            total += now @ row_entropy
            before, now = now, now @ to_plain + before * to_trigger
        return float(total / self.context)

    def _batch(self, seed: list[int], rows: list[int]) -> Batch:
        draws = np.random.default_rng(seed).random((self.sequences_per_step, self.context))[rows]
        sequences = torch.from_numpy(self._sequences(draws))
        return Batch(inputs=sequences[:, :-1], targets=sequences[:, 1:])

    def _sequences(self, draws: np.ndarray) -> np.ndarray:
        """Sequences of T+1 tokens from uniform draws of shape (sequences, T), one draw for each token after BOS."""
        first_plain = self.triggers.stop
        cumulative = np.cumsum(self.table, axis=1)
        cumulative[:, -1] = 1.0
        sequences = np.full((len(draws), self.context + 1), BOS_ID, dtype=np.int64)
        sequences[:, 1] = first_plain + (draws[:, 0] * (self.vocab_size - first_plain)).astype(np.int64)
        for position in range(2, self.context + 1):
            last = sequences[:, position - 1]
            drawn = (cumulative[last] <= draws[:, position - 1, None]).sum(axis=1)
            copies = (last >= self.triggers.start) & (last < first_plain)
            sequences[:, position] = np.where(copies, sequences[:, position - 2], drawn)
        return sequences


def bigram_table(settings: BigramBackcopySettings) -> np.ndarray:
    """The transition probabilities, float64 of shape (V, V); BOS is never drawn, rows 0 to num_triggers are unused."""
    rng = np.random.default_rng(settings.seed)
    size = settings.vocab_size - 1
    weights = 1 / np.arange(1, size + 1)
    table = np.zeros((settings.vocab_size, settings.vocab_size))
    table[:, 1:] = rng.dirichlet(settings.concentration * weights / weights.sum(), size=settings.vocab_size)
    return table
