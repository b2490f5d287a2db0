"""Windows of tokens: what starts them, what fills them, and texts that are too short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import SENTENCES, train_backend, write_corpus, write_text
from tokenizers import Tokenizer as Backend

from gatelab.data.settings import CorpusSettings
from gatelab.evaluate.model_tokenizer import ModelTokenizer
from gatelab.evaluate.texts import Windows, file_text, read_windows


def tokenizer_of(backend: Backend, bos_id: int | None = 0, num_bos_added: int = 0) -> ModelTokenizer:
    backend.encode_special_tokens = True
    return ModelTokenizer(
        encode=lambda text: backend.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: backend.decode(ids, skip_special_tokens=False),
        bos_id=bos_id,
        num_bos_added=num_bos_added,
        vocab_size=320,
    )


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return tokenizer_of(train_backend())


def windows_of(path: Path, tokenizer: ModelTokenizer, **options: int | None) -> Windows:
    return read_windows(file_text(path), tokenizer, path.parent / "cache", **options)  # type: ignore[arg-type]


def test_windows_are_the_text_in_order_with_one_bos_each(text: Path, tokenizer: ModelTokenizer) -> None:
    windows = windows_of(text, tokenizer, length=71, samples=3)
    whole = tokenizer.encode(text.read_text())
    assert windows.tokens.shape == (3, 71) and windows.tokens.dtype == torch.int64 and windows.calibration is None
    assert (windows.tokens[:, 0] == 0).all() and (windows.tokens[:, 1:] != 0).all()
    assert windows.tokens[:, 1:].flatten().tolist() == whole[: 3 * 70]
    context = windows.context
    assert context["text"] == "gates.txt" and (context["samples"], context["length"]) == (3, 71)
    assert context["bos"] == "one, '<s>' (id 0), at the start of each window; the tokenizer by itself adds none"


def test_without_bos_nothing_is_put_in_front(text: Path, tokenizer: ModelTokenizer) -> None:
    plain = tokenizer_of(train_backend(bos=None), bos_id=None)
    windows = windows_of(text, plain, length=71, samples=2)
    assert windows.tokens.flatten().tolist() == plain.encode(text.read_text())[: 2 * 71]
    assert windows.context["bos"] == "none: the model's tokenizer has no BOS"


def test_bos_can_be_left_out(text: Path, tokenizer: ModelTokenizer) -> None:
    windows = windows_of(text, tokenizer, length=71, bos=False)
    assert windows.tokens.flatten().tolist() == tokenizer.encode(text.read_text())[:71]
    policy = "none, as asked for, though '<s>' (id 0) is there; the tokenizer by itself adds none"
    assert windows.context["bos"] == policy


@pytest.mark.parametrize(("added", "words"), [(1, "adds one"), (2, "adds 2")])
def test_a_tokenizer_that_adds_bos_itself_gives_one_too(text: Path, added: int, words: str) -> None:
    windows = windows_of(text, tokenizer_of(train_backend(times_added=added), num_bos_added=added), length=71)
    assert int((windows.tokens == 0).sum()) == 1 and windows.context["bos"].endswith(words)


def test_bos_written_in_the_text_stays_text(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    (tmp_path / "hostile.txt").write_text("<s>" + "".join(SENTENCES[:9]), encoding="utf-8")
    windows = windows_of(tmp_path / "hostile.txt", tokenizer, length=71)
    assert int((windows.tokens == 0).sum()) == 1
    assert tokenizer.decode(windows.tokens[0].tolist()).startswith("<s><s>The gate")


def test_calibration_is_later_text_that_shares_nothing(text: Path, tokenizer: ModelTokenizer) -> None:
    windows = windows_of(text, tokenizer, length=67, samples=2, calibration_samples=3)
    assert windows.calibration is not None and windows.calibration.shape == (3, 67)
    both = torch.cat([windows.tokens, windows.calibration])[:, 1:].flatten().tolist()
    assert both == tokenizer.encode(text.read_text())[: 5 * 66]


def test_documents_follow_one_another(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    corpus = CorpusSettings(name="files", path=str(write_corpus(tmp_path / "corpus.jsonl")), heldout_fraction=1.0)
    windows = read_windows(corpus, tokenizer, tmp_path, length=99)
    assert tokenizer.decode(windows.tokens[0, 1:].tolist()).startswith(SENTENCES[0] + "\n\n" + SENTENCES[1])


def test_only_the_heldout_split_is_read(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    path = str(write_corpus(tmp_path / "corpus.jsonl"))
    half = CorpusSettings(name="files", path=path, title_field="title", heldout_fraction=0.5)
    whole = half.model_copy(update={"heldout_fraction": 1.0})
    texts = [
        set(tokenizer.decode(read_windows(text, tokenizer, tmp_path, length=1000).tokens[0, 1:].tolist()).split("\n\n"))
        for text in (half, whole)
    ]
    assert len(texts[0]) < len(texts[1])


def test_equal_ids_have_equal_fingerprints(text: Path, tokenizer: ModelTokenizer) -> None:
    one, two, other = (windows_of(text, tokenizer, length=length) for length in (70, 70, 72))
    assert one.context["tokens_sha256"] == two.context["tokens_sha256"] != other.context["tokens_sha256"]


class TestShortTexts:
    def test_a_window_is_as_long_as_a_shorter_text(self, tmp_path: Path, tokenizer: ModelTokenizer) -> None:
        path = write_text(tmp_path / "short.txt", 9)
        count = len(tokenizer.encode(path.read_text()))
        windows = windows_of(path, tokenizer, length=4096, samples=5)
        assert windows.tokens.shape == (1, count + 1)
        context = windows.context
        assert (context["length_asked_for"], context["samples_asked_for"]) == (4096, 5)
        assert (context["length"], context["samples"]) == (count + 1, 1)

    def test_below_64_tokens_it_is_refused(self, tmp_path: Path, tokenizer: ModelTokenizer) -> None:
        path = write_text(tmp_path / "short.txt", 2)
        count = len(tokenizer.encode(path.read_text()))
        assert count < 63
        with pytest.raises(ValueError, match=rf"the text short.txt has {count} tokens; give one of at least 64"):
            windows_of(path, tokenizer)

    def test_64_tokens_are_enough(self, tmp_path: Path, tokenizer: ModelTokenizer) -> None:
        whole = write_text(tmp_path / "text.txt").read_text()
        ids = tokenizer.encode(whole)
        (tmp_path / "text.txt").write_text(tokenizer.decode(ids[:63]), encoding="utf-8")
        assert windows_of(tmp_path / "text.txt", tokenizer).tokens.shape == (1, 64)
        (tmp_path / "text.txt").write_text(tokenizer.decode(ids[:62]), encoding="utf-8")
        with pytest.raises(ValueError, match="62 tokens"):
            windows_of(tmp_path / "text.txt", tokenizer)

    def test_calibration_needs_text_of_its_own(self, tmp_path: Path, tokenizer: ModelTokenizer) -> None:
        path = write_text(tmp_path / "short.txt", 9)
        message = "too few for 2 windows of 100 tokens to calibrate on beside one to measure"
        with pytest.raises(ValueError, match=message):
            windows_of(path, tokenizer, length=100, calibration_samples=2)

    def test_an_empty_file(self, tmp_path: Path, tokenizer: ModelTokenizer) -> None:
        (tmp_path / "empty.txt").touch()
        with pytest.raises(ValueError, match=r"empty.txt has 0 tokens"):
            windows_of(tmp_path / "empty.txt", tokenizer)


class TestLengths:
    def test_above_the_context(self, text: Path, tokenizer: ModelTokenizer) -> None:
        assert windows_of(text, tokenizer, length=97, max_context=97).tokens.shape == (1, 97)
        with pytest.raises(ValueError, match="length=98 is above the 97 tokens that the model was made for"):
            windows_of(text, tokenizer, length=98, max_context=97)

    def test_below_64(self, text: Path, tokenizer: ModelTokenizer) -> None:
        with pytest.raises(ValueError, match="length=63 is below 64 tokens"):
            windows_of(text, tokenizer, length=63)
