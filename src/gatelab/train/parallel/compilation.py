"""Recomputation and compilation of a decoder's layers."""

from __future__ import annotations

import shutil
import sysconfig
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gatelab.model.attention import AttentionKernel, GatedAttention, fused_attention
from gatelab.model.decoder import Decoder
from gatelab.model.fused.tiled_attention import SOURCE, tiled_attention
from gatelab.train.parallel.native import build_library, cpp_compiler


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
    run the ninth decoder of a study uncompiled. Attention on a CPU is computed by :func:`attention_kernel`. What is
    made of saved tensors without a matrix product, as a gated output or a SwiGLU's, is made again for the gradient of
    the projection that reads it: PyTorch would save it too, a third more to keep.
    """
    torch.compiler.reset()
    functorch_config.ban_recompute_materialized_backward = False
    if decoder.model.embed_tokens.weight.device.type == "cpu":
        for attention in decoder.modules():
            if isinstance(attention, GatedAttention):
                attention.kernel = attention_kernel()
    for layer in decoder.model.layers:
        layer.compile(dynamic=False)


@cache
def attention_kernel() -> AttentionKernel:
    """Tiles in bfloat16 where the processor multiplies bfloat16, PyTorch's own kernel elsewhere; built on first use."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return fused_attention
    try:
        return tiled_attention(build_library(SOURCE)) or fused_attention
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"attention is left to PyTorch's slower kernel, as GateLab's can't be built: {error}", stacklevel=2
        )
        return fused_attention


def compile_loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile the head with its loss, so that float32 logits need not be written out."""
    return torch.compile(function, dynamic=False)


def has_cpp_compiler() -> bool:
    """Whether torch.compile finds what it needs on a CPU: its C++ compiler, and Python's headers."""
    return shutil.which(cpp_compiler()) is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
