"""What lets the attention of a decoder, ours or one of transformers, run over pruned caches for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gatelab.diagnose.attention import widened
from gatelab.diagnose.calls import AttentionCall, Visibility
from gatelab.gates.gate import Gate
from gatelab.interop.gate_recovery import recover_gate
from gatelab.interop.probe import POSITION, attach_hugging_face, attention_options
from gatelab.longcontext.kv_pruning.cache import Query
from gatelab.model.attention import GroupedQueryAttention
from gatelab.model.cache import KVCache
from gatelab.model.decoder import Decoder
from gatelab.model.sink import Sink

Run = Callable[[Int[Tensor, "B T"], int], Float[Tensor, "B T V"]]
"""Reads tokens of which the first has this position in the text, and gives their logits."""


class Caches(Protocol):
    """All layers' caches, to which a connected model turns."""

    def attend(self, layer: int, asked: Query, keys: Tensor, values: Tensor) -> Tensor:
        """A layer's attention of (B T H C) queries with (B T K C) new keys and values, to (B T H Cv)."""
        ...

    def observe(self, seen: AttentionCall) -> None:
        """What the layer did around its attention: its gate scores and the output projection's weight."""
        ...


def connect(model: nn.Module, caches: Caches) -> AbstractContextManager[Run]:
    """Let a decoder read through these caches until the context ends; then it is as it was.

    Raises ``ValueError`` for a model whose attention can't be replaced, that is not causal, or that has layers without
    softmax attention, whose state no cut of keys could make smaller.
    """
    return _connect_decoder(model, caches) if isinstance(model, Decoder) else _connect_hugging_face(model, caches)


@contextmanager
def _connect_decoder(model: Decoder, caches: Caches) -> Iterator[Run]:
    if not model.settings.causal:
        raise ValueError(
            "a decoder with settings causal=False reads no token before the next; it has no cache to prune"
        )
    if model.settings.latent is not None:
        raise ValueError(
            "latent attention caches one latent for all heads, and pruning drops keys and values head by head; prune a "
            "decoder with grouped-query attention"
        )

    def run(tokens: Tensor, first_position: int) -> Tensor:
        place = KVCache(model.settings.num_layers)
        place.length = first_position
        return model(tokens, cache=place)

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, GroupedQueryAttention):
                layer = _DecoderLayer(module, caches)
                for name in ("kernel", "recorder"):
                    stack.callback(setattr, module, name, getattr(module, name))
                module.kernel, module.recorder = layer, layer
        yield run


class _DecoderLayer:
    """Stands in an attention module of ours for its kernel and its recorder."""

    def __init__(self, attention: GroupedQueryAttention, caches: Caches):
        self.attention, self.caches = attention, caches

    def __call__(
        self,
        query: Float[Tensor, "B T H C"],
        key: Float[Tensor, "B T K C"],
        value: Float[Tensor, "B T K C"],
        mask: Bool[Tensor, "#B 1 T S"] | None,
        causal: bool,
        sink: Sink | None = None,
    ) -> Float[Tensor, "B T H C"]:
        """Attention over the cache, which knows better than ``mask`` what is there."""
        scale = query.shape[-1] ** -0.5
        asked = Query(
            query=query,
            scale=scale,
            window=self.attention.window,
            learned_sinks=None if sink is None else sink.logits_for(widened(query), scale),
            sink_value=None if sink is None else sink.value,
        )
        return self.caches.attend(self.attention.layer, asked, key, value)

    def record(self, layer: int, tensors: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> None:
        """Hand the layer's gate scores and its output projection over."""
        gates = {position: gate for position, gate in self.attention.gates.items() if isinstance(gate, Gate)}
        self.caches.observe(
            AttentionCall(
                layer=layer,
                query=tensors["query"],
                key=tensors["key"],
                value=tensors["value"],
                output=tensors["output"],
                lse=torch.empty(0),
                scale=tensors["query"].shape[-1] ** -0.5,
                visibility=Visibility(tensors["query"].shape[1], tensors["key"].shape[1]),
                scores=scores,
                added=frozenset(position for position, gate in gates.items() if gate.spec.operation == "add"),
                output_weight=self.attention.o_proj.weight.detach(),
            )
        )


@contextmanager
def _connect_hugging_face(model: Any, caches: Caches) -> Iterator[Run]:
    """The probe checks the model and finds its gates; the attention that it registered is replaced by the caches'."""
    listener: Any = _HuggingFaceLayers(caches)
    with attach_hugging_face(model, listener):
        from transformers import AttentionInterface

        name = model.config._attn_implementation
        listener.probed = AttentionInterface()[name]
        AttentionInterface.register(name, listener.attention)

        def run(tokens: Tensor, first_position: int) -> Tensor:
            positions = torch.arange(first_position, first_position + tokens.shape[1], device=tokens.device)
            return model(tokens, position_ids=positions.expand_as(tokens)).logits

        yield run


class _HuggingFaceLayers:
    """An attention function for transformers over the caches, and the recorder that the probe reports to."""

    def __init__(self, caches: Caches):
        self.caches = caches
        self.probed: Callable[..., tuple[Tensor, None]] | None = None
        self.output = torch.empty(0)
        self.expected_layers: int | None = None

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
    ) -> tuple[Tensor, None]:
        """(B H T C) queries, (B K T C) new keys and values to (B T H Cv); the probe looks on."""
        assert self.probed is not None
        self.probed(module, query, key, value, attention_mask, **keywords)
        window = keywords.get("sliding_window")
        if isinstance(attention_mask, Visibility):
            if not attention_mask.causal or attention_mask.documents is not None:
                raise ValueError(f"{type(module).__name__} attends in chunks or both ways; its cache can't be pruned")
            window = window or attention_mask.window
        options = attention_options(type(module).__name__, query, keywords)
        asked = Query(query=query.transpose(1, 2), window=window, **options)
        self.output = self.caches.attend(module.layer_idx, asked, key.transpose(1, 2), value.transpose(1, 2))
        return self.output, None

    def record(self, call: AttentionCall) -> None:
        """The probe saw its own attention over the new tokens alone: a gate that it recovered is recovered anew."""
        if call.scores and not call.activations:
            assert call.gated_output is not None
            scores = recover_gate(self.output, call.gated_output)
            call = replace(call, scores={} if scores is None else {POSITION: scores})
        self.caches.observe(call)

    def record_hidden(self, layer: int, hidden: Tensor, real: Tensor | None = None) -> None:
        """Layer outputs are of no interest here."""

    def skip(self, layer: int, reason: str) -> None:
        """Refuse a layer that holds a state instead of keys."""
        raise ValueError(
            f"layer {layer} of the model ({reason}) holds a state instead of keys; only models whose layers all have "
            "softmax attention can be pruned"
        )
