from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from gatelab.data.tokenizer import Tokenizer, train_tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(text=st.one_of(TEXT, st.lists(st.sampled_from(["<|bos|>", " ", "\r\n", "é", "a"])).map("".join)))
def test_every_text_round_trips(tokenizer: Tokenizer, text: str):
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_id not in ids
    assert all(token < tokenizer.vocab_size for token in ids)


def test_bos_is_token_zero_and_text_never_becomes_it(tokenizer: Tokenizer):
    assert tokenizer.bos_id == 0
    assert tokenizer.decode([0]) == "<|bos|>"
    assert len(tokenizer.encode_batch(["<|bos|>"])[0]) > 1


def test_merges_shorten_text_like_the_training_text(tokenizer: Tokenizer):
    assert tokenizer.vocab_size == 283
    text = "the gate opens when"
    assert len(tokenizer.encode_batch([text])[0]) < len(text)


def test_equal_texts_give_equal_tokenizers():
    texts = [f"word{number % 7} other{number % 11}" for number in range(100)]
    assert train_tokenizer(texts, 300).to_text() == train_tokenizer(iter(texts), 300).to_text()
    assert train_tokenizer(texts, 300).to_text() != train_tokenizer(texts[:5], 300).to_text()


def test_little_text_gives_fewer_entries_and_no_text_is_refused():
    assert train_tokenizer(["ab"], 4096).vocab_size < 300
    with pytest.raises(ValueError, match="no text to train a tokenizer on: the training split is empty"):
        train_tokenizer([], 4096)


def test_a_saved_tokenizer_is_the_same(tokenizer: Tokenizer, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_text(), encoding="utf-8")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.encode_batch(["a token asks <|bos|>"]) == tokenizer.encode_batch(["a token asks <|bos|>"])
        assert (loaded.vocab_size, loaded.bos_id, loaded.to_text()) == (283, 0, tokenizer.to_text())


def test_any_special_token_can_start_documents():
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(1)
    with pytest.raises(ValueError, match=r"no special token '<\|bos\|>' to start documents with; .*<s>, </s>"):
        Tokenizer.from_text(backend.to_str())
    loaded = Tokenizer.from_text(backend.to_str(), bos_token="</s>")
    assert (loaded.bos_id, loaded.vocab_size) == (4, 5)
    assert loaded.encode_batch(["a b", "a"]) == [[0, 1], [0]], "nothing is cut off"


def test_a_tokenizer_without_special_tokens_is_refused():
    with pytest.raises(ValueError, match="no special token '<s>' to start documents with; it has none"):
        Tokenizer(Backend(models.BPE()), "<s>")


def test_the_vocabulary_size_holds_the_largest_id_despite_holes():
    backend = Backend(models.WordLevel({"a": 0, "<s>": 9}, unk_token="a"))
    backend.add_special_tokens(["<s>"])
    assert Tokenizer(backend, "<s>").vocab_size == 10


def test_unreadable_tokenizers_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no tokenizer at .*: give a tokenizer.json or a folder that has one"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"tokenizer.json: not a readable tokenizer.json"):
        Tokenizer.load(tmp_path)
