"""One family inside the probe against its own eager attention: logits, and attention to the first real key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tiny_families import batch, build
from torch import Tensor

from gatelab.diagnose.attention import key_mass
from gatelab.diagnose.calls import AttentionCall
from gatelab.diagnose.recorder import Recorder
from gatelab.interop.probe import attach_hugging_face


class Listener(Recorder):
    """A recorder that also keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, AttentionCall] = {}
        self.hidden: dict[int, Tensor] = {}

    def record(self, call: AttentionCall) -> None:
        super().record(call)
        self.calls[call.layer] = call

    def record_hidden(self, layer: int, hidden: Tensor, real: Tensor | None = None) -> None:
        super().record_hidden(layer, hidden, real)
        self.hidden[layer] = hidden


class Comparison(NamedTuple):
    """The largest errors over real tokens, and the layers that were seen and skipped out of ``num_layers``."""

    family: str
    left_padded: bool
    num_layers: int
    seen: list[int]
    skipped: dict[int, str]
    gate: str
    logit_error: float
    mass_error: float


@torch.no_grad()
def listen(model: Any, *inputs: Any, **keywords: Any) -> tuple[Any, Listener]:
    """The model's output inside the probe, and what it handed over."""
    listener = Listener()
    with attach_hugging_face(model, listener):
        return model(*inputs, **keywords), listener


@torch.no_grad()
def compare(family: str, left_padded: bool) -> Comparison:
    """Raises AssertionError where the probe saw other layers than eager attention made maps for."""
    model = build(family)
    tokens, mask = batch(left_padded)
    real = mask.bool()
    eager = model(tokens, attention_mask=mask, output_attentions=True)
    probed, listener = listen(model, tokens, attention_mask=mask)
    maps = [attention for attention in eager.attentions if attention is not None]
    seen = sorted(listener.calls)
    assert len(maps) == len(seen)
    first = mask.argmax(1, keepdim=True)
    errors = [
        (first_key_mass(listener.calls[layer], first) - whole[torch.arange(len(tokens)), :, :, first[:, 0]]).abs()
        for layer, whole in zip(seen, maps, strict=True)
    ]
    return Comparison(
        family=family,
        left_padded=left_padded,
        num_layers=len(listener.hidden) - 1,
        seen=seen,
        skipped=listener.skipped,
        gate=_gate(listener.calls[seen[0]]),
        logit_error=float((probed.logits - eager.logits)[real].abs().max()),
        mass_error=max(float(error.transpose(0, 1)[:, real].max()) for error in errors),
    )


def _gate(call: AttentionCall) -> str:
    if not call.scores:
        return "none"
    return "headwise" if call.scores["sdpa_output"].shape[-1] == 1 else "elementwise"


def first_key_mass(call: AttentionCall, first: Tensor) -> Tensor:
    """Attention (B H T) to one key of each sample, 0 from queries that do not see it."""
    mass = key_mass(call.query, call.key, call.lse, call.scale, first, call.softcap)
    return mass.masked_fill(~call.visibility.sees(first)[:, None], 0.0)


@contextmanager
def state_kept(model: Any) -> Iterator[None]:
    """Asserts that hooks, attention names, caches and transformers' registers are the same afterwards."""
    before = _state(model)
    yield
    assert _state(model) == before


def _state(model: Any) -> dict[str, Any]:
    from transformers import AttentionInterface, AttentionMaskInterface

    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._forward_pre_hooks_with_kwargs))
        for module in model.modules()
    ]
    return {
        "hooks": hooks,
        "attention": model.config._attn_implementation,
        "cache": getattr(model.config, "use_cache", None),
        "registers": [dict(interface._global_mapping) for interface in (AttentionInterface, AttentionMaskInterface)],
    }
