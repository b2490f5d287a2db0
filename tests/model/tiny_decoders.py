"""Small decoders whose every weight matters, for the tests of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from gatelab.gates.variants import find_variant
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import MixtureSettings, ModelSettings, RopeSettings

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


def tiny_decoder(settings: ModelSettings, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    """The initialised decoder with noise on every parameter, so that norms and gates are not at their start values."""
    decoder = Decoder(settings).to(dtype)
    initialize(decoder, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in decoder.parameters():
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
