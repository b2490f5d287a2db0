"""Table 2 and what else the model decides: dense, deep, with experts, at rates up to divergence, and its wall time."""

from __future__ import annotations

from gatelab.study.presets.arms import (
    CONFIRMATORY_SEEDS,
    UNGATED,
    compose,
    gated,
    larger_controls,
    run_of,
    ungated,
    with_surplus,
)
from gatelab.study.scales import Scale, ShapeName
from gatelab.study.study import RATE, STEP_SECONDS, Arm, Study

_ELEMENTWISE, _HEADWISE = "sdpa_elementwise", "sdpa_headwise"


def dense(scale: Scale) -> Study:
    """Table 2, rows 1 and 2, tuned and confirmatory: does a matched gate lower the loss of a dense model?"""
    return compose(
        scale,
        "dense",
        "dense",
        "Does a gate on the attention output lower the loss of a dense model of equal size, each at its own rate?",
        [ungated("T2 r1"), gated(_ELEMENTWISE, "T2 r2"), gated(_HEADWISE)],
        seeds=CONFIRMATORY_SEEDS,
        confirmatory=(_ELEMENTWISE, _HEADWISE),
        learning_rates=scale.learning_rates,
    )


def dense_large_batch(scale: Scale) -> Study:
    """Table 2, rows 3 and 4: twice the batch, 8.75 times the tokens, 1.125 times the rate of ``dense``."""
    question = "Does the gain of a dense model last through a longer training in larger batches?"
    arms = [ungated("T2 r3"), gated(_ELEMENTWISE, "T2 r4")]
    words = _larger_batch(scale, "dense", batch=2, tokens=8.75, rate=1.125)
    return compose(scale, "dense", "dense_large_batch", question, arms, assignments=words)


def dense_deep(scale: Scale) -> Study:
    """Table 2, rows 5, 8 and 9: a deep and narrow model; rows 6, 7 and 10 are in ``stability``."""
    question = "Does a gate lower the loss of a deep, narrow model?"
    arms = [ungated("T2 r5"), gated(_ELEMENTWISE, "T2 r8"), gated(_HEADWISE, "T2 r9")]
    return compose(scale, "deep", "dense_deep", question, arms)


def dense_deep_large_batch(scale: Scale) -> Study:
    """Table 2, rows 11 to 14: the deep model, 4 times the batch, 2.5 times the tokens, 1.325 and 2 times the rate."""
    high = _rate(scale, "deep", 2)
    arms = [
        ungated("T2 r11"),
        Arm(name=f"{UNGATED}_high_rate", assignments=(high,), paper="T2 r12"),
        gated(_ELEMENTWISE, "T2 r13"),
        Arm(name=f"{_ELEMENTWISE}_high_rate", assignments=(*gated(_ELEMENTWISE).assignments, high), paper="T2 r14"),
    ]
    question = "In large batches, does a deep model with a gate bear a rate at which the ungated one diverges?"
    words = _larger_batch(scale, "deep", batch=4, tokens=2.5, rate=1.325)
    return compose(scale, "deep", "dense_deep_large_batch", question, arms, assignments=words)


def stability(scale: Scale) -> Study:
    """Table 2, rows 5 to 8 and 10: a deep model with a gate, a sandwich norm or both, at rates up to divergence."""
    sandwich = "rival=sandwich_norm"
    arms = [
        ungated("T2 r5"),
        Arm(name="sandwich_norm", assignments=(sandwich,), paper="T2 r7"),
        gated(_ELEMENTWISE, "T2 r8"),
        Arm(name=f"{_ELEMENTWISE}_sandwich_norm", assignments=(*gated(_ELEMENTWISE).assignments, sandwich)),
    ]
    question = "How do loss, spikes and divergence depend on the learning rate, with a gate and with a sandwich norm?"
    return compose(scale, "deep", "stability", question, arms, learning_rates=scale.wide_learning_rates)


def moe(scale: Scale) -> Study:
    """Table 1, rows 1 to 5 and 10, on a mixture of experts: ungated models that are larger, and gates with surplus."""
    gates = [with_surplus(_ELEMENTWISE, "T1 r5"), with_surplus(_HEADWISE, "T1 r10")]
    question = "On a mixture of experts, do gates help more than heads or experts that hold more parameters?"
    arms = [ungated("T1 r1"), *larger_controls(scale, "mixture"), *gates]
    return compose(scale, "mixture", "moe", question, arms)


def overhead(scale: Scale) -> Study:
    """Section 4.1's "under 2 %": the wall time of a step, arms in turns, with surplus as in the paper and matched."""
    arms = [
        ungated(),
        with_surplus(_ELEMENTWISE),
        with_surplus(_HEADWISE),
        gated(_ELEMENTWISE).model_copy(update={"name": f"{_ELEMENTWISE}_matched"}),
    ]
    words = ("train.steps=40", "train.schedule.warmup_steps=0")
    question = "What does a gate cost in wall time, as a ratio to the ungated step?"
    fields = {"metric": STEP_SECONDS, "smallest_difference": None, "seeds": (0,)}
    return compose(scale, "dense", "overhead", question, arms, assignments=words, **fields)


def _larger_batch(scale: Scale, shape: ShapeName, batch: int, tokens: float, rate: float) -> tuple[str, ...]:
    """Words for another batch, number of tokens and rate, as multiples of the scale's own."""
    train = run_of(scale, shape).train
    return (
        f"train.sequences_per_step={batch * train.sequences_per_step}",
        f"train.steps={round(train.steps * tokens / batch)}",
        _rate(scale, shape, rate),
    )


def _rate(scale: Scale, shape: ShapeName, multiple: float) -> str:
    return f"{RATE}={run_of(scale, shape).train.optimizer.learning_rate * multiple:.6g}"
