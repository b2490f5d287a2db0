"""The text that a model is examined on: windows of tokens from a file or a corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from gatelab.data.corpora import documents
from gatelab.data.settings import CorpusSettings
from gatelab.evaluate.model_tokenizer import ModelTokenizer

SHORTEST = 64
BETWEEN_DOCUMENTS = "\n\n"


class Windows(NamedTuple):
    """``tokens`` to measure and, when asked for, ``calibration`` from later text that shares nothing with them.

    ``context`` says what they are, as plain values: text, windows asked for and made, BOS policy, a SHA-256 of the ids.
    """

    tokens: Int[Tensor, "N T"]
    calibration: Int[Tensor, "M T"] | None
    context: dict[str, Any]


def file_text(path: Path) -> CorpusSettings:
    """A text file, or files, read whole (.txt, .jsonl with a field ``text``, .parquet)."""
    return CorpusSettings(name="files", path=str(path), heldout_fraction=1.0)


def read_windows(
    text: CorpusSettings,
    tokenizer: ModelTokenizer,
    cache: Path,
    *,
    length: int = 4096,
    samples: int = 1,
    calibration_samples: int = 0,
    max_context: int | None = None,
    bos: bool = True,
) -> Windows:
    """The first ``samples`` windows of ``length`` tokens of a text's held-out split, then those for calibration.

    Documents follow one another with an empty line between them. Each window starts with exactly one BOS if the model
    has such a token, whether or not its tokenizer would add one; with none if ``bos`` is False. A text shorter than one
    window gives one that is as long as the text. Raises ``ValueError`` for a text shorter than 64 tokens, for a
    ``length`` below that or above ``max_context``, and when calibration needs more text than there is.
    """
    if length < SHORTEST:
        raise ValueError(f"length={length} is below {SHORTEST} tokens, where uniform attention looks like a sink too")
    if max_context is not None and length > max_context:
        raise ValueError(
            f"length={length} is above the {max_context} tokens that the model was made for; take at most that"
        )
    prefix = [tokenizer.bos_id] if bos and tokenizer.bos_id is not None else []
    content = length - len(prefix)
    ids = _first_tokens(text, tokenizer, cache, content * (samples + calibration_samples))
    if len(prefix) + len(ids) < SHORTEST:
        raise ValueError(
            f"the text {text.label} has {len(ids)} tokens; give one of at least {SHORTEST}, because in a shorter one "
            "uniform attention looks like a sink too"
        )
    content = min(content, len(ids))
    found = min(len(ids) // content, samples + calibration_samples)
    measured = min(samples, found - calibration_samples)
    if measured < 1:
        raise ValueError(
            f"the text {text.label} has {len(ids)} tokens, too few for {calibration_samples} windows of {length} "
            "tokens to calibrate on beside one to measure; give a longer text or a smaller length"
        )
    starts = range(0, content * (measured + calibration_samples), content)
    rows = torch.tensor([prefix + ids[start : start + content] for start in starts])
    tokens, calibration = rows[:measured], rows[measured:] if calibration_samples else None
    asked = {"length_asked_for": length, "samples_asked_for": samples}
    return Windows(tokens, calibration, {"text": text.label, **asked, **_describe(tokens, tokenizer, bos)})


def _first_tokens(text: CorpusSettings, tokenizer: ModelTokenizer, cache: Path, count: int) -> list[int]:
    """The first ``count`` ids of a text, or all that there are."""
    ids: list[int] = []
    for piece in _pieces(text, cache):
        ids += tokenizer.encode(piece)
        if len(ids) >= count:
            break
    return ids[:count]


def _pieces(text: CorpusSettings, cache: Path) -> Iterator[str]:
    separator = ""
    for document in documents(text, "heldout", cache):
        yield separator + document.text
        separator = BETWEEN_DOCUMENTS


def _describe(tokens: Int[Tensor, "N T"], tokenizer: ModelTokenizer, bos: bool) -> dict[str, Any]:
    return {
        "samples": tokens.shape[0],
        "length": tokens.shape[1],
        "tokens_sha256": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        "bos": _bos_policy(tokenizer, bos),
    }


def _bos_policy(tokenizer: ModelTokenizer, bos: bool) -> str:
    if tokenizer.bos_id is None:
        return "none: the model's tokenizer has no BOS"
    own = {0: "adds none", 1: "adds one"}.get(tokenizer.num_bos_added, f"adds {tokenizer.num_bos_added}")
    token = f"{tokenizer.decode_one(tokenizer.bos_id)!r} (id {tokenizer.bos_id})"
    used = f"one, {token}, at the start of each window" if bos else f"none, as asked for, though {token} is there"
    return f"{used}; the tokenizer by itself {own}"
