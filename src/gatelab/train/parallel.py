"""What is applied to a decoder from outside before it trains: recomputation, compilation, the allocator's habits."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import deterministic
from torch.utils.checkpoint import checkpoint

from gatelab.model.decoder import Decoder

_FILL = "fill_uninitialized_memory"
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def recompute_layers(decoder: Decoder) -> None:
    """Keep only each layer's input for the backward pass and compute the layer again there."""
    for layer in decoder.model.layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., object]) -> Callable[..., object]:
    def call(*arguments: object) -> object:
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False)

    return call


def compile_layers(decoder: Decoder) -> None:
    """Compile each layer by itself: all layers of a kind share one graph, so a deep model costs one compilation.

    What was compiled before in this process is forgotten, because PyTorch keeps eight graphs of one function and would
    run the ninth decoder of a study uncompiled.
    """
    torch.compiler.reset()
    for layer in decoder.model.layers:
        layer.compile(dynamic=False)


def compile_loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile the head with its loss, so that float32 logits need not be written out."""
    return torch.compile(function, dynamic=False)


def has_cpp_compiler() -> bool:
    """Whether torch.compile finds what it needs on a CPU: its C++ compiler, and Python's headers."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return shutil.which(compiler) is not None and Path(sysconfig.get_path("include"), "Python.h").exists()


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
    """
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
