"""A gate added to a trained decoder, at toy size: equal starts, two arms, files, page, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as HubTokenizer

from gatelab.interop.loading import load
from gatelab.recipes.table import resolve
from gatelab.report.page import write_page
from gatelab.study.gate_adding import AddedGate, Base, add_and_train, continuation, open_base, write_starts
from gatelab.study.gate_adding_page import added_gate_page, added_gate_table, text_difference
from gatelab.train.checkpoint import checkpoints
from gatelab.train.loop import train
from gatelab.train.run_folder import RunFolder
from gatelab.train.watch import Unwatched

GATE = "sdpa_elementwise_identity_start"


class StopAt(Unwatched):
    """Stops the driver after so many updates."""

    def __init__(self, updates: int):
        self.left = updates

    def update(self, step: int, loss: float, tokens_per_second: float, peak_share: float) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def base_run(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A trained run without a gate, in bfloat16 like the recipe."""
    text = tmp_path_factory.mktemp("text") / "documents.jsonl"
    lines = [{"text": f"Document {n} says {n * n} and {n % 7}, then rests. " * (1 + n % 5)} for n in range(300)]
    text.write_text("\n".join(json.dumps(line) for line in lines))
    words = [
        f"data.train={{name: files, path: {text}, heldout_fraction: 0.2}}",
        "data.tokenizer.vocab_size=300",
        "data.context=32",
        "model.width=24",
        "model.num_layers=2",
        "model.num_heads=3",
        "model.num_kv_heads=3",
        "model.head_size=8",
        "model.feedforward_width=40",
        "train.steps=6",
        "train.schedule.warmup_steps=2",
        "train.checkpoint.every=3",
    ]
    folder = tmp_path_factory.mktemp("base") / "run"
    train(resolve("demo", words), folder, cache)
    return folder


@pytest.fixture(scope="module")
def base(base_run: Path) -> Base:
    return open_base(str(base_run))


@pytest.fixture(scope="module")
def added(base: Base, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, AddedGate]:
    folder = tmp_path_factory.mktemp("added") / "gate"
    settings = continuation(base.settings, steps=5, gate_rate_scale=20.0)
    return folder, add_and_train(base, GATE, settings, folder, cache)


def test_both_arms_start_as_the_base_was(added: tuple[Path, AddedGate], base_run: Path) -> None:
    _, result = added
    assert [start["logit_error"] for start in result.starts] == [0.0]
    rows = [[row for row in run.metrics if row["kind"] == "evaluation"] for run in (result.without, result.gated)]
    assert rows[0][0]["step"] == 0 and rows[0][0]["loss"] == rows[1][0]["loss"], "bit-equal in bfloat16 too"
    steps = [[row["loss"] for row in run.metrics if row["kind"] == "step"] for run in (result.without, result.gated)]
    assert steps[0][0] == steps[1][0] and steps[0][-1] != steps[1][-1]
    base_result = RunFolder(base_run).result
    assert base_result is not None
    (domain,) = base_result["heldout"]
    assert result.before["heldout"][domain]["loss"] == base_result["heldout"][domain]["loss"]
    assert result.before["measurement"]["summary"] == base_result["measurement"]


def test_the_gate_moved_and_only_in_one_arm(added: tuple[Path, AddedGate]) -> None:
    _, result = added
    assert [(one.layer, one.position) for one in result.movement] == [(0, "sdpa_output"), (1, "sdpa_output")]
    for one in result.movement:
        assert one.score_before == 1.0 and one.norm_before == 0.0
        assert one.mean_change > 1e-4 and one.norm_after == one.norm_of_change > 0
    assert result.without.result["gate_parameters"] == 0 < result.gated.result["gate_parameters"]


def test_files(added: tuple[Path, AddedGate]) -> None:
    folder, result = added
    expected = {"starts", "start.json", "without_gate", "with_gate", "before.json", "movement.json"}
    assert {path.name for path in folder.iterdir()} == expected
    assert json.loads((folder / "movement.json").read_text()) == [one._asdict() for one in result.movement]
    assert json.loads((folder / "before.json").read_text()) == result.before
    assert json.loads((folder / "start.json").read_text()) == {"gate": GATE, "starts": result.starts}
    ids = torch.randint(300, (3, 17), generator=torch.Generator().manual_seed(0))
    plain, gated = (load(folder / "starts" / name) for name in ("without_gate", "with_gate"))
    assert gated.settings.gates and not plain.settings.gates and torch.equal(plain(ids), gated(ids))


def test_stopped_and_run_again_it_gives_the_same_figures(
    base: Base, added: tuple[Path, AddedGate], cache: Path, tmp_path: Path
) -> None:
    settings = continuation(base.settings, steps=5, gate_rate_scale=20.0)
    for updates in (3, 4):
        with pytest.raises(KeyboardInterrupt):
            add_and_train(base, GATE, settings, tmp_path / "gate", cache, StopAt(updates))
    again = add_and_train(base, GATE, settings, tmp_path / "gate", cache)
    _, whole = added
    assert again.movement == whole.movement and again.before == whole.before
    assert again.gated.result["heldout"] == whole.gated.result["heldout"]
    finished = add_and_train(base, GATE, settings, tmp_path / "gate", cache, StopAt(1))
    assert finished.movement == whole.movement


def test_the_table_and_the_page(added: tuple[Path, AddedGate], tmp_path: Path) -> None:
    _, result = added
    table = added_gate_table(result)
    headings = [column.heading for column in table.columns]
    assert headings == ["held-out text", "before", "trained on without", "trained on with the gate"]
    cells = {row[0]: row[1:] for row in table.cells()}
    assert cells["mean gate score"][:2] == ["–", "–"] and 0.5 < float(cells["mean gate score"][2]) < 1.5
    perplexities = [value for name, values in cells.items() if name.startswith("perplexity, ") for value in values]
    assert len(set(perplexities)) == 3
    write_page(added_gate_page(result, "gatelab add-gate RUN"), tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    for expected in ("gatelab add-gate RUN", "How far the gates moved", "brings no gain", "First-token attention by"):
        assert expected in html
    difference = text_difference(result)
    assert difference is not None
    ratio = float(cells[next(name for name in cells if name.startswith("perplexity"))][2])
    ratio /= float(cells[next(name for name in cells if name.startswith("perplexity"))][1])
    assert difference.relative_perplexity.value == pytest.approx(ratio - 1, abs=1e-4)


def test_settings_of_the_continuation(base: Base) -> None:
    settings = continuation(base.settings, 50, 8.0, ["train.sequences_per_step=2"])
    optimizer = settings.train.optimizer
    assert optimizer.learning_rate == pytest.approx(4e-4) and optimizer.gate_learning_rate == pytest.approx(32e-4)
    assert optimizer.gate_weight_decay == 0.0 and optimizer.weight_decay == base.settings.train.optimizer.weight_decay
    assert settings.train.seed == base.settings.train.seed + 1 and settings.train.steps == 50
    assert settings.train.sequences_per_step == 2 and settings.data == base.settings.data
    assert settings.model == base.settings.model and settings.train.schedule.warmup_steps == 5


@pytest.mark.parametrize("word", ["model.width=8", "train.start_from=elsewhere"])
def test_words_that_would_change_the_experiment(base: Base, word: str) -> None:
    with pytest.raises(ValueError, match="would change what the gate is added to; only data"):
        continuation(base.settings, 5, 1.0, [word])


@pytest.mark.parametrize(("steps", "scale"), [(0, 1.0), (5, 0.0)])
def test_settings_that_train_nothing(base: Base, steps: int, scale: float) -> None:
    with pytest.raises(ValueError, match=rf"steps={steps} with gate_rate_scale={scale:g} trains nothing"):
        continuation(base.settings, steps, scale)


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ("none", "gate 'none' adds nothing; name a gate, such as sdpa_elementwise_identity_start"),
        ("silu_on_sdpa", "silu_on_sdpa is a control without a gate, and changes the model from its first step"),
        ("sdpa_elementwize", "did you mean 'sdpa_elementwise'"),
    ],
)
def test_what_is_no_gate(base: Base, tmp_path: Path, gate: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_starts(base, gate, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_another_experiment_in_the_folder(base: Base, added: tuple[Path, AddedGate]) -> None:
    folder, _ = added
    before = sorted(path.name for path in folder.rglob("*"))
    with pytest.raises(ValueError, match=r"with_gate holds the weights of another model:\n  model\.gates\.0\.granul"):
        write_starts(base, "sdpa_headwise_identity_start", folder)
    other = base.decoder.__class__(base.decoder.settings)
    with pytest.raises(ValueError, match="without_gate holds the start of another experiment; choose another folder"):
        write_starts(Base(other, base.settings), GATE, folder)
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_folders_that_are_refused(base: Base, base_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds a run; choose another folder for what is trained from it"):
        write_starts(base, GATE, base_run)
    with pytest.raises(ValueError, match="is no checkpoint that GateLab loads"):
        open_base(str(tmp_path))
    (tmp_path / "settings.yaml").write_text(base.settings.to_yaml())
    with pytest.raises(ValueError, match="has no checkpoint yet; train it until it has saved one"):
        open_base(str(tmp_path))


def test_a_model_without_a_run_is_trained_on_with_its_own_tokenizer(
    base: Base, base_run: Path, cache: Path, tmp_path: Path
) -> None:
    """Weights and tokenizer alone, as of a model from elsewhere; the text is named by words."""
    model = tmp_path / "model"
    model.mkdir()
    newest = checkpoints(RunFolder(base_run).checkpoints)[-1]
    (model / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes())
    HubTokenizer.from_file(str(base_run / "tokenizer.json")).save(str(model / "tokenizer.json"))
    opened = open_base(str(model))
    assert opened.settings.data.tokenizer.path == str(model) and opened.decoder.settings == base.decoder.settings
    text = base.settings.data.train
    words = [
        f"data.train={{name: files, path: {text.path}, heldout_fraction: 0.2}}",
        "data.context=32",
        "train.sequences_per_step=4",
    ]
    settings = continuation(opened.settings, 2, 10.0, words)
    result = add_and_train(opened, "sdpa_and_value_headwise", settings, tmp_path / "gate", cache)
    assert [start["gate"]["position"] for start in result.starts] == ["sdpa_output", "value"]
    assert all(0 < start["logit_error"] < 0.01 and start["score_error"] < 1e-4 for start in result.starts)
    assert len(result.movement) == 4 and all(one.score_before > 0.9999 for one in result.movement)
