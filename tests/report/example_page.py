"""A made-up report like the real ones: three arms, every kind of chart, two tables."""

from __future__ import annotations

import math

from gatelab.report.charts import (
    Chart,
    Reference,
    bar_chart,
    dot_interval_chart,
    heat_map,
    histogram,
    line_chart,
)
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table

ARMS = ("ungated", "headwise", "elementwise")
ARM = Column("arm", "Arm")
STEP = Column("step", "Step", ",d")
LOSS = Column("loss", "Loss", ".3f", unit="nats")
LAYER = Column("layer", "Layer", "d")
SHARE = Column("share", "First-token attention", ".4f")
FLOOR = Reference("uniform attention", 0.0133)


def loss_rows(arms: tuple[str, ...] = ARMS, num_steps: int = 60) -> list[dict]:
    return [
        {"arm": arm, "step": step, "loss": 8.3 * math.exp(-step / 20) + 4.9 - 0.1 * number}
        for number, arm in enumerate(arms)
        for step in range(num_steps)
    ]


def layer_rows(arms: tuple[str, ...] = ARMS) -> list[dict]:
    rows = []
    for number, arm in enumerate(arms):
        for layer in range(5):
            share = 0.0133 + 0.05 / (number + 1) * math.sin(1 + layer / 3) ** 2
            rows.append({"arm": arm, "layer": layer, "share": share, "low": 0.9 * share, "high": 1.1 * share})
    return rows


def head_rows(arms: tuple[str, ...] = ARMS) -> list[dict]:
    return [
        {"arm": arm, "layer": layer, "head": head, "share": 0.01 + 0.02 * layer * head / (number + 1)}
        for number, arm in enumerate(arms)
        for layer in range(5)
        for head in range(3)
    ]


def bin_rows(arms: tuple[str, ...] = ARMS[1:]) -> list[dict]:
    return [
        {"arm": arm, "low": edge / 4, "high": (edge + 1) / 4, "fraction": (0.4, 0.3, 0.2, 0.1)[edge]}
        for arm in arms
        for edge in range(4)
    ]


def difference_rows(arms: tuple[str, ...] = ARMS[1:]) -> list[dict]:
    return [{"arm": arm, "difference": -0.1, "low": -0.14, "high": -0.05} for arm in arms]


def speed_rows(arms: tuple[str, ...] = ARMS) -> list[dict]:
    return [{"arm": arm, "speed": 8912.3 - 400 * number} for number, arm in enumerate(arms)]


def every_chart(arms: tuple[str, ...] = ARMS, suffix: str = "") -> list[Chart]:
    """One chart of each kind; the suffix stands in every title and axis."""
    head = Column("head", f"Head{suffix}", "d")
    score = Column("low", f"Gate score{suffix}", ".2f")
    fraction = Column("fraction", f"Share of scores{suffix}", ".1%")
    difference = Column("difference", f"Difference{suffix}", "+.3f")
    speed = Column("speed", f"Speed{suffix}", ",.0f", unit="tokens/s")
    return [
        line_chart(loss_rows(arms), STEP, LOSS, ARM, f"Loss{suffix}"),
        line_chart(layer_rows(arms), LAYER, SHARE, ARM, "By layer", band=("low", "high"), reference=FLOOR),
        heat_map(head_rows(arms), head, LAYER, SHARE, "By head", panel=ARM, floor=FLOOR),
        histogram(bin_rows(arms), score, "high", fraction, ARM, "Gate scores"),
        dot_interval_chart(difference_rows(arms), ARM, difference, ("low", "high"), "Differences"),
        bar_chart(speed_rows(arms), ARM, speed, "Speed"),
    ]


def example_page(arms: tuple[str, ...] = ARMS, suffix: str = "") -> Page:
    """A page with every kind of content; the suffix stands in every text."""
    figures = [
        Figure(chart, f"Caption {number}{suffix}", f"How it is computed{suffix}", f"T = 512{suffix}")
        for number, chart in enumerate(every_chart(arms, suffix))
    ]
    columns = [ARM, Column("loss", f"Held-out loss{suffix}", ".4f"), Column("interval", "95 % interval", ".3f")]
    rows = [{"arm": arm, "loss": 4.5 - number, "interval": (-0.14, -0.05)} for number, arm in enumerate(arms)]
    table = Table(columns, rows, f"Results{suffix}")
    return Page(
        title=f"Three arms{suffix}",
        lead=f"The gate lowers the loss.{suffix}\n\nOne seed was trained.",
        command=f"gatelab study demo train.steps=60{suffix}",
        sections=[
            Section(f"Result{suffix}", f"First.{suffix}\n\nSecond.", [table, figures[0]]),
            Section("Inside", content=figures[1:]),
        ],
        environment={f"torch{suffix}": f"2.13.0{suffix}"},
        notes=[f"A note{suffix}"],
    )
