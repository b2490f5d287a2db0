"""A run fine-tuned on chats at toy size: files, page, continuing, converting, preference tuning, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gatelab.data.chat_template import PLAIN
from gatelab.data.chat_windows import prepare_chats
from gatelab.evaluate.conversion import convert_model
from gatelab.evaluate.models import open_model
from gatelab.longcontext.extend import open_base_run
from gatelab.recipes.table import resolve
from gatelab.report.page import write_page
from gatelab.study.fine_tuning import FineTuned, fine_tune
from gatelab.study.fine_tuning_page import fine_tuning_page, fine_tuning_table
from gatelab.train import throughput
from gatelab.train.checkpoint import checkpoints
from gatelab.train.loop import train
from gatelab.train.run_folder import RunFolder
from gatelab.train.start import start_checksum
from gatelab.train.watch import Unwatched

WORDS = ["data.context=96", "data.chats.heldout_fraction=0.3", "train.optimizer.learning_rate=1e-2"]


class StopAt(Unwatched):
    """Stops the driver after so many updates."""

    def __init__(self, updates: int):
        self.left = updates

    def update(self, step: int, loss: float, tokens_per_second: float, peak_share: float) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.fixture(scope="module", autouse=True)
def no_waiting() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(throughput, "measure_peak", lambda dtype, **_: 1e12)
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def base_run(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A trained run with a gate."""
    folder = tmp_path_factory.mktemp("base")
    text = folder / "documents.jsonl"
    lines = [{"text": f"Gate {n} opens {n % 7} times. user: assistant: Yes. " * (1 + n % 5)} for n in range(200)]
    text.write_text("\n".join(json.dumps(line) for line in lines))
    words = [
        f"data.train={{name: files, path: {text}, heldout_fraction: 0.2}}",
        "data.tokenizer.vocab_size=300",
        "data.context=32",
        "model.max_context=128",
        "model.width=24",
        "model.num_layers=2",
        "model.num_heads=3",
        "model.num_kv_heads=3",
        "model.head_size=8",
        "model.feedforward_width=40",
        "model.vocab_size=300",
        "train.steps=6",
        "train.schedule.warmup_steps=2",
        "train.sequences_per_step=4",
        "train.precision=float32",
        "gate=sdpa_elementwise",
    ]
    train(resolve("dense_tiny", words), folder / "run", cache)
    return folder / "run"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("chats") / "gate chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"Gate {n}?"}, {"role": "assistant", "content": f"{n % 7} times."}]}
        for n in range(60)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def tuned(base_run: Path, chats: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FineTuned]:
    folder = tmp_path_factory.mktemp("tuned") / "run"
    return folder, fine_tune(str(base_run), chats, folder, cache, 3, WORDS)


def test_it_starts_from_the_runs_weights_and_learns_to_answer(tuned: tuple[Path, FineTuned], base_run: Path) -> None:
    folder, found = tuned
    run, base = RunFolder(folder), RunFolder(base_run)
    assert start_checksum(folder / "start") == start_checksum(checkpoints(base.checkpoints)[-1])
    settings = run.settings
    assert settings.train.steps == -(-3 * len(prepare_chats(settings.data).train) // 4)
    assert (settings.data.context, settings.train.seed) == (96, 1)
    assert settings.train.schedule.warmup_steps == settings.train.steps // 10
    figures = [found.before["heldout"]["gate_chats"], found.after.result["heldout"]["gate_chats"]]
    assert figures[0]["tokens"] == figures[1]["tokens"]
    assert figures[1]["loss"] < figures[0]["loss"] - 0.1
    first = next(row for row in found.after.metrics if row["kind"] == "evaluation")
    assert first["step"] == 0 and first["loss"] == pytest.approx(figures[0]["loss"], rel=1e-5)
    assert json.loads((folder / "before.json").read_text()) == found.before
    assert (folder / "tokenizer.json").read_text() == (base_run / "tokenizer.json").read_text()


def test_the_page_shows_both_states(tuned: tuple[Path, FineTuned], tmp_path: Path) -> None:
    _, found = tuned
    page = fine_tuning_page(found, "gatelab sft run --chats chats.jsonl")
    assert [section.title for section in page.sections] == ["Before and after", "Sinks, gates and hidden maxima"]
    titles = [figure.definition for figure in page.sections[1].content]  # type: ignore[union-attr]
    assert len(titles) == 3 and titles[1].startswith("The largest absolute value")
    before = found.before["heldout"]["gate_chats"]["loss"]
    assert page.lead.startswith(f"Loss of an answer's token on held-out chats: {before:.4f} before, ")
    write_page(page, tmp_path / "report.html")
    assert "fine-tuned on gate_chats" in (tmp_path / "report.html").read_text()
    assert "mean gate score" in str(fine_tuning_table(found))


def test_stopped_and_called_again_it_ends_with_the_same_weights(
    tuned: tuple[Path, FineTuned], base_run: Path, chats: Path, cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fine_tune(str(base_run), chats, tmp_path / "run", cache, 3, WORDS, StopAt(4))
    again = fine_tune(str(base_run), chats, tmp_path / "run", cache, 3, WORDS)
    states = [
        load_file(checkpoints(RunFolder(folder).checkpoints)[-1] / "model.safetensors")
        for folder in (tuned[0], tmp_path / "run")
    ]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    assert again.before == tuned[1].before
    with pytest.raises(ValueError, match=r"holds a run with other settings(.|\n)*train\.steps"):
        fine_tune(str(base_run), chats, tmp_path / "run", cache, 2, WORDS)


def test_a_fine_tuned_run_is_fine_tuned_again_with_its_template(
    tuned: tuple[Path, FineTuned], chats: Path, cache: Path, tmp_path: Path
) -> None:
    fine_tune(str(tuned[0]), chats, tmp_path / "run", cache, 0.1, WORDS)
    settings = RunFolder(tmp_path / "run").settings
    assert settings.train.steps == 1 and settings.data.chats is not None
    assert settings.data.chats.template == str(tuned[0])
    assert (tmp_path / "run" / "chat_template.jinja").read_text() == PLAIN


@pytest.fixture(scope="module")
def exported(tuned: tuple[Path, FineTuned], tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("exported") / "model"
    convert_model(tuned[0], folder, "gatelab")
    return folder


def test_the_exported_template_gives_the_tokens_that_were_trained_on(
    tuned: tuple[Path, FineTuned], exported: Path
) -> None:
    """What transformers makes of a chat by itself, and the answer where its own prompt ends."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    prepared = prepare_chats(RunFolder(tuned[0]).settings.data)
    ours = {tuple(chat.ids.tolist()): chat.is_answer for chat in (*prepared.train.chats, *prepared.heldout.chats)}
    for n in range(7):
        messages = [{"role": "user", "content": f"Gate {n}?"}, {"role": "assistant", "content": f"{n % 7} times."}]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        is_answer = ours[tuple(ids)].tolist()
        assert ids[: len(prompt)] == prompt and is_answer == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    generation = json.loads((exported / "generation_config.json").read_text())
    assert ids[-1] == tokenizer.eos_token_id == generation["eos_token_id"]
    assert open_model(str(exported)).tokenizer.encode("<|bos|>") != [tokenizer.bos_token_id], "a text stays a text"


def test_an_exported_model_is_fine_tuned_as_its_run_is(
    tuned: tuple[Path, FineTuned], exported: Path, chats: Path, cache: Path, tmp_path: Path
) -> None:
    found = fine_tune(str(exported), chats, tmp_path / "run", cache, 0.1, [*WORDS, "train.precision=float32"])
    after = tuned[1].after.result["heldout"]["gate_chats"]
    assert found.before["heldout"]["gate_chats"]["loss"] == pytest.approx(after["loss"], rel=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_two_steps_of_preference_tuning_move_the_gates(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe of docs/post-training.md, at toy size."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    from gatelab.interop import load, register

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    register()
    model, reference = (transformers.AutoModelForCausalLM.from_pretrained(exported) for _ in range(2))
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gates = [name for name, _ in model.named_parameters() if ".gates." in name]
    assert len(gates) == 2
    gradients: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda one, name=name: gradients.__setitem__(name, float(one.grad.abs().max()))
        )
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Gate {n}?"}],
            "chosen": [{"role": "assistant", "content": f"{n} times."}],
            "rejected": [{"role": "assistant", "content": "No."}],
        }
        for n in range(6)
    ]
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=3, learning_rate=1e-2, report_to="none",
        save_strategy="no", use_cpu=True, bf16=False, logging_steps=1, disable_tqdm=True, max_length=96,
        dataloader_pin_memory=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    assert trainer.train().global_step == 2
    assert all(gradients[name] > 0 for name in gates)
    after = trainer.model.state_dict()
    assert all(not torch.equal(after[name], before[name]) for name in gates)
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == PLAIN
    again = load(str(tmp_path / "saved")).state_dict()
    assert all(torch.equal(again[name], after[name]) for name in gates)


@pytest.mark.parametrize(
    ("words", "epochs", "sentence"),
    [
        (["model.width=32"], 1, r"'model\.width=32' can't be set: only data\.\* and train\.\* can, without start_from"),
        (["train.steps=9"], 1, r"'train\.steps=9' can't be set"),
        ([], 0, "--epochs 0 trains nothing; give a number above 0"),
        (["data.context=7"], 1, r"chats are longer than data\.context=7 tokens, .*raise data\.context"),
        (["data.context=512"], 1, r"data\.context=512 exceeds model\.max_context=128"),
    ],
)
def test_what_can_not_be_asked_is_refused_and_leaves_nothing(
    base_run: Path, chats: Path, cache: Path, tmp_path: Path, words: list[str], epochs: float, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        fine_tune(str(base_run), chats, tmp_path / "run", cache, epochs, words)
    assert not (tmp_path / "run").exists()


def test_folders_that_can_not_be_used_are_refused(base_run: Path, chats: Path, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is the model that is fine-tuned; choose another folder"):
        fine_tune(str(base_run), chats, base_run, cache)
    with pytest.raises(ValueError, match=r"there is no file of chats at .*nowhere\.jsonl"):
        fine_tune(str(base_run), tmp_path / "nowhere.jsonl", tmp_path / "run", cache)
    task = resolve("backcopy", ["train.steps=1", "train.schedule.warmup_steps=0", "train.evaluation.windows=1"])
    train(task, tmp_path / "task", cache)
    with pytest.raises(ValueError, match="was trained on a synthetic task and knows no text to answer with"):
        fine_tune(str(tmp_path / "task"), chats, tmp_path / "run", cache)


def test_a_fine_tuned_run_is_not_extended(tuned: tuple[Path, FineTuned]) -> None:
    with pytest.raises(ValueError, match="was trained on chats; extend the run that it started from, then fine-tune"):
        open_base_run(str(tuned[0]))
