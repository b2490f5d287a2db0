"""Reading a text of any length through a decoder whose layers remember a window cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gatelab.longcontext.streaming.cache import LayerStream, Logits, WindowCache
from gatelab.longcontext.streaming.huggingface import streaming_hugging_face
from gatelab.model.attention import GatedAttention
from gatelab.model.decoder import Decoder, DecoderLayer
from gatelab.model.rope import rotate, rotation_at
from gatelab.model.settings import ModelSettings, RopeSettings
from gatelab.model.sink import Sink

Read = Callable[[Tensor], Tensor]
"""Takes the next tokens (B T) of B texts and gives their logits (B T V)."""
_CHECKED_TOKENS, _TOLERANCE = 48, 1e-3


def streaming(model: nn.Module, cache: WindowCache) -> AbstractContextManager[Read]:
    """Let the attention of all layers run over window caches, empty at first, until the context ends.

    ``model`` is a GateLab decoder or a causal language model of transformers. Gates, norms, softcaps, learned sinks
    and each layer's own rotary base and window stay what they are. Raises ``ValueError`` for a decoder whose tokens
    see later ones, for a gate behind the rotation (its scores would have to be remembered with the keys), and for
    models of transformers with layers that are no softmax attention or with no rotary embedding that can be redone.
    """
    return _streaming_decoder(model, cache) if isinstance(model, Decoder) else streaming_hugging_face(model, cache)


@torch.no_grad()
def require_streamable(model: nn.Module, caches: Sequence[WindowCache], tokens: Int[Tensor, "B T"]) -> None:
    """Raise ``ValueError`` where :func:`streaming` would, or where a stream that evicts nothing is not the model.

    Compares logits of a few first tokens with those of a plain pass, so that a family which rotates in a way of its
    own is refused and never measured wrongly.
    """
    piece = tokens[:1, : min(_CHECKED_TOKENS, *(cache.capacity for cache in caches))]
    for cache in caches:
        with streaming(model, cache) as read:
            read(piece)
    with streaming(model, WindowCache(0, piece.shape[1])) as read:
        found = read(piece)
    plain = model(piece)
    expected = plain if isinstance(model, Decoder) else plain.logits
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error < _TOLERANCE:
        raise ValueError(
            f"{type(model).__name__} gives other logits with its rotation redone (off by {error:.2g} of the largest); "
            "it positions tokens in a way that can't be streamed"
        )


@contextmanager
def _streaming_decoder(decoder: Decoder, cache: WindowCache) -> Iterator[Read]:
    _require_rotation_last(decoder.settings)
    attentions = [_attention_of(layer) for layer in decoder.model.layers]
    kernels = [attention.kernel for attention in attentions]
    try:
        for number, attention in enumerate(attentions):
            attention.kernel = _StreamKernel(cache.within(attention.window), decoder.settings.rope_on_layer(number))
        yield partial(_read_unrotated, decoder)
    finally:
        for attention, kernel in zip(attentions, kernels, strict=True):
            attention.kernel = kernel


def _require_rotation_last(settings: ModelSettings) -> None:
    if not settings.causal:
        raise ValueError("causal=False lets tokens see later ones; only a causal decoder can read a stream")
    if settings.latent is not None:
        raise ValueError(
            "latent attention rotates one key for all heads ahead of its kernel, so its keys can't be turned to new "
            "positions; stream a decoder with grouped-query attention"
        )
    for gate in settings.gates:
        if gate.placement == "after_rope":
            raise ValueError(
                f"a {gate.position} gate has placement=after_rope, so its keys can't be turned to new positions; "
                "stream a model whose gate is before the rotation"
            )


def _attention_of(layer: nn.Module) -> GatedAttention:
    assert isinstance(layer, DecoderLayer)
    return layer.self_attn


class _StreamKernel:
    """The attention kernel of one layer while it streams: it gets queries and keys before their rotation."""

    def __init__(self, cache: WindowCache, rope: RopeSettings | None):
        self.stream, self.rope = LayerStream(cache), rope

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, sink: Sink | None = None
    ) -> Float[Tensor, "B T H C"]:
        """Attention over the layer's cache; the mask is that of the cache alone."""
        assert mask is None and causal
        scale = query.shape[-1] ** -0.5
        logits = Logits(scale) if sink is None else Logits(scale, None, partial(_sink_logits, sink, scale), sink.value)
        return self.stream.attend(query, key, value, self._rotate, logits)

    def _rotate(self, x: Float[Tensor, "B T N C"], positions: Int[Tensor, "T"]) -> Float[Tensor, "B T N C"]:
        if self.rope is None:
            return x
        return rotate(x, rotation_at(positions[None], self.rope, x.shape[-1], x.dtype))


def _sink_logits(sink: Sink, scale: float, query: Float[Tensor, "B T H C"]) -> Float[Tensor, "#B H #T"]:
    return sink.logits_for(query, scale)


def _read_unrotated(decoder: Decoder, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
    """The decoder's pass without rotations and masks, which the kernels add."""
    x = decoder.model.embed_tokens(ids)
    x = x.to(decoder.activation_dtype or x.dtype)
    for layer in decoder.model.layers:
        x, _ = layer(x, None)
    return decoder.logits(decoder.model.norm(x))
