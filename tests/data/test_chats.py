"""What a file of chats may hold, and the sentence for what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_chats import many_chats, turns, write_chats

from gatelab.data.chats import Message, read_chats


def test_lines_become_chats_with_their_place(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    write_chats(file, [turns("Hi", "Yes", system="Be brief.") | {"source": "hand"}, turns("A", "B", "C", "D")])
    file.write_text("\n" + file.read_text(), encoding="utf-8")
    first, second = read_chats(file)
    assert first.messages == (Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Yes"))
    assert (first.where, second.where) == (f"{file}, line 2", f"{file}, line 3")
    assert [message.content for message in second.messages] == list("ABCD")


def message(role: object, content: object, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


ASKS, SAYS = message("user", "Hi"), message("assistant", "Yes")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ([SAYS], "line 2 begins with an answer; a user turn has to stand before it"),
        ([message("system", "S"), SAYS], "line 2 begins with an answer"),
        ([ASKS], "line 2 has no answer: none of its messages has the role assistant; leave the line out"),
        ([], "line 2 has no answer"),
        ([ASKS, message("system", "S"), SAYS], "line 2, message 2 is a system turn, and only a chat's first can be"),
        ([message("assitant", "Yes")], "line 2, message 1 has the unknown role 'assitant'; did you mean 'assistant'?"),
        ([message(["user"], "Hi")], r"line 2, message 1 has the unknown role \['user'\]; .*the choices are: system"),
        ([ASKS, message("assistant", " \n")], "line 2, message 2, of assistant, is empty; leave out"),
        ([message("user", [{"type": "text"}]), SAYS], "line 2, message 1 has content of type list; only text can"),
        (
            [ASKS, message("assistant", "Y", tool_calls=[1])],
            "line 2, message 2 has the field 'tool_calls', which would be lost",
        ),
        ([ASKS, {"role": "assistant"}], "line 2, message 2 has no role and content; a message has both"),
        ("Hi", r'line 2 has no list of messages; a line is an object such as \{"messages":'),
        (None, "line 2 has no list of messages"),
    ],
)
def test_what_is_no_chat_is_refused_with_its_place(tmp_path: Path, found: object, sentence: str) -> None:
    file = write_chats(tmp_path / "chats.jsonl", [turns("Hi", "Yes"), {"messages": found}])
    with pytest.raises(ValueError, match=rf"chats\.jsonl, {sentence}"):
        read_chats(file)


def test_a_field_that_holds_nothing_is_no_loss(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "chats.jsonl", [{"messages": [ASKS, message("assistant", "Yes", tool_calls=None)]}])
    assert read_chats(file)[0].messages[1] == Message("assistant", "Yes")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"messages": [\n', r"chats\.jsonl, line 1 is not JSON"),
        (b"[1]\n", r"chats\.jsonl, line 1 has no list of messages"),
        (b"\xff\n", r"chats\.jsonl, line 1 is not UTF-8"),
        (b"\n \n", r"chats\.jsonl has no chats: it is empty; write lines such as"),
    ],
)
def test_a_file_that_holds_no_chats_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read_chats(file)
    with pytest.raises(ValueError, match=r"there is no file of chats at .*other\.jsonl; give a \.jsonl file"):
        read_chats(tmp_path / "other.jsonl")


def test_the_split_follows_the_text_alone(tmp_path: Path) -> None:
    chats = read_chats(write_chats(tmp_path / "chats.jsonl", many_chats(90)))
    again = read_chats(write_chats(tmp_path / "reversed.jsonl", many_chats(90)[::-1]))[::-1]
    sides = [chat.is_heldout(0.3) for chat in chats]
    assert sides == [chat.is_heldout(0.3) for chat in again]
    assert 0.15 < sum(sides) / 90 < 0.45
    assert all(chat.is_heldout(0.7) for chat, side in zip(chats, sides, strict=True) if side)
