"""What a conversion writes: the config.json and the tensors of each target, made from ours.

- ``gatelab``: our Hugging Face form (``gatelab.interop.register``), layout L1; any causal model without a sink.
- ``qwen3``: ungated models as ``Qwen3ForCausalLM`` or ``Qwen3MoeForCausalLM``.
- ``qwen3_next``: the paper's elementwise gate as ``Qwen3NextForCausalLM`` with full attention alone, layout L2.
- ``deepseek_v3``: ungated latent attention as ``DeepseekV3ForCausalLM`` with dense feed-forwards.
- ``official``: the paper's gate, elementwise or headwise, or none, for the paper's public code, layout L3.
- ``megatron``: the same for Megatron, layout L4 or L5; see :mod:`gatelab.interop.megatron`.

What a target can't express is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor

from gatelab.gates.spec import GateSpec
from gatelab.interop import megatron
from gatelab.interop.form import SCHEMA_VERSION, named_sizes
from gatelab.interop.latents import NORM_EPSILON, in_pairs
from gatelab.interop.layouts import FusedLayout, GateRows, Layout, merge
from gatelab.interop.rope_dialects import old_rope_keys, rope_parameters
from gatelab.interop.tensor_names import GATE, Made, itself, layer_of, output_gate, shapes_of
from gatelab.model.settings import ModelSettings

To = Literal["gatelab", "qwen3", "qwen3_next", "deepseek_v3", "official", "megatron"]
Config = dict[str, Any]
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Target(NamedTuple):
    """A model in the form of a target; ``layout`` is ``L1`` for one without a gate in another place."""

    config: Config
    tensors: dict[str, Made]
    layout: Layout


def plan(settings: ModelSettings, to: To, dtype: str, tokens: Mapping[str, Any]) -> Target:
    """The target's config.json and how its tensors come from ours.

    Raises ``ValueError`` with every reason why the target can't express the model.
    """
    reasons = list(_obstacles(settings, to))
    if reasons:
        raise ValueError(f"this model can't be written as {to}: " + "; ".join(reasons))
    about = {"dtype": dtype, **tokens}
    if to == "gatelab":
        return Target(
            _gatelab_config(settings, about), {name: Made((name,), itself) for name in shapes_of(settings)}, "L1"
        )
    if to == "megatron":
        layout = megatron.layout_of(settings)
        config = {"model_type": megatron.MODEL_TYPE, "gatelab_schema_version": SCHEMA_VERSION, "gate_layout": layout}
        return Target({**config, "gatelab": settings.to_mapping(), **about}, megatron.to_megatron(settings), layout)
    config = _CONFIGS[to](settings)
    fused: dict[str, FusedLayout] = {"qwen3_next": "L2", "official": "L3"}
    layout = fused.get(to) if settings.gates else None
    shift = (1.0 if settings.centred_norms else 0.0) - (1.0 if to == "qwen3_next" else 0.0)
    return Target({**config, **about}, _tensors(settings, layout, shift), layout or "L1")


def _obstacles(settings: ModelSettings, to: To) -> Iterator[str]:
    """What of a model the target does not have, one reason each."""
    if settings.sink is not None:
        yield f"its attention has the sink {settings.sink.kind}"
    if to == "gatelab":
        return
    if (settings.latent is not None) != (to == "deepseek_v3"):
        yield f"its attention has {'grouped queries' if settings.latent is None else 'latents'}"
    if settings.latent is not None and settings.latent.norm_epsilon != NORM_EPSILON:
        yield f"its latents' norms have epsilon={settings.latent.norm_epsilon:g}, {to} only {NORM_EPSILON:g}"
    if not settings.causal:
        yield "it is not causal"
    if settings.control is not None:
        yield f"it has the control {settings.control.operation} on the attention output"
    if settings.sandwich_norm:
        yield "it has sandwich norms"
    if settings.embedding_scale != 1 and to != "megatron":
        yield f"it scales the embedding by {settings.embedding_scale:g}"
    if not settings.qk_norm and to in ("qwen3", "qwen3_next"):
        yield "it has no q/k norm"
    if settings.rope.fraction != 1 and to in ("qwen3", "official"):
        yield f"only a share of {settings.rope.fraction:g} of each head's channels rotates"
    yield from _gate_obstacles(settings, to)
    yield from _bias_obstacles(settings, to)
    yield from _layer_obstacles(settings, to)
    yield from _mixture_obstacles(settings, to)


def _gate_obstacles(settings: ModelSettings, to: To) -> Iterator[str]:
    if not settings.gates:
        if to in ("qwen3_next", "megatron"):
            yield "it has no gate on the attention output"
        return
    if to in ("qwen3", "deepseek_v3"):
        yield "it has gates, and the architecture has none"
        return
    for gate in settings.gates:
        wanted = GateSpec(granularity=gate.granularity, bias=gate.bias, initialization=gate.initialization)
        for axis, value in gate:
            if value != getattr(wanted, axis):
                yield f"its gate has {axis}={value}, {to} only {getattr(wanted, axis)}"
        if to == "qwen3_next" and gate.granularity == "headwise":
            yield "its gate is headwise, qwen3_next has an elementwise one (--expand makes it so)"


def _bias_obstacles(settings: ModelSettings, to: To) -> Iterator[str]:
    """Query and gate rows are fused with or without a bias, so they have both one or none."""
    biased = set(settings.biased_projections)
    for gate in settings.gates:
        if to != "qwen3" and (gate.bias is not None) != ("q" in biased):
            yield "of its queries and its gate only one has a bias"
    allowed = {"official": [set("qkv")], "megatron": [set("qkv"), set("qkvo"), set("o")]}.get(to, [set("qkvo")])
    if biased and biased not in allowed:
        yield f"its projections {', '.join(sorted(biased))} have biases, {to} has none of just these"


def _layer_obstacles(settings: ModelSettings, to: To) -> Iterator[str]:
    if to == "megatron":
        return
    layers = settings.layers
    if any(layer.num_heads not in (None, settings.num_heads) for layer in layers):
        yield "its layers differ in their number of heads"
    if any(layer.rope not in (None, settings.rope) or not layer.rotary for layer in layers):
        yield "its layers differ in their rotation"
    windows = {layer.window for layer in layers if layer.window is not None}
    if windows and (to != "qwen3" or settings.mixture is not None or len(windows) > 1):
        yield f"it has layers with a window of {', '.join(map(str, sorted(windows)))}"


def _mixture_obstacles(settings: ModelSettings, to: To) -> Iterator[str]:
    mixture = settings.mixture
    if mixture is None:
        return
    if to in ("official", "megatron", "deepseek_v3"):
        yield f"it is a mixture of experts, written as {to} are dense models alone"
        return
    if mixture.router != "softmax" or mixture.selection_bias or mixture.routed_scale != 1:
        yield "its router is not a plain softmax"
    if to == "qwen3" and mixture.shared_width is not None:
        yield "it has a shared expert"
    if to == "qwen3_next" and not mixture.shared_gate:
        yield "it has no shared expert with a gate"


def _tensors(settings: ModelSettings, layout: FusedLayout | None, shift: float) -> dict[str, Made]:
    """Our tensors under their names, which are Qwen3's: gates fused, norms shifted, experts one by one."""
    made: dict[str, Made] = {}
    for name in shapes_of(settings):
        stem, _, kind = name.rpartition(".")
        if f".{GATE}" in name:
            continue
        gate = output_gate(settings, layer_of(name)) if stem.endswith("q_proj") else None
        if gate is not None and layout is not None:
            shape = settings.shape_on_layer(layer_of(name))
            build = partial(_merge, layout, gate.granularity, shape)
            made[name] = Made((name, name.replace(f"q_proj.{kind}", f"{GATE}.{kind}")), build)
        elif ".mlp.experts." in name:
            made |= _single_experts(name, settings)
        elif "norm" in stem.rsplit(".", 1)[-1] and shift:
            made[name] = Made((name,), partial(_shifted, shift))
        else:
            made[name] = Made((name,), itself) if settings.latent is None else in_pairs(settings, name)
    return made


def _single_experts(name: str, settings: ModelSettings) -> dict[str, Made]:
    assert settings.mixture is not None
    stem, projection = name.rsplit(".", 1)
    half = settings.mixture.expert_width
    parts = {"down_proj": slice(None)}
    if projection == "gate_up_proj":
        parts = {"gate_proj": slice(half), "up_proj": slice(half, None)}
    return {
        f"{stem}.{expert}.{part}.weight": Made((name,), partial(_expert, expert, rows))
        for expert in range(settings.mixture.num_experts)
        for part, rows in parts.items()
    }


def _merge(layout: FusedLayout, granularity: Any, shape: Any, query: Tensor, gate: Tensor) -> Tensor:
    return merge(GateRows(query, gate), layout, granularity, shape)


def _expert(expert: int, rows: slice, stacked: Tensor) -> Tensor:
    return stacked[expert, rows]


def _shifted(shift: float, weight: Tensor) -> Tensor:
    """A plain norm's weight as that of a centred one, or the reverse, in its own dtype."""
    return (weight.double() + shift).to(weight.dtype)


def _gatelab_config(settings: ModelSettings, about: Config) -> Config:
    try:
        from gatelab.interop.huggingface_config import GateLabConfig
    except ImportError:
        raise ValueError(
            "writing a model in GateLab's Hugging Face form needs transformers: install gatelab[hf]"
        ) from None
    config = GateLabConfig.from_settings(settings, **about)
    return {**config.to_dict(), "architectures": ["GateLabForCausalLM"]}


def _sizes(settings: ModelSettings) -> Config:
    """What all Qwen configurations share, rotation in the dialects of transformers 4 and 5."""
    return {
        **named_sizes(settings),
        "attention_dropout": 0.0,
        "attention_bias": "o" in settings.biased_projections,
        **old_rope_keys(settings.rope, settings.rotary_size),
        "use_cache": True,
    }


def _rope_parameters(settings: ModelSettings) -> Config:
    return rope_parameters(settings.rope, settings.rotary_size)


def _experts(settings: ModelSettings) -> Config:
    """Keys of a mixture; without one there are no experts on any layer."""
    mixture, layers = settings.mixture, range(settings.num_layers)
    if mixture is None:
        return {"num_experts": 0, "mlp_only_layers": list(layers)}
    return {
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "moe_intermediate_size": mixture.expert_width,
        "norm_topk_prob": mixture.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in layers if settings.mixture_on_layer(layer) is None],
    }


def _qwen3_config(settings: ModelSettings) -> Config:
    config = _sizes(settings) | {"rope_parameters": _rope_parameters(settings)}
    if settings.mixture is not None:
        about = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "use_sliding_window": False}
        return about | config | _experts(settings)
    windows = [settings.on_layer(layer).window for layer in range(settings.num_layers)]
    window = next((size for size in windows if size is not None), None)
    return config | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": ["full_attention" if size is None else "sliding_attention" for size in windows],
    }


def _qwen3_next_config(settings: ModelSettings) -> Config:
    fraction = {"partial_rotary_factor": settings.rope.fraction}
    config = _sizes(settings) | _experts(settings) | fraction
    if settings.mixture is not None:
        config["shared_expert_intermediate_size"] = settings.mixture.shared_width
    return config | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "rope_parameters": _rope_parameters(settings) | fraction,
        "layer_types": ["full_attention"] * settings.num_layers,
        "attn_output_gate": True,
    }


def _deepseek_v3_config(settings: ModelSettings) -> Config:
    latent = settings.latent
    assert latent is not None
    return _sizes(settings) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "rope_parameters": _rope_parameters(settings),
        "rope_interleave": True,
        "head_dim": latent.rotated_size,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_nope_head_dim": latent.unrotated_size,
        "qk_rope_head_dim": latent.rotated_size,
        "v_head_dim": latent.value_size,
        "first_k_dense_replace": settings.num_layers,
        "num_nextn_predict_layers": 0,
    }


def _official_config(settings: ModelSettings) -> Config:
    granularity = settings.gates[0].granularity if settings.gates else None
    return (
        {"rope_scaling": None}
        | _sizes(settings)
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "use_sliding_window": False,
            "sliding_window": None,
            "use_qk_norm": settings.qk_norm,
            "qkv_bias": "q" in settings.biased_projections,
            "headwise_attn_output_gate": granularity == "headwise",
            "elementwise_attn_output_gate": granularity == "elementwise",
        }
    )


_CONFIGS: dict[str, Callable[[ModelSettings], Config]] = {
    "qwen3": _qwen3_config,
    "qwen3_next": _qwen3_next_config,
    "deepseek_v3": _deepseek_v3_config,
    "official": _official_config,
}
