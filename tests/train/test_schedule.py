"""The learning rate of each step: its ends are exact, its phases may be empty."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatelab.train.schedule import rate_factor
from gatelab.train.settings import ScheduleSettings, TrainSettings


def factors(num_steps: int, **settings: object) -> list[float]:
    schedule = ScheduleSettings.parse(settings)
    return [rate_factor(step, num_steps, schedule) for step in range(num_steps)]


def test_warmup_and_cosine_against_values_by_hand() -> None:
    found = factors(9, warmup_steps=4, final_fraction=0.2)
    by_hand = [0.2 + 0.8 * (1 + math.cos(math.pi * fifth / 5)) / 2 for fifth in (1, 2, 3, 4)]
    assert found == [0.25, 0.5, 0.75, 1.0, *by_hand, 0.2]


def test_warmup_stable_decay_against_values_by_hand() -> None:
    found = factors(8, kind="warmup_stable_decay", warmup_steps=2, decay_steps=4, final_fraction=0.1)
    assert found[:4] == [0.5, 1.0, 1.0, 1.0]
    assert found[4:] == pytest.approx([0.775, 0.55, 0.325, 0.1], rel=1e-15)
    assert found[-1] == 0.1, "the last step is exact to the last bit"


def test_the_papers_schedule() -> None:
    """1,000 steps up to 2e-3, then a cosine to 3e-5 over 100,000 steps."""
    schedule = ScheduleSettings(warmup_steps=1000, final_fraction=0.015)
    rates = [2e-3 * rate_factor(step, 100_000, schedule) for step in (0, 999, 50_499, 99_999)]
    assert rates == pytest.approx([2e-6, 2e-3, (2e-3 + 3e-5) / 2, 3e-5], rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 0, "final_fraction": 0.0}, [0.75, 0.25, 0.0]),
        ({"warmup_steps": 3}, [1 / 3, 2 / 3, 1.0]),
        ({"kind": "warmup_stable_decay", "warmup_steps": 0}, [1.0, 1.0, 1.0]),
        ({"kind": "warmup_stable_decay", "warmup_steps": 1, "decay_steps": 2, "final_fraction": 0}, [1.0, 0.5, 0.0]),
        (
            {"kind": "warmup_stable_decay", "warmup_steps": 0, "decay_steps": 3, "final_fraction": 0.25},
            [0.75, 0.5, 0.25],
        ),
    ],
)
def test_phases_without_steps_are_legal(settings: dict[str, object], expected: list[float]) -> None:
    assert factors(3, **settings) == pytest.approx(expected, abs=1e-15)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, ScheduleSettings]:
    kind = draw(st.sampled_from(["cosine", "warmup_stable_decay"]))
    warmup, stable = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    decay = draw(st.integers(0, 40)) if kind == "warmup_stable_decay" else 0
    num_steps = max(1, warmup + stable + decay)
    final = draw(st.floats(0, 1))
    settings = {"kind": kind, "warmup_steps": warmup, "decay_steps": decay, "final_fraction": final}
    return num_steps, ScheduleSettings.parse(settings)


@given(schedules())
def test_every_schedule_rises_then_falls_between_its_ends(case: tuple[int, ScheduleSettings]) -> None:
    num_steps, settings = case
    found = [rate_factor(step, num_steps, settings) for step in range(num_steps)]
    warmup = settings.warmup_steps
    assert all(0 <= factor <= 1 for factor in found)
    assert all(before < after for before, after in pairwise(found[:warmup]))
    assert all(before >= after for before, after in pairwise(found[max(0, warmup - 1) :]))
    if warmup:
        assert found[0] > 0 and found[warmup - 1] == 1.0
    decays = settings.decay_steps > 0 or (settings.kind == "cosine" and num_steps > warmup)
    assert found[-1] == (settings.final_fraction if decays else 1.0)


def test_phases_longer_than_the_run_are_refused() -> None:
    with pytest.raises(ValueError, match=r"warmup_steps=7 and schedule.decay_steps=5 together exceed steps=11"):
        schedule = {"kind": "warmup_stable_decay", "warmup_steps": 7, "decay_steps": 5}
        TrainSettings.parse({"steps": 11, "schedule": schedule})
    with pytest.raises(ValueError, match="kind=cosine with decay_steps=5 is impossible"):
        ScheduleSettings.parse({"decay_steps": 5})
