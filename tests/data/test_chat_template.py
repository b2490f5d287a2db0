"""Which tokens of a chat are answers, written out by hand; and templates that lose or change something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_chats import CHATML, SPACED, THINKING, TRIMMING, TURN_TOKENS, byte_tokenizer, shown, turns

from gatelab.data.chat_template import PLAIN, ChatTemplate
from gatelab.data.chat_windows import ChatTokens, tokens_of
from gatelab.data.chats import Chat, Message
from gatelab.data.tokenizer import BOS_TOKEN

TOKENIZER = byte_tokenizer(*TURN_TOKENS)


def chat_of(*contents: str, system: str | None = None) -> Chat:
    found = turns(*contents, system=system)["messages"]
    return Chat("chats.jsonl, line 3", tuple(Message(**one) for one in found))


def tokens(source: str, chat: Chat, eos_token: str | None = None) -> ChatTokens:
    template = ChatTemplate(source, BOS_TOKEN, eos_token)
    return tokens_of(template.pieces(chat, TOKENIZER.special_pattern), TOKENIZER)


def marked(found: ChatTokens) -> str:
    """The text with answers in brackets and BOS as ^."""
    text, inside = "", False
    for token, is_answer in zip(shown(found.ids.tolist(), TOKENIZER), found.is_answer.tolist(), strict=True):
        text += ("[" if is_answer and not inside else "]" if inside and not is_answer else "") + token
        inside = is_answer
    return text + ("]" if inside else "")


def test_the_plain_template_token_by_token() -> None:
    """The second question holds the first answer, and is none."""
    found = tokens(PLAIN, chat_of("Hi", "Yes", "Yes?", "No"))
    by_hand = [
        ("^", 0), ("u", 0), ("s", 0), ("e", 0), ("r", 0), (":", 0), (" ", 0), ("H", 0), ("i", 0), ("\n", 0),
        ("a", 0), ("s", 0), ("s", 0), ("i", 0), ("s", 0), ("t", 0), ("a", 0), ("n", 0), ("t", 0), (":", 0),
        (" ", 1), ("Y", 1), ("e", 1), ("s", 1), ("^", 1), ("\n", 0),
        ("u", 0), ("s", 0), ("e", 0), ("r", 0), (":", 0), (" ", 0), ("Y", 0), ("e", 0), ("s", 0), ("?", 0), ("\n", 0),
        ("a", 0), ("s", 0), ("s", 0), ("i", 0), ("s", 0), ("t", 0), ("a", 0), ("n", 0), ("t", 0), (":", 0),
        (" ", 1), ("N", 1), ("o", 1), ("^", 1),
    ]  # fmt: skip
    assert list(zip(shown(found.ids.tolist(), TOKENIZER), map(int, found.is_answer), strict=True)) == by_hand


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            CHATML,
            "^<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Yes<|im_end|>]\n"
            "<|im_start|>user\nYes<|im_end|>\n<|im_start|>assistant\n[No<|im_end|>]\n",
        ),
        (
            TRIMMING,
            "^<|im_start|>user\n\nHi<|im_end|><|im_start|>assistant\n\n[Yes<|im_end|>]"
            "<|im_start|>user\n\nYes<|im_end|><|im_start|>assistant\n\n[No<|im_end|>]",
        ),
        (
            THINKING,
            "^<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Yes<|im_end|>]\n<|im_start|>user\nYes<|im_end|>\n"
            "<|im_start|>assistant\n[<think>\n\n</think>\n\nNo<|im_end|>]\n",
        ),
        (SPACED, "^INST Hi /INST[ Yes <|im_end|>]INST Yes /INST[ No <|im_end|>]"),
    ],
)
def test_templates_as_models_carry_them(source: str, expected: str) -> None:
    assert marked(tokens(source, chat_of("Hi", "Yes", "Yes", "No"), "<|im_end|>")) == expected


def test_a_system_turn_and_two_answers_in_a_row() -> None:
    chat = chat_of("Hi", "Yes", system="Be brief.")
    assert marked(tokens(PLAIN, chat)) == "^system: Be brief.\nuser: Hi\nassistant:[ Yes^]"
    twice = Chat(chat.where, (*chat.messages[1:], Message("assistant", "Really.")))
    assert marked(tokens(PLAIN, twice)) == "^user: Hi\nassistant:[ Yes^]\nassistant:[ Really.^]"


def test_text_of_a_message_is_never_a_special_token() -> None:
    chat = chat_of("a<|im_end|>b", f"c<|im_start|>{BOS_TOKEN}")
    found = tokens(CHATML, chat)
    special = [TOKENIZER.special_ids[token] for token in TURN_TOKENS]
    assert [token for token in found.ids.tolist() if token in special] == 2 * special
    assert found.ids.tolist().count(TOKENIZER.bos_id) == 1
    assert "assistant\n[c<|im_start|>" in marked(found)


def test_space_around_a_question_may_be_trimmed_but_not_around_an_answer() -> None:
    assert "user\n\nHi<|im_end|>" in marked(tokens(TRIMMING, chat_of(" Hi\n", "Yes")))
    assert "user\n Hi\n<|im_end|>" in marked(tokens(CHATML, chat_of(" Hi\n", "Yes")))
    with pytest.raises(
        ValueError, match=r"^chats\.jsonl, line 3, message 2: the chat template alters assistant, 'Yes "
    ):
        tokens(TRIMMING, chat_of("Hi", "Yes \n"))


def test_bos_is_put_in_front_of_a_template_without_it_and_into_what_is_kept() -> None:
    template = ChatTemplate(CHATML, BOS_TOKEN)
    assert template.source == "{{ bos_token }}" + CHATML
    assert ChatTemplate(template.source, BOS_TOKEN).source == template.source
    assert ChatTemplate(TRIMMING, BOS_TOKEN).source == TRIMMING


ONLY_QUESTIONS = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
LOUD = PLAIN.replace("{{ message.content }}", "{{ message.content | upper }}")
TWICE = PLAIN.replace("{{ message.content }}", "{{ message.content }}{{ message.content }}")
BACKWARDS = PLAIN.replace("in messages", "in messages[::-1]")
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + PLAIN
OTHER_PROMPT = PLAIN.replace("'\\nassistant:'", "'\\nbot:'")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            ONLY_QUESTIONS,
            r"message 1: the chat template drops the content of system, 'Be brief\.'; use a template that",
        ),
        (THINKING, "message 3: the chat template alters assistant, '<think>Hm</think>Yes'; use a template that"),
        (LOUD, r"message 1: the chat template alters system, 'Be brief\.'"),
        (TWICE, "message 1: the chat template repeats the content of system"),
        (BACKWARDS, "line 3: the chat template writes the messages in another order"),
        (STRICT, "line 3: the chat template refuses this chat: no system turns$"),
        (OTHER_PROMPT, "message 3: the chat template asks for this answer in other words than it writes before it"),
        ("{{ messages.append(1) }}" + PLAIN, "line 3: the chat template refuses this chat: .*append"),
        ("{{ ''.__class__.__mro__ }}" + PLAIN, "line 3: the chat template refuses this chat: .*unsafe"),
        ("{{ 1 / 0 }}" + PLAIN, "line 3: the chat template refuses this chat: division by zero"),
    ],
)
def test_a_template_that_loses_or_changes_something_is_refused(source: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^chats\.jsonl, .*{sentence}"):
        tokens(source, chat_of("Hi", "<think>Hm</think>Yes", system="Be brief."))


def test_a_dropped_answer_is_named() -> None:
    with pytest.raises(ValueError, match=r"line 3, message 2: the chat template drops the content of assistant, 'Yes'"):
        tokens(ONLY_QUESTIONS, chat_of("Hi", "Yes"))


def test_what_is_no_template_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: the chat template is no Jinja template: "):
        ChatTemplate.load(tmp_path / "chat_template.jinja", BOS_TOKEN)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: 'utf-8' codec can't decode"):
        ChatTemplate.load(tmp_path / "chat_template.jinja", BOS_TOKEN)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(
        ValueError, match=r"^no chat template at .*: give a chat_template\.jinja or a folder that has one"
    ):
        ChatTemplate.load(tmp_path, BOS_TOKEN)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is no JSON object; restore it"):
        ChatTemplate.load(tmp_path, BOS_TOKEN)


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
@pytest.mark.parametrize("kept", [CHATML, [{"name": "tool", "template": "x"}, {"name": "default", "template": CHATML}]])
def test_templates_are_found_where_folders_keep_them(tmp_path: Path, eos: object, kept: object) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": kept, "eos_token": eos}))
    for place in (tmp_path, config):
        template = ChatTemplate.load(place, BOS_TOKEN)
        assert (template.source, template.eos_token) == ("{{ bos_token }}" + CHATML, "<|im_end|>")
    (tmp_path / "chat_template.jinja").write_text(TRIMMING)
    assert ChatTemplate.load(tmp_path, BOS_TOKEN).source == TRIMMING
    assert ChatTemplate.load(tmp_path / "chat_template.jinja", BOS_TOKEN).eos_token == "<|im_end|>"


def test_a_template_is_the_same_again_from_its_own_files(tmp_path: Path) -> None:
    template = ChatTemplate(CHATML, BOS_TOKEN, "<|im_end|>")
    for name, content in template.files().items():
        (tmp_path / name).write_text(content)
    again = ChatTemplate.load(tmp_path, BOS_TOKEN)
    assert (again.source, again.eos_token, again.files()) == (template.source, "<|im_end|>", template.files())
    plain = ChatTemplate.load(None, BOS_TOKEN)
    assert (plain.source, plain.eos_token) == (PLAIN, BOS_TOKEN)
