"""The fused kernels of torch that give log-sum-exp beside the output: private operators behind one checked adapter."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
_LSE_TOLERANCE = 1e-3


@functools.cache
def find_kernel(device_type: str, dtype: torch.dtype) -> Kernel | None:
    """The first kernel for this device and dtype that passes its self-test; ``None`` leaves the plain formula.

    A kernel takes queries (B H T C), keys (B K T C), values (B K T C), whether it is causal, and the scale; it gives
    the output (B H T C) and the log-sum-exp (B H T). The operators are no public API of torch, so each is compared with
    the plain formula on one small case before its first use.
    """
    for kernel in _CANDIDATES.get(device_type, ()):
        if dtype in _TOLERANCE and passes_self_test(kernel, device_type, dtype):
            return kernel
    return None


@torch.no_grad()
def passes_self_test(kernel: Kernel, device_type: str, dtype: torch.dtype) -> bool:
    """Whether the kernel equals the plain formula on 2 samples of 13 tokens, 4 query and 2 key heads of size 8."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 13, heads, 8, generator=generator).to(device_type, dtype).transpose(1, 2) for heads in (4, 2, 2)
    )
    scale = 0.7
    for causal in (True, False):
        logits = query.double() @ key.double().repeat_interleave(2, 1).transpose(-1, -2) * scale
        if causal:
            logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -torch.inf)
        expected = logits.softmax(-1) @ value.double().repeat_interleave(2, 1)
        try:
            output, lse = kernel(query, key, value, causal, scale)
        except (RuntimeError, NotImplementedError, AttributeError, TypeError):
            return False
        if output.shape != expected.shape or lse.shape != logits.shape[:-1]:
            return False
        lse_tolerance = min(_LSE_TOLERANCE, _TOLERANCE[dtype])
        if not (output.double() - expected).abs().max() < _TOLERANCE[dtype]:
            return False
        if not (lse.double() - logits.logsumexp(-1)).abs().max() < lse_tolerance:
            return False
    return True


def _flash_on_cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operator(query, key, value, 0.0, causal, scale=scale)


def _flash_on_cuda(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """For half precision; wants head sizes that are multiples of 8."""
    head_size = query.shape[-1]
    query, key, value = (_pad_channels(tensor, 8) for tensor in (query, key, value))
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, *_for_each_query_head(query, key, value), 0.0, causal, False, scale=scale
    )
    return output[..., :head_size], lse[..., : query.shape[2]]


def _efficient_on_cuda(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """For float32 too; the log-sum-exp comes back padded to a multiple of 32 queries."""
    head_size = query.shape[-1]
    query, key, value = (_pad_channels(tensor, 8) for tensor in (query, key, value))
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, *_for_each_query_head(query, key, value), None, True, 0.0, causal, scale=scale
    )
    return output[..., :head_size], lse[..., : query.shape[2]]


def _pad_channels(tensor: Float[Tensor, "B N T C"], multiple: int) -> Float[Tensor, "B N T C2"]:
    return F.pad(tensor, (0, -tensor.shape[-1] % multiple))


def _for_each_query_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    return key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)


_CANDIDATES: dict[str, tuple[Kernel, ...]] = {"cpu": (_flash_on_cpu,), "cuda": (_flash_on_cuda, _efficient_on_cuda)}
