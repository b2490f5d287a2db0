"""Studies by name: the paper's tables, its rivals, the mechanism and what is left open, each at any scale."""

from gatelab.study.presets.demo import DEMO
from gatelab.study.presets.paper_numbers import PAPER_NUMBERS, PaperRow, paper_difference
from gatelab.study.presets.table import LEFT_OUT, PRESETS, command_that_leaves, find_preset, plan

__all__ = [
    "DEMO",
    "LEFT_OUT",
    "PAPER_NUMBERS",
    "PRESETS",
    "PaperRow",
    "command_that_leaves",
    "find_preset",
    "paper_difference",
    "plan",
]
