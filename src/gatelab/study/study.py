"""What a study compares, written down before its first run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from gatelab.evaluate.quantisation.schemes import SCHEMES
from gatelab.recipes.table import resolve
from gatelab.settings import Settings, nearest
from gatelab.study.contrasts import MIN_SEEDS
from gatelab.train.settings import RunSettings

NAME = r"^\w[\w.-]*$"
STEP_SECONDS = "step_seconds"
LOGITS_ERROR, QUANTISATION_COST = "logits_error[bfloat16_against_float32]", "quantisation_cost"
PROBES = (LOGITS_ERROR, *(f"{QUANTISATION_COST}[{scheme}]" for scheme in SCHEMES))
"""Metrics that are measured on a finished run's checkpoint (gatelab.study.probes)."""
INSIDE = ("gated_output_effective_rank", "attention_entropy")
"""Metrics of which neither more nor less is better: they describe what a model does."""
HELDOUT_ERROR = "heldout_error"
METRICS = (
    "heldout_loss",
    HELDOUT_ERROR,
    "first_token_attention",
    "first_token_attention[SET]",
    "delimiter_attention[NAME]",
    *INSIDE,
    STEP_SECONDS,
    *PROBES,
)
METRIC = re.compile(
    rf"heldout_loss|{HELDOUT_ERROR}|first_token_attention(\[[\w-]+\])?|delimiter_attention\[[\w-]+\]|"
    rf"{'|'.join(INSIDE)}|{STEP_SECONDS}"
)
SMALLEST_GRID = 3
RATE, SEED = "train.optimizer.learning_rate", "train.seed"
SEED_MARK = "{seed}"
"""In a word of a study or an arm it stands for the run's seed, as in a start that each seed has of its own."""
Seed = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]


class Arm(Settings):
    """One way to train: ``key=value`` words on top of the study's recipe."""

    name: str = Field(pattern=NAME, description="also the name of its folder")
    assignments: tuple[str, ...] = ()
    paper: str | None = Field(default=None, description="the row of the paper's tables that it redoes, as 'T1 r5'")


class Interaction(Settings):
    """Whether the difference between two arms depends on what ``changed`` has and ``plain`` has not.

    It is that of the pair ``changed``, first less second, minus that of the pair ``plain``.
    """

    name: str = Field(pattern=NAME, description="what is changed")
    changed: tuple[str, str] = Field(description="two arms with the change, as gated and ungated")
    plain: tuple[str, str] = Field(description="the same two without it")


class Study(Settings):
    """A question, and the arms whose differences answer it. Everything that no arm assigns is equal between them.

    With ``learning_rates`` each arm is tuned first: every rate is run with the tuning seeds, and the one with the least
    loss on validation text is the arm's own. Then every arm is run with the comparison seeds, at its own rate and at
    the baseline's, and scored on test text. Without, every arm is run once for each seed at the rate of its settings.
    """

    name: str = Field(pattern=NAME)
    question: str
    recipe: str
    assignments: tuple[str, ...] = Field(
        default=(), description="words on top of the recipe, for every arm; {seed} is the run's"
    )
    arms: tuple[Arm, ...] = Field(min_length=2)
    baseline: str = Field(description="the arm that the others are compared with")
    seeds: tuple[Seed, ...] = Field(default=(0,), min_length=1, description="of the runs that are compared")
    metric: str = Field(
        default="heldout_loss",
        description="what verdicts are about: nats per token; the share of targets that are not found likeliest; the "
        "first-token attention of the worst layer, or that of a set of queries that the task names, as "
        "first_token_attention[other]; an encoder's attention to certain tokens, as delimiter_attention[SEP]; what a "
        "scheme of quantisation adds to the loss, as quantisation_cost[w8a8]; bfloat16's relative error of the logits; "
        "the effective rank of what the output projection reads, or the entropy of attention; or the time of a step, "
        "all arms in turns (gatelab.study.overhead)",
    )
    smallest_difference: float | None = Field(
        default=None, gt=0, description="the smallest difference that matters, in the metric's unit"
    )
    confirmatory: tuple[str, ...] = Field(
        default=(), description="arms whose difference from the baseline gets a verdict; all others are exploratory"
    )
    interactions: tuple[Interaction, ...] = Field(
        default=(), description="pairs of arms whose difference is compared with that of two other arms"
    )
    learning_rates: tuple[Rate, ...] = Field(
        default=(), description="rates to tune each arm over, ascending; those of the settings when empty"
    )
    tuning_seeds: tuple[Seed, ...] = Field(default=(1000, 1001), min_length=1, description="of the runs that tune")
    scale: str | None = Field(default=None, description="the name of the size it is run at")

    @model_validator(mode="after")
    def _check_arms(self) -> Self:
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names):
            raise ValueError(f"two arms of study {self.name} have the same name: {', '.join(names)}")
        if self.baseline not in names:
            raise ValueError(
                f"baseline {self.baseline!r} is no arm of study {self.name}; {nearest(self.baseline, names)}"
            )
        seen: dict[str, str] = {}
        for arm in self.arms:
            twin = seen.setdefault(self.settings_of(arm).to_yaml(), arm.name)
            if twin != arm.name:
                raise ValueError(f"arms {twin} and {arm.name} of study {self.name} have equal settings; drop one")
        for words in (self.assignments, *(arm.assignments for arm in self.arms)):
            self._check_words(words)
        return self

    @model_validator(mode="after")
    def _check_metric(self) -> Self:
        if self.metric not in PROBES and not METRIC.fullmatch(self.metric):
            raise ValueError(f"metric {self.metric!r} is unknown; {nearest(self.metric, METRICS)}")
        if self.metric in INSIDE and self.confirmatory:
            raise ValueError(
                f"metric {self.metric} describes what a model does, so no arm of study {self.name} can be better or "
                "worse in it; leave confirmatory empty"
            )
        return self

    @model_validator(mode="after")
    def _check_interactions(self) -> Self:
        names = [arm.name for arm in self.arms]
        for one in self.interactions:
            for arm in (*one.changed, *one.plain):
                if arm not in names:
                    raise ValueError(
                        f"interaction {one.name} of study {self.name} names {arm!r}, which is no arm; "
                        f"{nearest(arm, names)}"
                    )
            if one.changed[0] == one.changed[1] or one.plain[0] == one.plain[1] or one.changed == one.plain:
                raise ValueError(
                    f"interaction {one.name} of study {self.name} compares {' with '.join(one.changed)} and "
                    f"{' with '.join(one.plain)}; name two pairs of two arms"
                )
        _require_distinct("interactions", [one.name for one in self.interactions])
        return self

    @model_validator(mode="after")
    def _check_statistics(self) -> Self:
        others = [arm.name for arm in self.arms if arm.name != self.baseline]
        for name in self.confirmatory:
            if name not in others:
                raise ValueError(f"confirmatory names {name!r}, which is no arm to compare; {nearest(name, others)}")
        _require_distinct("confirmatory", self.confirmatory)
        _require_distinct("seeds", self.seeds)
        _require_distinct("tuning_seeds", self.tuning_seeds)
        if self.confirmatory and len(self.seeds) < MIN_SEEDS:
            raise ValueError(
                f"study {self.name} has {len(self.seeds)} seeds, and a confirmatory comparison needs at least "
                f"{MIN_SEEDS}; add seeds or leave confirmatory empty"
            )
        if self.confirmatory and self.smallest_difference is None:
            raise ValueError(
                f"study {self.name} has confirmatory comparisons and no smallest_difference to judge them by; state one"
            )
        return self

    @model_validator(mode="after")
    def _check_tuning(self) -> Self:
        rates = self.learning_rates
        if not rates:
            return self
        if list(rates) != sorted(set(rates)) or len(rates) < SMALLEST_GRID:
            raise ValueError(
                f"learning_rates={list(rates)} is no grid that can hold an optimum inside: give at least "
                f"{SMALLEST_GRID} rates, each above the one before"
            )
        shared = sorted(set(self.seeds) & set(self.tuning_seeds))
        if shared:
            raise ValueError(
                f"seed {shared[0]} is both in seeds and in tuning_seeds; compare on seeds that tuned nothing"
            )
        return self

    def _check_words(self, words: Sequence[str]) -> None:
        """Refuse words for what the study decides itself."""
        decided = {SEED: "seeds"} | ({RATE: "learning_rates"} if self.learning_rates else {})
        for word in words:
            path = word.partition("=")[0].strip()
            if path in decided:
                raise ValueError(f"{word!r} assigns what {decided[path]} of study {self.name} decides; drop the word")

    @property
    def warnings(self) -> list[str]:
        """What a reader should know before the first run, a sentence each."""
        if len(self.seeds) > 1:
            return []
        return ["One seed: differences come without an interval over seeds, and no verdict can be given."]

    def arm(self, name: str) -> Arm:
        """The arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)

    def changed(self, words: Sequence[str] = (), num_seeds: int | None = None) -> Study:
        """The same study with further words for every arm, or another number of seeds."""
        seeds = self.seeds if num_seeds is None else tuple(range(num_seeds))
        return Study.parse({**self.to_mapping(), "assignments": (*self.assignments, *words), "seeds": seeds})

    def settings_of(self, arm: Arm, seed: int | None = None, learning_rate: float | None = None) -> RunSettings:
        """The resolved settings of one arm, with the recipe's own seed and rate where none is given."""
        words, own = [*self.assignments, *arm.assignments], []
        if seed is not None:
            words = [word.replace(SEED_MARK, str(seed)) for word in words]
            own.append(f"{SEED}={seed}")
        if learning_rate is not None:
            own.append(f"{RATE}={learning_rate!r}")
        return resolve(self.recipe, words).with_overrides(own)


def _require_distinct(field: str, values: Sequence[object]) -> None:
    if len(set(values)) < len(values):
        raise ValueError(f"{field}={list(values)} names one of them twice; once is possible")
