"""What presets are put together from: a scale's model, gates with and without matching, larger ungated controls."""

from __future__ import annotations

from typing import Any

from gatelab.recipes.table import resolve
from gatelab.study.scales import Scale, ShapeName
from gatelab.study.study import RATE, Arm, Study
from gatelab.train.settings import RunSettings

# About 1 % of perplexity. The paper's dense models gain 0.8 to 1.8 % at equal learning rate (table 2), so a difference
# below it would not be the paper's claim, whichever its sign.
SMALLEST_LOSS_DIFFERENCE = 0.01
EXPLORATORY_SEEDS = (0, 1, 2)
CONFIRMATORY_SEEDS = (0, 1, 2, 3, 4)
UNGATED = "ungated"


def compose(scale: Scale, shape: ShapeName, name: str, question: str, arms: list[Arm], **fields: Any) -> Study:
    """The study of these arms on one of the scale's models; ``fields`` are further fields of :class:`Study`.

    The first arm is the baseline. Left to themselves: three seeds, no confirmatory contrast, held-out loss.
    """
    is_loss = fields.get("metric", "heldout_loss") == "heldout_loss"
    smallest = SMALLEST_LOSS_DIFFERENCE if is_loss else uniform_floor(run_of(scale, shape).data.context)
    defaults = {"baseline": arms[0].name, "seeds": EXPLORATORY_SEEDS, "smallest_difference": smallest}
    words = (*words_of(scale, shape, tuned=bool(fields.get("learning_rates"))), *fields.pop("assignments", ()))
    named = {"name": name, "question": question, "scale": scale.name, "recipe": scale.shapes[shape].recipe}
    return Study(**named, assignments=words, arms=tuple(arms), **{**defaults, **fields})


def words_of(scale: Scale, shape: ShapeName, tuned: bool = False) -> tuple[str, ...]:
    """The words of every arm: the training's, the model's, and a learning rate unless it is tuned."""
    rate = () if tuned or scale.learning_rate is None else (f"{RATE}={scale.learning_rate!r}",)
    return (*scale.assignments, *scale.shapes[shape].assignments, *rate)


def run_of(scale: Scale, shape: ShapeName) -> RunSettings:
    """The settings of the ungated arm."""
    return resolve(scale.shapes[shape].recipe, words_of(scale, shape))


def uniform_floor(context: int, first: int = 0) -> float:
    """First-token attention of uniform attention, the mean of 1 / (t + 1) over queries t from ``first`` on: the
    smallest difference that is one of sinks."""
    return sum(1 / (position + 1) for position in range(first, context)) / (context - first)


QK_NORM_OFF = {"qk_norm_off": ("model.qk_norm=False",)}
NO_WEIGHT_DECAY = {"weight_decay_0": ("train.optimizer.weight_decay=0",)}


def other_bos(run: RunSettings) -> dict[str, tuple[str, ...]]:
    """Windows that do not start with BOS where the run's do, and the other way round."""
    has_bos = run.data.bos_in_every_window
    return {f"bos_{'off' if has_bos else 'on'}": (f"data.bos_in_every_window={not has_bos}",)}


def require_text(run: RunSettings, preset: str, deed: str, scale: Scale) -> None:
    """Raise ``ValueError`` for a scale whose data is a synthetic task; ``deed`` is what the preset does to a text."""
    if run.data.synthetic is not None:
        raise ValueError(f"preset {preset} {deed}, and scale {scale.name} is a synthetic task; choose a larger scale")


def ungated(paper: str | None = None) -> Arm:
    """The decoder as it is."""
    return Arm(name=UNGATED, paper=paper)


def gated(gate: str, paper: str | None = None) -> Arm:
    """A named gate or control, with the baseline's number of parameters."""
    return Arm(name=gate, assignments=(f"gate={gate}", "match=parameters"), paper=paper)


def with_surplus(gate: str, paper: str | None = None, name: str | None = None) -> Arm:
    """A named gate on top of the whole baseline, as in the paper's tables 1, 3 and 4."""
    return Arm(name=name or gate, assignments=(f"gate={gate}",), paper=paper)


def both_ways(scale: Scale, shape: ShapeName, gate: str, paper: str) -> list[Arm]:
    """A gate matched and, where matching narrows the feed-forward at all, with its surplus."""
    words, recipe = words_of(scale, shape), scale.shapes[shape].recipe
    matched, surplus = gated(gate, paper), with_surplus(gate, paper, f"{gate}_with_surplus")
    with_match, without = (resolve(recipe, (*words, *arm.assignments)).model for arm in (matched, surplus))
    is_narrower = (with_match.feedforward_width, with_match.mixture) != (without.feedforward_width, without.mixture)
    return [matched, surplus] if is_narrower else [matched]


def rival(name: str) -> Arm:
    """A named rival of the gate."""
    return Arm(name=name, assignments=(f"rival={name}",))


def larger_controls(scale: Scale, shape: ShapeName) -> list[Arm]:
    """The ungated decoders of table 1's rows 2 to 4, larger on purpose; row 4 where there are experts.

    Twice the key/value heads, half as many query heads again, 1 expert more for each 32: the paper's 8, 48 and 132.
    """
    model = run_of(scale, shape).model
    arms = [
        Arm(name="more_kv_heads", assignments=(f"model.num_kv_heads={2 * model.num_kv_heads}",), paper="T1 r2"),
        Arm(name="more_query_heads", assignments=(f"model.num_heads={3 * model.num_heads // 2}",), paper="T1 r3"),
    ]
    if model.mixture is not None:
        num_experts = model.mixture.num_experts + model.mixture.num_experts // 32
        words = (f"model.mixture.num_experts={num_experts}",)
        arms.append(Arm(name="more_experts", assignments=words, paper="T1 r4"))
    return arms
