"""Attention sinks: what raises them without a gate, what else removes them, and a task on which they surely grow."""

from __future__ import annotations

from gatelab.model.rivals import RIVALS
from gatelab.study.presets.arms import (
    CONFIRMATORY_SEEDS,
    NO_WEIGHT_DECAY,
    QK_NORM_OFF,
    compose,
    gated,
    other_bos,
    require_text,
    rival,
    run_of,
    ungated,
    uniform_floor,
)
from gatelab.study.presets.gates import TABLE_4
from gatelab.study.scales import Scale
from gatelab.study.study import RATE, Arm, Study

_RIVALS = [rival(name) for name in RIVALS if name != "none"]


def sinks(scale: Scale) -> Study:
    """Levers on the ungated decoder, one at a time, and those that should raise a sink all together."""
    run = run_of(scale, "dense")
    require_text(run, "paper/sinks", "varies BOS and context of a text", scale)
    model, context, sequences = run.model, run.data.context, run.train.sequences_per_step
    has_bos = run.data.bos_in_every_window
    high_rate = f"{RATE}={3 * run.train.optimizer.learning_rate:.6g}"
    wide_start = f"model.init_std={2 * model.init_std:.6g}"
    levers = {
        **other_bos(run),
        "context_halved": _context(context // 2, 2 * sequences),
        "context_doubled": _context(2 * context, sequences // 2),
        "rate_tripled": (high_rate,),
        **NO_WEIGHT_DECAY,
        "weight_decay_0.5": ("train.optimizer.weight_decay=0.5",),
        **QK_NORM_OFF,
        "initial_weights_doubled": (wide_start,),
        "layers_halved": (f"model.num_layers={model.num_layers // 2}",),
        "layers_doubled": (f"model.num_layers={2 * model.num_layers}",),
        "all_together": (
            *(() if has_bos else ("data.bos_in_every_window=True",)),
            "train.optimizer.weight_decay=0.5",
            "model.qk_norm=False",
            *_context(2 * context, sequences // 2),
            high_rate,
            wide_start,
        ),
    }
    arms = [ungated(), *(Arm(name=name, assignments=words) for name, words in levers.items())]
    question = "Does any lever raise the ungated decoder's first-token attention to 5 times its uniform floor?"
    return compose(scale, "dense", "sinks", question, arms, metric="first_token_attention")


def rivals(scale: Scale) -> Study:
    """The simpler fixes beside the gates, on the dense model."""
    gates = [gated("sdpa_elementwise"), gated("sdpa_headwise"), gated("sdpa_from_value")]
    question = "Is there a simpler fix that does as well as a gate?"
    return compose(scale, "dense", "rivals", question, [ungated(), *gates, *_RIVALS])


def mechanism(scale: Scale) -> Study:
    """Bigram-Backcopy (arXiv 2410.13835): which gates and which rivals take over from a functional sink?"""
    if run_of(scale, "dense").data.synthetic is None:
        raise ValueError(
            f"preset mechanism is a synthetic task, and scale {scale.name} reads text; use scale mechanism"
        )
    gates = [*(gated(gate, row) for gate, row in TABLE_4.items()), gated("sdpa_from_value")]
    return compose(
        scale,
        "dense",
        "mechanism",
        "Where a head needs an off-switch, does a gate take over from the attention sink, and which gates do?",
        [ungated("T4 r1"), *gates, *_RIVALS],
        seeds=CONFIRMATORY_SEEDS,
        metric="first_token_attention[other]",
        smallest_difference=uniform_floor(run_of(scale, "dense").data.context, first=4),
        confirmatory=("sdpa_elementwise", "sdpa_headwise"),
    )


def _context(context: int, sequences: int) -> tuple[str, ...]:
    """Words for another context in steps of as many tokens."""
    return (
        f"data.context={context}",
        f"model.max_context={context}",
        f"train.sequences_per_step={sequences}",
    )
