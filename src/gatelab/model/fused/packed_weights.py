"""Decoding with weights in the layout that the processor's kernels read best (oneDNN's).

A step of decoding multiplies a few rows with every weight, so it lasts as long as reading the weights does, and from
plain row-major weights most kernels read at half the speed or less. ``benchmarks/generation.py`` measures decoding;
``gatelab.gates.linear.Linear`` is the plain twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gatelab.gates.linear import Linear
from gatelab.model.decoder import Decoder

Product = Callable[..., Tensor]
_WORTH_PACKING = 16  # steps from which on what each of them gains repays the packing


@contextmanager
def packed_weights(decoder: Decoder, num_rows: int) -> Iterator[None]:
    """While it lasts, projections and head multiply with copies of their weights, laid out for ``num_rows`` rows.

    For calls without gradients and weights that stay as they are. The copies have the dtype of the activations and take
    as much memory again; making them takes as long as a few steps of decoding. Nothing changes off the CPU, in other
    dtypes than float32 and bfloat16, and for experts.
    """
    dtype = decoder.hidden_dtype
    if not can_pack(decoder.model.embed_tokens.weight.device, dtype):
        yield
        return
    products = {
        module: _packed(module.weight, module.bias, dtype, num_rows, module.forward)
        for module in decoder.modules()
        if isinstance(module, Linear)
    }
    head = None
    if decoder.lm_head is None:
        head = _packed(decoder.model.embed_tokens.weight, None, dtype, num_rows, decoder.logits)
    try:
        for projection, product in products.items():
            projection.forward = product
        if head is not None:
            decoder.logits = head
        yield
    finally:
        for projection in products:
            del projection.forward
        if head is not None:
            del decoder.logits


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this PyTorch and processor have the kernels."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def repays_packing(decoder: Decoder, num_steps: int) -> bool:
    """Whether so many steps of decoding are faster with packed weights, the packing included.

    Not in float32 on one of Intel's processors, whose library for it (MKL) reads plain weights up to 1.3 times as fast.
    """
    name = torch.cpu.get_capabilities().get("cpu_name", "")
    at_home = torch.backends.mkl.is_available() and str(name).startswith("Intel")
    return num_steps >= _WORTH_PACKING and not (at_home and decoder.hidden_dtype == torch.float32)


def _packed(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, num_rows: int, plain: Product) -> Product:
    """``plain`` with the weight packed; an input of another dtype, as a gate's may be, goes to ``plain`` itself."""
    kernels: Any = torch.ops.mkldnn
    packed = kernels._reorder_linear_weight(weight.detach().to(dtype), num_rows)
    offset = None if bias is None else bias.detach().to(dtype)

    def product(input: Tensor) -> Tensor:
        if input.dtype != dtype:
            return plain(input)
        return kernels._linear_pointwise(input, packed, offset, "none", [], "")

    return product
