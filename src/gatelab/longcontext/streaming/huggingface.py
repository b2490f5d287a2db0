"""Decoders of transformers whose attention runs over a window cache for a while.

Their rotary embedding gives "no rotation" to the layers, so queries and keys reach our attention function unrotated;
there they are turned by the family's own function, with cosines and sines of the family's own embedding, to their
positions in the cache. No cache of transformers takes part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gatelab.interop.probe import attention_options
from gatelab.longcontext.streaming.cache import LayerStream, Logits, WindowCache

_SOFTMAX_LAYERS = {"full_attention", "sliding_attention"}
_ROTATE_FUNCTION = "apply_rotary_pos_emb"


@contextmanager
def streaming_hugging_face(model: Any, cache: WindowCache) -> Iterator[Any]:
    """See :func:`gatelab.longcontext.streaming.models.streaming`; on exit the model is as it was."""
    layers, rotary = _require_rotary_decoder(model)
    stream = _HuggingFaceStream(cache, model.config.model_type)
    with ExitStack() as stack:
        _switch_attention(model, stream, stack)
        stack.callback(rotary.register_forward_hook(stream.see_rotary, with_kwargs=True).remove)
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(stream.begin_layer, with_kwargs=True).remove)

        def read(ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
            stream.begin_pass(ids.shape[1])
            logits = model(ids, use_cache=False).logits
            stream.end_pass(len(layers))
            return logits

        yield read


def _require_rotary_decoder(model: Any) -> tuple[nn.ModuleList, nn.Module]:
    """The model's layers and its rotary embedding; ``ValueError`` where one of them is missing or of another kind."""
    config = model.config.get_text_config(decoder=True)
    family = config.model_type
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _SOFTMAX_LAYERS:
            raise ValueError(
                f"{family} has {kind} layers, whose memory can't be cut to a window; stream a model with softmax "
                "attention on every layer"
            )
    if not model._can_set_attn_implementation():
        raise ValueError(f"{family} computes attention in its own code; it can't be streamed")
    decoder = model.get_decoder()
    embeddings = [module for name, module in decoder.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    layers = [
        module
        for module in decoder.modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if len(embeddings) != 1 or not layers:
        raise ValueError(f"{family} has no one rotary embedding for all layers; its positions can't be redone")
    return layers[0], embeddings[0]


def _switch_attention(model: Any, stream: _HuggingFaceStream, stack: ExitStack) -> None:
    """Let the model call our attention function, without a mask."""
    from transformers import AttentionInterface

    name, earlier = f"gatelab_stream_{id(stream)}", model.config._attn_implementation
    AttentionInterface.register(name, stream.attention)
    stack.callback(AttentionInterface._global_mapping.pop, name)
    model.set_attn_implementation(name)
    stack.callback(model.set_attn_implementation, earlier)


class _Turns(NamedTuple):
    """Cosines and sines of positions from ``first`` on, as the family's embedding gives them."""

    cos: Float[Tensor, "1 P R"]
    sin: Float[Tensor, "1 P R"]
    first: int


class _HuggingFaceStream:
    """Window caches of all attention modules of a model, and the rotations of the pass that runs."""

    def __init__(self, cache: WindowCache, family: str):
        self.cache, self.family = cache, family
        self.streams: dict[nn.Module, LayerStream] = {}
        self.turns_of: dict[int, tuple[Tensor, _Turns]] = {}
        self.turns: _Turns | None = None
        self.num_tokens = self.seen = 0
        self._own_rotation = f"{family} rotates in a way of its own; its positions can't be redone"

    def begin_pass(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.seen += num_tokens
        self.turns_of.clear()

    def end_pass(self, num_layers: int) -> None:
        """ValueError unless every layer attended once."""
        if len(self.streams) != num_layers or any(stream.seen != self.seen for stream in self.streams.values()):
            raise ValueError(
                f"{self.family} ran attention in {len(self.streams)} of {num_layers} layers, or more than once in one; "
                "it can't be streamed"
            )

    def see_rotary(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        """Give the layers no rotation, and remember which one it stands for."""
        if not (isinstance(output, tuple) and len(output) == 2):
            raise ValueError(f"{self.family} has a rotary embedding without cosines and sines; it can't be redone")
        positions = torch.arange(1 - self.num_tokens, self.cache.capacity, device=output[0].device)[None]
        others = {name: value for name, value in keywords.items() if name != "position_ids"}
        cos, sin = module.forward(inputs[0], positions, *inputs[2:], **others)
        none = torch.ones_like(output[0]), torch.zeros_like(output[1])
        self.turns_of[id(none[0])] = none[0], _Turns(cos, sin, 1 - self.num_tokens)
        return none

    def begin_layer(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        cos, _ = keywords.get("position_embeddings") or (None, None)
        _, self.turns = self.turns_of.get(id(cos), (None, None))

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
    ) -> tuple[Tensor, None]:
        """The attention function that transformers calls: query (B H T C), key and value (B K T C) to (B T H C)."""
        if module not in self.streams:
            self.streams[module] = LayerStream(self.cache.within(keywords.get("sliding_window")))

        def rotate(x: Float[Tensor, "B T N C"], positions: Int[Tensor, "T"]) -> Float[Tensor, "B T N C"]:
            return self._rotate(module, x, positions)

        logits = _logits(self.family, query, keywords)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return self.streams[module].attend(query, key, value, rotate, logits), None

    def _rotate(
        self, module: nn.Module, x: Float[Tensor, "B T N C"], positions: Int[Tensor, "T"]
    ) -> Float[Tensor, "B T N C"]:
        """By the family's own function; of a family that turns a part of the channels, these."""
        function = getattr(sys.modules[type(module).__module__], _ROTATE_FUNCTION, None)
        if function is None or self.turns is None:
            raise ValueError(self._own_rotation)
        cos, sin = (table[:, positions - self.turns.first] for table in (self.turns.cos, self.turns.sin))
        turned_channels = getattr(module, "rotary_ndims", x.shape[-1])
        heads = x.transpose(1, 2)
        try:
            turned, _ = function(heads[..., :turned_channels], heads[:, :1, :, :turned_channels], cos, sin)
        except (TypeError, RuntimeError) as error:  # it takes other tensors
            raise ValueError(self._own_rotation) from error
        return torch.cat((turned, heads[..., turned_channels:]), dim=-1).transpose(1, 2)


def _logits(family: str, query: Float[Tensor, "B H T C"], keywords: dict[str, Any]) -> Logits:
    """Scale, softcap and learned sinks out of a model's keywords; ValueError for a keyword that we do not know."""
    options = attention_options(family, query, keywords)
    sinks = options["learned_sinks"]
    return Logits(options["scale"], options["softcap"], None if sinks is None else lambda query: sinks)
