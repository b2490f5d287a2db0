"""How the config.json of each family becomes fields of our settings, and its gate.

Mathematics as in the modeling files of transformers 5.24. ``output_gate_type`` of Qwen3.5 and its successors is the
activation in linear attention; it never changes a softmax gate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gatelab.gates.spec import GateSpec
from gatelab.interop.config_keys import ConfigKeys, layer_types, windows
from gatelab.interop.latents import NORM_EPSILON
from gatelab.interop.official import GATINGS
from gatelab.interop.rope_dialects import ropes
from gatelab.model.settings import RopeSettings

# Fields of ModelSettings, not yet checked.
Fields = dict[str, Any]


def _sizes(keys: ConfigKeys, derived: bool = False) -> Fields:
    """What all families share; with ``derived`` the head size is width / heads and K is H where they are not given."""
    keys.only("hidden_act", "silu")
    keys.only("pruned_heads", {})
    width, num_heads = keys.require("hidden_size"), keys.require("num_attention_heads")
    given = keys.get if derived else keys.require
    return {
        "vocab_size": keys.require("vocab_size"),
        "width": width,
        "num_layers": keys.require("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": given("num_key_value_heads") or num_heads,
        "head_size": given("head_dim") or width // num_heads,
        "feedforward_width": keys.require("intermediate_size"),
        "max_context": keys.require("max_position_embeddings"),
        "tied_head": keys.get("tie_word_embeddings", False),
        "norm_epsilon": keys.require("rms_norm_eps"),
        "init_std": keys.get("initializer_range", 0.02),
    }


def _layers(
    fields: Fields,
    rotations: Sequence[RopeSettings],
    windows: Sequence[int | None] | None = None,
    num_heads: Sequence[int] | None = None,
    sparse: Sequence[bool] | None = None,
    rotary: Sequence[bool] | None = None,
) -> Fields:
    """The fields with ``rope`` and ``layers``: what single layers have otherwise than the model."""
    rope = rotations[0]
    layers = []
    for layer, rotation in enumerate(rotations):
        own: Fields = {}
        if rotary is not None and not rotary[layer]:
            own["rotary"] = False
        elif rotation != rope:
            own["rope"] = rotation.to_mapping()
        if windows is not None and windows[layer] is not None:
            own["window"] = windows[layer]
        if num_heads is not None and num_heads[layer] != fields["num_heads"]:
            own["num_heads"] = num_heads[layer]
        if sparse is not None and fields.get("mixture") and not sparse[layer]:
            own["mixture"] = False
        layers.append(own)
    return {**fields, "rope": rope.to_mapping(), "layers": tuple(layers) if any(layers) else ()}


def _biased(keys: ConfigKeys) -> tuple[str, ...]:
    """``attention_bias`` is on all four projections, ``qkv_bias`` (the paper's code) on three."""
    if keys.get("attention_bias", False):
        return ("q", "k", "v", "o")
    return ("q", "k", "v") if keys.get("qkv_bias", False) else ()


def _sliding(keys: ConfigKeys, num_layers: int) -> list[str]:
    """Layer types of Qwen2 and Qwen3, whose windows are off unless ``use_sliding_window``."""
    first, is_used = keys.get("max_window_layers", 28), keys.get("use_sliding_window", False)
    if is_used and not keys.says("sliding_window"):
        raise ValueError("config.json has use_sliding_window=true without sliding_window; write its size, or null")
    is_used = is_used and keys.get("sliding_window") is not None
    default = ["sliding_attention" if is_used and layer >= first else "full_attention" for layer in range(num_layers)]
    kinds = layer_types(keys, num_layers, default)
    if not is_used and "sliding_attention" in kinds:
        raise ValueError("config.json has sliding_attention layers, but no sliding_window that is used")
    return kinds


def qwen2(keys: ConfigKeys) -> Fields:
    keys.only("attention_bias", True)
    sizes = _sizes(keys, derived=True)
    kinds = _sliding(keys, sizes["num_layers"])
    fields = sizes | {"qk_norm": False, "biased_projections": ("q", "k", "v")}
    return _layers(fields, ropes(keys, kinds), windows(keys, kinds))


def llama(keys: ConfigKeys) -> Fields:
    keys.only("mlp_bias", False)
    fields = _sizes(keys, derived=True) | {"qk_norm": False, "biased_projections": _biased(keys)}
    return _layers(fields, ropes(keys, ["full_attention"] * fields["num_layers"]))


def qwen3(keys: ConfigKeys) -> Fields:
    fields = _sizes(keys) | {"qk_norm": keys.get("use_qk_norm", True), "biased_projections": _biased(keys)}
    kinds = _sliding(keys, fields["num_layers"])
    return _layers(fields, ropes(keys, kinds), windows(keys, kinds))


def _sparse(keys: ConfigKeys, num_layers: int, num_experts: int) -> list[bool]:
    """Which layers have experts, in Qwen's words."""
    dense, step = keys.get("mlp_only_layers", []), keys.get("decoder_sparse_step", 1)
    return [num_experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


def _mixture(keys: ConfigKeys, sparse: Sequence[bool], num_experts: int, **others: Any) -> Fields:
    """``mixture``, which a model without any sparse layer does not have."""
    if not any(sparse):
        keys.ignore("num_experts_per_tok", "moe_intermediate_size")
        return {"mixture": None}
    experts = {
        "num_experts": num_experts,
        "experts_per_token": keys.require("num_experts_per_tok"),
        "expert_width": keys.require("moe_intermediate_size"),
    }
    return {"mixture": {**experts, **others}}


def qwen3_moe(keys: ConfigKeys) -> Fields:
    keys.only("use_sliding_window", False)
    keys.ignore("sliding_window", "max_window_layers")
    fields = _sizes(keys) | {"qk_norm": keys.get("use_qk_norm", True), "biased_projections": _biased(keys)}
    num_experts = keys.get("num_experts", keys.get("num_local_experts"))
    num_experts = keys.require("num_experts") if num_experts is None else num_experts
    sparse = _sparse(keys, fields["num_layers"], num_experts)
    fields |= _mixture(keys, sparse, num_experts, renormalize=keys.get("norm_topk_prob", False))
    return _layers(fields, ropes(keys, ["full_attention"] * fields["num_layers"]), sparse=sparse)


def full_attention(keys: ConfigKeys) -> Fields:
    """The full-attention layers of Qwen3-Next and Qwen3.5: centred norms, a quarter of each head rotates."""
    keys.only("attn_output_gate", True)
    keys.ignore("output_gate_type", "mamba_ssm_dtype")
    keys.ignore("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim")
    keys.ignore("linear_num_key_heads", "linear_num_value_heads")
    keys.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers")
    fields = _sizes(keys) | {"centred_norms": True, "biased_projections": _biased(keys)}
    every = keys.get("full_attention_interval", 4)
    hybrid = ["linear_attention" if (n + 1) % every else "full_attention" for n in range(fields["num_layers"])]
    kinds = layer_types(keys, fields["num_layers"], hybrid)
    keys.only("use_sliding_window", False)
    return _layers(fields, ropes(keys, kinds, default_fraction=0.25), windows(keys, kinds))


def qwen3_next(keys: ConfigKeys) -> Fields:
    fields = full_attention(keys)
    num_experts = keys.require("num_experts")
    sparse = _sparse(keys, fields["num_layers"], num_experts)
    shared = {"shared_width": keys.get("shared_expert_intermediate_size"), "shared_gate": True}
    fields |= _mixture(keys, sparse, num_experts, renormalize=keys.get("norm_topk_prob", True), **shared)
    rope = RopeSettings.parse(fields["rope"])
    return _layers(fields, [rope] * fields["num_layers"], sparse=sparse)


def deepseek_v3(keys: ConfigKeys) -> Fields:
    """Latent attention; experts are chosen among all of them or the model is refused."""
    keys.only("attention_bias", False)
    keys.only("num_key_value_heads", keys.require("num_attention_heads"))
    for key, value in {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}.items():
        keys.only(key, value)
    keys.ignore("head_dim", "qk_head_dim", "rope_interleave", "num_nextn_predict_layers")
    keys.ignore("aux_loss_alpha", "seq_aux", "ep_size")
    if not keys.says("q_lora_rank"):
        keys.require("q_lora_rank")
    latent = {
        "query_rank": keys.get("q_lora_rank"),
        "key_value_rank": keys.require("kv_lora_rank"),
        "unrotated_size": keys.require("qk_nope_head_dim"),
        "rotated_size": keys.require("qk_rope_head_dim"),
        "value_size": keys.require("v_head_dim"),
        "norm_epsilon": NORM_EPSILON,
    }
    sizes = _sizes(keys, derived=True)
    fields = sizes | {
        "latent": latent,
        "head_size": latent["unrotated_size"] + latent["rotated_size"],
        "num_kv_heads": sizes["num_heads"],
        "qk_norm": False,
    }
    num_layers, first = fields["num_layers"], keys.get("first_k_dense_replace", 3)
    groups, chosen_groups = keys.get("n_group", 8), keys.get("topk_group", 4)
    sparse = [layer >= first for layer in range(num_layers)]
    if not any(sparse):
        keys.ignore("n_routed_experts", "n_shared_experts", "routed_scaling_factor", "norm_topk_prob")
        fields |= _mixture(keys, sparse, 0)
    elif groups != chosen_groups:
        raise ValueError(
            f"config.json chooses experts in topk_group={chosen_groups} of n_group={groups} groups; GateLab's router "
            "chooses among all experts"
        )
    else:
        fields |= _mixture(
            keys, sparse, keys.require("n_routed_experts"), router="sigmoid", selection_bias=True,
            routed_scale=keys.get("routed_scaling_factor", 2.5), renormalize=keys.get("norm_topk_prob", True),
            shared_width=keys.require("moe_intermediate_size") * keys.require("n_shared_experts"),
        )  # fmt: skip
    return _layers(fields, ropes(keys, ["full_attention"] * num_layers), sparse=sparse)


def afmoe(keys: ConfigKeys) -> Fields:
    for key, value in {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}.items():
        keys.only(key, value)
    keys.only("num_expert_groups", 1)
    keys.only("num_limited_groups", 1)
    keys.ignore("load_balance_coeff", "use_grouped_mm")
    fields = _sizes(keys) | {"sandwich_norm": True, "biased_projections": _biased(keys)}
    num_layers, every = fields["num_layers"], keys.get("global_attn_every_n_layers", 4)
    default = ["sliding_attention" if (n + 1) % every else "full_attention" for n in range(num_layers)]
    kinds = layer_types(keys, num_layers, default)
    if keys.get("mup_enabled", False):
        fields["embedding_scale"] = math.sqrt(fields["width"])
    num_experts, dense = keys.require("num_experts"), keys.require("num_dense_layers")
    sparse = [layer >= dense for layer in range(num_layers)]
    shared_width = keys.require("moe_intermediate_size") * keys.require("num_shared_experts")
    fields |= _mixture(
        keys, sparse, num_experts, router="sigmoid", selection_bias=True,
        routed_scale=keys.get("route_scale", 1.0), shared_width=shared_width,
    )  # fmt: skip
    rotary = [kind == "sliding_attention" for kind in kinds]
    return _layers(fields, ropes(keys, kinds), windows(keys, kinds), sparse=sparse, rotary=rotary)


def laguna(keys: ConfigKeys) -> Fields:
    keys.only("moe_apply_router_weight_on_input", False)
    keys.only("moe_router_logit_softcapping", 0.0)
    fields: Fields = _sizes(keys) | {"biased_projections": _biased(keys)}
    num_layers = fields["num_layers"]
    kinds = layer_types(keys, num_layers, ["full_attention"] * num_layers)
    sparse = _sparse_by_name(keys, num_layers, first_sparse=1)
    fields |= _mixture(
        keys, sparse, keys.require("num_experts"), router="sigmoid", selection_bias=True,
        routed_scale=keys.get("moe_routed_scaling_factor", 1.0),
        shared_width=keys.require("shared_expert_intermediate_size"),
    )  # fmt: skip
    heads = keys.get("num_attention_heads_per_layer", [fields["num_heads"]] * num_layers)
    return _layers(fields, ropes(keys, kinds, default_fraction=1.0), windows(keys, kinds), heads, sparse)


def step(keys: ConfigKeys) -> Fields:
    for key in ("mlp_bias", "use_bidirectional_attention"):
        keys.only(key, False)
    keys.ignore("mtp_layer_types", "mtp_mlp_layer_types", "num_nextn_predict_layers")
    fields = _sizes(keys) | {"centred_norms": True, "biased_projections": _biased(keys)}
    keys.only("query_pre_attn_scalar", fields["head_size"])
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        if any(keys.get(key, [])):
            raise ValueError(f"config.json has {key}={keys.get(key)}; GateLab's feed-forward layers clamp nothing")
    num_layers = fields["num_layers"]
    kinds = layer_types(keys, num_layers, ["full_attention"] * num_layers)
    sparse = _sparse_by_name(keys, num_layers, first_sparse=3)
    fields |= _mixture(
        keys, sparse, keys.require("n_routed_experts"), router="sigmoid", selection_bias=True,
        routed_scale=keys.get("moe_router_scaling_factor", 1.0), shared_width=keys.require("share_expert_dim"),
    )  # fmt: skip
    heads = _step_heads(keys, kinds, fields["num_heads"])
    return _layers(fields, ropes(keys, kinds, default_fraction=1.0), windows(keys, kinds), heads, sparse)


def _step_heads(keys: ConfigKeys, kinds: Sequence[str], num_heads: int) -> list[int]:
    """Query heads of each layer: by layer in ``per_layer_config``, else by kind."""
    local, by_layer = keys.get("num_sliding_attention_heads", num_heads), keys.get("per_layer_config")
    if by_layer is None:
        return [local if kind == "sliding_attention" else num_heads for kind in kinds]
    for layer, own in by_layer.items():
        if unknown := sorted(own.keys() - {"num_attention_heads"}):
            raise ValueError(f"config.json has {unknown[0]}={own[unknown[0]]!r} for layer {layer}, which is not known")
    return [by_layer.get(str(layer), {}).get("num_attention_heads", num_heads) for layer in range(len(kinds))]


def _sparse_by_name(keys: ConfigKeys, num_layers: int, first_sparse: int) -> list[bool]:
    """Which layers have experts, from ``mlp_layer_types``."""
    default = ["dense" if layer < first_sparse else "sparse" for layer in range(num_layers)]
    return [kind == "sparse" for kind in keys.get("mlp_layer_types", default)[:num_layers]]


def elementwise_in_q_proj(keys: ConfigKeys) -> GateSpec:
    """In ``q_proj``, so with a bias where that has one."""
    return GateSpec(bias=0.0 if keys.get("attention_bias") else None)


def laguna_gate(keys: ConfigKeys) -> GateSpec:
    keys.only("gating", *GATINGS)
    granularity = GATINGS[keys.get("gating", True)]
    return GateSpec(granularity=granularity, activation="softplus", score_dtype="float32")


def step_gate(keys: ConfigKeys) -> GateSpec:
    keys.only("gating", True, "per-head")
    keys.only("use_head_wise_attn_gate", True)
    return GateSpec(granularity="headwise")
