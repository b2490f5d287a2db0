"""Runs on chats: the loss against loops over answer tokens, chats apart from each other, pieces, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_parity import on_ranks
from tiny_runs import Recording, assert_same_run, tiny_model, tiny_run
from torch import Tensor

from gatelab.data.chat_template import PLAIN
from gatelab.data.chat_windows import ChatTokens, ChatWindows, prepare_chats
from gatelab.data.loader import IGNORED, Batch
from gatelab.data.settings import DataSettings
from gatelab.data.tokenizer import train_tokenizer
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.masks import PADDING
from gatelab.model.perplexity import token_nats
from gatelab.model.settings import MixtureSettings
from gatelab.train.evaluation import measure_heldout, score
from gatelab.train.loop import build, train
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings, TrainSettings
from gatelab.train.source import open_source
from gatelab.train.step import take_step

VOCAB, CONTEXT = 270, 83


def write_chats(path: Path, count: int = 40) -> Path:
    """Chats of different lengths, every other one of two answers."""
    rows = []
    for number in range(count):
        asks = {"role": "user", "content": f"Gate {number}?"}
        says = {"role": "assistant", "content": f"Opens {number % 7}." + " Yes." * (number % 3)}
        rows.append({"messages": [asks, says] * (1 + number % 2)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat_run(folder: Path, *overrides: str, **model_changes: Any) -> RunSettings:
    """The tiny run on a file of chats, with a tokenizer of 270 entries."""
    folder.mkdir(exist_ok=True)
    chats = write_chats(folder / "chats.jsonl")
    tokenizer = folder / "base_tokenizer.json"
    tokenizer.write_text(train_tokenizer(["user: Gate 3? assistant: Opens 5. Yes."] * 5, VOCAB).to_text())
    data = {
        "chats": {"path": str(chats), "heldout_fraction": 0.25},
        "tokenizer": {"path": str(tokenizer)},
        "context": CONTEXT,
        "document_masks": True,
    }
    run = tiny_run(vocab_size=VOCAB, max_context=CONTEXT, **model_changes)
    settings = RunSettings(model=run.model, data=DataSettings.parse(data), train=run.train)
    return settings.with_overrides(overrides)


def naive_nats(decoder: Decoder, chat: ChatTokens) -> list[Tensor]:
    """-ln p of each answer token of one chat that is read alone."""
    ids = chat.ids.tolist()
    log_probabilities = decoder(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    return [-log_probabilities[t - 1, ids[t]] for t in range(1, len(ids)) if chat.is_answer[t]]


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> ChatWindows:
    return prepare_chats(chat_run(tmp_path_factory.mktemp("chats")).data).train


def make_decoder(gate: str = "sdpa_elementwise", **changes: Any) -> Decoder:
    decoder = Decoder(tiny_model(gate, vocab_size=VOCAB, max_context=CONTEXT, init_std=0.2, **changes)).double()
    initialize(decoder, 5)
    return decoder


def step_of(decoder: Decoder, batch: Batch, accumulation: int = 1) -> tuple[float, float]:
    """Loss and gradient norm of one step that moves nothing."""
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.0)
    settings = TrainSettings.parse({"sequences_per_step": len(batch.inputs), "accumulation": accumulation})

    def sum_of_nats(state: Tensor, targets: Tensor) -> Tensor:
        return token_nats(decoder.logits(state), targets).sum()

    figures = take_step(decoder, optimizer, batch, sum_of_nats, settings)
    return figures.loss, figures.gradient_norm


def first_batch(windows: ChatWindows, count: int = 4) -> Batch:
    batch = windows.batch(range(count))
    return Batch(batch.inputs, batch.targets, batch.documents)


def test_the_loss_is_the_mean_of_loops_over_answer_tokens(windows: ChatWindows) -> None:
    """Chat by chat without a neighbour, so it is also proof that packed chats do not see each other."""
    decoder = make_decoder()
    nats = [
        one for window in windows.packed[:4] for which in window for one in naive_nats(decoder, windows.chats[which])
    ]
    assert max(map(len, windows.packed[:4])) > 1
    expected = torch.stack(nats).mean()
    gradients = torch.autograd.grad(expected, list(decoder.parameters()))
    loss, norm = step_of(decoder, first_batch(windows))
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert norm == pytest.approx(torch.stack([g.norm() for g in gradients]).norm().item(), rel=1e-6)


@pytest.mark.parametrize("mixture", [None, MixtureSettings(num_experts=5, experts_per_token=2, expert_width=20)])
def test_pieces_with_unequal_answers_give_the_mean_of_all(windows: ChatWindows, mixture: Any) -> None:
    decoder, batch = make_decoder(mixture=mixture), first_batch(windows)
    counts = (batch.targets != IGNORED).sum(dim=1)
    assert len(set(counts.tolist())) > 1
    assert step_of(decoder, batch, 1)[0] == pytest.approx(step_of(decoder, batch, 4)[0], rel=1e-12)
    if mixture is None:
        assert step_of(decoder, batch, 1)[1] == pytest.approx(step_of(decoder, batch, 4)[1], rel=1e-6)


def test_changing_one_chat_leaves_the_loss_of_its_neighbours(windows: ChatWindows) -> None:
    decoder, batch = make_decoder(), windows.batch([0])
    assert batch.documents is not None
    first, second = batch.documents[0] == 0, batch.documents[0] == 1
    assert first.any() and second.any()
    changed = batch.inputs.clone()
    changed[0, first] = (changed[0, first] + 7) % VOCAB

    def nats(inputs: Tensor, documents: Tensor | None) -> Tensor:
        return token_nats(decoder(inputs, documents), batch.targets)[0]

    before, after = nats(batch.inputs, batch.documents), nats(changed, batch.documents)
    assert torch.equal(before[second], after[second]) and not torch.allclose(before[first], after[first])
    assert not torch.allclose(nats(batch.inputs, None)[second], nats(changed, None)[second]), "masks keep them apart"


def train_on_rank(rank: int, settings: RunSettings, folder: Path, cache: Path) -> None:
    train(settings, folder, cache)


@pytest.mark.slow
def test_two_ranks_in_two_pieces_are_the_run_of_one(tmp_path: Path, cache: Path) -> None:
    """Ranks and pieces have unequal numbers of answer tokens; the mean is over those of the whole step."""
    words = ("train.precision=float64", "train.steps=6")
    train(chat_run(tmp_path, *words), tmp_path / "one", cache)
    spread = chat_run(tmp_path, *words, "train.parallel.shard=2", "train.accumulation=2")
    on_ranks(2, train_on_rank, spread, tmp_path / "two", cache)
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for kind in ("step", "evaluation"):
        losses = [[row["loss"] for row in rows if row["kind"] == kind] for rows in (one, two)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    results = [RunFolder(tmp_path / name).result for name in ("one", "two")]
    assert results[0] is not None and results[1] is not None
    assert results[0]["heldout"]["chats"] == pytest.approx(results[1]["heldout"]["chats"], abs=1e-9)


def test_heldout_answers_are_scored_chat_by_chat(tmp_path: Path, cache: Path) -> None:
    settings = chat_run(tmp_path, "train.precision=float64")
    source, chats = open_source(settings, cache), prepare_chats(settings.data).heldout
    decoder, _ = build(settings, compiled=False)
    found = score(decoder, source.heldout["chats"])
    expected = [torch.stack(naive_nats(decoder, chat)).sum().item() for chat in chats.chats]
    assert found.document_nats.tolist() == pytest.approx(expected, rel=1e-10)
    assert found.document_tokens.tolist() == [int(chat.is_answer.sum()) for chat in chats.chats]
    assert found.figures()["loss"] == pytest.approx(sum(expected) / chats.num_answer_tokens)


def test_padding_enters_no_measurement(tmp_path: Path, cache: Path) -> None:
    settings = chat_run(tmp_path, "train.precision=float64")
    source = open_source(settings, cache)
    decoder, _ = build(settings, compiled=False)
    windows = source.measured_windows(3)
    assert windows.documents is not None
    num_padding = int((windows.documents == PADDING).sum())
    measured = measure_heldout(decoder, source, 3)
    assert 0 < num_padding == measured.context["padding"]
    assert measured.context["tokens"] == windows.inputs.numel() - num_padding


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    train(chat_run(folder / "data"), folder / "run", cache)
    return folder


@pytest.mark.parametrize("stop", [2, 7])
def test_stopped_and_continued_it_ends_with_the_same_bits(
    finished: Path, tmp_path: Path, cache: Path, stop: int
) -> None:
    settings = chat_run(finished / "data")
    with pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path / "run", cache, Recording(stop))
    train(settings, tmp_path / "run", cache)
    assert_same_run(finished / "run", tmp_path / "run")


def test_a_run_learns_to_answer_and_keeps_its_template(finished: Path) -> None:
    run = RunFolder(finished / "run")
    assert run.result is not None and run.chat_template is not None
    assert run.chat_template.source == PLAIN
    losses = [row["loss"] for row in read_metrics(run.metrics, "step")]
    assert losses[-1] < losses[0]
    assert run.data["heldout"] == ["chats"] and run.data["attributions"][0].startswith("chats of ")
    assert run.result["heldout"]["chats"]["bits_per_byte"] > 0


def test_other_chats_or_another_template_are_no_continuation(finished: Path, tmp_path: Path, cache: Path) -> None:
    settings = chat_run(tmp_path / "data")
    with pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path / "run", cache, Recording(2))
    write_chats(tmp_path / "data" / "chats.jsonl", 41)
    with pytest.raises(ValueError, match="holds a run with other data; restore the text that it was begun with"):
        train(settings, tmp_path / "run", cache)


def test_a_vocabulary_that_does_not_hold_the_tokenizer_is_refused(tmp_path: Path, cache: Path) -> None:
    settings = chat_run(tmp_path, "model.vocab_size=100")
    with pytest.raises(
        ValueError, match=r"^model\.vocab_size=100 is smaller than the vocabulary of 270 of the tokenizer"
    ):
        train(settings, tmp_path / "run", cache)
    assert not (tmp_path / "run").exists()
