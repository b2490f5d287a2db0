"""What holds for a whole process while it trains: its threads, its kernels, its allocator's habits."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic

_FILL = "fill_uninitialized_memory"
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Compute on this many CPU threads, or on as many as before when ``None``, for as long as the context lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Only kernels that give the same bits every time, for as long as the context lasts.

    PyTorch would also fill every new tensor with NaN in this mode, a check of itself that costs time and is left off.
    cuBLAS needs a workspace of fixed size for it, which an environment variable asks for.
    """
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills_before = getattr(deterministic, _FILL)
    torch.use_deterministic_algorithms(enabled)
    setattr(deterministic, _FILL, False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        setattr(deterministic, _FILL, fills_before)


def keep_freed_memory() -> None:
    """Tell glibc's allocator to keep large freed blocks instead of giving them back to the kernel.

    Every step of an eager training run frees and takes the same large tensors; fresh pages cost more than the
    arithmetic on them. Elsewhere than on glibc this does nothing. It changes no result.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20)):
            mallopt(option, value)
