"""Our decoder as a model of transformers: the same modules, with its attention functions, masks and caches.

Only functions import this module, because transformers is optional. Gates stand outside the attention function, so
every ``attn_implementation`` shares them. Parameters carry the names of :class:`gatelab.model.decoder.Decoder`.
"""
# ruff: noqa: RUF012 - transformers reads its plans and lists from the class

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Cache, DynamicCache, GenerationMixin
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from gatelab.gates.gate import Gate, HeadNorm
from gatelab.gates.linear import Linear
from gatelab.interop.form import MODEL_TYPE
from gatelab.interop.huggingface_attention import (
    AttentionArguments,
    AttentionDispatch,
    CachedLayer,
    GateLabAttention,
    GateLabLatentAttention,
)
from gatelab.interop.huggingface_config import GateLabConfig
from gatelab.interop.model_card import ModelCard, write_model_card
from gatelab.model.decoder import Decoder, DecoderLayer, ScaledEmbedding
from gatelab.model.moe import Experts, MixtureOfExperts
from gatelab.model.norm import RMSNorm
from gatelab.model.rope import rotation_at


def register() -> None:
    """Let ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM`` know GateLab models; calling it twice is fine."""
    AutoConfig.register(MODEL_TYPE, GateLabConfig, exist_ok=True)
    AutoModel.register(GateLabConfig, GateLabModel, exist_ok=True)
    AutoModelForCausalLM.register(GateLabConfig, GateLabForCausalLM, exist_ok=True)


def from_decoder(decoder: Decoder, **tokens: Any) -> GateLabForCausalLM:
    """The Hugging Face form of a decoder, on the very same parameters; ``tokens`` as in ``from_settings``.

    Its activations have the dtype of the embedding. Raises ``ValueError`` as :class:`GateLabConfig` does.
    """
    config = GateLabConfig.from_settings(decoder.settings, **tokens)
    with torch.device("meta"):
        model = GateLabForCausalLM(config)
    state = decoder.state_dict(keep_vars=True)
    if decoder.lm_head is None:
        state["lm_head.weight"] = decoder.model.embed_tokens.weight
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.train(decoder.training)


def to_decoder(model: GateLabForCausalLM) -> Decoder:
    """The decoder of a Hugging Face form, on the very same parameters."""
    with torch.device("meta"):
        decoder = Decoder(model.config.settings)
    state = model.state_dict(keep_vars=True)
    if decoder.lm_head is None:
        state.pop("lm_head.weight", None)
    decoder.load_state_dict(state, assign=True)
    return decoder.train(model.training)


class GateLabPreTrainedModel(PreTrainedModel):
    """What transformers has to know about our models."""

    config: GateLabConfig
    config_class = GateLabConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": DecoderLayer, "attentions": AttentionDispatch}

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # transformers passes over modules of custom code that have no parameters of their own, and so over gates.
        super()._initialize_weights(module, is_custom_code=False)

    def _init_weights(self, module: nn.Module) -> None:
        """Start values as in :func:`gatelab.model.initialization.initialize`, from PyTorch's own generator."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=std)
        elif isinstance(module, RMSNorm | HeadNorm):
            init.constant_(module.weight, 0.0 if isinstance(module, RMSNorm) and module.centred else 1.0)
        elif isinstance(module, MixtureOfExperts) and module.selection_bias is not None:
            init.zeros_(module.selection_bias)
        elif isinstance(module, Experts):
            init.normal_(module.gate_up_proj, std=std)
            init.normal_(module.down_proj, std=std)
        elif isinstance(module, Gate):
            _start_gate(module)


def _rotation(config: GateLabConfig) -> list[Any]:
    """What of the model's settings decides its rotation, as the configuration has it now."""
    return [(config.gatelab or {}).get(part) for part in ("rope", "layers")]


def _start_gate(gate: Gate) -> None:
    """Zero weights and start biases where the specification asks for them; its projections are drawn already."""
    if gate.spec.source == "parameter":
        init.zeros_(gate.logits)
        return
    last = gate.projection if isinstance(gate.projection, Linear) else gate.projection.get_submodule("up")
    assert isinstance(last, Linear)
    if gate.spec.initialization == "zeros":
        init.zeros_(last.weight)
    if gate.spec.bias is not None:
        init.constant_(last.bias, gate.spec.bias)


class GateLabModel(GateLabPreTrainedModel):
    """Embedding, layers and final norm."""

    def __init__(self, config: GateLabConfig):
        super().__init__(config)
        settings = config.settings
        self.embed_tokens = ScaledEmbedding(settings.vocab_size, settings.width, settings.embedding_scale)
        self.layers = nn.ModuleList(_layer(config, layer) for layer in range(settings.num_layers))
        self.norm = RMSNorm(settings.width, settings.norm_epsilon, settings.centred_norms)
        self.ropes = [settings.rope_on_layer(layer) for layer in range(settings.num_layers)]
        self.rotary_size = settings.rotary_size
        self.rotation = copy.deepcopy(_rotation(config))
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The state after the final norm, and the cache if one is used; positions count from 0 unless given."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if _rotation(self.config) != self.rotation:
            raise ValueError(
                "the rotation in config.gatelab was changed in place, which a model that is built does not follow; "
                "change a decoder with gatelab.model.decoder.with_rope and convert that"
            )
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + past)[None]
        masks = self._masks(x, attention_mask, position_ids, cache)
        rotations = {
            rope: None if rope is None else rotation_at(position_ids, rope, self.rotary_size, x.dtype)
            for rope in dict.fromkeys(self.ropes)
        }
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        keywords = {"position_ids": position_ids, **kwargs}
        for index, layer in enumerate(self.layers):
            rotation, mask = rotations[self.ropes[index]], masks[self.config.layer_types[index]]
            arguments = AttentionArguments(mask, keywords)
            if recompute:
                x, _ = self._gradient_checkpointing_func(layer.__call__, x, rotation, arguments)
            else:
                past = None if cache is None else CachedLayer(cache, index)
                x, _ = layer(x, rotation, arguments, None, past)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), cache=cache if use_cache else None)

    def _masks(self, x: Tensor, attention_mask: Any, position_ids: Tensor, cache: Cache | None) -> dict[str, Any]:
        """A mask for each kind of layer, in the form that the attention function takes."""
        if isinstance(attention_mask, dict):
            return attention_mask
        functions = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        return {
            kind: functions[kind](
                config=self.config,
                inputs_embeds=x,
                attention_mask=attention_mask,
                cache=cache,
                position_ids=position_ids,
            )
            for kind in set(self.config.layer_types)
        }


def _layer(config: GateLabConfig, layer: int) -> DecoderLayer:
    """Our layer with transformers' attention functions."""
    module = DecoderLayer(config.settings, layer)
    kind = GateLabAttention if config.settings.latent is None else GateLabLatentAttention
    module.self_attn = kind(config, layer)
    return module


class GateLabForCausalLM(GateLabPreTrainedModel, GenerationMixin):
    """The model with its head; what ``AutoModelForCausalLM`` returns."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan: Any = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config: GateLabConfig):
        super().__init__(config)
        self.model = GateLabModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        if config.base_model_tp_plan is None:
            self._tp_plan = {}
        self._can_compile_fullgraph = config.settings.mixture is None

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and with ``labels`` (-100 ignores a token) the mean next-token loss."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def resize_token_embeddings(self, *arguments: Any, **keywords: Any) -> nn.Embedding:
        """As in transformers; the model's settings follow."""
        embedding = super().resize_token_embeddings(*arguments, **keywords)
        self.config.gatelab = {**self.config.settings.to_mapping(), "vocab_size": self.config.vocab_size}
        return embedding

    def save_pretrained(
        self, save_directory: str | Path, *arguments: Any, model_card: ModelCard | None = None, **keywords: Any
    ) -> None:
        """As in transformers, and a README.md beside; one that is there already stays unless a card is given."""
        super().save_pretrained(save_directory, *arguments, **keywords)
        if keywords.get("is_main_process", True):
            write_model_card(Path(save_directory), self.config.settings, model_card)
