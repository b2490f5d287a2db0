"""What a run takes on a number of accelerators: memory, time, money; and the settings with which it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gatelab.model.accounting import count_parameters, flops_per_token_training
from gatelab.report.tables import Column, Table
from gatelab.train.hardware import Gpu
from gatelab.train.memory import MemoryPerRank, memory_per_rank, sequences_at_once
from gatelab.train.parallel.mesh import require_divisible
from gatelab.train.settings import ParallelSettings, RunSettings

_RANKS_ON_ONE_MACHINE = 8
_MOST_GPUS = 65_536
_HOUR = 3600.0


@dataclass(frozen=True)
class Assumptions:
    """What no formula gives: the share of the peak that is reached, with communication; the share of memory that can
    be filled (the rest: context, fragments, buffers of collectives); the price of one GPU's hour."""

    peak_share: int | float = 0.4
    memory_share: int | float = 0.9
    dollars_per_hour: float | int | None = None

    def __post_init__(self) -> None:
        for name in ("peak_share", "memory_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name):g} is no share; give a number above 0 and at most 1")
        if self.dollars_per_hour is not None and self.dollars_per_hour < 0:
            raise ValueError(f"a price of {self.dollars_per_hour:g} per hour is negative; give 0 or more")


@dataclass(frozen=True)
class Plan:
    """A run on ``num_gpus`` accelerators of one kind, reading ``tokens``."""

    run: RunSettings
    gpu: Gpu
    num_gpus: int
    tokens: int | float
    assumptions: Assumptions
    memory: MemoryPerRank

    @property
    def usable_bytes(self) -> int | float:
        """Memory of one accelerator that the plan may fill."""
        return self.gpu.memory_bytes * self.assumptions.memory_share

    @property
    def fits(self) -> bool:
        """Whether every rank's bytes go into one accelerator."""
        return self.memory.total <= self.usable_bytes

    @property
    def flops(self) -> int | float:
        """Floating point operations of the whole run."""
        train = self.run.train
        return self.tokens * flops_per_token_training(self.run.model, self.run.data.context, train.recompute)

    @property
    def hours(self) -> int | float:
        """Hours of the whole run at the assumed share of peak."""
        return self.flops / (self.num_gpus * self.gpu.peak_flops * self.assumptions.peak_share) / _HOUR

    @property
    def dollars(self) -> int | float:
        """Price of the whole run."""
        price = self.assumptions.dollars_per_hour
        return self.hours * self.num_gpus * (self.gpu.dollars_per_hour if price is None else price)

    def describe_settings(self) -> str:
        """The words of the command line that make this plan of its recipe."""
        train = self.run.train
        changed = {name: value for name, value in train.parallel.to_mapping().items() if value != 1}
        words = [f"train.parallel.{name}={value}" for name, value in changed.items()]
        words += [f"train.accumulation={train.accumulation}", f"train.recompute={str(train.recompute).lower()}"]
        return " ".join(words)

    def to_mapping(self) -> dict[str, Any]:
        """Every figure by name, in bytes, operations, hours and dollars."""
        counts = count_parameters(self.run.model)
        price = self.assumptions.dollars_per_hour
        return {
            "parameters": counts.total,
            "active_parameters": counts.active,
            "gpu": self.gpu.name,
            "num_gpus": self.num_gpus,
            "settings": self.describe_settings(),
            "sequences_at_once": sequences_at_once(self.run, self.num_gpus),
            "context": self.run.data.context,
            "memory_per_rank": {**self.memory._asdict(), "total": self.memory.total, "usable": self.usable_bytes},
            "tokens": self.tokens,
            "flops": self.flops,
            "hours": self.hours,
            "gpu_hours": self.hours * self.num_gpus,
            "dollars": self.dollars,
            "assumptions": {
                "peak_flops": self.gpu.peak_flops,
                "peak_share": self.assumptions.peak_share,
                "memory_share": self.assumptions.memory_share,
                "dollars_per_gpu_hour": self.gpu.dollars_per_hour if price is None else price,
            },
        }


def plan_as_set(
    run: RunSettings, gpu: Gpu, num_gpus: int, tokens: float | int | None = None, assumptions: Assumptions | None = None
) -> Plan:
    """The plan of a run with its own settings; ``ValueError`` that says what would fit when it doesn't.

    ``tokens`` are those of the run's steps when ``None``.
    """
    plan = _plan(run, gpu, num_gpus, tokens, assumptions or Assumptions())
    if plan.fits:
        return plan
    problem = f"the plan, {_too_large(plan)}"
    other = next(_fitting(plan), None)
    if other is not None:
        raise ValueError(f"{problem}; this fits: {other.describe_settings()}")
    raise ValueError(f"{problem}; {_what_else_would(plan)}")


def find_plan(
    run: RunSettings, gpu: Gpu, num_gpus: int, tokens: float | int | None = None, assumptions: Assumptions | None = None
) -> Plan:
    """The first plan that fits: without recomputation before with it, fewer tensor ranks before more, and as little
    accumulation as possible; the run's own parallel settings, accumulation and recomputation are not looked at.

    Raises ``ValueError`` that says what would fit when nothing does.
    """
    first = next(_candidates(run, num_gpus), None)
    if first is None:
        raise ValueError(
            f"{num_gpus} GPUs can't share train.sequences_per_step={run.train.sequences_per_step} sequences evenly; "
            "choose a number of GPUs that divides them, or another number of sequences"
        )
    plan = _plan(first, gpu, num_gpus, tokens, assumptions or Assumptions())
    found = next(_fitting(plan), None)
    if found is None:
        raise ValueError(f"no plan fits: the smallest, {_too_large(_smallest(plan))}; {_what_else_would(plan)}")
    return found


def _plan(run: RunSettings, gpu: Gpu, num_gpus: int, tokens: float | int | None, assumptions: Assumptions) -> Plan:
    tokens = float(run.tokens_per_step * run.train.steps) if tokens is None else tokens
    if not tokens > 0:
        raise ValueError(f"a run of {tokens:g} tokens trains nothing; give a positive number")
    return Plan(run, gpu, num_gpus, tokens, assumptions, memory_per_rank(run, num_gpus))


def _with(plan: Plan, run: RunSettings, num_gpus: int | None = None) -> Plan:
    return _plan(run, plan.gpu, num_gpus or plan.num_gpus, plan.tokens, plan.assumptions)


def _candidates(run: RunSettings, num_gpus: int) -> Iterator[RunSettings]:
    """The settings that are tried, in the order of preference."""
    for recompute in (False, True):
        for tensor in range(1, _RANKS_ON_ONE_MACHINE + 1):
            shard, rest = divmod(num_gpus, tensor)
            if rest or _refused(run, tensor):
                continue
            sequences, rest = divmod(run.train.sequences_per_step, shard)
            for accumulation in [n for n in range(1, sequences + 1) if sequences % n == 0 and not rest]:
                changes = {
                    "parallel": {"shard": shard, "tensor": tensor},
                    "accumulation": accumulation,
                    "recompute": recompute,
                }
                yield RunSettings.parse({**run.to_mapping(), "train": {**run.train.to_mapping(), **changes}})


def _refused(run: RunSettings, tensor: int) -> bool:
    """Whether the model's heads and widths can't be split over so many ranks."""
    try:
        require_divisible(run.model, ParallelSettings(tensor=tensor))
    except ValueError:
        return True
    return False


def _fitting(plan: Plan, num_gpus: int | None = None) -> Iterator[Plan]:
    found = (_with(plan, run, num_gpus) for run in _candidates(plan.run, num_gpus or plan.num_gpus))
    return (candidate for candidate in found if candidate.fits)


def _smallest(plan: Plan) -> Plan:
    candidates = [_with(plan, run) for run in _candidates(plan.run, plan.num_gpus)]
    return min(candidates, key=lambda candidate: candidate.memory.total)


def _too_large(plan: Plan) -> str:
    return (
        f"{plan.describe_settings()}, takes {plan.memory.total / 1e9:,.1f} GB on each of {plan.num_gpus} "
        f"{plan.gpu.name}, of which {plan.usable_bytes / 1e9:,.1f} GB may be filled"
    )


def _what_else_would(plan: Plan) -> str:
    """The smallest doubling of the accelerators with which something fits."""
    num_gpus = 2 * plan.num_gpus
    while num_gpus <= _MOST_GPUS:
        found = next(_fitting(plan, num_gpus), None)
        if found is not None:
            return f"{num_gpus} of them would do, with {found.describe_settings()}"
        num_gpus *= 2
    return "no number of them does; shorten data.context or take a GPU with more memory"


def plan_table(plan: Plan) -> Table:
    """The plan for a terminal: a row for each figure."""
    figures, memory = plan.to_mapping(), plan.memory
    rows = [
        ("parameters", f"{figures['parameters']:,d}"),
        ("of them active for a token", f"{figures['active_parameters']:,d}"),
        ("machine", f"{plan.num_gpus} x {plan.gpu.name}"),
        ("settings", plan.describe_settings()),
        ("sequences at once on a rank", f"{figures['sequences_at_once']:,d} of {figures['context']:,d} tokens"),
        *((f"memory: {name.replace('_', ' ')}", f"{value / 1e9:,.2f} GB") for name, value in memory._asdict().items()),
        ("memory of a rank", f"{memory.total / 1e9:,.2f} GB of {plan.usable_bytes / 1e9:,.1f} GB"),
        ("tokens", f"{plan.tokens:,.3g}"),
        ("floating point operations", f"{plan.flops:.3e}"),
        ("time", f"{plan.hours / 24:,.2f} days ({plan.hours * plan.num_gpus:,.0f} GPU-hours)"),
        ("cost", f"${plan.dollars:,.0f}"),
    ]
    assumed = figures["assumptions"]
    caption = (
        f"Assumed: {assumed['peak_share']:.0%} of {assumed['peak_flops'] / 1e12:,.0f} TFLOP/s, "
        f"{assumed['memory_share']:.0%} of the memory, ${assumed['dollars_per_gpu_hour']:g} for a GPU-hour."
    )
    columns = [Column("figure", "figure"), Column("value", "value")]
    return Table(columns, [{"figure": name, "value": value} for name, value in rows], caption)
