"""Chats in windows against loops: places, targets, masks; batches of any rank; what is too long or left over."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chats import CHATML, byte_tokenizer, many_chats, turns, write_chats

from gatelab.data.chat_windows import (
    PADDING,
    ChatLoader,
    ChatTokens,
    ChatWindows,
    PreparedChats,
    heldout_chat_batches,
    pack,
    prepare_chats,
)
from gatelab.data.loader import IGNORED
from gatelab.data.settings import DataSettings
from gatelab.model import masks

CONTEXT = 40


def tokens_of_lengths(lengths: list[int], seed: int = 0) -> list[ChatTokens]:
    """Chats of random tokens, BOS first, of which some tokens and always the last are answers."""
    rng = np.random.default_rng(seed)
    chats = []
    for length in lengths:
        is_answer = rng.random(length) < 0.4
        is_answer[0], is_answer[-1] = False, True
        chats.append(ChatTokens(np.concatenate([[0], rng.integers(1, 97, length - 1)]), is_answer))
    return chats


def data_settings(folder: Path, chats: list[object], **changes: object) -> DataSettings:
    """Settings on a file of these chats, with a tokenizer of bytes beside it."""
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_text())
    wanted = {"path": str(write_chats(folder / "chats.jsonl", chats)), "heldout_fraction": 0.3, **changes}
    context = wanted.pop("context", 200)
    return DataSettings.parse(
        {
            "chats": wanted,
            "tokenizer": {"path": str(folder / "tokenizer.json")},
            "context": context,
            "document_masks": True,
        }
    )


def naive_pack(lengths: list[int], room: int) -> list[list[int]]:
    """The longest first, each into the window with the least room that is enough."""
    windows: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        left = [room - sum(lengths[one] for one in window) for window in windows]
        fitting = [window for window in range(len(windows)) if left[window] >= lengths[number]]
        if fitting:
            windows[min(fitting, key=lambda window: (left[window], window))].append(number)
        else:
            windows.append([number])
    return sorted(sorted(window) for window in windows)


@given(lengths=st.lists(st.integers(1, 23), min_size=1, max_size=40))
@settings(max_examples=80, deadline=None)
def test_packing_is_best_fit_decreasing(lengths: list[int]) -> None:
    packed = pack(lengths, 23)
    assert packed == naive_pack(lengths, 23)
    assert sorted(one for window in packed for one in window) == list(range(len(lengths)))
    assert all(sum(lengths[one] for one in window) <= 23 for window in packed)


def test_windows_are_those_of_loops() -> None:
    chats = tokens_of_lengths([7, 13, 2, 40, 19, 5])
    windows = ChatWindows(chats, CONTEXT)
    assert windows.packed == [[0, 1, 4, 5], [2, 3]]
    batch = windows.batch([*range(len(windows)), None])
    assert batch.documents is not None and batch.document_ids is not None
    for row in range(len(windows) + 1):
        place = 0
        for document, which in enumerate(windows.packed[row] if row < len(windows) else []):
            ids, is_answer = chats[which]
            for token in range(len(ids) - 1):
                assert batch.inputs[row, place] == ids[token]
                assert batch.targets[row, place] == (ids[token + 1] if is_answer[token + 1] else IGNORED)
                assert batch.documents[row, place] == document
                assert batch.document_ids[row, place] == (which if is_answer[token + 1] else -1)
                place += 1
        assert (batch.targets[row, place:] == IGNORED).all() and (batch.documents[row, place:] == PADDING).all()
        assert (batch.inputs[row, place:] == 0).all() and (batch.document_ids[row, place:] == -1).all()
    assert int((batch.targets != IGNORED).sum()) == windows.num_answer_tokens == sum(c.is_answer.sum() for c in chats)
    assert PADDING == masks.PADDING


@given(step=st.integers(0, 60), num_ranks=st.sampled_from([1, 2, 3]), pieces=st.sampled_from([1, 2]))
@settings(max_examples=40, deadline=None)
def test_ranks_in_order_are_the_one_rank_batch_and_a_batch_depends_on_its_step_alone(
    step: int, num_ranks: int, pieces: int
) -> None:
    windows = ChatWindows(tokens_of_lengths([23, 31, 29, 37, 24, 26, 33]), CONTEXT)
    used = ChatLoader(windows, sequences_per_step=12, seed=5)
    used.batch(11)
    whole = used.batch(step)
    parts = [
        ChatLoader(windows, sequences_per_step=12, seed=5).batch(step, rank, num_ranks, pieces)
        for rank in range(num_ranks)
    ]
    size = 12 // pieces // num_ranks
    order = [part.inputs[piece * size : (piece + 1) * size] for piece in range(pieces) for part in parts]
    assert torch.equal(torch.cat(order), whole.inputs)
    assert whole.document_ids is None and whole.inputs.shape == (12, CONTEXT)


def test_an_epoch_has_every_window_once_in_an_order_of_its_own() -> None:
    windows = ChatWindows(tokens_of_lengths([23, 31, 29, 37, 24, 26, 33]), CONTEXT)
    loader = ChatLoader(windows, sequences_per_step=1, seed=5)
    assert loader.num_windows == 7
    epochs = [[tuple(loader.batch(step).inputs[0].tolist()) for step in range(7 * e, 7 * e + 7)] for e in range(2)]
    assert (
        sorted(epochs[0]) == sorted(epochs[1]) == sorted(tuple(row.tolist()) for row in windows.batch(range(7)).inputs)
    )
    assert epochs[0] != epochs[1]


def test_heldout_batches_score_every_answer_token_once_in_one_shape() -> None:
    windows = ChatWindows(tokens_of_lengths([23, 31, 29, 37, 24, 26, 33]), CONTEXT)
    batches = list(heldout_chat_batches(windows, 3))
    assert [batch.inputs.shape for batch in batches] == 3 * [(3, CONTEXT)]
    scored = torch.cat(
        [batch.document_ids[batch.targets != IGNORED] for batch in batches if batch.document_ids is not None]
    )
    assert torch.equal(scored.bincount(), torch.tensor([int(chat.is_answer.sum()) for chat in windows.chats]))


def prepared(tmp_path: Path, **changes: object) -> PreparedChats:
    return prepare_chats(data_settings(tmp_path, list(many_chats(37)), **changes))


def test_what_is_read_has_a_fingerprint_of_everything_that_decides_it(tmp_path: Path) -> None:
    first = prepared(tmp_path)
    assert first.fingerprint == prepared(tmp_path).fingerprint
    assert first.attribution.startswith(
        f"chats of {tmp_path / 'chats.jsonl'}: {len(first.train.chats)} to train on with "
    )
    assert len(first.train.chats) + len(first.heldout.chats) == 37
    (tmp_path / "louder.jinja").write_text(first.template.source.replace("user", "USER").replace(": {{", ":  {{"))
    others = [
        prepared(tmp_path, context=210),
        prepared(tmp_path, heldout_fraction=0.4),
        prepared(tmp_path, template=str(tmp_path / "louder.jinja")),
        prepare_chats(data_settings(tmp_path, list(many_chats(36)))),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_bytes_of_heldout_answers_count_their_ends(tmp_path: Path) -> None:
    chats = prepared(tmp_path)
    lines = [json.loads(line)["messages"] for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    known = {len(" " + m[1]["content"] + "<|bos|>") * (len(m) // 2) for m in lines}
    assert set(chats.heldout_text_bytes.tolist()) <= known
    assert len(chats.heldout_text_bytes) == len(chats.heldout.chats)


def test_chats_that_are_too_long_are_counted_and_refused_or_cut(tmp_path: Path) -> None:
    long = turns("Hi", "Yes " * 60), turns("Hi" * 200, "Yes")
    settings_of_refusal = data_settings(tmp_path, [*many_chats(37), *long])
    with pytest.raises(
        ValueError,
        match=r"^2 of 39 chats are longer than data\.context=200 tokens, the longest \(.*chats\.jsonl, line 39\) has "
        r"422; raise data\.context, or set data\.chats\.too_long=cut$",
    ):
        prepare_chats(settings_of_refusal)
    cut = prepare_chats(data_settings(tmp_path, [*many_chats(37), *long], too_long="cut"))
    assert cut.attribution.endswith("; 2 were longer than 200 tokens and were cut, 1 of them to nothing")
    assert len(cut.train.chats) + len(cut.heldout.chats) == 38
    assert max(len(chat.ids) for chat in (*cut.train.chats, *cut.heldout.chats)) == 201


@pytest.mark.parametrize(
    ("chats", "changes", "sentence"),
    [
        (
            [turns("Hi", "Yes")],
            {"heldout_fraction": 0.999},
            "the training split of .*chats.jsonl is empty: of its 1 ch",
        ),
        ([turns("Hi", "Yes")], {"heldout_fraction": 0.001}, "the held-out split of .* give more chats or another frac"),
        ([turns("Hi", "Yes")], {"template": "nowhere"}, "no chat template at nowhere: give a chat_template.jinja"),
    ],
)
def test_what_leaves_nothing_to_learn_is_refused(
    tmp_path: Path, chats: list[object], changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        prepare_chats(data_settings(tmp_path, chats, **changes))


def test_an_end_that_the_tokenizer_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with pytest.raises(ValueError, match=r"eos_token '<\|im_end\|>' is no special token of the tokenizer at .*give a"):
        prepared(tmp_path, template=str(tmp_path))


def test_a_tokenizer_that_adds_spaces_is_refused(tmp_path: Path) -> None:
    wanted = data_settings(tmp_path, list(many_chats(7)))
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    file.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"tokenizer\.json puts a space before each text, so that an answer would begin"
    ):
        prepare_chats(wanted)


def test_a_template_that_hides_its_bos_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{% if messages[0].content == 'Hello' %}{{ bos_token }}{% endif %}" + CHATML)
    with pytest.raises(ValueError, match=r"line 1: the chat template does not begin with <\|bos\|>; put it in front"):
        prepared(tmp_path, template=str(tmp_path / "t.jinja"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"document_masks": False}, "chats need document_masks=True: those in one window must not see each other"),
        ({"bos_in_every_window": False}, "bos_in_every_window=False with chats is impossible: every chat begins with"),
        ({"tokenizer": {}}, "chats need tokenizer.path, the tokenizer of the model that learns to answer"),
        ({"synthetic": {}}, "chats with synthetic is impossible: chats are the whole of a run's data; leave synthetic"),
        (
            {"mixture": [{"corpus": {"name": "python_standard_library"}, "weight": 1}]},
            "chats with mixture is impossible",
        ),
        ({"heldout": [{"name": "python_standard_library"}]}, "chats with heldout is impossible"),
        ({"chats": {"path": ""}}, "chats.path cannot be ''"),
    ],
)
def test_settings_that_contradict_chats_are_refused(changes: dict[str, object], sentence: str) -> None:
    sound = {"chats": {"path": "a/my chats.jsonl"}, "tokenizer": {"path": "t"}, "document_masks": True}
    parsed = DataSettings.parse(sound)
    assert parsed.chats is not None and parsed.chats.label == "my_chats"
    with pytest.raises(ValueError, match=sentence):
        DataSettings.parse(sound | changes)
