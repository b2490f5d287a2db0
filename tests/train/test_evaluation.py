"""Scoring held-out text against a loop over its tokens, and what a run reads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import tiny_run, tiny_text_run, write_corpus

from gatelab.data.loader import IGNORED, Batch
from gatelab.data.prepare import prepare
from gatelab.data.shards import TokenShards
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.perplexity import bits_per_byte, mean_perplexity, perplexity, token_nats
from gatelab.train.evaluation import Score, score
from gatelab.train.settings import RunSettings
from gatelab.train.source import Source, open_source

FREE = ["data.bos_in_every_window=false"]
MASKED = ["data.document_masks=true"]


def make_decoder(settings: RunSettings) -> Decoder:
    decoder = Decoder(settings.model.model_copy(update={"init_std": 0.2})).double()
    initialize(decoder, seed=1)
    return decoder


def heldout_tokens(settings: RunSettings, cache: Path) -> TokenShards:
    return next(iter(prepare(settings.data, cache).heldout.values()))


def naive_scores(decoder: Decoder, tokens: TokenShards, settings: RunSettings) -> list[list[float]]:
    """-ln p of every text token, document by document: one forward pass for each token, on its window up to there."""
    stream = tokens[:].tolist()
    owners = tokens.document_ids(0, len(stream)).tolist()
    context, has_bos, masked = settings.data.context, settings.data.bos_in_every_window, settings.data.document_masks
    documents: list[list[float]] = [[] for _ in range(tokens.num_documents)]
    for position, token in enumerate(stream):
        if token == 0:
            continue
        if has_bos:
            first = position // context * context
            window, numbers = [0, *stream[first:position]], [owners[first], *owners[first:position]]
        else:
            first = (position - 1) // context * context
            window, numbers = stream[first:position], owners[first:position]
        own = torch.tensor([[number - numbers[0] for number in numbers]]) if masked else None
        logits = decoder(torch.tensor([window]), own)[0, -1]
        documents[owners[position]].append(-logits.log_softmax(-1)[token].item())
    return documents


@pytest.mark.parametrize(
    "overrides", [[], FREE, MASKED, FREE + MASKED], ids=["bos", "no bos", "masks", "masks, no bos"]
)
def test_every_token_is_scored_once_and_credited_to_its_document(
    corpus: Path, cache: Path, overrides: list[str]
) -> None:
    settings = tiny_text_run(corpus, *overrides)
    decoder = make_decoder(settings)
    tokens = heldout_tokens(settings, cache)
    (domain,) = open_source(settings, cache).heldout.values()
    with torch.no_grad():
        expected = naive_scores(decoder, tokens, settings)
    found = score(decoder, domain)
    assert len(expected) > 5 and found.num_tokens == sum(map(len, expected)) == len(tokens) - tokens.num_documents
    assert found.document_tokens.tolist() == [len(nats) for nats in expected]
    sums = torch.tensor([sum(nats) for nats in expected], dtype=torch.float64)
    torch.testing.assert_close(found.document_nats, sums, rtol=1e-12, atol=1e-12)
    assert found.nats == pytest.approx(sums.sum().item(), rel=1e-12)
    assert found.nats == pytest.approx(found.document_nats.sum().item(), rel=1e-12)
    assert found.num_bytes == tokens.num_text_bytes == tokens.document_text_bytes.sum()
    figures = found.figures()
    assert figures["loss"] == found.nats / found.num_tokens
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]), rel=1e-15)
    assert figures["bits_per_byte"] == pytest.approx(found.nats / math.log(2) / tokens.num_text_bytes, rel=1e-15)


def test_uniform_logits_have_the_vocabulary_as_perplexity(corpus: Path, cache: Path) -> None:
    settings = tiny_text_run(corpus)
    decoder = make_decoder(settings)
    torch.nn.init.zeros_(decoder.model.embed_tokens.weight)
    (domain,) = open_source(settings, cache).heldout.values()
    figures = score(decoder, domain).figures()
    assert figures["perplexity"] == pytest.approx(270, rel=1e-13)
    assert figures["bits_per_byte"] == pytest.approx(math.log2(270) * figures["tokens"] / figures["bytes"], rel=1e-13)


def test_all_batches_have_one_shape(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny_text_run(corpus)
    decoder = make_decoder(settings)
    shapes = []
    decoder.register_forward_pre_hook(lambda module, arguments: shapes.append(tuple(arguments[0].shape)))
    (domain,) = open_source(settings, cache).heldout.values()
    score(decoder, domain)
    assert len(shapes) > 3 and set(shapes) == {(4, 19)}
    total = len(shapes)
    shapes.clear()
    part = score(decoder, domain, num_windows=5)
    assert len(shapes) == 2 < total, "rounded up to whole batches"
    assert score(decoder, domain, num_windows=4).num_tokens < part.num_tokens and len(shapes) == 3
    assert part.num_bytes is None and part.figures()["bits_per_byte"] is None
    assert 0 < part.num_tokens <= 8 * 19


def test_the_first_windows_are_scored_as_in_the_whole(corpus: Path, cache: Path) -> None:
    settings = tiny_text_run(corpus)
    decoder = make_decoder(settings)
    (domain,) = open_source(settings, cache).heldout.values()
    part, whole = score(decoder, domain, num_windows=4), score(decoder, domain)
    finished = int(part.document_tokens.count_nonzero()) - 1
    assert finished >= 1
    assert torch.equal(part.document_nats[:finished], whole.document_nats[:finished])


def test_domains_are_scored_apart_and_averaged_arithmetically(tmp_path: Path, corpus: Path, cache: Path) -> None:
    other = write_corpus(tmp_path / "sinks.jsonl", num_documents=9, word="sink")
    second = f"{{name: files, path: '{other}', heldout_fraction: 1.0}}"
    settings = tiny_text_run(corpus, f"data.heldout=[{second}]")
    heldout = open_source(settings, cache).heldout
    decoder = make_decoder(settings)
    figures = {name: score(decoder, domain).figures() for name, domain in heldout.items()}
    assert list(figures) == ["gates.jsonl", "sinks.jsonl"]
    one, two = (domain["perplexity"] for domain in figures.values())
    assert abs(one - two) > 1e-3 and mean_perplexity([one, two]) == (one + two) / 2


def test_the_synthetic_task_has_no_text(cache: Path) -> None:
    settings = tiny_run()
    (domain,) = open_source(settings, cache).heldout.values()
    found = score(make_decoder(settings), domain)
    assert found.num_tokens == 8 * 4 * 19 and found.num_bytes is None
    assert found.document_nats.numel() == found.document_tokens.numel() == 0


@given(mean=st.floats(1e-6, 690), num_tokens=st.integers(1, 10_000), num_bytes=st.integers(1, 10_000))
def test_perplexity_and_bits_per_byte_say_the_same(mean: float, num_tokens: int, num_bytes: int) -> None:
    nats = mean * num_tokens
    bits = bits_per_byte(nats, num_bytes) * num_bytes
    assert math.log(perplexity(nats, num_tokens)) == pytest.approx(mean, rel=1e-9, abs=1e-15)
    assert bits == pytest.approx(nats * math.log2(math.e), rel=1e-12)


def test_a_perplexity_beyond_floating_point_is_infinite() -> None:
    assert perplexity(1400.0, 2) == math.inf > perplexity(1398.0, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_token_nats_are_computed_in_float32_at_least(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 7, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(1))
    targets[0, 2] = targets[2, 6] = IGNORED
    nats = token_nats(logits, targets)
    assert nats.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row in range(3):
        for t in range(7):
            target = targets[row, t].item()
            values = logits[row, t].double().tolist()
            expected = 0.0 if target == IGNORED else math.log(sum(map(math.exp, values))) - values[int(target)]
            assert nats[row, t].item() == pytest.approx(expected, abs=1e-12 if dtype == torch.float64 else 2e-6)


class TestSource:
    def test_measured_windows_are_whole(self, corpus: Path, cache: Path) -> None:
        """The last window of a text is filled up with nothing, and is not measured."""
        for overrides in ([], FREE):
            settings = tiny_text_run(corpus, *overrides)
            source = open_source(settings, cache)
            tokens = heldout_tokens(settings, cache)[:].tolist()
            (domain,) = source.heldout.values()
            num_whole = len(tokens) // 19 if not overrides else (len(tokens) - 1) // 19
            assert domain.num_whole_windows == num_whole and len(tokens) % 19 > 1
            found = source.measured_windows(10_000).inputs
            assert found.shape == (num_whole, 19)
            stream = found[:, 1:].flatten() if not overrides else found.flatten()
            expected = [t for i, t in enumerate(tokens[: num_whole * 19]) if overrides or i % 19 != 18]
            assert stream.tolist() == expected
            assert torch.equal(source.measured_windows(3).inputs, found[:3])

    def test_the_synthetic_task_is_measured_on_heldout_sequences(self, cache: Path) -> None:
        source = open_source(tiny_run(), cache)
        found = source.measured_windows(6).inputs
        assert found.shape == (6, 19) and (found[:, 0] == 0).all()
        trained = source.train.batch(0)
        assert isinstance(trained, Batch) and not torch.equal(found[:4], trained.inputs)

    def test_a_heldout_text_shorter_than_a_window_is_refused(self, tmp_path: Path, corpus: Path, cache: Path) -> None:
        short = tmp_path / "short.jsonl"
        short.write_text('{"text": "ab"}\n')
        overrides = [
            "data.train.heldout_fraction=0.0",
            f"data.heldout=[{{name: files, path: '{short}', heldout_fraction: 1.0}}]",
        ]
        with pytest.raises(ValueError, match=r"held-out text short.jsonl is shorter than one window of context=19"):
            open_source(tiny_text_run(corpus, *overrides), cache)

    def test_a_source_names_what_it_read(self, corpus: Path, cache: Path) -> None:
        source: Source = open_source(tiny_text_run(corpus), cache)
        assert len(source.fingerprint) == 64 and list(source.heldout) == ["gates.jsonl"]
        again = open_source(tiny_text_run(corpus, "train.seed=9"), cache)
        assert again.fingerprint == source.fingerprint
        assert open_source(tiny_run(), cache).fingerprint != source.fingerprint


def test_a_score_adds_up() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    assert Score(empty, empty, nats=6.0, num_tokens=3, num_right=2, num_bytes=4).figures() == {
        "loss": 2.0,
        "perplexity": math.exp(2.0),
        "bits_per_byte": 6.0 / (math.log(2) * 4),
        "accuracy": 2 / 3,
        "tokens": 3,
        "bytes": 4,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 41, 4096), (3, 5, 200_000), (1, 0, 8)])
def test_nats_of_a_few_tokens_at_a_time_are_those_of_all(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """With gradients all tokens are read at once; the bits are the same, the mark for "ignore" is known to both."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator).to(dtype)
    targets = torch.randint(0, shape[2], shape[:2], generator=generator)
    targets[:, 1::7] = IGNORED
    at_once = token_nats(logits.clone().requires_grad_(), targets)
    few = token_nats(logits, targets)
    assert at_once.requires_grad and torch.equal(few, at_once)
    assert bool((few[:, 1::7] == 0).all()) and few.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
