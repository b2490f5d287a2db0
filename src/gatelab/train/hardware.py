"""Accelerators as a plan sees them. Nothing here imports torch."""

from __future__ import annotations

from typing import NamedTuple

from gatelab.settings import nearest


class Gpu(NamedTuple):
    """One accelerator: dense bfloat16 peak (floating point operations a second), memory, and an assumed price.

    Peaks and sizes are those of NVIDIA's data sheets (SXM forms, without sparsity); prices are round numbers for rented
    machines, to be replaced by one's own.
    """

    name: str
    peak_flops: float
    memory_bytes: float
    dollars_per_hour: float


GPUS: dict[str, Gpu] = {
    "a100": Gpu("A100 80GB SXM", 312e12, 80e9, 1.5),
    "h100": Gpu("H100 80GB SXM", 989e12, 80e9, 2.5),
    "h200": Gpu("H200 141GB SXM", 989e12, 141e9, 3.5),
}


def find_gpu(name: str) -> Gpu:
    """The accelerator with this name; ``ValueError`` with the nearest name for any other."""
    if name not in GPUS:
        raise ValueError(f"gpu {name!r} is unknown; {nearest(name, GPUS)}")
    return GPUS[name]
