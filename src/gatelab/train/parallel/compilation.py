"""Recomputation and compilation of a decoder's layers."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gatelab.model.attention import GatedAttention
from gatelab.model.decoder import Decoder
from gatelab.model.fused.blocked_attention import blocked_attention


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
    run the ninth decoder of a study uncompiled. Where :func:`blocked_attention` wins, it computes attention.
    """
    torch.compiler.reset()
    for attention in decoder.modules():
        if isinstance(attention, GatedAttention):
            attention.kernel = blocked_attention
    for layer in decoder.model.layers:
        layer.compile(dynamic=False)


def compile_loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile the head with its loss, so that float32 logits need not be written out."""
    return torch.compile(function, dynamic=False)


def has_cpp_compiler() -> bool:
    """Whether torch.compile finds what it needs on a CPU: its C++ compiler, and Python's headers."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return shutil.which(compiler) is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
