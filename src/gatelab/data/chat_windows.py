"""Whole chats packed into windows, of which only the assistant's answers are targets.

Notation: T the context, c the tokens of a chat, which begin with BOS. A chat takes len(c) - 1 places of one window:
inputs [c_0, ..., c_n-2], targets [c_1, ..., c_n-1], with ``IGNORED`` where the target is no part of an answer. Chats in
a window are documents of their own and don't see each other; what is left of it is padding. All tokens are in memory.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gatelab.data.chat_template import ChatTemplate, Piece
from gatelab.data.chats import read_chats
from gatelab.data.checksums import digest
from gatelab.data.loader import IGNORED, Batch, Epochs, rows_in_pieces
from gatelab.data.settings import ChatSettings, DataSettings
from gatelab.data.tokenizer import Tokenizer

PADDING = -1  # the document of padding, as the model's masks have it


class ChatTokens(NamedTuple):
    """The tokens of a chat, int64, and which of them are part of an answer, bool."""

    ids: np.ndarray
    is_answer: np.ndarray

    def cut(self, length: int) -> ChatTokens:
        """Its first tokens."""
        return ChatTokens(self.ids[:length], self.is_answer[:length])


class ChatWindows:
    """Chats of one split in windows of T tokens, packed best fit decreasing: the same for any seed and rank."""

    def __init__(self, chats: Sequence[ChatTokens], context: int):
        self.chats = chats
        self.context = context
        self.packed = pack([len(chat.ids) - 1 for chat in chats], context)

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def num_answer_tokens(self) -> int:
        """The targets of all windows together."""
        return sum(int(chat.is_answer.sum()) for chat in self.chats)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all tokens, of what is an answer, and of the windows."""
        found = hashlib.sha256(repr((self.context, self.packed)).encode())
        for chat in self.chats:
            found.update(len(chat.ids).to_bytes(8, "little") + chat.ids.astype("<i8").tobytes())
            found.update(chat.is_answer.tobytes())
        return found.hexdigest()

    def batch(self, numbers: Sequence[int | None]) -> Batch:
        """The windows of these numbers, with ``None`` for one of padding."""
        shape = (len(numbers), self.context)
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED)
        documents, document_ids = np.full(shape, PADDING), np.full(shape, -1)
        for row, number in enumerate(numbers):
            start = 0
            for document, which in enumerate([] if number is None else self.packed[number]):
                ids, is_answer = self.chats[which]
                places = slice(start, start := start + len(ids) - 1)
                inputs[row, places] = ids[:-1]
                targets[row, places] = np.where(is_answer[1:], ids[1:], IGNORED)
                documents[row, places] = document
                document_ids[row, places] = np.where(is_answer[1:], which, -1)
        return Batch(*map(torch.from_numpy, (inputs, targets, documents, document_ids)))


class ChatLoader:
    """Training batches of chats: ``batch(step)`` depends on the chats, the seed and the step alone.

    Each epoch reads every window once, in an order drawn from (seed, epoch), as :class:`TrainLoader` does.
    """

    def __init__(self, windows: ChatWindows, *, sequences_per_step: int, seed: int):
        self.context = windows.context
        self.sequences_per_step = sequences_per_step
        self.num_windows = len(windows)
        self._windows = windows
        self._epochs = Epochs(len(windows), seed)

    def batch(self, step: int, rank: int = 0, num_ranks: int = 1, pieces: int = 1) -> Batch:
        """The sequences of one rank at one step, as :meth:`TrainLoader.batch` gives them."""
        rows = rows_in_pieces(self.sequences_per_step, rank, num_ranks, pieces)
        batch = self._windows.batch(self._epochs.windows_at([step * self.sequences_per_step + row for row in rows]))
        return Batch(batch.inputs, batch.targets, batch.documents)


@dataclass(frozen=True)
class PreparedChats:
    """The chats that a run reads; ``fingerprint`` is a SHA-256 over the tokenizer, the template and all windows."""

    tokenizer: Tokenizer
    template: ChatTemplate
    train: ChatWindows
    heldout: ChatWindows
    fingerprint: str
    attribution: str

    @property
    def heldout_text_bytes(self) -> np.ndarray:
        """UTF-8 bytes of each held-out chat's answers, the tokens that end them written out; int64."""
        answers = [self.tokenizer.decode(chat.ids[chat.is_answer].tolist()) for chat in self.heldout.chats]
        return np.array([len(text.encode()) for text in answers], dtype=np.int64)


def prepare_chats(settings: DataSettings) -> PreparedChats:
    """Read, render, tokenize and pack the chats that the settings name.

    Raises ``ValueError`` as :func:`read_chats` and :class:`ChatTemplate` do, and, with counts, for chats longer than
    the context (unless they are to be cut) and for a split without chats.
    """
    wanted = settings.chats
    assert wanted is not None and settings.tokenizer.path is not None
    tokenizer = Tokenizer.load(Path(settings.tokenizer.path), settings.tokenizer.bos_token)
    template = ChatTemplate.load(None if wanted.template is None else Path(wanted.template), tokenizer.bos_token)
    if template.eos_token not in tokenizer.special_ids:
        raise ValueError(
            f"the chat template's eos_token {template.eos_token!r} is no special token of the tokenizer at "
            f"{settings.tokenizer.path}; give a template with its tokenizer_config.json, or without one to end with BOS"
        )
    ids = tokenizer.encode_batch(["a", "b"])
    if tokenizer.decode([*ids[0], *ids[1]]) != "ab":
        raise ValueError(
            f"the tokenizer at {settings.tokenizer.path} puts a space before each text, so that an answer would begin "
            "with one that nobody wrote; chats need a tokenizer without a prefix space"
        )
    chats = read_chats(Path(wanted.path))
    tokens = [tokens_of(template.pieces(chat, tokenizer.special_pattern), tokenizer) for chat in chats]
    for chat, one in zip(chats, tokens, strict=True):
        if one.ids[0] != tokenizer.bos_id:
            raise ValueError(
                f"{chat.where}: the chat template does not begin with {tokenizer.bos_token}; put it in front"
            )
    _require_room([len(one.ids) - 1 for one in tokens], [chat.where for chat in chats], settings)
    num_cut = sum(len(one.ids) > settings.context + 1 for one in tokens)
    splits: dict[bool, list[ChatTokens]] = {False: [], True: []}
    for chat, one in zip(chats, tokens, strict=True):
        cut = one.cut(settings.context + 1)
        if cut.is_answer.any():
            splits[chat.is_heldout(wanted.heldout_fraction)].append(cut)
    for is_heldout, split in splits.items():
        if not split:
            raise ValueError(
                f"the {'held-out' if is_heldout else 'training'} split of {wanted.path} is empty: of its {len(chats)} "
                f"chats none falls into it at data.chats.heldout_fraction={wanted.heldout_fraction:g}; give more chats "
                "or another fraction"
            )
    train, heldout = (ChatWindows(splits[is_heldout], settings.context) for is_heldout in (False, True))
    parts = [tokenizer.to_text(), *template.files().values(), train.fingerprint, heldout.fingerprint]
    return PreparedChats(
        tokenizer, template, train, heldout, digest(parts), _attribution(wanted, train, heldout, num_cut, len(chats))
    )


def tokens_of(pieces: Sequence[Piece], tokenizer: Tokenizer) -> ChatTokens:
    """The tokens of a chat's text. Special tokens are what the template wrote; a message's own text has none.

    Text is cut at special tokens, and where an answer begins or ends, nowhere else.
    """
    parts: list[tuple[bool, bool, str]] = []  # is it a special token, is it an answer, text
    for piece in pieces:
        place = 0
        for found in () if piece.is_content else tokenizer.special_pattern.finditer(piece.text):
            parts += [(False, piece.is_answer, piece.text[place : found.start()]), (True, piece.is_answer, found[0])]
            place = found.end()
        parts.append((False, piece.is_answer, piece.text[place:]))
    joined: list[tuple[bool, bool, str]] = []
    for (is_special, is_answer), group in groupby((part for part in parts if part[2]), key=lambda part: part[:2]):
        texts = [text for _, _, text in group]
        joined += [(is_special, is_answer, text) for text in (texts if is_special else ["".join(texts)])]
    encoded = iter(tokenizer.encode_batch([text for is_special, _, text in joined if not is_special]))
    ids = [[tokenizer.special_ids[text]] if is_special else next(encoded) for is_special, _, text in joined]
    is_answer = [np.full(len(some), answer) for some, (_, answer, _) in zip(ids, joined, strict=True)]
    return ChatTokens(np.concatenate(ids).astype(np.int64), np.concatenate(is_answer))


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Best fit decreasing: the longest first, each into the fullest window that it fits into; windows by first member.

    No length exceeds ``room``.
    """
    windows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room left and window, by room
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect_left(free, (lengths[number], -1))
        if place == len(free):
            windows.append([])
            left, window = room, len(windows) - 1
        else:
            left, window = free.pop(place)
        windows[window].append(number)
        insort(free, (left - lengths[number], window))
    return sorted(sorted(window) for window in windows)


def heldout_chat_batches(windows: ChatWindows, sequences: int) -> Iterator[Batch]:
    """All windows in their order, in batches of one fixed shape, the last filled up with padding."""
    numbers = [*range(len(windows)), *[None] * (-len(windows) % sequences)]
    for first in range(0, len(numbers), sequences):
        yield windows.batch(numbers[first : first + sequences])


def _require_room(lengths: Sequence[int], places: Sequence[str], settings: DataSettings) -> None:
    assert settings.chats is not None
    longer = [number for number, length in enumerate(lengths) if length > settings.context]
    if longer and settings.chats.too_long == "refuse":
        longest = max(longer, key=lambda number: lengths[number])
        raise ValueError(
            f"{len(longer)} of {len(lengths)} chats are longer than data.context={settings.context} tokens, the "
            f"longest ({places[longest]}) has {lengths[longest]}; raise data.context, or set data.chats.too_long=cut"
        )


def _attribution(wanted: ChatSettings, train: ChatWindows, heldout: ChatWindows, num_cut: int, num_chats: int) -> str:
    """What was read, for people: with the chats that were cut."""
    sentence = (
        f"chats of {wanted.path}: {len(train.chats):,} to train on with {train.num_answer_tokens:,} answer tokens in "
        f"{len(train):,} windows, {len(heldout.chats):,} held out"
    )
    if num_cut:
        lost = num_chats - len(train.chats) - len(heldout.chats)
        sentence += f"; {num_cut:,} were longer than {train.context:,} tokens and were cut, {lost:,} of them to nothing"
    return sentence
