"""Small decoders beside their Hugging Face form, for its tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gatelab.gates.spec import GateSpec
from gatelab.gates.variants import find_variant
from gatelab.interop.huggingface import from_decoder
from gatelab.model.cache import KVCache
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import LayerSettings, MixtureSettings, ModelSettings, RopeSettings

B, T, V = 3, 17, 97
MIXTURE = MixtureSettings(num_experts=5, experts_per_token=2, expert_width=24, shared_width=28)


def tiny_settings(gate: str = "sdpa_elementwise", **changes: Any) -> ModelSettings:
    """A decoder of distinct sizes with the named gate."""
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
    return ModelSettings(**{**sizes, **changes})


# What every option of a decoder looks like, each at least once.
MODELS: dict[str, ModelSettings] = {
    "ungated": tiny_settings("none"),
    "elementwise": tiny_settings(tied_head=False),
    "headwise with sandwich norms": tiny_settings("sdpa_headwise", sandwich_norm=True),
    "value gate": tiny_settings("value_elementwise"),
    "key gate after rotation": tiny_settings("key_after_rope"),
    "dense output gate": tiny_settings("dense_output_elementwise", qk_norm=False),
    "gate from the output": tiny_settings("sdpa_from_output"),
    "control": tiny_settings("rms_norm_on_sdpa"),
    "low rank and prefix": tiny_settings(
        gates=(GateSpec(rank=3, bias=0.5), GateSpec(position="query", source="prefix", prefix_channels=12))
    ),
    "parameter": tiny_settings(gates=(GateSpec(position="value", source="parameter", initialization="zeros"),)),
    "mixture": tiny_settings("sdpa_and_value_headwise", mixture=MIXTURE),
    "biases and scale": tiny_settings(biased_projections=("q", "k", "v", "o"), embedding_scale=3.0),
    "centred norms": tiny_settings(centred_norms=True, rope=RopeSettings(base=500.0, fraction=0.25)),
    "windows": tiny_settings(
        num_layers=3,
        mixture=MIXTURE.model_copy(update={"router": "sigmoid", "selection_bias": True, "shared_gate": True}),
        layers=(
            LayerSettings(window=5, mixture=False),
            LayerSettings(rotary=False, num_heads=4),
            LayerSettings(window=5, rope=RopeSettings(base=300.0, fraction=0.5)),
        ),
    ),
}

# Models with a gate that tensor-parallel ranks can't share.
WHOLE = {"gate from the output", "parameter"}


def tiny_decoder(settings: ModelSettings, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    """A decoder in eval mode with noise on everything, so that nothing is at its start value."""
    decoder = Decoder(settings).to(dtype)
    initialize(decoder, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for tensor in decoder.state_dict().values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator).to(dtype)
    return decoder.eval()


def tiny_pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[Decoder, Any]:
    """A decoder and its Hugging Face form, on the same parameters."""
    decoder = tiny_decoder(MODELS[name], dtype)
    return decoder, from_decoder(decoder)


def token_ids(num_rows: int = B, num_tokens: int = T, seed: int = 3) -> Tensor:
    """Random token ids (B T)."""
    return torch.randint(V, (num_rows, num_tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy(decoder: Decoder, ids: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Our own greedy decode: ids with ``num_tokens`` more, and whether each was clear by more than 1e-3 until then."""
    cache, step, clear = KVCache(decoder.settings.num_layers), ids, []
    for _ in range(num_tokens):
        logits = decoder(step, cache=cache)[:, -1]
        best = logits.topk(2).values
        clear.append(best[:, 0] - best[:, 1] > 1e-3)
        step = logits.argmax(-1, keepdim=True)
        ids = torch.cat((ids, step), dim=1)
    return ids, torch.stack(clear, dim=1).cumprod(1).bool()
