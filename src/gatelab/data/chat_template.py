"""Chats as text: a Jinja template in a sandbox, as Hugging Face folders carry one, and where its answers are.

What a template does with a message is found by rendering a mark in its place, never by looking for its text. An answer
begins where the template's own prompt for it ends (``add_generation_prompt``) and goes on through the first special
token behind it, which ends the turn; without such a token through all that the template writes behind a last answer,
if it writes that behind the others too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gatelab.data.chats import ASSISTANT, Chat, Message
from gatelab.files import parse_json

TEMPLATE_FILE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ '' if loop.first else '\\n' }}"
    "{{ message.role }}: {{ message.content }}{{ eos_token if message.role == 'assistant' else '' }}"
    "{% endfor %}{{ '\\nassistant:' if add_generation_prompt else '' }}"
)
_MARKS = [chr(code) for code in range(0xE000, 0xF900)]  # for private use, so that hardly a text has them


class Piece(NamedTuple):
    """A part of a chat's text; ``is_content``: it is a message's own, and nothing in it is a special token."""

    text: str
    is_content: bool
    is_answer: bool


class ChatTemplate:
    """A template's source with the tokens that it writes as ``bos_token`` and ``eos_token``.

    One that does not begin with BOS gets it in front, because every document does. It can't read the clock
    (``strftime_now`` is undefined). Raises ``ValueError`` for a source that is no template.
    """

    def __init__(self, source: str, bos_token: str, eos_token: str | None = None):
        self.bos_token, self.eos_token = bos_token, eos_token or bos_token
        self.source = source
        self._template = _compiled(source)
        if not self._begins_with_bos():
            self.source = "{{ bos_token }}" + source
            self._template = _compiled(self.source)

    @classmethod
    def load(cls, path: Path | None, bos_token: str) -> ChatTemplate:
        """The template of a ``chat_template.jinja``, a ``tokenizer_config.json`` or a folder with one of them, with
        the EOS of the ``tokenizer_config.json`` there (BOS without one); ``PLAIN`` for ``None``.

        Raises ``ValueError`` when there is none, or none that can be read.
        """
        if path is None:
            return cls(PLAIN, bos_token)
        folder = path if path.is_dir() else path.parent
        config = tokenizer_config(folder)
        file = folder / TEMPLATE_FILE if path.is_dir() or path.name == TOKENIZER_CONFIG else path
        try:
            source = file.read_text(encoding="utf-8") if file.is_file() else _default_of(config.get("chat_template"))
            if source is not None:
                return cls(source, bos_token, token_of(config, "eos_token"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        raise ValueError(
            f"no chat template at {path}: give a {TEMPLATE_FILE} or a folder that has one, or leave "
            "data.chats.template out for a plain one"
        )

    def files(self) -> dict[str, str]:
        """What a folder has to hold for :meth:`load` to give the same template: names and contents."""
        config = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return {TEMPLATE_FILE: self.source, TOKENIZER_CONFIG: json.dumps(config, indent=1) + "\n"}

    def pieces(self, chat: Chat, special: re.Pattern[str]) -> list[Piece]:
        """The chat's text in pieces, of which ``special`` finds the special tokens in what the template wrote.

        Raises ``ValueError``, naming file, line and message, when the template refuses the chat, drops, repeats or
        alters a message, or asks for an answer in other words than those that stand before it.
        """
        messages = self._as_read(chat)
        texts = [self.source, *(message.content for message in messages)]
        mark = next(mark for mark in _MARKS if not any(mark in text for text in texts))
        marked = [Message(message.role, f"{mark}{number}{mark}") for number, message in enumerate(messages)]
        whole = self._render(chat, marked)
        spans = self._spans(chat, whole, mark)
        self._require_verbatim(chat, messages, marked, whole, spans)
        pieces: list[Piece] = []
        position = 0
        for number, (start, stop) in enumerate(spans):
            is_answer = messages[number].role == ASSISTANT
            begin = self._begin(chat, marked, number, whole, position) if is_answer else start
            end = stop + len(self._closing(chat, marked, number, whole[stop:], special)) if is_answer else stop
            pieces += [
                Piece(whole[position:begin], False, False),
                Piece(whole[begin:start], False, True),
                Piece(messages[number].content, True, is_answer),
                Piece(whole[stop:end], False, True),
            ]
            position = end
        pieces.append(Piece(whole[position:], False, False))
        return [piece for piece in pieces if piece.text]

    def _begins_with_bos(self) -> bool:
        """Whether a chat's text does; taken as given of a template that refuses this chat."""
        try:
            return self._text([Message("user", "Hello")]).startswith(self.bos_token)
        except Exception:  # a template is a program, and raises what it likes
            return True

    def _text(self, messages: Sequence[Message], asks: bool = False) -> str:
        return self._template.render(
            messages=[message._asdict() for message in messages],
            add_generation_prompt=asks,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
        )

    def _render(self, chat: Chat, messages: Sequence[Message], asks: bool = False) -> str:
        try:
            return self._text(messages, asks)
        except Exception as error:  # a template is a program, and raises what it likes
            raise ValueError(f"{chat.where}: the chat template refuses this chat: {error}") from None

    def _as_read(self, chat: Chat) -> list[Message]:
        """The messages, without the space around what is no answer if the template does not write it."""
        bare = [
            message if message.role == ASSISTANT else Message(message.role, message.content.strip())
            for message in chat.messages
        ]
        if bare == list(chat.messages) or self._render(chat, bare) != self._render(chat, chat.messages):
            return list(chat.messages)
        return bare

    def _spans(self, chat: Chat, whole: str, mark: str) -> list[tuple[int, int]]:
        """Where each message's mark stands in the text."""
        found = [(int(one[1]), one.span()) for one in re.finditer(f"{mark}([0-9]+){mark}", whole)]
        numbers = [number for number, _ in found]
        for number, message in enumerate(chat.messages):
            if numbers.count(number) != 1:
                done = "repeats" if number in numbers else "drops"
                raise ValueError(_fault(chat, number, f"the chat template {done} the content of", message))
        if numbers != sorted(numbers):
            raise ValueError(f"{chat.where}: the chat template writes the messages in another order; use another one")
        return [span for _, span in found]

    def _require_verbatim(
        self,
        chat: Chat,
        messages: Sequence[Message],
        marked: Sequence[Message],
        whole: str,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        """Raise ``ValueError`` unless the chat's text is that with the marks, with the contents in their place."""
        if self._render(chat, messages) == _filled(whole, spans, messages):
            return
        for number, (message, (start, stop)) in enumerate(zip(messages, spans, strict=True)):
            alone = [*marked[:number], message, *marked[number + 1 :]]
            if self._render(chat, alone) != whole[:start] + message.content + whole[stop:]:
                raise ValueError(_fault(chat, number, "the chat template alters", message))
        raise ValueError(f"{chat.where}: the chat template alters the messages; use another one")

    def _begin(self, chat: Chat, marked: Sequence[Message], number: int, whole: str, after: int) -> int:
        """Where an answer begins: at the end of the prompt for it."""
        prompt = self._render(chat, marked[:number], asks=True)
        if not whole.startswith(prompt) or len(prompt) < after:
            raise ValueError(
                f"{chat.where}, message {number + 1}: the chat template asks for this answer in other words than it "
                "writes before it, so that the model would be trained on another prompt than it gets; use another one"
            )
        return len(prompt)

    def _closing(
        self, chat: Chat, marked: Sequence[Message], number: int, behind: str, special: re.Pattern[str]
    ) -> str:
        """What ends the turn of an answer, of the text that stands behind it."""
        closing = self._render(chat, marked[: number + 1]).partition(marked[number].content)[2]
        end = special.search(closing)
        closing = closing if end is None else closing[: end.end()]
        return closing if behind.startswith(closing) else ""


class _Generation(Extension):
    """``{% generation %}`` tells other trainers where an answer is; here it is no more than what it encloses."""

    tags = {"generation"}  # noqa: RUF012 - as in jinja2

    def parse(self, parser: Any) -> Any:
        """The statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is no Jinja template: {error}") from None


def _filled(whole: str, spans: Sequence[tuple[int, int]], messages: Sequence[Message]) -> str:
    """The text with a message's content at each of the spans."""
    text, position = "", 0
    for (start, stop), message in zip(spans, messages, strict=True):
        text += whole[position:start] + message.content
        position = stop
    return text + whole[position:]


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """What a folder's ``tokenizer_config.json`` says, nothing without one; ``ValueError`` when it is damaged."""
    file = folder / TOKENIZER_CONFIG
    if not file.is_file():
        return {}
    try:
        content = parse_json(file.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is no JSON object; restore it, or give a {TEMPLATE_FILE} in another folder")
    return content


def token_of(config: dict[str, Any], name: str) -> str | None:
    """A token of a ``tokenizer_config.json``: a text, or an object with its ``content``."""
    found = config.get(name)
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def _default_of(found: Any) -> str | None:
    """The template in a ``tokenizer_config.json``: a text, or the one called default of a list of them."""
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get("default")
    return found if isinstance(found, str) else None


def _fault(chat: Chat, number: int, done: str, message: Message) -> str:
    shown = message.content if len(message.content) <= 60 else message.content[:60] + "..."
    return (
        f"{chat.where}, message {number + 1}: {done} {message.role}, {shown!r}; use a template that writes it as it is"
    )
