"""The decoder: embedding, pre-norm layers, final norm, head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gatelab.gates.linear import Linear
from gatelab.model.attention import GatedAttention, GroupedQueryAttention, LayerCache
from gatelab.model.cache import KVCache
from gatelab.model.feedforward import FeedForward
from gatelab.model.latent import LatentAttention
from gatelab.model.masks import PADDING, document_mask, positions_in_documents, suffix_mask
from gatelab.model.moe import MixtureOfExperts, RouterStatistics
from gatelab.model.norm import RMSNorm
from gatelab.model.patches import PatchEmbedding
from gatelab.model.rope import Rotation, rotation_at
from gatelab.model.settings import ModelSettings, RopeSettings

Item = TypeVar("Item")


class Hidden(NamedTuple):
    """What the layers give: the state after the final norm, and router statistics if there are experts."""

    state: Float[Tensor, "B T D"]
    router: RouterStatistics | None


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)); with sandwich norms each branch is normed again."""

    def __init__(self, settings: ModelSettings, layer: int):
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(settings.width, settings.norm_epsilon, settings.centred_norms)

        self.input_layernorm = norm()
        kind = GroupedQueryAttention if settings.latent is None else LatentAttention
        self.self_attn: GatedAttention = kind(settings, layer)
        self.after_attention_norm = norm() if settings.sandwich_norm else nn.Identity()
        self.post_attention_layernorm = norm()
        mixture = settings.mixture_on_layer(layer)
        if mixture is None:
            self.mlp = FeedForward(settings.width, settings.feedforward_width)
        else:
            self.mlp = MixtureOfExperts(mixture, settings.width)
        self.after_feedforward_norm = norm() if settings.sandwich_norm else nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        rotation: Rotation | None,
        mask: Bool[Tensor, "#B 1 T S"] | None = None,
        counted: Bool[Tensor, "B T"] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Tensor, "B T D"], RouterStatistics | None]:
        """The new residual stream, and this layer's router statistics."""
        attended = self.self_attn(self.input_layernorm(x), rotation, mask, cache)
        x = x + self.after_attention_norm(attended)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MixtureOfExperts):
            update, statistics = self.mlp(normed, counted)
        else:
            update, statistics = self.mlp(normed), None
        return x + self.after_feedforward_norm(update), statistics


class ScaledEmbedding(nn.Embedding):
    """Rows of the embedding matrix times a constant factor; a tied head uses the matrix without it."""

    def __init__(self, vocab_size: int, width: int, scale: float):
        super().__init__(vocab_size, width)
        self.embed_scale = scale

    def forward(self, input: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """The scaled rows, in the dtype of the weights."""
        rows = super().forward(input)
        return rows if self.embed_scale == 1 else rows * self.embed_scale


class DecoderStack(nn.Module):
    """Embedding, layers and final norm, under the names of Hugging Face's ``Qwen3Model``."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.embed_tokens = (
            ScaledEmbedding(settings.vocab_size, settings.width, settings.embedding_scale)
            if settings.patches is None
            else PatchEmbedding(settings.patches, settings.max_context, settings.width)
        )
        self.layers = nn.ModuleList(DecoderLayer(settings, layer) for layer in range(settings.num_layers))
        self.norm = RMSNorm(settings.width, settings.norm_epsilon, settings.centred_norms)


class Decoder(nn.Module):
    """A gated decoder: ``decoder(ids)`` gives logits, ``decoder.hidden(ids)`` what the head and losses stand on.

    Parameters keep their own dtype; activations have ``activation_dtype``, that of the embedding when it is ``None``.
    Setting ``settings`` raises ``ValueError``: what was built from them would not follow; see :func:`with_rope`.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self._settings = settings
        self.model = DecoderStack(settings)
        self.lm_head = None if settings.tied_head else Linear(settings.width, settings.vocab_size, bias=False)
        self.activation_dtype: torch.dtype | None = None
        self._ropes, self._rope_of_layer = _distinct([settings.rope_on_layer(i) for i in range(settings.num_layers)])
        self._windows, self._window_of_layer = _distinct(
            [settings.on_layer(i).window for i in range(settings.num_layers)]
        )

    @property
    def settings(self) -> ModelSettings:
        """The decoder's shape."""
        return self._settings

    @settings.setter
    def settings(self, value: ModelSettings) -> None:
        raise ValueError(
            "a decoder keeps the settings that it was built from; build another one, or change its rotation with "
            "gatelab.model.decoder.with_rope(decoder, rope, max_context)"
        )

    @property
    def hidden_dtype(self) -> torch.dtype:
        """That of the activations: ``activation_dtype``, or the embedding's."""
        return self.activation_dtype or self.model.embed_tokens.weight.dtype

    def forward(
        self, ids: Int[Tensor, "B T"], documents: Int[Tensor, "B T"] | None = None, cache: KVCache | None = None
    ) -> Float[Tensor, "B T V"]:
        """Logits of the next token at each position; arguments as for :meth:`hidden`."""
        return self.logits(self.hidden(ids, documents, cache).state)

    def logits(self, state: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """The head: logits of final states."""
        if self.lm_head is not None:
            return self.lm_head(state)
        return F.linear(state, self.model.embed_tokens.weight.to(state.dtype))

    def hidden(
        self, ids: Int[Tensor, "B T"], documents: Int[Tensor, "B T"] | None = None, cache: KVCache | None = None
    ) -> Hidden:
        """States after the final norm.

        ``documents`` numbers the document of each token, one run of equal numbers for each document of a row: tokens
        see their own document only and positions start again with each; -1 marks padding. ``cache`` holds earlier
        tokens and takes these; documents then number these tokens alone. Raises ``ValueError`` for sequences beyond
        ``settings.max_context``.
        """
        rotations, masks, counted = self._where(ids, documents, cache)
        x = self.model.embed_tokens(ids)
        x = x.to(self.activation_dtype or x.dtype)
        pasts = cache.layers if cache else [None] * len(self.model.layers)
        collected = []
        for layer, rotation, mask, past in zip(self.model.layers, rotations, masks, pasts, strict=True):
            x, statistics = layer(x, rotation, mask, counted, past)
            if statistics is not None:
                collected.append(statistics)
        router = None
        if collected:
            router = RouterStatistics(*(torch.stack(rows) for rows in zip(*collected, strict=True)))
        return Hidden(self.model.norm(x), router)

    def _where(
        self, ids: Tensor, documents: Tensor | None, cache: KVCache | None
    ) -> tuple[list[Rotation | None], list[Tensor | None], Tensor | None]:
        """Each layer's rotation, each layer's visibility mask, and the counted tokens of a call."""
        num_queries, past = ids.shape[1], cache.length if cache else 0
        total = past + num_queries
        if total > self.settings.max_context:
            raise ValueError(
                f"{total} tokens exceed max_context={self.settings.max_context} of the model; "
                "shorten the sequence or extend the rotary embedding"
            )
        counted = None if documents is None else documents != PADDING
        if cache is not None:
            documents = cache.extend_documents(documents, ids)
        if documents is not None:
            positions = positions_in_documents(documents)[:, -num_queries:]
        else:
            positions = torch.arange(past, total, device=ids.device)[None]
        rotations = [self._rotation(rope, positions) for rope in self._ropes]
        masks = [self._mask(window, documents, past, total, ids.device) for window in self._windows]
        return [rotations[i] for i in self._rope_of_layer], [masks[i] for i in self._window_of_layer], counted

    def _rotation(self, rope: RopeSettings | None, positions: Tensor) -> Rotation | None:
        if rope is None:
            return None
        return rotation_at(positions, rope, self.settings.rotary_size, self.hidden_dtype)

    def _mask(
        self, window: int | None, documents: Tensor | None, past: int, total: int, device: torch.device
    ) -> Tensor | None:
        """The mask of a layer with this window; ``None`` where it is the causal triangle, or full attention."""
        causal, num_queries = self.settings.causal, total - past
        if documents is not None:
            return document_mask(documents, num_queries, causal, window)
        if causal and (past or (window is not None and window < total)):
            return suffix_mask(num_queries, total, device, window)
        return None


def with_rope(decoder: Decoder, rope: RopeSettings, max_context: int) -> Decoder:
    """A decoder with the same weights, in the same memory, and another rotation in the layers without a window.

    Mode and dtypes are kept; what was attached from outside (kernels, recorders, compilation) is not. Raises
    ``ValueError`` as :meth:`ModelSettings.with_rope`.
    """
    with torch.device("meta"):
        changed = Decoder(decoder.settings.with_rope(rope, max_context))
    changed.load_state_dict(decoder.state_dict(), assign=True)
    changed.activation_dtype = decoder.activation_dtype
    return changed.train(decoder.training)


def _distinct(items: Sequence[Item]) -> tuple[list[Item], list[int]]:
    """Each different item once, and for each of the given ones its index among those."""
    found = list(dict.fromkeys(items))
    return found, [found.index(item) for item in items]
