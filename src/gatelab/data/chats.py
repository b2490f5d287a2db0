"""Chats from JSON Lines: an object with ``messages`` on each line, each message with a ``role`` and its ``content``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from gatelab.data.corpora import is_heldout
from gatelab.data.text_files import Document, json_lines, well_formed
from gatelab.settings import nearest

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT)
FORM = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


class Message(NamedTuple):
    """One turn."""

    role: str
    content: str


class Chat(NamedTuple):
    """A chat with at least one answer; ``where`` names its file and line."""

    where: str
    messages: tuple[Message, ...]

    def is_heldout(self, fraction: float) -> bool:
        """Whether the chat is held out, by a hash of its text: equal chats are on one side."""
        text = "\0".join(part for message in self.messages for part in message)
        return is_heldout(Document(None, text), fraction)


def read_chats(path: Path) -> list[Chat]:
    """The chats of a file in its order; other fields of a line than ``messages`` are not looked at.

    Raises ``ValueError``, naming file and line, for what is no chat: an unknown role or field, content that is no text,
    a system turn behind the first place, an answer to nothing, no answer at all; and for a file without chats.
    """
    if not path.is_file():
        raise ValueError(f"there is no file of chats at {path}; give a .jsonl file with lines such as {FORM}")
    chats = [_chat(row, f"{path}, line {number}") for number, row in json_lines(path)]
    if not chats:
        raise ValueError(f"{path} has no chats: it is empty; write lines such as {FORM}")
    return chats


def _chat(row: Any, where: str) -> Chat:
    found = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"{where} has no list of messages; a line is an object such as {FORM}")
    messages = tuple(_message(one, f"{where}, message {number}") for number, one in enumerate(found, start=1))
    roles = [message.role for message in messages]
    if "system" in roles[1:]:
        raise ValueError(
            f"{where}, message {roles.index('system', 1) + 1} is a system turn, and only a chat's first can be one"
        )
    if ASSISTANT not in roles:
        raise ValueError(f"{where} has no answer: none of its messages has the role {ASSISTANT}; leave the line out")
    if roles.index(ASSISTANT) == roles.count("system"):
        raise ValueError(f"{where} begins with an answer; a user turn has to stand before it")
    return Chat(where, messages)


def _message(found: Any, where: str) -> Message:
    if not isinstance(found, dict) or not {"role", "content"} <= found.keys():
        raise ValueError(f"{where} has no role and content; a message has both")
    role, content = found["role"], found["content"]
    if role not in ROLES:
        raise ValueError(f"{where} has the unknown role {role!r}; {nearest(str(role), ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"{where} has content of type {type(content).__name__}; only text can be trained on")
    if not content.strip():
        raise ValueError(f"{where}, of {role}, is empty; leave out the message or the line")
    further = [key for key, value in found.items() if key not in ("role", "content") and value is not None]
    if further:
        raise ValueError(
            f"{where} has the field {further[0]!r}, which would be lost; a message has role and content alone"
        )
    return Message(role, well_formed(content))
