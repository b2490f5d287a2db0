"""The machine's limit: a bfloat16 matrix product of size 2,048 cubed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

SIZE, REPETITIONS = 2048, 20


def prepare(settings: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
    """Twenty products; ``flops`` is their floating-point operations."""
    a, b = torch.randn(2, SIZE, SIZE).to(torch.bfloat16)

    def turn() -> dict[str, float]:
        for _ in range(REPETITIONS):
            torch.mm(a, b)
        return {"flops": 2 * SIZE**3 * REPETITIONS}

    return turn
