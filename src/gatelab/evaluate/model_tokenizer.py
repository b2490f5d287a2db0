"""One face for the tokenizers of GateLab runs and of Hugging Face models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gatelab.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelTokenizer:
    """Text to ids and back, without special tokens: characters such as ``<s>`` in a text stay plain text.

    ``bos_id`` starts a sequence, and is ``None`` when the model has no such token. ``num_bos_added`` counts how many of
    them the tokenizer puts in front by itself (never used here); 2 is a known fault of some of them. ``source`` is the
    tokenizer that this one stands for.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    bos_id: int | None
    num_bos_added: int
    vocab_size: int
    source: Any = None

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer puts BOS in front by itself."""
        return self.num_bos_added > 0

    def decode_one(self, token: int) -> str:
        """The text of one id, special tokens written out."""
        return self.decode([token])


def from_gatelab(tokenizer: Tokenizer) -> ModelTokenizer:
    """The tokenizer of a run; its BOS is added by whoever packs windows."""
    return ModelTokenizer(
        encode=lambda text: tokenizer.encode_batch([text])[0],
        decode=tokenizer.decode,
        bos_id=tokenizer.bos_id,
        num_bos_added=0,
        vocab_size=tokenizer.vocab_size,
        source=tokenizer,
    )


def from_hugging_face(tokenizer: Any) -> ModelTokenizer:
    """The tokenizer of a Hugging Face model."""
    bos_id = tokenizer.bos_token_id
    beginning = tokenizer("a", verbose=False)["input_ids"]
    others = (number for number, token in enumerate(beginning) if token != bos_id)
    return ModelTokenizer(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        bos_id=bos_id,
        num_bos_added=0 if bos_id is None else next(others, len(beginning)),
        vocab_size=len(tokenizer),
        source=tokenizer,
    )
