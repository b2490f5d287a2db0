"""Cross-entropy per token, perplexity, bits per byte: pure functions on tensors and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def token_nats(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """-ln p(target) of each token, in float32 at least; 0 where the target is -100, PyTorch's mark for "ignore"."""
    wide = logits if logits.dtype.itemsize > 4 else logits.float()
    nats = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none")
    return nats.view_as(targets)


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
