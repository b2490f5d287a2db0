"""Small decoders whose every weight matters, for the tests of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from gatelab.gates.spec import GateSpec
from gatelab.gates.variants import find_variant
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import (
    LatentSettings,
    LayerSettings,
    MixtureSettings,
    ModelSettings,
    RopeSettings,
    SinkSettings,
)

B, T, V = 3, 17, 97
MIXTURE = MixtureSettings(num_experts=5, experts_per_token=2, expert_width=24, shared_width=28)


def tiny_settings(gate: str = "none", **changes: object) -> ModelSettings:
    """A decoder of distinct sizes with the named gate; its weights are wide, so attention is far from flat."""
    variant = find_variant(gate)
    sizes = {
        "vocab_size": V,
        "width": 40,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_size": 8,
        "feedforward_width": 56,
        "max_context": 64,
        "init_std": 0.2,
        "gates": variant.gates,
        "control": variant.control,
    }
    return ModelSettings(**{**sizes, **changes})  # type: ignore[arg-type]


def latent_settings(
    gate: str = "none", query_rank: int | None = 11, value_size: int = 9, **changes: object
) -> ModelSettings:
    """A decoder with latent attention: of 14 channels 4 rotate, and the latents' norms have an epsilon of their own."""
    latent = LatentSettings(
        query_rank=query_rank,
        key_value_rank=12,
        unrotated_size=10,
        rotated_size=4,
        value_size=value_size,
        norm_epsilon=1e-3,
    )
    sizes = {"num_kv_heads": 6, "head_size": 14, "qk_norm": False, "latent": latent}
    return tiny_settings(gate, **{**sizes, **changes})


def tiny_decoder(settings: ModelSettings, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    """The initialised decoder with noise on every number, so that norms and gates are not at their start values."""
    decoder = Decoder(settings).to(dtype)
    initialize(decoder, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in [*decoder.parameters(), *decoder.buffers()]:
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return decoder


def token_ids(num_rows: int = B, num_tokens: int = T, seed: int = 3) -> Tensor:
    """Random token ids (B T)."""
    return torch.randint(V, (num_rows, num_tokens), generator=torch.Generator().manual_seed(seed))


ARCHITECTURES: dict[str, ModelSettings] = {
    "dense": tiny_settings(),
    "mixture": tiny_settings(mixture=MIXTURE),
    "value gate": tiny_settings("value_elementwise"),
    "key gate": tiny_settings("key_elementwise"),
    "key gate after rotation": tiny_settings("key_after_rope"),
    "query gate": tiny_settings("query_headwise"),
    "gate from the output": tiny_settings("sdpa_from_output"),
    "gate from the values": tiny_settings("sdpa_from_value"),
    "two gates": tiny_settings("sdpa_and_value_headwise", mixture=MIXTURE),
    "control": tiny_settings("rms_norm_on_sdpa"),
    "sandwich norm": tiny_settings("sdpa_headwise", sandwich_norm=True),
    "no q/k norm": tiny_settings("dense_output_elementwise", qk_norm=False),
    "own head": tiny_settings("sdpa_elementwise", tied_head=False),
    "partial rotary": tiny_settings(rope=RopeSettings(fraction=0.25, base=500.0)),
    "one head each": tiny_settings(num_heads=3, num_kv_heads=3),
}

# What the decoder layers of other families need, each in the shape of one of them.
_SIGMOID = MixtureSettings(
    num_experts=5,
    experts_per_token=2,
    expert_width=24,
    shared_width=28,
    router="sigmoid",
    selection_bias=True,
    routed_scale=1.7,
)
_SOFTPLUS = GateSpec(granularity="headwise", activation="softplus", score_dtype="float32")
_LOCAL, _GLOBAL = RopeSettings(base=300.0), RopeSettings(base=9000.0, fraction=0.5)
FAMILIES: dict[str, ModelSettings] = {
    "qwen2": tiny_settings(qk_norm=False, biased_projections=("q", "k", "v")),
    "llama": tiny_settings(qk_norm=False, biased_projections=("q", "k", "v", "o"), tied_head=False),
    "qwen3-next": tiny_settings(
        "sdpa_elementwise",
        centred_norms=True,
        rope=RopeSettings(base=500.0, fraction=0.25),
        mixture=MIXTURE.model_copy(update={"shared_gate": True}),
    ),
    "afmoe": tiny_settings(
        "sdpa_elementwise",
        num_layers=3,
        sandwich_norm=True,
        tied_head=False,
        embedding_scale=40**0.5,
        mixture=_SIGMOID,
        layers=(
            LayerSettings(window=5, mixture=False),
            LayerSettings(rotary=False),
            LayerSettings(window=5),
        ),
    ),
    "laguna": tiny_settings(
        gates=(_SOFTPLUS,),
        num_layers=3,
        mixture=_SIGMOID,
        layers=(
            LayerSettings(num_heads=4, rope=_GLOBAL, mixture=False),
            LayerSettings(window=6, rope=_LOCAL),
            LayerSettings(num_heads=2, window=6, rope=_LOCAL),
        ),
    ),
    "step": tiny_settings(
        "sdpa_headwise",
        centred_norms=True,
        mixture=_SIGMOID.model_copy(update={"selection_bias": False, "renormalize": False}),
        layers=(LayerSettings(num_heads=10, window=4, rope=_LOCAL), LayerSettings(rope=_GLOBAL)),
    ),
}
ARCHITECTURES.update(FAMILIES)

# A key that no token has, beside gates and windows.
_WINDOWED = (LayerSettings(window=5), LayerSettings())
SINKS: dict[str, ModelSettings] = {
    "learned logit": tiny_settings(sink=SinkSettings(kind="learned_logit"), layers=_WINDOWED),
    "off by one": tiny_settings("sdpa_headwise", sink=SinkSettings(kind="off_by_one"), qk_norm=False, init_std=0.15),
    "learned key and value": tiny_settings(sink=SinkSettings(kind="learned_key_value"), layers=_WINDOWED),
}
ARCHITECTURES.update(SINKS)

LATENTS: dict[str, ModelSettings] = {
    "latents": latent_settings(layers=(LayerSettings(window=5), LayerSettings(rotary=False))),
    "latents, gate on the output": latent_settings("sdpa_elementwise", query_rank=None, mixture=MIXTURE),
    "latents, gate on the value": latent_settings("sdpa_and_value_headwise"),
    "latents, gate on the key": latent_settings("key_elementwise", value_size=14),
    "latents, gate from the values": latent_settings("sdpa_from_value", value_size=16, sandwich_norm=True),
}
ARCHITECTURES.update(LATENTS)
