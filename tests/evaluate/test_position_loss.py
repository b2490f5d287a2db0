"""Loss by position against loops, its buckets and intervals, and the texts it is taken on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gatelab.data.shard_writing import write_shards
from gatelab.data.shards import TokenShards
from gatelab.data.tokenizer import train_tokenizer
from gatelab.evaluate import position_loss
from gatelab.evaluate.model_tokenizer import ModelTokenizer
from gatelab.evaluate.models import OpenedModel
from gatelab.evaluate.position_loss import (
    PositionLosses,
    by_position,
    difference_by_position,
    held_out_texts,
    position_losses,
)
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import ModelSettings

V, BOS, LENGTH = 97, 5, 19


def opened(model: nn.Module, max_context: int = 64, bos_id: int | None = BOS) -> OpenedModel:
    tokenizer = ModelTokenizer(lambda text: [], lambda ids: "", bos_id, 0, V)
    return OpenedModel("tiny", "gatelab", model, tokenizer, max_context)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    settings = ModelSettings(
        vocab_size=V, width=40, num_layers=2, num_heads=6, num_kv_heads=2, head_size=8, feedforward_width=56,
        max_context=64, init_std=0.3,
    )  # fmt: skip
    model = Decoder(settings)
    initialize(model, 0)
    return model.eval()


def texts(number: int = 3, length: int = 23) -> list[list[int]]:
    rows = torch.randint(BOS + 1, V, (number, length), generator=torch.Generator().manual_seed(0))
    rows[:, 0] = BOS
    rows[1, 7] = BOS
    return rows.tolist()


@torch.no_grad()
def by_loops(model: nn.Module, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Every token from a pass over the tokens before it alone."""
    nats, scored = torch.zeros(len(rows), LENGTH, dtype=torch.float64), torch.zeros(len(rows), LENGTH).bool()
    for n, row in enumerate(rows):
        for position in range(1, min(LENGTH, len(row))):
            if row[position] != BOS:
                logits = model(torch.tensor([row[:position]]))[0, -1].double()
                nats[n, position] = -logits.log_softmax(-1)[row[position]]
                scored[n, position] = True
    return nats, scored


@pytest.mark.parametrize("chunk", [5, 1024])
def test_losses_equal_loops(decoder: Decoder, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position_loss, "HEAD_CHUNK", chunk)
    rows = [*texts(), texts()[0][:11]]
    found = position_losses(opened(decoder), rows, LENGTH)
    nats, scored = by_loops(decoder, rows)
    torch.testing.assert_close(found.nats, nats, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.scored, scored) and not scored[1, 7] and not scored[3, 11:].any()


def test_models_of_transformers_and_models_without_bos(decoder: Decoder) -> None:
    huggingface = pytest.importorskip("gatelab.interop.huggingface")
    rows = texts()
    ours, theirs = (position_losses(opened(one), rows, LENGTH) for one in (decoder, huggingface.from_decoder(decoder)))
    torch.testing.assert_close(theirs.nats, ours.nats, rtol=1e-5, atol=1e-5)
    everything = position_losses(opened(decoder, bos_id=None), rows, LENGTH)
    assert everything.scored.sum() == ours.scored.sum() + 1 and everything.nats[1, 7] > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "jamba"])
def test_models_of_transformers_are_read_by_pieces(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that are no divisor of the length or the window; a recurrent state is read at once."""
    model, rows = tiny_model(family), [*texts(), texts()[0][:11]]
    whole = position_losses(opened(model), rows, LENGTH)
    monkeypatch.setattr(position_loss, "HEAD_CHUNK", 5)
    sizes: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda head, given, logits: sizes.append(logits.shape[1]))
    found = position_losses(opened(model), rows, LENGTH)
    torch.testing.assert_close(found.nats, whole.nats, rtol=1e-5, atol=1e-5)
    assert max(sizes) == (LENGTH - 1 if family == "jamba" else 5)


def tiny_model(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": V, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 1, "initializer_range": 0.3,
    }  # fmt: skip
    layers = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    mamba = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4}
    configs = {
        "llama": transformers.LlamaConfig(**sizes),
        "gemma3": transformers.Gemma3TextConfig(**sizes, **layers, head_dim=8),
        "jamba": transformers.JambaConfig(**sizes, **mamba),
    }
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(configs[family]).eval()


def test_a_length_beyond_the_model_is_refused(decoder: Decoder) -> None:
    with pytest.raises(ValueError, match="tiny was made for 18 tokens, not 19; take fewer, or extend its context"):
        position_losses(opened(decoder, max_context=18), texts(), LENGTH)


def random_losses(number: int = 30, length: int = 19, seed: int = 0) -> PositionLosses:
    generator = torch.Generator().manual_seed(seed)
    scored = torch.rand(number, length, generator=generator) < 0.8
    scored[:, 0] = False
    nats = torch.rand(number, length, generator=generator, dtype=torch.float64) + torch.arange(length)
    return PositionLosses(nats.where(scored, 0.0), scored)


def test_buckets_are_powers_of_two_and_hold_each_token_once() -> None:
    losses = random_losses()
    buckets = by_position(losses)
    assert [(bucket.start, bucket.stop) for bucket in buckets] == [(1, 2), (2, 4), (4, 8), (8, 16), (16, 19)]
    assert sum(bucket.tokens for bucket in buckets) == int(losses.scored.sum())
    for bucket in buckets:
        values = [
            float(losses.nats[n, p]) for n in range(30) for p in range(bucket.start, bucket.stop) if losses.scored[n, p]
        ]
        assert bucket.nats == pytest.approx(sum(values) / len(values)) and bucket.tokens == len(values)
        assert bucket.low is not None and bucket.high is not None and bucket.low < bucket.nats < bucket.high


def test_the_interval_is_that_of_texts_not_of_tokens() -> None:
    """Texts that differ and whose tokens agree: the standard error has N texts, not N T tokens."""
    levels = torch.randn(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses = PositionLosses(levels[:, None].expand(60, 16).clone(), torch.ones(60, 16).bool())
    bucket = by_position(losses)[-1]
    assert bucket.low is not None and bucket.high is not None
    assert (bucket.high - bucket.low) / 2 == pytest.approx(1.96 * float(levels.std()) / math.sqrt(60), rel=0.12)


def test_differences_are_paired() -> None:
    losses = random_losses()
    shifted = PositionLosses((losses.nats + 0.25).where(losses.scored, 0.0), losses.scored)
    for bucket in difference_by_position(shifted, losses):
        assert (bucket.nats, bucket.low, bucket.high) == pytest.approx((0.25, 0.25, 0.25))
    with pytest.raises(AssertionError, match="on the same texts"):
        difference_by_position(losses, random_losses(seed=3))


def test_one_text_has_no_interval_and_an_empty_bucket_is_left_out() -> None:
    losses = random_losses(number=1)
    losses.scored[:, 4:8] = False
    buckets = by_position(losses)
    assert 4 not in [bucket.start for bucket in buckets]
    assert all(bucket.low is None and bucket.high is None for bucket in buckets)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Documents of 40, 9, 30 and 20 or so tokens."""
    words = [f"w{n}" for n in range(60)]
    documents = [" ".join(words[:n]) for n in (40, 5, 30, 12)]
    tokenizer = train_tokenizer(documents, 270, "<|bos|>")
    folder: Path = tmp_path_factory.mktemp("shards")
    write_shards(folder, documents, tokenizer, tokens_per_shard=1000)
    return TokenShards(folder), tokenizer, [[tokenizer.bos_id, *tokenizer.encode_batch([d])[0]] for d in documents]


def test_long_documents_are_taken_from_their_beginning(shards: Any) -> None:
    tokens, tokenizer, documents = shards
    length = len(documents[2]) - 2
    found = held_out_texts(tokens, tokenizer.bos_id, length, 5)
    assert found.are_documents and found.rows == [documents[0][:length], documents[2][:length]]
    assert held_out_texts(tokens, tokenizer.bos_id, length, 1).rows == found.rows[:1]


def test_too_few_long_documents_are_put_one_after_another(shards: Any) -> None:
    tokens, tokenizer, documents = shards
    stream = [token for document in documents for token in document]
    length = len(documents[2]) + 1
    found = held_out_texts(tokens, tokenizer.bos_id, length, 5)
    expected = [[tokenizer.bos_id, *stream[n : n + length - 1]] for n in range(0, len(stream), length - 1)]
    assert not found.are_documents and found.rows == [row for row in expected if len(row) == length]
    with pytest.raises(ValueError, match=f"the held-out text has {len(stream)} tokens, less than one row of 5000"):
        held_out_texts(tokens, tokenizer.bos_id, 5000, 5)
