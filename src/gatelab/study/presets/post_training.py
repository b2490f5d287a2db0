"""After training: what becomes of sinks, gates and hidden maxima when models learn to answer."""

from __future__ import annotations

from pathlib import Path

from gatelab.study.presets.arms import CONFIRMATORY_SEEDS, UNGATED, compose, gated, require_text, run_of, ungated
from gatelab.study.scales import Scale
from gatelab.study.study import RATE, SEED_MARK, Arm, Study
from gatelab.train.checkpoint import path_of_step

PRETRAINING = "open/quantisation"
CHATS = "chats.jsonl"
_GATES = ("sdpa_elementwise", "sdpa_headwise")
_SHARE = 10  # of the pretraining's steps, and of its learning rate


def sft(scale: Scale) -> Study:
    """Fine-tuning on chats, gated against ungated, from the runs that ``open/quantisation`` leaves of the same arms.

    Each seed starts from its own pretrained model and draws its own order of the chats, so intervals are of both. Every
    run measures sinks, gates and hidden maxima before its first step and on to its last. The chats are ``chats.jsonl``
    unless ``data.chats.path=`` says otherwise.
    """
    run = run_of(scale, "dense")
    require_text(run, "open/sft", "fine-tunes models of text", scale)
    steps = run.train.steps // _SHARE
    words = (
        f"data.chats={{path: {CHATS}}}",
        f"data.tokenizer.path={_pretrained(scale, UNGATED, CONFIRMATORY_SEEDS[0]) / 'tokenizer.json'}",
        "data.document_masks=True",
        "data.bos_in_every_window=True",
        _start(scale, UNGATED),
        f"train.steps={steps}",
        f"train.schedule.warmup_steps={steps // 10}",
        f"train.evaluation.every={max(1, steps // 8)}",
        f"train.evaluation.measure_every={max(1, steps // 16)}",
        f"train.evaluation.measured_windows={run.train.evaluation.final_measured_windows}",
        f"{RATE}={run.train.optimizer.learning_rate / _SHARE:.6g}",
    )
    gates = [gated(gate) for gate in _GATES]
    arms = [Arm(name=arm.name, assignments=(*arm.assignments, _start(scale, arm.name))) for arm in gates]
    question = "Do sinks and hidden maxima grow when a model learns to answer, and less with a gate?"
    fields = {"metric": "first_token_attention", "confirmatory": _GATES, "seeds": CONFIRMATORY_SEEDS}
    return compose(scale, "dense", "sft", question, [ungated(), *arms], assignments=words, **fields)


def _pretrained(scale: Scale, arm: str, seed: int | str) -> Path:
    """The run folder that ``gatelab study open/quantisation --scale SCALE`` leaves of an arm and seed."""
    return Path("runs/study") / f"{PRETRAINING.removeprefix('open/')}-{scale.name}" / arm / f"seed_{seed}"


def _start(scale: Scale, arm: str) -> str:
    checkpoint = path_of_step(_pretrained(scale, arm, SEED_MARK) / "checkpoints", run_of(scale, "dense").train.steps)
    return f"train.start_from={checkpoint}"
