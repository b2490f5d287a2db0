"""What schemes cost, from losses that are known and through the command."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tiny_models import save_llama, save_tokenizer, write_text
from typer.testing import CliRunner

from gatelab.cli import models as commands
from gatelab.data.settings import CorpusSettings
from gatelab.diagnose.activations import HiddenTotals
from gatelab.evaluate.models import open_model
from gatelab.evaluate.quantisation import trial as trials
from gatelab.evaluate.quantisation.inputs import LinearInput
from gatelab.evaluate.quantisation.layers import Place
from gatelab.evaluate.quantisation.report import (
    FILES,
    comparisons,
    finding,
    layer_rows,
    quantisation_page,
    quantisation_table,
    scheme_rows,
    write_quantisation,
)
from gatelab.evaluate.quantisation.trial import (
    QuantisationTrial,
    QuantisedModel,
    SchemeLoss,
    cost_difference,
    quantise_models,
)
from gatelab.evaluate.texts import file_text
from gatelab.report import folder as report_folder

COMMAND = "gatelab quantise it"
NATS = [3.0, 3.5, 2.0]


def measured(name: str = "it", worse: float = 1.0, digest: str = "a") -> QuantisedModel:
    """w8a8 adds 0.1, 0.3 and 0.2 nats times ``worse``, fp8 adds 0.01 to all."""
    added = {"w8a8": [0.1 * worse, 0.3 * worse, 0.2 * worse], "fp8": [0.01, 0.01, 0.01]}
    clipped = {Place(0, "mlp.up_proj"): 0.25, Place(1, "mlp.up_proj"): 0.05}
    losses = [SchemeLoss(None, NATS, {})]
    for scheme, costs in added.items():
        nats = [one + cost for one, cost in zip(NATS, costs, strict=True)]
        losses.append(SchemeLoss(scheme, nats, clipped if scheme == "w8a8" else {}))
    inputs = []
    for layer in range(2):
        totals = HiddenTotals()
        totals.add(torch.randn(1, 13, 40, generator=torch.Generator().manual_seed(layer)) * (1 + layer))
        statistics = totals.statistics()
        assert statistics is not None
        inputs.append(LinearInput(layer, ("mlp.gate_proj", "mlp.up_proj"), statistics))
    context = {"samples": 3, "length": 64, "text": "notes.txt", "bos": "one", "tokens_sha256": digest}
    return QuantisedModel(name, context | {"calibration_samples": 2}, losses, inputs)


def test_costs_are_paired_by_text() -> None:
    model = measured()
    cost = model.cost(model.losses[1])
    assert cost.mean == pytest.approx(0.2)
    assert cost.high - cost.mean == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-5)  # t of 2 degrees of freedom
    row = scheme_rows([model])[1]
    assert row["perplexity"] == pytest.approx(math.exp(8.5 / 3 + 0.2)) and row["ratio"] == pytest.approx(math.exp(0.2))
    assert (row["clipped"], row["most_clipped"]) == (pytest.approx(0.15), 0.25)
    fixed = model.cost(model.losses[2])
    assert (fixed.low, fixed.high) == pytest.approx((0.01, 0.01))


def test_two_models_are_compared_on_equal_tokens_alone() -> None:
    first, second = measured("plain", worse=3.0), measured("gated")
    (w8a8, fp8) = comparisons([first, second])
    assert (w8a8["scheme"], w8a8["mean"]) == ("w8a8", pytest.approx(-0.4)) and fp8["mean"] == pytest.approx(0)
    differences = [-0.2, -0.6, -0.4]
    mean = sum(differences) / 3
    spread = (sum((one - mean) ** 2 for one in differences) / 2) ** 0.5
    assert mean - w8a8["low"] == pytest.approx(4.302653 * spread / 3**0.5, rel=1e-5)
    assert cost_difference(second, measured("other", digest="b"), "w8a8") is None
    assert comparisons([first]) == comparisons([first, measured("other", digest="b")]) == []
    titles = [section.title for section in quantisation_page([first, second], COMMAND).sections]
    assert "Which model is easier to quantise" in titles
    page = quantisation_page([first, measured("other", digest="b")], COMMAND)
    assert "Which model is easier to quantise" not in [section.title for section in page.sections]
    assert "The two models read different tokens." in page.lead


def test_the_finding_names_each_cost() -> None:
    sentence = finding(measured())
    assert sentence.startswith(
        "it: perplexity 17.002 as it is; rounding adds, in nats a token: w8a8 +0.2000 (-0.0484 to"
    )
    assert sentence.endswith("fp8 +0.0100 (+0.0100 to +0.0100).")


def test_rows_by_layer_are_tidy() -> None:
    rows = layer_rows([measured()])
    assert [row["metric"] for row in rows[:3]] == ["input_largest", "input_kurtosis", "input_median"]
    assert rows[0]["linear"] == "mlp.gate_proj+mlp.up_proj" and rows[0]["channel"] is not None
    assert [(row["scheme"], row["layer"], row["value"]) for row in rows if row["metric"] == "clipped"] == [
        ("w8a8", 0, 0.25), ("w8a8", 1, 0.05),
    ]  # fmt: skip


def test_the_report_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_folder, "save_chart", lambda chart, stem: [stem.with_suffix(".svg").touch()])
    models, folder = [measured("plain", 3.0), measured("gat<ed")], tmp_path / "out"
    assert write_quantisation(folder, models, COMMAND) == folder / "report.html"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "figures", "report.html"])
    whole = json.loads((folder / "quantisation.json").read_text())
    assert whole["command"] == COMMAND and whole["schemes"]["w8a8"]["activations"]["static"] is True
    assert [row["scheme"] for row in whole["figures"]] == 2 * ["as it is", "w8a8", "fp8"]
    assert whole["second_less_first"][0]["mean"] == pytest.approx(-0.4)
    with (folder / "texts.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * 3 and float(rows[4]["loss"]) == pytest.approx(3.5 + 0.9)
    page = (folder / "report.html").read_text()
    assert "gat&lt;ed" in page and "gat<ed" not in page
    assert quantisation_table(models).columns[0].key == "model"
    assert quantisation_table(models[:1]).columns[0].key == "scheme"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schemes": ()}, "nothing would be quantised; name at least one scheme"),
        ({"schemes": ("w8a",)}, "scheme 'w8a' is unknown; did you mean 'w8a8'?"),
        ({"samples": 1}, "samples=1 gives no interval; take at least 2"),
        ({"calibration": 0}, "calibration=0 measures no range; take at least 1 window"),
        ({"text": file_text(Path("nowhere.txt"))}, "nowhere.txt"),
    ],
)
def test_trials_without_a_meaning_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        QuantisationTrial(**{"text": CorpusSettings(), "cache": Path("cache"), "schemes": ("w8a8",)} | changes)


def run_command(*words: str) -> Any:
    app = typer.Typer()
    app.command()(commands.quantise)
    return CliRunner().invoke(app, list(words))


def test_the_command_quantises_two_models(
    run: Path, llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_folder, "save_chart", lambda chart, stem: [])
    words = [
        "--text",
        str(text),
        "--length",
        "64",
        "--samples",
        "3",
        "--calibration",
        "2",
        "--out",
        str(tmp_path / "q"),
    ]
    done = run_command(str(run), "--compare", str(llama), "--schemes", "w8a8,fp8_per_token,int8_weights", *words)
    assert done.exit_code == 0, done.output
    whole = json.loads((tmp_path / "q" / "quantisation.json").read_text())
    ours, theirs = (model["context"] for model in whole["models"])
    assert ours["family"] == "gatelab" and theirs["family"] == "llama" and ours["samples"] == 3
    assert (ours["linear_layers"], theirs["linear_layers"]) == (3 * 8, 3 * 7)
    layers = open_model(str(llama)).model.model.layers
    weights = sum(one.weight.numel() for layer in layers for one in layer.modules() if isinstance(one, torch.nn.Linear))
    assert theirs["share_of_parameters_rounded"] == pytest.approx(weights / theirs["parameters"])
    costs = [row["cost"] for row in whole["figures"] if row["cost"] is not None]
    assert len(costs) == 6 and all(cost != 0 for cost in costs)


def test_models_and_texts_are_checked_before_any_is_measured(
    run: Path, llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_measure", lambda *arguments: pytest.fail("a model was measured"))

    def refused(names: list[Path], **changes: Any) -> str:
        arguments = {"text": file_text(text), "cache": tmp_path, "schemes": ("w8a8",), "length": 64, "samples": 2}
        with pytest.raises(ValueError) as error:
            quantise_models([str(name) for name in names], QuantisationTrial(**arguments | changes))
        return str(error.value)

    assert refused([run, run]).endswith("would be compared with itself; name another model, or leave out --compare")
    assert "inputs, which groups of 32 don't divide" in refused([run], schemes=("w8a8", "w4_group32"))
    assert "has no gate with a linear layer of its own to leave out" in refused([run, llama], gates=False)
    assert "length=512 is above the 97 tokens that the model was made for" in refused([llama], length=512)
    short = write_text(tmp_path / "short.txt", num_sentences=10)
    assert "to calibrate on" in refused([run], text=file_text(short), calibration=3)
    short = write_text(tmp_path / "longer.txt", num_sentences=18)
    alone = refused([run], text=file_text(short), calibration=1, length=96)
    assert "is too short for 2 samples of 96 tokens beside 1 to calibrate on; give a longer text" in alone
    tail = refused([run], schemes=("w8a8_percentile",), calibration=1)
    assert "64 tokens with 24 inputs have no value in a tail of 0.0001; calibrate on at least 417 tokens" in tail


def test_two_texts_are_one_too_many(run: Path) -> None:
    done = run_command(str(run), "--text", "a.txt", "--corpus", "b")
    assert str(done.exception) == "--text a.txt and --corpus b are two texts; give one of them"


def test_a_second_llama_reads_the_same_tokens(llama: Path, text: Path, tmp_path: Path) -> None:
    other = save_llama(tmp_path, hidden_size=36)
    save_tokenizer(other, times_added=1)
    trial = QuantisationTrial(file_text(text), tmp_path, ("w4a4",), length=64, samples=3, calibration=1)
    models = quantise_models([str(llama), str(other)], trial)
    (row,) = comparisons(models)
    assert row["mean"] == pytest.approx(
        models[1].cost(models[1].losses[1]).mean - models[0].cost(models[0].losses[1]).mean
    )
