"""Chats, templates as models carry them, and tokenizers in which a token is a byte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from gatelab.data.tokenizer import BOS_TOKEN, Tokenizer, train_tokenizer

TURN_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMING = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n\\n' }}"
    "{{- message.content | trim + '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}"
)
# An empty thought stands before the last answer alone, and what an answer says before </think> is dropped.
THINKING = (
    "{%- for message in messages %}{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SPACED = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}INST {{ message.content }} /INST"
    "{% else %}{% generation %} {{ message.content }} {{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


def byte_tokenizer(*special: str) -> Tokenizer:
    """BOS is 0, then the 256 bytes, then the further special tokens."""
    backend = tokenizers.Tokenizer.from_str(train_tokenizer(["a"], 257).to_text())
    backend.add_special_tokens(list(special))
    return Tokenizer(backend)


def turns(*contents: str, system: str | None = None) -> dict[str, list[dict[str, str]]]:
    """A line's object: user and assistant in turn."""
    first = [] if system is None else [{"role": "system", "content": system}]
    rest = [{"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)]
    return {"messages": first + rest}


def write_chats(path: Path, chats: Sequence[object]) -> Path:
    """A file with one chat a line."""
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    return path


def many_chats(count: int) -> list[dict[str, list[dict[str, str]]]]:
    """Short chats of different lengths, of one answer or two."""
    return [
        turns(*[f"Gate {number}?", f"It opens {number % 7} times." + " Yes." * (number % 3)] * (1 + number % 2))
        for number in range(count)
    ]


def shown(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Each token as text."""
    return [tokenizer.decode([token]).replace(BOS_TOKEN, "^") for token in ids]
