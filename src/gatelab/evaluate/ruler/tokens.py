"""Exact token counts for many texts, the ids of a prompt, and tokenizers by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gatelab.data.tokenizer import Tokenizer
from gatelab.evaluate.hugging_face import load_tokenizer
from gatelab.evaluate.model_tokenizer import ModelTokenizer, from_gatelab
from gatelab.evaluate.ruler.prompts import PromptName

CHARACTERS_AT_ONCE = 4_000_000

CountTokens = Callable[[Sequence[str]], list[int]]


def counter(tokenizer: ModelTokenizer) -> CountTokens:
    """A function from texts to their numbers of tokens, without BOS, each text encoded whole.

    Special tokens that a text spells out count as one token, as in the reference, when the tokenizer is Hugging Face's.
    """
    source = tokenizer.source
    if isinstance(source, Tokenizer):
        return lambda texts: [len(ids) for ids in source.encode_batch(texts)]
    backend = getattr(source, "backend_tokenizer", None)
    if backend is None:
        return lambda texts: [len(encode_prompt(tokenizer, text, "chat")) for text in texts]
    return lambda texts: list(_count_with_backend(backend, texts))


def encode_prompt(tokenizer: ModelTokenizer, text: str, prompt: PromptName) -> list[int]:
    """The ids of a sample's input, without BOS. In a chat prompt the template's special tokens are such tokens; in a
    base prompt every character is plain text."""
    if prompt == "base":
        return tokenizer.encode(text)
    return tokenizer.source.encode(text, add_special_tokens=False, verbose=False)


def tokenizer_sha256(tokenizer: ModelTokenizer) -> str:
    """What a tokenizer makes of a text, as a SHA-256 of its rules, or of its vocabulary if it has no others to show."""
    source = tokenizer.source
    if isinstance(source, Tokenizer):
        rules = source.to_text()
    elif getattr(source, "backend_tokenizer", None) is not None:
        rules = source.backend_tokenizer.to_str()
    else:
        rules = json.dumps([type(source).__name__, sorted(source.get_vocab().items())])
    return hashlib.sha256(rules.encode()).hexdigest()


def open_tokenizer(name: str) -> ModelTokenizer:
    """The tokenizer of a run or prepared folder (only ``tokenizer.json``), a Hugging Face folder, a GGUF file or a
    folder with one, or a hub name; ``ValueError`` when there is none."""
    path = Path(name)
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return load_tokenizer(str(files[0].parent), gguf_file=files[0].name)
    is_ours = path.suffix == ".json" or (path / "tokenizer.json").is_file()
    if is_ours and not any((path / other).is_file() for other in ("tokenizer_config.json", "config.json")):
        return from_gatelab(Tokenizer.load(path))
    return load_tokenizer(name)


def _count_with_backend(backend: Any, texts: Sequence[str]) -> Iterator[int]:
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    for batch in _batches(texts):
        yield from map(len, backend.encode_batch_fast(batch, add_special_tokens=False))


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts of at most so many characters together, which bounds the memory of their encodings."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and characters + len(text) > CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch
