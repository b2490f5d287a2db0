"""Runs that find hidden tokens: what they read, score and measure, exact resume, ranks, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel_parity import on_ranks
from tiny_runs import Recording, assert_same_run, tiny_text_run, write_corpus

from gatelab.data.loader import IGNORED
from gatelab.data.masking import MaskedLoader
from gatelab.data.tokenizer import train_tokenizer
from gatelab.model.decoder import Decoder
from gatelab.model.perplexity import token_nats
from gatelab.train.checkpoint import checkpoints, load_decoder
from gatelab.train.evaluation import measure_heldout, score
from gatelab.train.loop import build, train
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings
from gatelab.train.source import open_source

ENCODER = ("model.causal=false", "data.masking={probability: 0.3}", "model.vocab_size=275")
SEP = 273


def encoder_run(corpus: Path, *overrides: str, gate: str = "sdpa_elementwise") -> RunSettings:
    """The tiny run on a text, of a vocabulary with room for [SEP] and [MASK] and three ids that nothing uses."""
    return tiny_text_run(corpus, *ENCODER, *overrides, gate=gate)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "run"
    train(encoder_run(corpus), folder, cache)
    return folder


def test_a_run_reads_masked_windows_and_is_told_to_find_their_tokens(corpus: Path, cache: Path) -> None:
    source = open_source(encoder_run(corpus), cache)
    assert isinstance(source.train, MaskedLoader) and source.delimiters == {"SEP": [SEP]}
    batch = source.train.batch(3)
    assert batch.inputs.shape == (4, 19) and batch.documents is None
    assert (batch.inputs[:, 0] == 0).all() and (batch.inputs[:, -1] == SEP).all()
    assert (batch.inputs == 274).any() and batch.inputs.max() == 274
    assert 0.1 < (batch.targets != IGNORED).float().mean() < 0.5
    assert int(batch.targets.max()) < 270


def test_a_run_learns_and_ends_with_what_a_study_asks_for(finished: Path) -> None:
    run = RunFolder(finished)
    assert run.result is not None
    losses = [row["loss"] for row in read_metrics(run.metrics, "step")]
    assert losses[-1] < losses[0]
    figures, measured = run.result["heldout"]["gates.jsonl"], run.result["measurement"]
    assert figures["bits_per_byte"] is None and 0 <= figures["accuracy"] <= 1
    assert measured["first_token_attention_floor"] == pytest.approx(1 / 19), "every query sees all keys"
    assert 0 < measured["delimiter_attention[SEP]"] < 1
    for name in ("gate_mean", "largest_activation", "activation_ratio", "activation_kurtosis"):
        assert measured[name] > 0
    assert measured.keys() <= read_metrics(run.metrics, "measurement")[-1].keys()


def test_heldout_tokens_are_scored_as_by_loops(finished: Path, corpus: Path, cache: Path) -> None:
    """Loss, accuracy and documents, target by target; another seed of the run is asked for the same tokens."""
    settings = encoder_run(corpus, "train.precision=float64")
    decoder, _ = build(settings, compiled=False)
    source = open_source(settings, cache)
    (domain,) = source.heldout.values()
    nats, right, by_document = [], 0, {}
    for batch in domain.batches():
        assert batch.document_ids is not None
        logits = decoder(batch.inputs)
        for row, place in (batch.targets != IGNORED).nonzero().tolist():
            target, document = int(batch.targets[row, place]), int(batch.document_ids[row, place])
            nats.append(-logits[row, place].log_softmax(-1)[target].item())
            right += int(logits[row, place].argmax()) == target
            by_document[document] = by_document.get(document, 0.0) + nats[-1]
    found = score(decoder, domain)
    assert found.num_tokens == len(nats) > 50 and found.num_right == right
    assert found.nats == pytest.approx(sum(nats), rel=1e-12)
    known = {number: value for number, value in enumerate(found.document_nats.tolist()) if value}
    assert known == pytest.approx(by_document, rel=1e-12) and len(known) > 3
    assert found.figures()["accuracy"] == right / len(nats)
    (other,) = open_source(encoder_run(corpus, "train.seed=5"), cache).heldout.values()
    for one, two in zip(domain.batches(), other.batches(), strict=True):
        assert torch.equal(one.inputs, two.inputs) and torch.equal(one.targets, two.targets)


def attention_by_loops(decoder: Decoder, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Each layer's weights (B H T S), from the queries and keys that its kernel is given."""
    found: list[torch.Tensor] = []
    for layer in decoder.model.layers:
        kernel = layer.self_attn.kernel

        def kernel_with_weights(query, key, value, mask, causal, sink=None, kernel=kernel):
            num_queries, num_heads, group = query.shape[1], query.shape[2], query.shape[2] // key.shape[2]
            weights = torch.empty(len(query), num_heads, num_queries, num_queries, dtype=torch.float64)
            for row in range(len(query)):
                for head in range(num_heads):
                    for t in range(num_queries):
                        logits = [query[row, t, head] @ one for one in key[row, :, head // group]]
                        weights[row, head, t] = (torch.stack(logits) * query.shape[-1] ** -0.5).double().softmax(0)
            found.append(weights)
            return kernel(query, key, value, mask, causal, sink)

        layer.self_attn.kernel = kernel_with_weights
    with torch.no_grad():
        decoder.hidden(inputs)
    return found


def test_attention_to_cls_and_sep_is_that_of_whole_maps(corpus: Path, cache: Path) -> None:
    settings = encoder_run(corpus, "train.precision=float64", "model.init_std=0.3")
    source = open_source(settings, cache)
    decoder, _ = build(settings, compiled=False)
    found = measure_heldout(decoder, source, 3)
    inputs = source.measured_windows(3).inputs
    is_sep = inputs == SEP
    assert is_sep.sum() > len(inputs), "between documents too"
    decoder, _ = build(settings, compiled=False)
    for layer, weights in zip(found.layers, attention_by_loops(decoder, inputs), strict=True):
        on_cls = weights[..., 0].mean((0, 2))
        on_sep = (weights * is_sep[:, None, None]).sum(-1).mean((0, 2))
        assert layer.by_head("first_token_attention") == pytest.approx(on_cls.tolist(), rel=1e-9)
        assert layer.by_head("delimiter_attention[SEP]") == pytest.approx(on_sep.tolist(), rel=1e-9)
        assert layer.floor("first_token_attention") == pytest.approx(1 / 19)
        assert layer.floor("delimiter_attention[SEP]") == pytest.approx(float(is_sep.double().mean()))
    summary = found.summary()
    assert summary["delimiter_attention[SEP]"] == found.mean("delimiter_attention[SEP]")
    assert summary["delimiter_attention_floor[SEP]"] == pytest.approx(float(is_sep.double().mean()))


@pytest.mark.parametrize("gate", ["sdpa_elementwise", "sdpa_headwise", "value_elementwise"])
def test_gates_get_gradients_from_hidden_tokens(corpus: Path, cache: Path, gate: str) -> None:
    settings = encoder_run(corpus, gate=gate)
    batch = open_source(settings, cache).train.batch(0)
    decoder, _ = build(settings, compiled=False)
    token_nats(decoder(batch.inputs), batch.targets).sum().backward()
    gates = {name: one.grad for name, one in decoder.named_parameters() if ".gates." in name}
    assert len(gates) >= 2 and all(one is not None and one.abs().max() > 0 for one in gates.values())


@pytest.mark.parametrize("stop", [2, 7])
def test_stopped_and_continued_an_encoder_ends_with_the_same_bits(
    finished: Path, tmp_path: Path, corpus: Path, cache: Path, stop: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(encoder_run(corpus), tmp_path / "run", cache, Recording(stop))
    train(encoder_run(corpus), tmp_path / "run", cache)
    assert_same_run(finished, tmp_path / "run")


def train_on_rank(rank: int, settings: RunSettings, folder: Path, cache: Path) -> None:
    train(settings, folder, cache)


@pytest.mark.slow
def test_two_ranks_in_two_pieces_hide_what_one_does(tmp_path: Path, corpus: Path, cache: Path) -> None:
    words = ("train.precision=float64", "train.steps=6")
    train(encoder_run(corpus, *words), tmp_path / "one", cache)
    spread = encoder_run(corpus, *words, "train.parallel.shard=2", "train.accumulation=2")
    on_ranks(2, train_on_rank, spread, tmp_path / "two", cache)
    one, two = (RunFolder(tmp_path / name) for name in ("one", "two"))
    for kind in ("step", "evaluation"):
        losses = [[row["loss"] for row in read_metrics(run.metrics, kind)] for run in (one, two)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    assert one.result is not None and two.result is not None
    assert one.result["heldout"]["gates.jsonl"] == pytest.approx(two.result["heldout"]["gates.jsonl"], abs=1e-9)


def test_a_mixture_of_corpora_is_hidden_too(tmp_path: Path, corpus: Path, cache: Path) -> None:
    other = write_corpus(tmp_path / "other.jsonl", word="sink")
    second = f"{{name: files, path: {other}, title_field: title, heldout_fraction: 0.3}}"
    mixed = f"data.mixture=[{{corpus: {second}, weight: 2}}]"
    train(encoder_run(corpus, mixed, "train.steps=3", "data.masking.probability=0.5"), tmp_path / "run", cache)
    result = RunFolder(tmp_path / "run").result
    assert result is not None and list(result["heldout"]) == ["gates.jsonl", "other.jsonl"]


def test_an_encoder_is_a_model_of_both_sides(finished: Path) -> None:
    decoder = load_decoder(checkpoints(RunFolder(finished).checkpoints)[-1])
    ids = torch.arange(19)[None] + 30
    changed = ids.clone()
    changed[0, -1] = 7
    with torch.no_grad():
        assert not torch.equal(decoder(ids)[0, 0], decoder(changed)[0, 0])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.masking=null"],
            r"^model.causal=False can't be trained to predict the next token.*; set model.causal=true, or "
            r"data.masking=\{\} to find hidden tokens$",
        ),
        (
            ["model.causal=true"],
            r"^data.masking hides tokens that are found from both sides, and model.causal=True sees one side alone; "
            r"set model.causal=false, or leave data.masking out$",
        ),
        (
            ["model.vocab_size=271"],
            r"^model.vocab_size=271 is smaller than the data's vocabulary of 272, the two ids of \[SEP\] and \[MASK\]",
        ),
        (["data.masking.probability=1.5"], r"data.masking.probability cannot be 1.5: input should be less than 1"),
    ],
)
def test_settings_that_can_not_be_are_refused(corpus: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder_run(corpus, *overrides)


def test_a_tokenizer_that_leaves_no_room_is_refused_before_any_text_is_read(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(train_tokenizer(["gate"], 258).to_text())
    words = (f"data.tokenizer.path={file}", "model.vocab_size=259")
    settings = encoder_run(tmp_path / "missing.jsonl", *words)
    with pytest.raises(ValueError, match=r"^model.vocab_size=259 is smaller than 260: the tokenizer's 258, \[SEP\]"):
        open_source(settings, cache)


def test_a_window_longer_than_the_heldout_text_is_refused(corpus: Path, cache: Path) -> None:
    words = ("data.context=900", "model.max_context=900")
    with pytest.raises(ValueError, match=r"the held-out text gates.jsonl is shorter than one window of context=900"):
        open_source(encoder_run(corpus, *words), cache)
