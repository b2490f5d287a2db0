"""What is pruned, how far, and on what it is judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gatelab.data.settings import CorpusSettings
from gatelab.evaluate.texts import SHORTEST
from gatelab.longcontext.kv_pruning.budgets import Allocation, require_allocation
from gatelab.longcontext.kv_pruning.driver import NUM_RECENT
from gatelab.longcontext.kv_pruning.presses import build_press

PREFILL, DECODING, ANSWERS = "prefill", "decoding", "answers"
LOSS, DIVERGENCE, FOUND = "loss_difference", "kl", "mini_ruler"


class Arm(NamedTuple):
    """A press, and how the budget is divided among layers and heads."""

    press: str
    allocation: Allocation

    @property
    def label(self) -> str:
        """As it is written: ``h2o``, or ``h2o@heads``."""
        return self.press if self.allocation == "uniform" else f"{self.press}@{self.allocation}"


@dataclass(frozen=True)
class Trial:
    """What is pruned, how far, and on what text it is judged; ``ValueError`` for values without a meaning.

    ``presses`` are names, each with ``@heads``, ``@layers`` or ``@both`` after it if its budget follows the gates.
    ``budgets`` are shares of the ``context`` tokens; ``step`` is how many tokens come at a time in decoding. With a
    ``ruler_length`` the mini tasks are asked too, ``ruler_samples`` of each.
    """

    text: CorpusSettings
    cache: Path
    presses: tuple[str, ...]
    budgets: tuple[float, ...] = (0.5, 0.25, 0.1)
    context: int = 1024
    continuation: int = 256
    samples: int = 16
    step: int = 32
    num_recent: int = NUM_RECENT
    seed: int = 0
    ruler_length: int | None = None
    ruler_samples: int = 10
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not self.presses or not self.budgets:
            raise ValueError("nothing would be pruned; name at least one press and one budget")
        for budget in self.budgets:
            if self.budgets.count(budget) > 1:
                raise ValueError(f"budget {budget:g} is given twice; give each budget once")
            if not 0 < budget <= 1:
                raise ValueError(f"budget {budget:g} is no share of the cache; take one above 0, and 1 at most")
        if self.context < SHORTEST:
            raise ValueError(f"context={self.context} is below {SHORTEST} tokens; there is little to prune in it")
        for name, value, least in (
            ("continuation", self.continuation, 2),
            ("samples", self.samples, 2),
            ("step", self.step, 1),
            ("num_recent", self.num_recent, 0),
            ("ruler_samples", self.ruler_samples, 2),
        ):
            if value < least:
                raise ValueError(f"{name}={value} is too little; take at least {least}")
        _ = self.arms

    @property
    def arms(self) -> list[Arm]:
        """The presses with their allocations, each once."""
        return list(dict.fromkeys(self._arm(word) for word in self.presses))

    @staticmethod
    def _arm(word: str) -> Arm:
        press, _, allocation = word.partition("@")
        build_press(press)
        return Arm(press, require_allocation(allocation or "uniform"))

    def keys_at(self, budget: float, num_tokens: int | None = None) -> int:
        """Keys a head on average, of the context or of so many tokens."""
        return max(1, round(budget * (num_tokens or self.context)))

    def to_mapping(self) -> dict[str, Any]:
        """What decides the figures beside the model and the text, as plain values."""
        return {
            "presses": [arm.label for arm in self.arms],
            "budgets": list(self.budgets),
            "context": self.context,
            "continuation": self.continuation,
            "step": self.step,
            "recent_keys_kept": self.num_recent,
            "seed": self.seed,
            "ruler_length": self.ruler_length,
            "ruler_samples": self.ruler_samples if self.ruler_length else None,
            "keys_re_rotated": False,
        }


class Score(NamedTuple):
    """One figure of one sample."""

    arm: Arm
    use: str
    budget: float
    sample: int
    metric: str
    value: float
