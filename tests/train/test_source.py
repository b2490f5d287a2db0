"""What a run reads: tokenizers that fit, and measured windows with their documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_text_run

from gatelab.data.loader import Batch
from gatelab.data.tokenizer import train_tokenizer
from gatelab.model.decoder import Decoder
from gatelab.train.checkpoint import checkpoints, load_decoder
from gatelab.train.loop import train
from gatelab.train.metrics import read_metrics
from gatelab.train.source import open_source


def test_a_tokenizer_larger_than_the_model_is_refused_before_any_text_is_read(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer([corpus.read_text()], vocab_size=271)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_text())
    settings = tiny_text_run(corpus, f"data.tokenizer.path={tmp_path}")
    monkeypatch.setattr("gatelab.train.source.prepare", lambda *_: pytest.fail("the text was read"))
    message = r"model.vocab_size=270 is smaller than the vocabulary of 271 of the tokenizer at .*; choose a model.vocab"
    with pytest.raises(ValueError, match=message):
        train(settings, tmp_path / "run", tmp_path / "cache")
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


def test_a_tokenizer_that_fits_is_used(tmp_path: Path, corpus: Path) -> None:
    tokenizer = train_tokenizer([corpus.read_text()], vocab_size=270)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_text())
    source = open_source(tiny_text_run(corpus, f"data.tokenizer.path={tmp_path}"), tmp_path / "cache")
    assert source.tokenizer is not None and source.tokenizer.to_text() == tokenizer.to_text()


class Seen:
    """Stands in an attention layer for its recorder, and remembers what the layer computed."""

    def __init__(self, decoder: Decoder, batch: Batch, documents: torch.Tensor | None):
        self.tensors: list[Any] = []
        self.scores: list[torch.Tensor] = []
        self.maxima: list[float] = []
        for layer in decoder.model.layers:
            layer.self_attn.recorder = self
            layer.register_forward_hook(self.look_at)
        with torch.no_grad():
            decoder(batch.inputs, documents)

    def record(self, layer: int, tensors: Any, scores: Any) -> None:
        self.tensors.append(tensors)
        self.scores.extend(scores.values())

    def look_at(self, module: Any, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self.maxima.append(float(hidden.abs().max()))


def first_token_attention(tensors: Any, documents: list[list[int]]) -> float:
    """Mean over heads and the queries of each window's first document, weight by weight."""
    query, key = tensors["query"].double(), tensors["key"].double()
    heads_per_key = query.shape[2] // key.shape[2]
    weights = []
    for row, numbers in enumerate(documents):
        for t, number in enumerate(numbers):
            if number == numbers[0]:
                keys = [s for s in range(t + 1) if numbers[s] == number]
                for head in range(query.shape[2]):
                    logits = key[row, keys, head // heads_per_key] @ query[row, t, head] / query.shape[3] ** 0.5
                    weights.append(float(logits.softmax(0)[0]))
    return sum(weights) / len(weights)


def expected(decoder: Decoder, batch: Batch, documents: torch.Tensor | None) -> dict[str, float]:
    seen = Seen(decoder, batch, documents)
    numbers = (torch.zeros_like(batch.inputs) if documents is None else documents).tolist()
    layers = [first_token_attention(tensors, numbers) for tensors in seen.tensors]
    return {
        "first_token_attention": sum(layers) / len(layers),
        "largest_activation": max(seen.maxima),
        "gate_mean": sum(float(scores.double().mean()) for scores in seen.scores) / len(seen.scores),
    }


@pytest.mark.parametrize("bos", ["true", "false"])
def test_a_run_with_document_masks_is_measured_with_them(tmp_path: Path, cache: Path, bos: str) -> None:
    """Against a forward pass under the mask, weight by weight; without the mask the figures would be others."""
    corpus = tmp_path / "short.jsonl"
    rows = [{"title": str(n), "text": f"{n * n % 97} opens"} for n in range(150)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = tiny_text_run(
        corpus, "data.document_masks=true", f"data.bos_in_every_window={bos}", "data.context=21", "train.steps=3"
    )
    result = train(settings, tmp_path / "run", cache)
    windows = list(next(iter(open_source(settings, cache).heldout.values())).batches())
    path = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    logged = read_metrics(tmp_path / "run" / "metrics.jsonl", "measurement")[-1]
    for figures, number in ((logged, 2), (result["measurement"], 5)):
        assert figures["measured_tokens"] == number * 21
        inputs, documents = (
            torch.cat([getattr(batch, name) for batch in windows])[:number] for name in ("inputs", "documents")
        )
        batch = Batch(inputs, inputs, documents)
        masked, plain = (expected(load_decoder(path), batch, one) for one in (documents, None))
        for name, value in masked.items():
            assert figures[name] == pytest.approx(value, rel=1e-5), name
        assert abs(masked["first_token_attention"] - plain["first_token_attention"]) > 1e-3
    assert json.loads((tmp_path / "run" / "measurement.json").read_text())["context"]["documents"] is True
