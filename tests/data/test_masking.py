"""Hidden tokens: windows against loops over single tokens, shares against their chances, batches as pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from gatelab.data.loader import IGNORED, MixedLoader, TrainLoader
from gatelab.data.masking import MaskedLoader, Vocabulary, masked_heldout_batches, masked_window
from gatelab.data.settings import DataSettings, MaskingSettings
from gatelab.data.shards import TokenShards
from gatelab.data.tokenizer import Tokenizer, train_tokenizer

T, V, BOS, NUM_TEXT_IDS = 17, 97, 5, 90
IDS = Vocabulary(cls=BOS, sep=V - 2, mask=V - 1, num_text_ids=NUM_TEXT_IDS)
BERT = MaskingSettings()
TEXTS = ["the gate opens " * 9, "a token asks for it " * 7, "nothing is worth reading " * 8]


def text_of(size: int = T - 2, seed: int = 1) -> np.ndarray:
    """Tokens of a stream, two of which start a document."""
    text = np.random.default_rng(seed).integers(6, NUM_TEXT_IDS, size)
    text[[3, size // 2]] = BOS
    return text


def window_by_loops(text: list[int], settings: MaskingSettings, seed: list[int]) -> tuple[list[int], list[int]]:
    """Token by token: what is read, and what is to be found."""
    draws = np.random.default_rng(seed)
    lots = [float(draws.random()) for _ in text]
    kinds = [float(draws.random()) for _ in text]
    others = draws.integers(NUM_TEXT_IDS - 1, size=len(text)).tolist()
    words = [place for place, token in enumerate(text) if token != BOS]
    chosen = [place for place in words if lots[place] <= settings.probability]
    if not chosen and words:
        chosen = [min(words, key=lambda place: lots[place])]
    inputs, targets = [BOS], [IGNORED]
    for place, token in enumerate(text):
        read = V - 2 if token == BOS else token
        target = IGNORED
        if place in chosen:
            target = token
            if kinds[place] < settings.masked:
                read = V - 1
            elif kinds[place] < settings.masked + settings.random:
                without_bos = [one for one in range(NUM_TEXT_IDS) if one != BOS]
                read = without_bos[others[place]]
        inputs.append(read)
        targets.append(target)
    return [*inputs, V - 2], [*targets, IGNORED]


@pytest.mark.parametrize("probability", [0.15, 0.6, 0.001])
def test_a_window_is_that_of_loops(probability: float) -> None:
    settings = MaskingSettings(probability=probability, masked=0.5, random=0.3)
    seen = set()
    for number in range(60):
        text = text_of(seed=number)
        inputs, targets = masked_window(text, settings, IDS, [0, 7, number])
        expected = window_by_loops(text.tolist(), settings, [0, 7, number])
        assert (inputs.tolist(), targets.tolist()) == expected
        seen |= {(int(read) == V - 1, read == word) for read, word in zip(inputs, targets, strict=True) if word >= 0}
    assert len(seen) == 3, "masked, replaced and kept"


def test_shares_are_those_that_were_asked_for() -> None:
    """Of 200,000 words; every interval is five standard deviations wide."""
    text = np.random.default_rng(0).integers(6, NUM_TEXT_IDS, 200_000)
    inputs, targets = masked_window(text, BERT, IDS, [0, 0, 0])
    chosen = targets[1:-1] != IGNORED
    read, found = inputs[1:-1][chosen], targets[1:-1][chosen]
    assert chosen.mean() == pytest.approx(0.15, abs=5 * np.sqrt(0.15 * 0.85 / 200_000))
    width = 5 * np.sqrt(0.25 / chosen.sum())
    assert (read == IDS.mask).mean() == pytest.approx(0.8, abs=width)
    replaced = (read != IDS.mask) & (read != found)
    assert replaced.mean() == pytest.approx(0.1 * 88 / 89, abs=width), "one replacement in 89 is the word itself"
    assert (read == found).mean() == pytest.approx(0.1, abs=width)
    assert np.array_equal(found, text[chosen]) and np.array_equal(inputs[1:-1][~chosen], text[~chosen])
    others = np.unique(read[replaced])
    assert BOS not in others and others.max() < NUM_TEXT_IDS and len(others) == NUM_TEXT_IDS - 1
    assert np.corrcoef(chosen[:-1], chosen[1:])[0, 1] == pytest.approx(0, abs=0.02)


def test_document_starts_are_separators_and_never_chosen() -> None:
    text = text_of(size=300)
    inputs, targets = masked_window(text, MaskingSettings(probability=0.99), IDS, [0, 1])
    starts = np.flatnonzero(text == BOS) + 1
    assert len(starts) == 2 and (inputs[starts] == IDS.sep).all() and (targets[starts] == IGNORED).all()
    assert (inputs[0], inputs[-1]) == (BOS, IDS.sep) and (targets[0], targets[-1]) == (IGNORED, IGNORED)
    none_left, nothing = masked_window(np.full(4, BOS), BERT, IDS, [0])
    assert none_left.tolist() == [BOS, *[V - 2] * 5] and (nothing == IGNORED).all()


@pytest.fixture
def shards(make_shards: Callable[..., TokenShards]) -> TokenShards:
    return make_shards(TEXTS)


def loader(shards: TokenShards, seed: int = 3, settings: MaskingSettings = BERT) -> MaskedLoader:
    texts = TrainLoader(shards, context=T - 2, sequences_per_step=4, seed=seed, bos_id=0)
    return MaskedLoader(texts, settings, Vocabulary(0, 290, 291, 283), seed)


def test_batches_are_pure_functions_of_seed_and_step(shards: TokenShards) -> None:
    whole = [loader(shards).batch(step) for step in range(7)]
    again = loader(shards).batch(5)
    assert torch.equal(again.inputs, whole[5].inputs) and torch.equal(again.targets, whole[5].targets)
    for pieces in (1, 2):
        parts = [loader(shards).batch(5, rank, 2, pieces) for rank in range(2)]
        rows = [[0, 1], [2, 3]] if pieces == 1 else [[0, 2], [1, 3]]
        for part, own in zip(parts, rows, strict=True):
            assert torch.equal(part.inputs, whole[5].inputs[own]) and torch.equal(part.targets, whole[5].targets[own])
    other = loader(shards, seed=4).batch(5)
    assert not torch.equal(other.targets, whole[5].targets)
    assert all((batch.inputs.shape, batch.inputs[:, 0].max()) == ((4, T), 0) for batch in whole)


def test_every_epoch_hides_other_tokens_of_the_same_text(shards: TokenShards) -> None:
    """The text under the masks is that of the loader, window by window."""
    masked = loader(shards, settings=MaskingSettings(probability=0.3))
    texts = TrainLoader(shards, context=T - 2, sequences_per_step=4, seed=3, bos_id=0)
    chosen: dict[tuple[int, ...], set[tuple[bool, ...]]] = {}
    for step in range(3 * texts.num_windows // 4):
        batch, plain = masked.batch(step), texts.batch(step).targets
        hidden = batch.targets[:, 1:-1] != IGNORED
        assert torch.equal(batch.targets[:, 1:-1][hidden], plain[hidden])
        for text, places in zip(plain.tolist(), hidden.tolist(), strict=True):
            chosen.setdefault(tuple(text), set()).add(tuple(places))
    assert len(chosen) > 5, "windows of these texts repeat"
    assert all(len(found) > 1 for found in chosen.values())


def test_mixed_texts_are_hidden_alike(shards: TokenShards) -> None:
    sources = {
        name: TrainLoader(shards, context=T - 2, sequences_per_step=4, seed=3, bos_id=0) for name in ("one", "two")
    }
    texts = MixedLoader(sources, [1.0, 2.0], 3)
    batch = MaskedLoader(texts, BERT, Vocabulary(0, 290, 291, 283), 3).batch(2)
    hidden = batch.targets[:, 1:-1] != IGNORED
    assert hidden.any() and torch.equal(batch.targets[:, 1:-1][hidden], texts.batch(2).targets[hidden])


def test_heldout_windows_are_whole_and_the_same_for_everyone(shards: TokenShards) -> None:
    ids = Vocabulary(0, 290, 291, 283)
    batches = list(masked_heldout_batches(shards, BERT, ids, context=T, sequences=3))
    num_windows = len(shards) // (T - 2)
    assert num_windows % 3 and len(batches) == -(-num_windows // 3)
    assert {tuple(batch.inputs.shape) for batch in batches} == {(3, T)}
    inputs, targets, documents = (
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("inputs", "targets", "document_ids")
    )
    assert (targets[num_windows:] == IGNORED).all() and (documents[num_windows:] == -1).all()
    for number in range(num_windows):
        text = shards[number * (T - 2) : (number + 1) * (T - 2)].astype(np.int64)
        expected = masked_window(text, BERT, ids, [1, number])
        assert (inputs[number].tolist(), targets[number].tolist()) == tuple(part.tolist() for part in expected)
        for place in range(T):
            is_target = targets[number, place] != IGNORED
            of = shards.document_ids(0, len(shards))[number * (T - 2) + place - 1] if is_target else -1
            assert documents[number, place] == of
    assert sorted(set(documents.flatten().tolist())) == [-1, 0, 1, 2]
    fewer = list(masked_heldout_batches(shards, BERT, ids, context=T, sequences=2))
    assert torch.equal(torch.cat([batch.inputs for batch in fewer])[:num_windows], inputs[:num_windows])


def test_the_vocabulary_must_leave_two_ids(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    assert Vocabulary.of(tokenizer, size + 2) == (0, size, size + 1, size)
    assert Vocabulary.of(tokenizer, size + 9) == (0, size + 7, size + 8, size), "the last two, whatever lies between"
    with pytest.raises(ValueError, match=rf"^model.vocab_size={size + 1} is smaller than {size + 2}: the tokenizer's"):
        Vocabulary.of(tokenizer, size + 1)
    other = train_tokenizer(["gate"], 300, "<s>")
    assert Vocabulary.of(other, 400).cls == other.bos_id


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["masking={probability: 0}"], "masking.probability cannot be 0: input should be greater than 0"),
        (["masking={probability: 1}"], "masking.probability cannot be 1: input should be less than 1"),
        (["masking={masked: 0.8, random: 0.3}"], "masking: masked=0.8 and random=0.3 are together more than all"),
        (["masking={masked: -1}"], "masking.masked cannot be -1"),
        (["masking={kept: 0.1}"], "'masking.kept' is unknown; the choices are: probability, masked, random"),
        (["masking={}", "synthetic={}"], "masking with synthetic is impossible: tokens of a text are hidden"),
        (
            ["masking={}", "chats={path: chats.jsonl}", "tokenizer.path=here", "document_masks=true"],
            "masking with chats is impossible",
        ),
        (["masking={}", "document_masks=true"], "document_masks=True with masking is impossible: [CLS] and [SEP]"),
        (["masking={}", "bos_in_every_window=false"], "bos_in_every_window=False with masking is impossible"),
        (["masking={}", "context=2"], "context=2 with masking leaves no text between [CLS] and [SEP]"),
    ],
)
def test_impossible_masking_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DataSettings().with_overrides(overrides)
