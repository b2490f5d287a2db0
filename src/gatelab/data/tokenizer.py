"""Text to token ids and back: a byte-level BPE trained here, or any existing ``tokenizer.json``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from gatelab.settings import nearest

BOS_TOKEN = "<|bos|>"


class Tokenizer:
    """A ``tokenizers`` tokenizer with one special token, BOS, that starts each document.

    Text never becomes a special token: the characters ``<|bos|>`` inside a document are encoded as plain text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, bos_token: str = BOS_TOKEN):
        special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
        if bos_token not in special:
            listed = nearest(bos_token, special) if special else "it has none"
            raise ValueError(f"the tokenizer has no special token {bos_token!r} to start documents with; {listed}")
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token = bos_token

    @classmethod
    def from_text(cls, text: str, bos_token: str = BOS_TOKEN) -> Tokenizer:
        """Read the content of a ``tokenizer.json``; ``ValueError`` when it is not one."""
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"not a readable tokenizer.json: {str(error).partition(chr(10))[0]}") from None
        return cls(backend, bos_token)

    @classmethod
    def load(cls, path: Path, bos_token: str = BOS_TOKEN) -> Tokenizer:
        """Read a ``tokenizer.json`` or the folder that has one; ``ValueError`` names the file when it can't be read."""
        file = tokenizer_file(path)
        try:
            return cls.from_text(file.read_text(encoding="utf-8"), bos_token)
        except (ValueError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: {error}") from None

    @property
    def vocab_size(self) -> int:
        """The smallest vocabulary size that holds every id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def bos_id(self) -> int:
        """The id of the token that starts each document; 0 in a tokenizer trained here."""
        found = self._backend.token_to_id(self.bos_token)
        assert found is not None
        return found

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The id of each special token."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """What finds a special token that is written out, the longest that fits."""
        return re.compile("|".join(map(re.escape, sorted(self.special_ids, key=len, reverse=True))))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without BOS or any other special token."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens written out."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def to_text(self) -> str:
        """The content of its ``tokenizer.json``."""
        return self._backend.to_str(pretty=True)


def tokenizer_file(path: Path) -> Path:
    """The ``tokenizer.json`` that a path means, itself or inside the folder; ``ValueError`` when there is none."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"no tokenizer at {path}: give a tokenizer.json or a folder that has one")
    return file


def train_tokenizer(texts: Iterable[str], vocab_size: int, bos_token: str = BOS_TOKEN) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` entries: BOS (id 0), the 256 bytes, then merges by frequency.

    Every text round-trips exactly. Equal texts give equal tokenizers. ``ValueError`` when there is no text.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[bos_token],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = iter(texts)
    first = next(texts, None)
    if first is None:
        raise ValueError("there is no text to train a tokenizer on: the training split is empty")
    backend.train_from_iterator(chain([first], texts), trainer)
    return Tokenizer(backend, bos_token)
