"""Figures and the report of streamed models, from losses that are known and through the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from streaming_by_loops import stream_decoder, stream_settings
from typer.testing import CliRunner

from gatelab.cli import long_context
from gatelab.data.settings import CorpusSettings
from gatelab.evaluate.model_tokenizer import ModelTokenizer
from gatelab.evaluate.models import OpenedModel
from gatelab.evaluate.texts import file_text
from gatelab.longcontext.streaming import stream as streaming
from gatelab.longcontext.streaming.cache import WindowCache
from gatelab.longcontext.streaming.report import finding, streaming_page, streaming_table, write_streaming
from gatelab.longcontext.streaming.statistics import BLOCK, bin_rows, block_mean, summarize
from gatelab.longcontext.streaming.stream import (
    StreamedLoss,
    StreamedModel,
    StreamingTest,
    stream_losses,
    stream_models,
)

TOKENS, CONTEXT, WINDOW = 1200, 500, 100
COMMAND = "gatelab stream it"


def streamed(name: str = "it", digest: str = "a") -> StreamedModel:
    """0 kept tokens cost 2 nats from the first eviction on, 4 cost 0.1; each token has a difficulty of its own."""
    difficulty = np.random.default_rng(5).gamma(3.0, size=(2, TOKENS - 1))
    late = np.arange(1, TOKENS) > WINDOW
    without, kept = (difficulty + price * late for price in (2.0, 0.1))
    losses = [
        StreamedLoss(WindowCache(0, WINDOW), without),
        StreamedLoss(WindowCache(4, WINDOW), kept),
        StreamedLoss(None, difficulty[:, : CONTEXT - 1]),
    ]
    context = {"samples": 2, "length": TOKENS, "text": "notes.txt", "bos": "one", "tokens_sha256": digest}
    return StreamedModel(name, losses, context)


def test_a_mean_has_the_t_interval_of_its_blocks() -> None:
    values = np.random.default_rng(2).normal(size=(2, 3 * BLOCK + 7))
    means = [values[row, BLOCK * block : BLOCK * (block + 1)].mean() for row in (0, 1) for block in (0, 1, 2)]
    spread = (sum((mean - sum(means) / 6) ** 2 for mean in means) / 5) ** 0.5
    found = block_mean(values)
    assert found.value == pytest.approx(values.sum() / values.size)
    assert found.num_tokens == 2 * (3 * BLOCK + 7)
    assert found.low is not None and found.high is not None
    assert found.high - found.value == pytest.approx(2.570582 * spread / 6**0.5)  # t of 5 degrees of freedom
    assert found.value - found.low == pytest.approx(found.high - found.value)
    assert block_mean(values[:1, : 2 * BLOCK - 1]).interval is None


def test_summaries_compare_the_same_tokens() -> None:
    model = streamed()
    without, kept, full = summarize(model)
    difficulty = model.losses[2].nats
    assert without.before.value == kept.before.value == full.before.value == pytest.approx(difficulty[:, :100].mean())
    assert without.before.num_tokens == 2 * WINDOW
    after = WINDOW + 4 + 1
    assert without.after is not None and kept.after is not None and full.after is None
    assert without.after.num_tokens == kept.after.num_tokens == 2 * (TOKENS - after)
    assert kept.after.value == pytest.approx(model.losses[1].nats[:, after - 1 :].mean())
    assert without.over_most_kept is not None and without.over_full is not None and kept.over_full is not None
    assert without.over_most_kept.value == pytest.approx(1.9)
    assert kept.over_most_kept is full.over_most_kept is full.over_full is None
    assert (without.over_full.value, kept.over_full.value) == pytest.approx((2.0, 0.1))
    assert kept.over_full.num_tokens == 2 * (CONTEXT - after)


def test_bins_hold_every_token_once() -> None:
    model = streamed()
    rows = [row for row in bin_rows(model) if row["kept"] == 0]
    assert [row["start"] for row in rows] == [1, *(row["stop"] for row in rows[:-1])]
    assert rows[-1]["stop"] == TOKENS and sum(row["tokens"] for row in rows) == 2 * (TOKENS - 1)
    nats, fewest = model.losses[0].nats, rows[1]
    part = slice(fewest["start"] - 1, fewest["stop"] - 1)
    assert fewest["loss"] == pytest.approx(nats[:, part].mean())
    assert fewest["cost"] == pytest.approx((nats - model.losses[1].nats)[:, part].mean()) == pytest.approx(1.9)
    assert {row["stop"] for row in bin_rows(model) if row["kept"] is None} <= {*range(CONTEXT + 1)}


def test_the_finding_says_what_the_first_tokens_are_worth() -> None:
    model = streamed()
    sentence = finding(model)
    assert sentence.startswith("it: once the caches evict, ")
    assert "with 0 + 100 tokens" in sentence and "the difference is +1.900 (95 %: +1.900 to +1.900)." in sentence
    alone = finding(model._replace(losses=model.losses[1:]))
    assert alone.endswith("nats per token with 4 + 100 tokens.")
    page = streaming_page([model._replace(losses=model.losses[1:])], COMMAND)
    assert "What the first tokens are worth" not in [section.title for section in page.sections]


def test_the_report_is_written_whole_and_replaces_only_itself(tmp_path: Path) -> None:
    models, folder = [streamed("gated"), streamed("un<gated", "b")], tmp_path / "out"
    assert write_streaming(folder, models, COMMAND) == folder / "report.html"
    assert sorted(path.name for path in folder.iterdir()) == ["figures", "metrics.csv", "metrics.json", "report.html"]
    assert len(list((folder / "figures").glob("*.png"))) == 3
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["command"] == COMMAND
    first = metrics["models"][0]["caches"][0]
    assert first["kept"] == 0 and first["window"] == WINDOW
    assert first["over_most_kept"]["value"] == pytest.approx(1.9)
    assert metrics["models"][0]["caches"][2]["kept"] is None
    with (folder / "metrics.csv").open() as file:
        assert len(list(csv.DictReader(file))) == sum(len(bin_rows(model)) for model in models)
    page = (folder / "report.html").read_text()
    assert "The two models read different tokens." in page and "un&lt;gated" in page and "un<gated" not in page
    write_streaming(folder, models[:1], COMMAND)
    assert "The two models read different tokens." not in (folder / "report.html").read_text()
    (folder / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"holds other files \(notes.txt\); name a new folder with --out"):
        write_streaming(folder, models, COMMAND)


def test_the_table_has_a_row_for_each_cache() -> None:
    rows = streaming_table([streamed()]).rows
    assert [row["cache"] for row in rows] == ["0 + 100", "4 + 100", "all"]
    assert rows[2]["after"] is rows[2]["perplexity"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kept": ()}, "kept names no cache; give at least one number of initial tokens, such as 0"),
        ({"kept": (0, 4, 0)}, "kept=0 is given twice; give each number of initial tokens once"),
        ({"kept": (-2, 4)}, "kept=-2 is below 0; keep 0 initial tokens or more"),
        ({"window": 0}, "window=0 holds no token; take at least 1"),
        ({"samples": 0}, "samples=0 reads nothing; take at least 1"),
        ({"tokens": 261}, "tokens=261 evicts nothing: window=256 and kept=4 hold 260 tokens; take a longer text or"),
    ],
)
def test_tests_without_a_meaning_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StreamingTest(**{"text": CorpusSettings(), "folder": Path("cache")} | changes)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models of 64 tokens of context, whose tokens are characters; others can't be opened."""
    tokenizer = ModelTokenizer(lambda text: [1 + ord(sign) % 96 for sign in text], str, 0, 0, 97)
    gates = {"plain": "none", "gated": "sdpa_headwise"}
    models = {name: stream_decoder(stream_settings(gate)) for name, gate in gates.items()}

    def open_model(name: str) -> OpenedModel:
        if name not in models:
            raise ValueError(f"{name} is no model")
        decoder = models[name]
        return OpenedModel(name, "gatelab", decoder, tokenizer, decoder.settings.max_context)

    monkeypatch.setattr(streaming, "open_model", open_model)
    monkeypatch.setattr(ModelTokenizer, "decode_one", lambda self, token: "<s>")


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text("".join(f"Line {number} of these notes says {number**3}. " for number in range(60)))
    return path


@pytest.mark.usefixtures("opened")
def test_models_are_streamed_over_one_text(notes: Path) -> None:
    said: list[str] = []
    test = StreamingTest(file_text(notes), notes.parent, window=20, kept=(4, 0), tokens=150, samples=3)
    plain, gated = stream_models(["plain", "gated"], test, said.append)
    assert [loss.label for loss in plain.losses] == ["0 + 20", "4 + 20", "all"]
    assert [loss.nats.shape for loss in gated.losses] == [(3, 149), (3, 149), (3, 63)]
    assert plain.context["length"] == 150 and plain.context["samples"] == 3 and plain.context["max_context"] == 64
    assert said[0] == "plain: 450 tokens, 0 + 20" and said[-1] == "gated: 192 tokens, all remembered"
    ids = torch.tensor([0, *(1 + ord(sign) % 96 for sign in notes.read_text()[:149])])[None]
    expected = stream_losses(stream_decoder(stream_settings()), ids, WindowCache(4, 20), chunk=1)
    np.testing.assert_allclose(plain.losses[1].nats[:1], expected, atol=1e-10)


@pytest.mark.usefixtures("opened")
def test_impossible_streams_are_refused_before_a_model_reads(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "stream_losses", lambda *given: pytest.fail("a model reads"))
    source = file_text(notes)
    with pytest.raises(ValueError, match="plain would be compared with itself"):
        stream_models(["plain", "plain"], StreamingTest(source, notes.parent, 20))
    with pytest.raises(ValueError, match="window=61 and kept=4 are 65 tokens, above the 64 that plain was made for"):
        stream_models(["plain"], StreamingTest(source, notes.parent, 61))
    with pytest.raises(ValueError, match="other is no model"):
        stream_models(["plain", "other"], StreamingTest(source, notes.parent, 20))
    notes.write_text("notes so" * 8)
    with pytest.raises(ValueError, match=r"notes.txt of 65 tokens evicts nothing: window=60 and kept=4 hold 64 tokens"):
        stream_models(["plain"], StreamingTest(source, notes.parent, 60))


@pytest.mark.usefixtures("opened")
def test_the_command_writes_the_report_and_prints_its_finding(notes: Path) -> None:
    app, out = typer.Typer(), notes.parent / "out"
    app.command()(long_context.stream)
    words = [
        "gated",
        "--compare",
        "plain",
        "--text",
        str(notes),
        "--window",
        "20",
        "--tokens",
        "300",
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(app, [*words, "--kept", "0", "--kept", "2"], catch_exceptions=False)
    assert done.exit_code == 0 and "gated: once the caches evict" in done.output
    assert [one["kept"] for one in json.loads((out / "metrics.json").read_text())["models"][1]["caches"]] == [
        0,
        2,
        None,
    ]
    with pytest.raises(ValueError, match="are two texts; give one of them"):
        CliRunner().invoke(app, [*words, "--corpus", "wikipedia"], catch_exceptions=False)
