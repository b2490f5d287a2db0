"""What a study found so far, read from its folder: figures of arms, their differences, and the paper's beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from gatelab.study.conditions import Conditions
from gatelab.study.contrasts import Contrast, compare_arms, difference_of_differences
from gatelab.study.jobs import JobResult
from gatelab.study.presets.paper_numbers import PAPER_NUMBERS, PaperRow
from gatelab.study.runner import CONDITIONS, read_conditions, read_results
from gatelab.study.statistics import Estimate, compare_on_documents, t_interval
from gatelab.study.status import StudyStatus, open_study, read_rates, status
from gatelab.study.study import HELDOUT_ERROR, INSIDE, LOGITS_ERROR, PROBES, QUANTISATION_COST, Interaction, Study

Direction = Literal["agrees", "disagrees", "can't tell"]
Runs = Mapping[str, Sequence[JobResult]]
LOSS = "heldout_loss"
FIRST_TOKEN, WORST_LAYER = "first_token_attention", "first_token_attention_worst_layer"
ON_DELIMITER = "delimiter_attention"
OVER_FLOOR = "_over_floor"


class Quantity(NamedTuple):
    """A figure of a run: its key in the measurement, or ``heldout_loss``; what it is called; how it is written.

    ``paper`` is the paper's figure of the same kind, from one of its rows. A key that ends in ``_over_floor`` is of an
    attention to the first token, or to delimiters, in units of what uniform attention gives.
    """

    key: str
    title: str
    format: str
    paper: Callable[[PaperRow], float | None] = lambda row: None

    @property
    def name(self) -> str:
        """What is measured, whatever the queries and the unit."""
        return self.key.removesuffix(OVER_FLOOR).partition("[")[0]

    @property
    def unit(self) -> str:
        """What follows a difference in it, as in "0.01 nats per token"."""
        return _UNITS.get(self.name, f"in {self.title}")

    @property
    def is_lower_better(self) -> bool:
        """Whether less of it is better, as for all but what describes a model."""
        return self.key not in INSIDE

    @property
    def is_of_part(self) -> bool:
        """Whether it is of one layer or of some queries, and no figure of the whole model."""
        return self.key == WORST_LAYER or "[" in self.key

    def of(self, result: JobResult) -> float | None:
        """A run's figure; ``None`` when it diverged or did not measure it."""
        if self.key == LOSS:
            return result.heldout_loss
        if result.measurement is None:
            return None
        if self.key.endswith(OVER_FLOOR):
            absolute = self._replace(key=self.key.removesuffix(OVER_FLOOR))
            value, floor = absolute.of(result), absolute.floor(result)
            return None if value is None or floor is None else value / floor
        return result.measurement.get(self.key)

    def floor(self, result: JobResult) -> float | None:
        """What uniform attention gives for attention to the first token or delimiters; ``None`` for other figures."""
        if not self.key.startswith((FIRST_TOKEN, ON_DELIMITER)) or result.measurement is None:
            return None
        if self.key.endswith(OVER_FLOOR):
            return 1.0
        kind = ON_DELIMITER if self.key.startswith(ON_DELIMITER) else FIRST_TOKEN
        part = self.key.removeprefix(WORST_LAYER).removeprefix(kind)
        return result.measurement.get(f"{kind}_floor{part}")

    @property
    def over_floor(self) -> Quantity:
        """An attention as a multiple of its own run's floor."""
        return Quantity(f"{self.key}{OVER_FLOOR}", f"{self.title}, times uniform", ".2f")


class Comparison(NamedTuple):
    """One arm against the baseline in one figure, over the ``num_pairs`` seeds that both have finished.

    ``difference`` is the arm's minus the baseline's, with a 95 % interval over seeds, or over documents where there is
    one seed with a held-out text; ``None`` where there is neither, or where either diverged.
    """

    arm: str
    num_pairs: int
    num_seeds: int
    difference: Estimate | None
    over: Literal["seeds", "documents"] | None
    contrast: Contrast | None

    @property
    def is_judged(self) -> bool:
        """Whether it has a verdict."""
        return self.contrast is not None and self.contrast.judgement is not None

    def direction(self, of_paper: float | None) -> Direction | None:
        """Whether the paper's difference points where ours does; ``None`` without the paper's.

        A verdict decides where there is one; one of "equal" agrees with a paper's difference that is as small. Else the
        interval over seeds does, and can't where it holds 0 or is over documents alone.
        """
        if of_paper is None:
            return None
        judgement = self.contrast.judgement if self.contrast is not None else None
        if judgement is not None and judgement.verdict == "equal":
            return "agrees" if abs(of_paper) < judgement.smallest_difference else "disagrees"
        if judgement is not None:
            is_lower = {"better": True, "worse": False}.get(judgement.verdict)
        elif self.difference is None or self.over != "seeds" or self.difference.low <= 0 <= self.difference.high:
            is_lower = None
        else:
            is_lower = self.difference.value < 0
        if is_lower is None or of_paper == 0:
            return "can't tell"
        return "agrees" if is_lower == (of_paper < 0) else "disagrees"


class Dependence(NamedTuple):
    """What became of an interaction of the study in one figure, over the seeds that all four arms have.

    ``changed`` and ``plain`` are the two differences, ``difference`` is the first less the second; each with a 95 % t
    interval, nan for one seed, and ``None`` where a run diverged or did not measure it.
    """

    name: str
    changed: Estimate | None
    plain: Estimate | None
    difference: Estimate | None
    num_pairs: int


@dataclass(frozen=True)
class Findings:
    """A study and what is finished of it; ``rates`` are the tuned ones, ``None`` without a grid or before they are."""

    study: Study
    folder: Path
    status: StudyStatus
    results: Sequence[JobResult]
    conditions: Sequence[Conditions]
    rates: Mapping[str, float] | None

    @cached_property
    def compared(self) -> Runs:
        """The finished runs of each arm that are compared, in order of their seeds, each arm at its own rate."""
        return self._at(self.rates)

    @cached_property
    def at_equal_rate(self) -> Runs | None:
        """The same at the baseline's rate; ``None`` where that is every arm's own."""
        if self.rates is None or len(set(self.rates.values())) == 1:
            return None
        return self._at(dict.fromkeys(self.rates, self.rates[self.study.baseline]))

    def _at(self, rates: Mapping[str, float] | None) -> Runs:
        compared = [one for one in self.results if one.purpose == "comparison"]
        return {
            arm.name: [
                one for one in compared if one.arm == arm.name and one.learning_rate == (rates or {}).get(arm.name)
            ]
            for arm in self.study.arms
        }

    @property
    def metric(self) -> Quantity:
        """The figure that verdicts are about."""
        metric = WORST_LAYER if self.study.metric == FIRST_TOKEN else self.study.metric
        return next((one for one in self.quantities if one.key == metric), _quantity(metric))

    @cached_property
    def quantities(self) -> list[Quantity]:
        """The loss, and what was measured inside any of the models, query sets too.

        Attention that has a floor is there as a multiple of it too, where runs have other floors.
        """
        summaries = [one.measurement for one in self.results if one.measurement is not None]
        keys = dict.fromkeys(key for one in summaries for key, value in one.items() if value is not None)
        inside = [_quantity(key) for key in keys if key.partition("[")[0] in _MEASURED]
        return [_quantity(LOSS), *inside, *(one.over_floor for one in inside if len(self.floors(one)) > 1)]

    def floors(self, quantity: Quantity) -> list[float]:
        """The uniform floors of an attention over the runs, ascending; none for other figures."""
        floors = {quantity.floor(one) for one in self.results}
        return sorted(floor for floor in floors if floor is not None)

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """Every other arm against the baseline in the study's metric, each at its own rate."""
        return compare(self.study, self.compared, self.metric.of, judge=True)

    def in_quantity(self, quantity: Quantity) -> dict[str, Comparison]:
        """The same in another figure, without verdicts."""
        if quantity.key == self.metric.key:
            return self.comparisons
        return compare(self.study, self.compared, quantity.of)

    def dependences(self, quantity: Quantity) -> list[Dependence]:
        """The study's interactions in a figure, of what has finished."""
        values = {arm: {one.seed: _value(one, quantity.of) for one in runs} for arm, runs in self.compared.items()}
        return [_dependence(self.study, one, values) for one in self.study.interactions]

    def paper_row(self, arm: str) -> PaperRow | None:
        """The paper's row that an arm redoes."""
        return PAPER_NUMBERS.get(self.study.arm(arm).paper or "")

    def paper_difference(self, arm: str, quantity: Quantity) -> float | None:
        """The paper's difference from its baseline's row in a figure: nats per token for the loss."""
        rows = self.paper_row(arm), self.paper_row(self.study.baseline)
        own, base = (None if row is None else quantity.paper(row) for row in rows)
        return None if own is None or base is None or arm == self.study.baseline else own - base


def read_findings(folder: Path) -> Findings:
    """What is finished of the study in a folder; ``ValueError`` when it holds none or a file is damaged."""
    study = open_study(folder)
    conditions = read_conditions(folder) if (folder / CONDITIONS).exists() else []
    return Findings(study, folder, status(folder), read_results(folder), conditions, read_rates(folder))


def compare(
    study: Study, runs: Runs, quantity: Callable[[JobResult], float | None], judge: bool = False
) -> dict[str, Comparison]:
    """Every other arm that has a figure against the baseline, paired by seed.

    With ``judge``, the confirmatory arms get their verdicts once all of them and the baseline have finished every seed:
    verdicts on the way, and a stop at a good one, would find more than the stated rate of differences.
    """
    values = {arm: {one.seed: _value(one, quantity) for one in of_arm} for arm, of_arm in runs.items()}
    base, others = values[study.baseline], [arm.name for arm in study.arms if arm.name != study.baseline]
    found = {arm: _compare_one(study, arm, runs, values) for arm in others if base and values[arm]}
    family = [study.baseline, *study.confirmatory]
    if judge and study.confirmatory and all(set(values[arm]) == set(study.seeds) for arm in family):
        arrays = {arm: np.array([values[arm][seed] for seed in study.seeds]) for arm in family}
        for contrast in compare_arms(arrays, study.baseline, study.confirmatory, study.smallest_difference):
            found[contrast.arm] = found[contrast.arm]._replace(contrast=contrast)
    return found


def mean_over_seeds(values: Sequence[float | None]) -> Estimate | None:
    """The mean of what did not diverge, with its t interval, which is nan for a single value."""
    finite = np.array([value for value in values if value is not None and math.isfinite(value)])
    if len(finite) == 0:
        return None
    return t_interval(finite) if len(finite) > 1 else Estimate(float(finite[0]), math.nan, math.nan)


def _compare_one(study: Study, arm: str, runs: Runs, values: Mapping[str, Mapping[int, float]]) -> Comparison:
    base = study.baseline
    seeds = [seed for seed in study.seeds if seed in values[arm] and seed in values[base]]
    blank = Comparison(arm, len(seeds), len(study.seeds), None, None, None)
    if len(seeds) > 1:
        arrays = {name: np.array([values[name][seed] for seed in seeds]) for name in (base, arm)}
        (contrast,) = compare_arms(arrays, base)
        difference = None if contrast.seeds is None else contrast.seeds.difference
        return blank._replace(difference=difference, over="seeds", contrast=contrast)
    if len(seeds) == 1:
        scores = [next(one for one in runs[name] if one.seed == seeds[0]) for name in (arm, base)]
        own, other = (one.documents for one in scores)
        is_loss = [values[name][seeds[0]] for name in (arm, base)] == [one.heldout_loss for one in scores]
        if own is not None and other is not None and is_loss:
            relative = compare_on_documents(own, other).relative_perplexity
            return blank._replace(difference=Estimate(*(math.log1p(one) for one in relative)), over="documents")
    return blank


def _dependence(study: Study, one: Interaction, values: Mapping[str, Mapping[int, float]]) -> Dependence:
    arms = (*one.changed, *one.plain)
    seeds = [seed for seed in study.seeds if all(seed in values[arm] for arm in arms)]
    arrays = {arm: np.array([values[arm][seed] for seed in seeds]) for arm in arms}
    effects = [arrays[first] - arrays[second] for first, second in (one.changed, one.plain)]
    if not seeds or np.isnan(effects).any():
        return Dependence(one.name, None, None, None, len(seeds))
    found = difference_of_differences(arrays, one.changed, one.plain) if len(seeds) > 1 else None
    difference = mean_over_seeds((effects[0] - effects[1]).tolist()) if found is None else found.difference
    changed, plain = (mean_over_seeds(each.tolist()) for each in effects)
    return Dependence(one.name, changed, plain, difference, len(seeds))


def _value(result: JobResult, quantity: Callable[[JobResult], float | None]) -> float:
    value = quantity(result)
    return math.nan if value is None else value


def _quantity(key: str) -> Quantity:
    name, bracket, inside = key.removesuffix("]").partition("[")
    title, format, paper = _MEASURED.get(name, _MEASURED[LOSS])
    if name == ON_DELIMITER:
        title += f" to {inside}"
    elif bracket:
        title += f", {inside}" if key in PROBES else f" of {inside} queries"
    return Quantity(key, title, format, paper)


_Description = tuple[str, str, Callable[[PaperRow], float | None]]


def _nothing(row: PaperRow) -> Any:
    return None


def _first_token(row: PaperRow) -> float | None:
    return row.first_token_attention


def _nats(row: PaperRow) -> float | None:
    return None if row.perplexity is None else math.log(row.perplexity)


_MEASURED: dict[str, _Description] = {
    LOSS: ("held-out loss", ".4f", _nats),
    FIRST_TOKEN: ("first-token attention", ".4f", _first_token),
    WORST_LAYER: ("first-token attention, worst layer", ".4f", _first_token),
    ON_DELIMITER: ("attention", ".4f", _nothing),
    "learned_sink_attention": ("attention to a learned sink", ".4f", _nothing),
    "largest_activation": ("largest |h|", ",.1f", _nothing),
    "mean_activation_maximum": ("largest |h|, mean over layers", ",.1f", lambda row: row.largest_activation),
    "activation_ratio": ("largest |h| in medians", ",.1f", _nothing),
    "activation_kurtosis": ("kurtosis of h, mean over layers", ",.2f", _nothing),
    "gated_output_effective_rank": ("effective rank of what the output projection reads", ".2f", _nothing),
    "attention_entropy": ("attention entropy, nats", ".3f", _nothing),
    HELDOUT_ERROR: ("held-out error", ".4f", _nothing),
    "gate_mean": ("mean gate score", ".3f", lambda row: row.mean_gate),
    "gate_binary_entropy": ("entropy of a score, nats", ".3f", _nothing),
    "gate_histogram_entropy": ("entropy of the scores' histogram, nats", ".3f", _nothing),
    "gate_attention_entropy_correlation": ("correlation of score and attention entropy", ".3f", _nothing),
    QUANTISATION_COST: ("nats per token that rounding adds", ".4f", _nothing),
    LOGITS_ERROR.partition("[")[0]: ("error of the logits", ".5f", _nothing),
}
_UNITS = {
    **dict.fromkeys([LOSS, QUANTISATION_COST], "nats per token"),
    **dict.fromkeys([FIRST_TOKEN, WORST_LAYER, ON_DELIMITER], "of a query's attention"),
    HELDOUT_ERROR: "of the held-out targets",
    "attention_entropy": "nats",
}
