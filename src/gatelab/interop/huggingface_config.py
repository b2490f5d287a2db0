"""A decoder's settings as a ``config.json`` of transformers, and how its projections split over ranks."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from gatelab.gates.spec import GateSpec
from gatelab.interop.form import MODEL_TYPE, SCHEMA_VERSION, named_sizes
from gatelab.model.settings import MixtureSettings, ModelSettings

LAYOUT = "L1"
OTHER_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


class GateLabConfig(PreTrainedConfig):
    """``gatelab`` holds the :class:`ModelSettings`; the names that other tools read are derived from them.

    Make one with :meth:`from_settings`. Raises ``ValueError`` for a newer schema, another gate layout than L1, a
    standard name that contradicts the settings, and for what transformers can't express: attention that is not
    causal, a sink, and windows of more than one size. The rotation can't be set later, because a model that was built
    would not follow: setting it, under our names or transformers', raises ``ValueError``.
    """

    model_type: ClassVar[str] = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]
    base_model_pp_plan: ClassVar[Any] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    gatelab: dict[str, Any] | None = None
    gate_layout: str = LAYOUT
    gatelab_schema_version: int = SCHEMA_VERSION
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.gatelab_schema_version > SCHEMA_VERSION:
            raise ValueError(
                f"gatelab_schema_version={self.gatelab_schema_version} is newer than this GateLab, which reads "
                f"{SCHEMA_VERSION}; upgrade gatelab"
            )
        if self.gate_layout != LAYOUT:
            raise ValueError(f"gate_layout={self.gate_layout} can't be read here; convert the model to {LAYOUT} first")
        for name, value in standard_names(self.settings).items():
            given = kwargs.pop(name, None)
            if given is not None and given != value:
                raise ValueError(f"{name}={given} contradicts the model's settings, which say {value}; remove {name}")
            setattr(self, name, value)
        self.base_model_tp_plan = tensor_parallel_plan(self.settings)  # pyright: ignore[reportAttributeAccessIssue]
        super().__post_init__(**kwargs)

    def __setattr__(self, key: str, value: Any) -> None:
        is_rotation = key in OTHER_ROPE_KEYS and value is not None
        before = self.__dict__.get("gatelab")
        if key == "gatelab" and before is not None:
            is_rotation = value is None or any(value.get(part) != before.get(part) for part in ("rope", "layers"))
        if is_rotation:
            raise ValueError(
                f"{key} of a GateLabConfig can't be set to another rotation, which a model that is built would not "
                "follow; change a decoder with gatelab.model.decoder.with_rope and convert that"
            )
        super().__setattr__(key, value)

    @classmethod
    def from_settings(cls, settings: ModelSettings, **tokens: Any) -> GateLabConfig:
        """The configuration of a model; ``tokens`` are bos_token_id, eos_token_id, pad_token_id."""
        return cls(gatelab=settings.to_mapping(), **tokens)

    @property
    def settings(self) -> ModelSettings:
        """The model's settings."""
        if self.gatelab is None:
            raise ValueError("a GateLabConfig needs the model's settings; make one with GateLabConfig.from_settings")
        return ModelSettings.parse(self.gatelab)


def standard_names(settings: ModelSettings) -> dict[str, Any]:
    """What other tools read of a configuration, under transformers' names."""
    if not settings.causal:
        raise ValueError("a model with causal=False generates no text; it has no Hugging Face form")
    if settings.sink is not None:
        raise ValueError(f"transformers' attention functions know no sink {settings.sink.kind}; no Hugging Face form")
    windows = [settings.on_layer(layer).window for layer in range(settings.num_layers)]
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ValueError(f"transformers knows one sliding window for a model, and this one has {sorted(sizes)}")
    names = {
        **named_sizes(settings),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "sliding_window": next(iter(sizes), None),
    }
    if settings.mixture is not None:
        names["num_experts"] = settings.mixture.num_experts
        names["num_experts_per_tok"] = settings.mixture.experts_per_token
        names["moe_intermediate_size"] = settings.mixture.expert_width
    return names


def tensor_parallel_plan(settings: ModelSettings) -> dict[str, str] | None:
    """transformers' style of every projection of a layer, gates included; ``None`` where a gate can't be split.

    Each rank computes some heads with their gates. A head-shared gate averages over all heads, one that reads the
    values or the attention output needs them all, and logits without a projection can't be split by module, so models
    with these have no plan; nor have those with latent attention, whose latents all heads read.
    """
    if settings.latent is not None:
        return None
    attention, mlp = "layers.*.self_attn", "layers.*.mlp"
    plan = {f"{attention}.{name}_proj": "colwise" for name in "qkv"} | {f"{attention}.o_proj": "rowwise"}
    if settings.qk_norm:
        plan |= {f"{attention}.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}
    if settings.control is not None and settings.control.operation == "rms_norm":
        plan |= {f"{attention}.control": "local_params", f"{attention}.control.weight": "colwise"}
    for gate in settings.gates:
        if gate.sharing == "head_shared" or gate.source not in ("hidden", "prefix"):
            return None
        plan |= _gate_plan(f"{attention}.gates.{gate.position}.projection", gate)
    mixtures = [settings.mixture_on_layer(layer) for layer in range(settings.num_layers)]
    if None in mixtures:
        plan |= _feedforward_plan(mlp)
    return plan if settings.mixture is None else plan | _mixture_plan(mlp, settings.mixture)


def _gate_plan(name: str, gate: GateSpec) -> dict[str, str]:
    """Rows follow the heads that they gate; what gates all of the dense output is whole on every rank."""
    style = "replicate" if gate.position == "dense_output" else "colwise"
    return {name: style} if gate.rank is None else {f"{name}.down": "replicate", f"{name}.up": style}


def _mixture_plan(name: str, mixture: MixtureSettings) -> dict[str, str]:
    """Every rank has a slice of each expert; routers are whole."""
    plan = {
        f"{name}.gate": "replicate",
        f"{name}.experts.gate_up_proj": "packed_colwise",
        f"{name}.experts.down_proj": "rowwise",
        f"{name}.experts": "moe_tp_experts",
    }
    if mixture.shared_width is not None:
        plan |= _feedforward_plan(f"{name}.shared_expert")
    if mixture.shared_gate:
        plan[f"{name}.shared_expert_gate"] = "replicate"
    return plan


def _feedforward_plan(name: str) -> dict[str, str]:
    return {f"{name}.gate_proj": "colwise", f"{name}.up_proj": "colwise", f"{name}.down_proj": "rowwise"}
