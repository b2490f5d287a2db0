"""Measuring any Hugging Face decoder: its attention runs through ours and is handed to a recorder, for a while.

transformers dispatches attention by name. Inside ``attach_hugging_face`` a name of ours stands for one attention
function, which computes the output and its log-sum-exp, and one mask function (``interop.masks``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from gatelab.diagnose.attention import attend
from gatelab.diagnose.calls import AttentionCall, Visibility
from gatelab.diagnose.measure import Forward
from gatelab.diagnose.recorder import EMBEDDING, Recorder
from gatelab.interop.gate_recovery import KNOWN_GATES, KnownGate, read_gate, recover_gate
from gatelab.interop.masks import visibility_mask

# Keywords that models pass to every attention function and that leave the mathematics alone.
HARMLESS_KEYWORDS = frozenset({
    "cache", "cache_position", "deterministic", "hidden_states", "is_causal", "logits_to_keep", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings",
    "position_ids", "return_dict", "sliding_window", "target_dtype", "token_type_ids", "use_cache",
})  # fmt: skip
POSITION = "sdpa_output"


@contextmanager
def attach_hugging_face(model: nn.Module, recorder: Recorder) -> Iterator[Forward]:
    """Let a Hugging Face decoder hand every attention call and layer output to ``recorder`` until the context ends.

    Gives the function that runs it without its head.

    ``model`` is any ``transformers`` decoder, with or without its head, in eval mode. Its logits stay those of its
    eager attention; key-value caches are off. Layers without softmax attention are named by ``recorder.skip``. On exit
    the model and transformers are as they were, whatever happened.

    Raises ValueError without transformers, for a model whose attention cannot be replaced (Falcon, BLOOM, MPT and
    GPT-Neo compute it in their own code), and, during the pass, for a layer that bypasses our function or asks it for
    something that it does not know.
    """
    layers = _decoder_layers(model)
    settings: Any = model.config
    settings = settings.get_text_config(decoder=True)
    recorder.expected_layers = len(layers)
    probe = _Probe(recorder, KNOWN_GATES.get(settings.model_type))
    with ExitStack() as stack:
        _switch_attention(model, probe, stack)
        for index, layer in enumerate(layers):
            reason = _reason_without_softmax(settings, index, layer)
            _hook_layer(probe, index, layer, reason, stack)
        try:
            yield _forward(model)
        except (AttributeError, TypeError) as error:
            if "'Visibility'" not in str(error):
                raise
            raise ValueError(f"{settings.model_type} changes its attention mask; it cannot be measured") from error


def _forward(model: Any) -> Forward:
    decoder = model.get_decoder()

    def forward(tokens: Tensor, real: Tensor | None, documents: Tensor | None) -> None:
        assert documents is None, "measure refuses documents of foreign models"
        decoder(tokens, attention_mask=real)

    return forward


def _decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's layers; ValueError where it is not a decoder whose attention can be replaced."""
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise ValueError("measuring Hugging Face models needs transformers; pip install 'gatelab[hf]'") from error
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} is no Hugging Face model; pass an attach of its own to measure")
    family = model.config.model_type
    if model.config.is_encoder_decoder:
        raise ValueError(f"{family} is an encoder with a decoder; only decoders can be measured")
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{family} computes attention in its own code and ignores a registered attention function; "
            "it cannot be measured without its attention maps"
        )
    num_layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ValueError(f"{family} holds no list of {num_layers} layers; it cannot be measured")


def _reason_without_softmax(settings: Any, index: int, layer: nn.Module) -> str | None:
    """Why a layer holds no softmax attention; ``None`` where it should hold one."""
    kinds = getattr(settings, "layer_types", None) or ()
    kind = kinds[index] if index < len(kinds) else None
    if kind == "linear_attention" or (kind is not None and "attention" not in kind and "hybrid" not in kind):
        return f"{kind} layer"
    if kind is None and not any("Attention" in type(module).__name__ for module in layer.modules()):
        return f"{type(layer).__name__} holds no attention"
    return None


def _switch_attention(model: Any, probe: _Probe, stack: ExitStack) -> None:
    """Register the probe's functions under a name of their own and let all the model's configurations name it."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

    name = f"gatelab_probe_{id(probe)}"
    for interface, function in ((AttentionInterface, probe.attention), (AttentionMaskInterface, probe.mask)):
        interface.register(name, function)
        stack.callback(interface._global_mapping.pop, name)
    configs = {id(config): config for module in model.modules() for config in (getattr(module, "config", None),)}
    for config in configs.values():
        if isinstance(config, PreTrainedConfig):
            stack.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation)
            config._attn_implementation_internal = name
            if getattr(config, "use_cache", False):
                stack.callback(setattr, config, "use_cache", config.use_cache)
                config.use_cache = False


def _hook_layer(probe: _Probe, index: int, layer: nn.Module, reason: str | None, stack: ExitStack) -> None:
    """Let a layer's beginning, end and inner modules report to the probe."""
    from transformers.pytorch_utils import Conv1D

    def hook(register: Callable[..., Any], function: Callable[..., None]) -> None:
        stack.callback(register(function).remove)

    def begin(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        probe.begin_layer(index, inputs[0] if inputs else keywords["hidden_states"])

    stack.callback(layer.register_forward_pre_hook(begin, with_kwargs=True).remove)
    for module in layer.modules():
        if isinstance(module, nn.Linear | Conv1D):
            hook(module.register_forward_pre_hook, lambda module, inputs: probe.see_input(module, inputs[0]))
        elif "Norm" in type(module).__name__:
            hook(module.register_forward_pre_hook, lambda module, inputs: probe.see_norm())
        elif module is not layer:
            hook(module.register_forward_hook, lambda module, inputs, output: probe.end_module(module))
        if (projection := probe.gate_projection(module)) is not None:
            hook(projection.register_forward_hook, lambda module, inputs, output: probe.see_gate(output))
    hook(layer.register_forward_hook, lambda module, inputs, output: probe.end_layer(module, output, reason))


@dataclass
class _Running:
    """An attention module that called the attention function and has not returned yet."""

    module: nn.Module
    call: AttentionCall
    last_linear: nn.Module | None = None
    last_input: Tensor | None = None
    normalised: bool = False


class _Probe:
    """Follows one attached model through a pass: the layer it is in, and that layer's running attention module."""

    def __init__(self, recorder: Recorder, known_gate: KnownGate | None):
        self.recorder = recorder
        self.known_gate = known_gate
        self.real: Tensor | None = None
        self.layer: int | None = None
        self.called = False
        self.running: _Running | None = None
        self.gate_projected: Tensor | None = None

    def mask(self, **arguments: Any) -> Visibility:
        """The mask function that transformers calls; remembers which tokens are padding."""
        visibility = visibility_mask(**arguments)
        self.real = visibility.real
        return visibility

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
    ) -> tuple[Tensor, None]:
        """The attention function that transformers calls: query (B H T C), key and value (B K S C) to (B T H C)."""
        options = attention_options(_name(module), query, keywords)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        options["visibility"] = _visibility(module, query, key, attention_mask, keywords)
        output, lse = attend(query, key, value, **options)
        if self.layer is not None:
            if self.called:
                raise ValueError(f"layer {self.layer} ({_name(module)}) attends twice; it cannot be measured")
            self.called = True
            call = AttentionCall(self.layer, query, key, value, output, lse, **options)
            self.running = _Running(module, call)
        return output, None

    def gate_projection(self, module: nn.Module) -> nn.Module | None:
        """The projection of an attention module that gives its gate's logits, where the family is known."""
        if self.known_gate is None or "Attention" not in _name(module):
            return None
        return getattr(module, self.known_gate.projection, None)

    def begin_layer(self, layer: int, hidden: Tensor) -> None:
        self.layer, self.called, self.gate_projected = layer, False, None
        if layer == 0:
            self._record_hidden(EMBEDDING, hidden)

    def see_input(self, linear: nn.Module, value: Tensor) -> None:
        if self.running is not None:
            self.running.last_linear, self.running.last_input = linear, value

    def see_gate(self, projected: Tensor) -> None:
        self.gate_projected = projected

    def see_norm(self) -> None:
        """A norm between attention and output projection changes the output, and is no gate."""
        if self.running is not None:
            self.running.normalised = True

    def end_module(self, module: nn.Module) -> None:
        if self.running is not None and self.running.module is module:
            self._record(self.running)
            self.running = None

    def end_layer(self, module: nn.Module, output: Any, reason: str | None) -> None:
        """Record the layer's output, and name a layer in which nothing called the attention function."""
        assert self.layer is not None
        if self.running is not None:
            self.end_module(self.running.module)
        if not self.called:
            if reason is None:
                raise ValueError(
                    f"layer {self.layer} ({_name(module)}) ignored the registered attention function; "
                    "the model cannot be measured"
                )
            self.recorder.skip(self.layer, reason)
        self._record_hidden(self.layer, output[0] if isinstance(output, tuple) else output)
        self.layer = None

    def _record_hidden(self, layer: int, hidden: Tensor) -> None:
        if hidden.ndim != 3:
            raise ValueError(f"layers hand over hidden states of shape {tuple(hidden.shape)}, not (B, T, D)")
        self.recorder.record_hidden(layer, hidden, None if self.real is None else self.real[:, -hidden.shape[1] :])

    def _record(self, running: _Running) -> None:
        """Complete a call by the weights around it and by what its output projection read."""
        call, projection, gated = running.call, running.last_linear, running.last_input
        call = replace(call, value_weight=_value_weight(running.module, call))
        num_heads, head_size = call.output.shape[2:]
        if projection is not None and gated is not None and gated.shape[-1] == num_heads * head_size:
            call = replace(call, output_weight=_weight(projection))
            gated = gated.reshape(call.output.shape)
            call = replace(call, gated_output=gated) if running.normalised else self._with_gate(call, gated)
        self.recorder.record(call)

    def _with_gate(self, call: AttentionCall, gated: Tensor) -> AttentionCall:
        """The call with its gate's scores, read where the family is known, else recovered; as it is without a gate."""
        if self.known_gate is not None and self.gate_projected is not None:
            scores = read_gate(self.known_gate, self.gate_projected, call.output)
            activations = {POSITION: self.known_gate.activation}
            self.gate_projected = None
        else:
            scores, activations = recover_gate(call.output, gated), {}
        if scores is None:
            return call
        return replace(call, scores={POSITION: scores}, activations=activations, gated_output=gated)


def _value_weight(module: nn.Module, call: AttentionCall) -> Tensor | None:
    """The value projection's weight (KCv D) where it is called ``v_proj``; ``None`` elsewhere."""
    projection = getattr(module, "v_proj", None)
    if isinstance(projection, nn.Linear) and projection.out_features == call.value.shape[2] * call.value.shape[3]:
        return _weight(projection)
    return None


def _weight(projection: Any) -> Tensor | None:
    """The weight (out in) of a Linear or Conv1D; ``None`` where it is quantised or not loaded."""
    weight = projection.weight
    if weight.is_meta or not weight.is_floating_point():
        return None
    return weight.detach() if isinstance(projection, nn.Linear) else weight.detach().T


def attention_options(name: str, query: Tensor, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """``scale``, ``softcap`` and ``learned_sinks`` (1 H 1), from what transformers passes to an attention function.

    ``query`` is (B H T C); ``name`` says in errors who calls. ``ValueError`` for dropout and for unknown keywords.
    """
    given = {word: value for word, value in keywords.items() if value is not None and value is not False}
    scale, softcap = given.pop("scaling", None), given.pop("softcap", None)
    sinks, dropout = given.pop("s_aux", None), given.pop("dropout", 0.0)
    if dropout:
        raise ValueError(f"{name} drops attention with probability {dropout}; call model.eval() first")
    unknown = sorted(given.keys() - HARMLESS_KEYWORDS)
    if unknown:
        raise ValueError(
            f"{name} asks its attention function for {', '.join(unknown)}, which may change the mathematics; the model "
            "cannot be measured, streamed or pruned"
        )
    return {
        "scale": query.shape[-1] ** -0.5 if scale is None else float(scale),
        "softcap": softcap or None,
        "learned_sinks": None if sinks is None else sinks.reshape(1, query.shape[1], 1),
    }


def _visibility(module: nn.Module, query: Tensor, key: Tensor, mask: Any, keywords: dict[str, Any]) -> Visibility:
    """What our mask function made; without a mask, what the module says about itself."""
    num_queries, num_keys = query.shape[1], key.shape[1]
    if mask is None:
        causal = keywords.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        return Visibility(num_queries, num_keys, bool(causal), keywords.get("sliding_window") if causal else None)
    if not isinstance(mask, Visibility):
        raise ValueError(f"{_name(module)} uses a mask of its own; it cannot be measured")
    if (mask.num_queries, mask.num_keys) != (num_queries, num_keys):
        raise ValueError(
            f"{_name(module)} has {num_queries} queries and {num_keys} keys, its mask {mask.num_queries} and "
            f"{mask.num_keys}; measure whole sequences without a cache"
        )
    return mask


def _name(module: nn.Module) -> str:
    return type(module).__name__
