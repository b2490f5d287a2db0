"""The smallest study, which the command ``gatelab demo`` runs."""

from __future__ import annotations

from gatelab.study.study import Arm, Study

DEMO = Study(
    name="demo",
    question="What does a gate on the attention output change in the first minutes of training?",
    recipe="demo",
    baseline="ungated",
    arms=(
        Arm(name="ungated"),
        Arm(name="headwise", assignments=("gate=sdpa_headwise", "match=parameters")),
        Arm(name="elementwise", assignments=("gate=sdpa_elementwise", "match=parameters")),
    ),
)
