"""The cost of a study, counted run by run and refused when it is too high."""

from __future__ import annotations

import pytest

from gatelab.model.accounting import flops_per_token_training
from gatelab.study.cost import PEAK_SHARE, arm_costs, cost_table
from gatelab.study.jobs import comparison_jobs, tuning_jobs
from gatelab.study.presets import PRESETS
from gatelab.study.scales import SCALES
from gatelab.study.study import Study

TINY = ("model.width=24", "model.head_size=10", "model.feedforward_width=40", "train.steps=7", "data.context=17",
        "train.sequences_per_step=3", "train.schedule.warmup_steps=2")  # fmt: skip


def tiny(**changes: object) -> Study:
    arms = [{"name": "ungated"}, {"name": "gated", "assignments": ["gate=sdpa_elementwise"]}]
    values = {"name": "tiny", "question": "?", "recipe": "backcopy", "assignments": TINY, "arms": arms}
    return Study.parse({**values, "baseline": "ungated", "seeds": (0, 1, 2, 3), **changes})


@pytest.mark.parametrize("rates", [(), (1e-3, 2e-3, 4e-3)])
def test_costs_are_those_of_the_jobs(rates: tuple[float, ...]) -> None:
    """With every arm tuned to a rate of its own, no job is left out and none counted twice."""
    study = tiny(learning_rates=rates)
    own = {"ungated": 1e-3, "gated": 4e-3} if rates else None
    jobs = [*tuning_jobs(study), *comparison_jobs(study, own)]
    for cost in arm_costs(study):
        of_arm = [job for job in jobs if job.arm == cost.arm]
        assert cost.tuning_runs == sum(job.purpose == "tuning" for job in of_arm)
        assert cost.comparison_runs == sum(job.purpose == "comparison" for job in of_arm)
        assert cost.tokens == len(of_arm) * 7 * 3 * 17
        model = of_arm[0].settings.model
        assert cost.flops == pytest.approx(cost.tokens * flops_per_token_training(model, 17))


def test_the_table_adds_up_and_states_its_share() -> None:
    table = cost_table(tiny(), peak_flops=2e9)
    first, second, total = table.rows
    assert total["arm"] == "all" and total["comparison_runs"] == 8 and total["tuning_runs"] == 0
    for key in ("tokens", "flops", "hours"):
        assert total[key] == pytest.approx(first[key] + second[key])
    assert total["hours"] == pytest.approx(total["flops"] / (2e9 * PEAK_SHARE) / 3600)
    assert (first["surplus"], second["surplus"]) == (0, pytest.approx(second["parameters"] / first["parameters"] - 1))
    assert "25% of this machine's matrix product in float32, 2 GFLOP/s" in table.caption
    assert table.cells()[-1][1:3] == ["–", "–"]


def test_the_peak_is_measured_when_none_is_given() -> None:
    assert cost_table(tiny()).rows[-1]["hours"] > 0


def test_a_study_over_its_budget_is_refused() -> None:
    study = PRESETS["paper/positions"](SCALES["paper"])
    message = r"^study positions at scale paper takes about [\d,.]+ hours on this machine, more than the budget of 10; "
    with pytest.raises(ValueError, match=message + "choose a smaller scale, fewer seeds or a larger budget$"):
        cost_table(study, budget_hours=10, peak_flops=1e15)
    hours = cost_table(tiny(), peak_flops=2e9).rows[-1]["hours"]
    assert cost_table(tiny(), budget_hours=1.01 * hours, peak_flops=2e9)
    with pytest.raises(ValueError, match="study tiny takes"):
        cost_table(tiny(), budget_hours=0.99 * hours, peak_flops=2e9)
