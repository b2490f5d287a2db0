"""Cross-entropy per token, perplexity, bits per byte: pure functions on tensors and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

_LOGITS_AT_ONCE = 1 << 17  # what a core's cache holds in float32


def token_nats(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """-ln p(target) of each token, in float32 at least; 0 where the target is -100, PyTorch's mark for "ignore".

    On a CPU and without gradients a few tokens at a time, so that no wide logits are written to memory: the same bits
    in a half to a quarter of the time.
    """
    rows, wanted = logits.flatten(0, 1), targets.flatten()
    if logits.requires_grad or logits.device.type != "cpu":
        return _nats(rows, wanted).view_as(targets)
    at_once = max(1, _LOGITS_AT_ONCE // rows.shape[1])
    parts = [_nats(*part) for part in zip(rows.split(at_once), wanted.split(at_once), strict=True)]
    return torch.cat(parts).view_as(targets)


def _nats(logits: Float[Tensor, "N V"], targets: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    wide = logits if logits.dtype.itemsize > 4 else logits.float()
    return F.cross_entropy(wide, targets, reduction="none")


def perplexity(nats: float, num_tokens: int) -> float:
    """exp of the mean cross-entropy; uniform logits give the vocabulary size. ``inf`` once exp overflows."""
    mean = nats / num_tokens
    return math.exp(mean) if mean < 700 else math.inf


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Total nats / (ln 2 x UTF-8 bytes of the text): comparable across tokenizers. BOS is never scored."""
    return nats / (math.log(2) * num_bytes)


def mean_perplexity(perplexities: Iterable[float]) -> float:
    """The arithmetic mean over domains, as in the paper."""
    values = list(perplexities)
    return sum(values) / len(values)
