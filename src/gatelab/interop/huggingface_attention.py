"""Our attention with transformers' attention functions and caches in the places of its kernel and its cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gatelab.interop.huggingface_config import GateLabConfig
from gatelab.model.attention import GatedAttention, GroupedQueryAttention, of_one_size
from gatelab.model.latent import LatentAttention
from gatelab.model.sink import Sink


class AttentionArguments(NamedTuple):
    """Mask and keywords of transformers' attention functions, handed through our layers in the place of the mask."""

    mask: Any
    keywords: dict[str, Any]


class CachedLayer:
    """One layer of a transformers cache, as our attention extends it."""

    def __init__(self, cache: Cache, layer: int):
        self.cache, self.layer = cache, layer

    def extend(
        self, keys: Float[Tensor, "B T K C"], values: Float[Tensor, "B T K Cv"]
    ) -> tuple[Float[Tensor, "B S K C"], Float[Tensor, "B S K Cv"]]:
        """Add keys and values and return those that the cache holds; a static cache has room after the last one."""
        keys, values = self.cache.update(keys.transpose(1, 2), values.transpose(1, 2), self.layer)
        return keys.transpose(1, 2), values.transpose(1, 2)


def eager_attention(
    module: nn.Module,
    query: Float[Tensor, "B H T C"],
    key: Float[Tensor, "B K S C"],
    value: Float[Tensor, "B K S C"],
    attention_mask: Float[Tensor, "#B 1 T S"] | None,
    scaling: float,
    **_: Any,
) -> tuple[Float[Tensor, "B T H C"], Float[Tensor, "B H T S"]]:
    """Attention in plain steps, with its weights; softmax in float32 at least."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights


class AttentionDispatch(nn.Module):
    """Calls the attention function that the configuration names; its weights are recorded from here."""

    def __init__(self, config: GateLabConfig):
        super().__init__()
        self.config = config

    def forward(
        self, module: DispatchedAttention, query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments
    ) -> tuple[Float[Tensor, "B T H Cv"], Float[Tensor, "B H T S"] | None]:
        """Output, and the weights where the function returns them (eager)."""
        name = self.config._attn_implementation or "eager"
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        value_size = value.shape[-1]
        query, key, value = (tensor.transpose(1, 2) for tensor in of_one_size(query, key, value))
        output, weights = attend(
            module,
            query,
            key,
            value,
            arguments.mask,
            dropout=0.0,
            scaling=module.scaling,
            sliding_window=module.sliding_window,
            **arguments.keywords,
        )
        return output[..., :value_size], weights


class DispatchedAttention(GatedAttention):
    """Attention of ours whose kernel is transformers' attention function; it has the attributes that these read.

    Abstract: a kind connects itself when it is built.
    """

    def connect(self, config: GateLabConfig) -> None:
        """Set what transformers reads, and the kernel."""
        shape = config.settings.shape_on_layer(self.layer)
        self.config = config
        self.layer_idx = self.layer
        self.is_causal = True
        self.scaling = shape.head_size**-0.5
        self.num_key_value_groups = shape.num_heads // shape.num_kv_heads
        self.sliding_window = self.window
        self.dispatch = AttentionDispatch(config)
        self.kernel = self._attend

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool, sink: Sink | None = None
    ) -> Tensor:
        assert causal and sink is None
        return self.dispatch(self, query, key, value, mask)[0]


class GateLabAttention(DispatchedAttention, GroupedQueryAttention):
    """Grouped-query attention in transformers."""

    def __init__(self, config: GateLabConfig, layer: int):
        super().__init__(config.settings, layer)
        self.connect(config)


class GateLabLatentAttention(DispatchedAttention, LatentAttention):
    """Latent attention in transformers, whose caches hold what ours do."""

    def __init__(self, config: GateLabConfig, layer: int):
        super().__init__(config.settings, layer)
        self.connect(config)
