"""Runs that tell digits apart: what they score and measure, exact resume, gates, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import Recording, assert_same_run, tiny_model, tiny_run

from gatelab.data.loader import IGNORED
from gatelab.data.settings import DataSettings
from gatelab.model.perplexity import token_nats
from gatelab.train.evaluation import measure_heldout, score
from gatelab.train.loop import build, train
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings
from gatelab.train.source import open_source

T = 17


def vision_run(*overrides: str, gate: str = "sdpa_elementwise") -> RunSettings:
    """Twelve steps on digits in patches of 2 x 2 pixels."""
    patches = {"pixels": 4, "levels": 17}
    changes = {"vocab_size": 10, "causal": False, "tied_head": False, "patches": patches}
    model = tiny_model(gate).to_mapping() | changes
    data = DataSettings.parse({"images": {"patch_size": 2}, "context": T})
    settings = RunSettings.parse({"model": model, "data": data.to_mapping(), "train": tiny_run().train.to_mapping()})
    return settings.with_overrides(overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("vision") / "run"
    train(vision_run(), folder, cache)
    return folder


def test_a_run_learns_classes_and_measures_cls_and_background(finished: Path) -> None:
    run = RunFolder(finished)
    assert run.result is not None and run.data["heldout"] == ["digits"] and not run.tokenizer.exists()
    losses = [row["loss"] for row in read_metrics(run.metrics, "step")]
    assert min(losses[6:]) < losses[0]
    figures, measured = run.result["heldout"]["digits"], run.result["measurement"]
    assert figures["tokens"] == 359 and figures["bits_per_byte"] is None and 0 < figures["accuracy"] < 1
    assert measured["first_token_attention_floor"] == pytest.approx(1 / T)
    for name in ("delimiter_attention[background]", "gate_mean", "activation_ratio", "activation_kurtosis"):
        assert measured[name] > 0


def test_accuracy_and_loss_are_those_of_loops_over_images(finished: Path, cache: Path) -> None:
    settings = vision_run("train.precision=float64")
    decoder, _ = build(settings, compiled=False)
    (domain,) = open_source(settings, cache).heldout.values()
    nats, right = [], 0
    with torch.no_grad():
        for batch in domain.batches():
            for sequence, targets in zip(batch.inputs, batch.targets, strict=True):
                if targets[0] != IGNORED:
                    logits = decoder(sequence[None])[0, 0]
                    nats.append(float(logits.exp().sum().log() - logits[targets[0]]))
                    right += int(logits.argmax()) == int(targets[0])
    figures = score(decoder, domain).figures()
    assert len(nats) == 359 and figures["loss"] == pytest.approx(sum(nats) / 359, rel=1e-10)
    assert figures["accuracy"] == right / 359


def test_attention_to_background_is_measured_against_its_share_of_patches(finished: Path, cache: Path) -> None:
    """Of a model whose queries are zero every key gets the same, so that each figure is its floor."""
    settings = vision_run("train.precision=float64", "model.qk_norm=false", "model.init_std=0.3")
    source = open_source(settings, cache)
    decoder, _ = build(settings, compiled=False)
    measured = measure_heldout(decoder, source, 6).summary()
    for layer in decoder.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    even = measure_heldout(decoder, source, 6).summary()
    share = float((source.measured_windows(6).inputs == 0).double().mean())
    assert 0.2 < share < 0.8
    assert even["delimiter_attention[background]"] == pytest.approx(share)
    assert even["first_token_attention"] == pytest.approx(1 / T)
    assert measured["delimiter_attention_floor[background]"] == pytest.approx(share)
    assert abs(measured["delimiter_attention[background]"] - share) > 1e-4


@pytest.mark.parametrize("gate", ["sdpa_elementwise", "sdpa_headwise", "value_elementwise"])
def test_gates_get_gradients_from_classes(finished: Path, cache: Path, gate: str) -> None:
    settings = vision_run(gate=gate)
    batch = open_source(settings, cache).train.batch(0)
    decoder, _ = build(settings, compiled=False)
    token_nats(decoder(batch.inputs), batch.targets).sum().backward()
    gates = {name: one.grad for name, one in decoder.named_parameters() if ".gates." in name}
    assert len(gates) >= 2 and all(one is not None and one.abs().max() > 0 for one in gates.values())


def test_stopped_and_continued_a_run_on_images_ends_with_the_same_bits(
    finished: Path, tmp_path: Path, cache: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(vision_run(), tmp_path / "run", cache, Recording(7))
    train(vision_run(), tmp_path / "run", cache)
    assert_same_run(finished, tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.patches=null"], r"^data.images of patch_size=2 are read by a model with patches; set model.patches="),
        (["model.patches.pixels=1"], r"set model.patches=\{pixels: 4, levels: 17\}$"),
        (["data.images=null"], r"^model.patches reads images, and data.images is none; set data.images=\{\}$"),
        (["model.vocab_size=9"], r"^model.vocab_size=9 is smaller than the data's vocabulary of 10$"),
        (["model.max_context=16"], r"^data.context=17 exceeds model.max_context=16"),
        (["model.causal=true"], r"causal=True with patches is impossible"),
    ],
)
def test_settings_that_read_no_images_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vision_run(*overrides)
