"""Causal attention in bfloat16 on a CPU by a kernel of its own, for compiled training.

PyTorch's kernel for CPUs takes three times as long, most of it in its backward pass, and torch.compile makes nothing
better of the same products (``benchmarks/training_step.py`` measures a step with both). Logits and every sum are
float32; gradients of keys and values are summed over the query heads that share them before they are rounded, so they
are nearer to float64 than PyTorch's. ``fused_attention`` is the plain twin.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gatelab.model.attention import AttentionKernel, fused_attention
from gatelab.model.sink import Sink

SOURCE = Path(__file__).with_name("tiled_attention.cpp")
# Written out, because a session that checks shapes puts functions of its own around the operators'.
_FORWARD = "(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor query, Tensor key, Tensor value, Tensor output, Tensor normalizer, Tensor upstream)"
    " -> (Tensor, Tensor, Tensor)"
)


@cache
def tiled_attention(library: Path) -> AttentionKernel | None:
    """The kernel of :data:`SOURCE` built as ``library``; ``None`` where the processor has no bfloat16 products.

    What is not its own (masks, sinks, caches, other dtypes and devices, heads of an odd size) is left to
    :func:`fused_attention`.
    """
    functions = ctypes.CDLL(str(library))
    if not functions.is_supported():
        return None
    attend = _operators(functions)

    def kernel(
        query: Float[Tensor, "B T H C"],
        key: Float[Tensor, "B S K C"],
        value: Float[Tensor, "B S K Cv"],
        mask: Tensor | None,
        causal: bool,
        sink: Sink | None = None,
    ) -> Float[Tensor, "B T H Cv"]:
        is_triangle = causal and mask is None and sink is None and query.shape[1] == key.shape[1] > 1
        is_even = query.shape[-1] % 2 == value.shape[-1] % 2 == 0
        if is_triangle and is_even and query.dtype == torch.bfloat16 and query.device.type == "cpu":
            return attend(query, key, value)[0]
        return fused_attention(query, key, value, mask, causal, sink)

    return kernel


def _operators(functions: ctypes.CDLL) -> Any:
    """The operator that gives output and normalizers, with its gradient, as PyTorch's compiler wants to know it."""

    @torch.library.custom_op("gatelab::tiled_attention", mutates_args=(), schema=_FORWARD)
    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        inputs = [_side_by_side(tensor) for tensor in (query, key, value)]
        output, normalizer = _empty_outputs(query, key, value)
        functions.forward(_Sizes.of(query, key, value), *map(_view, inputs), _start(output), _start(normalizer))
        return output, normalizer

    @torch.library.custom_op("gatelab::tiled_attention_backward", mutates_args=(), schema=_BACKWARD)
    def pull_back(
        query: Tensor, key: Tensor, value: Tensor, output: Tensor, normalizer: Tensor, upstream: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = [_side_by_side(tensor) for tensor in (query, key, value, output, upstream)]
        gradients = _empty_gradients(query, key, value)
        sizes = _Sizes.of(query, key, value)
        functions.backward(sizes, *map(_view, inputs), _start(normalizer), *map(_start, gradients))
        return gradients

    attend.register_fake(_empty_outputs)
    pull_back.register_fake(lambda query, key, value, *_: _empty_gradients(query, key, value))

    def keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, *output)

    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return pull_back(*ctx.saved_tensors, upstream)

    attend.register_autograd(backward, setup_context=keep)
    return attend


def _empty_outputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, num_tokens, num_heads, _ = query.shape
    normalizer = query.new_empty(num_rows, num_heads, num_tokens, dtype=torch.float32)
    return query.new_empty(num_rows, num_tokens, num_heads, value.shape[-1]), normalizer


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


class _Sizes(ctypes.Structure):
    """B, T, H, K, C and Cv, as the kernel reads them."""

    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "tokens", "heads", "kv_heads", "size", "value_size")]

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return ctypes.byref(cls(*query.shape[:3], *key.shape[2:], value.shape[-1]))


class _View(ctypes.Structure):
    """Where a tensor begins, and how far its rows, tokens and heads are apart."""

    _fields_ = [("base", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("row", "token", "head")]


def _side_by_side(tensor: Tensor) -> Tensor:
    """The tensor with its channels side by side in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _view(tensor: Tensor) -> Any:
    return ctypes.byref(_View(tensor.data_ptr(), *tensor.stride()[:3]))


def _start(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
