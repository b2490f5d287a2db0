"""Qwen3-Next of transformers, full-attention layers alone: the elementwise gate on the attention output.

Its ``q_proj`` holds query and gate rows head by head (layout L2: C query rows, then C gate rows), and its norms
multiply by 1 + weight.
"""

from __future__ import annotations

import pytest
import torch
from parity_checks import SIZES, assert_all_close, gradients, randomise, token_ids
from torch import Tensor

from gatelab.gates.spec import GateSpec
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings, RopeSettings

transformers = pytest.importorskip("transformers")

HEADS, HEAD_SIZE, LAYERS = 6, 8, 2
GATE = "gates.sdpa_output.projection.weight"


def to_ours(weights: dict[str, Tensor], norm_offset: float = 1.0) -> dict[str, Tensor]:
    """Their weights under our names; gradients convert alike, but for the offset of the norms."""
    converted = {}
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            by_head = weight.unflatten(0, (HEADS, 2, HEAD_SIZE))
            converted[name] = by_head[:, 0].flatten(0, 1)
            converted[name.replace("q_proj.weight", GATE)] = by_head[:, 1].flatten(0, 1)
        else:
            converted[name] = weight + norm_offset if "norm" in name else weight
    return converted


def to_theirs(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under their names."""
    converted = {}
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            halves = [
                rows.unflatten(0, (HEADS, HEAD_SIZE)) for rows in (weight, weights[name.replace("q_proj.weight", GATE)])
            ]
            converted[name] = torch.stack(halves, dim=1).flatten(0, 2)
        elif not name.endswith(GATE):
            converted[name] = weight - 1 if "norm" in name else weight
    return converted


def build_pair() -> tuple[Decoder, torch.nn.Module]:
    """Both models, each with random weights of its own."""
    config = transformers.Qwen3NextConfig(
        **SIZES,
        layer_types=["full_attention"] * LAYERS,
        num_experts=0,
        mlp_only_layers=list(range(LAYERS)),
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    )
    theirs = transformers.Qwen3NextForCausalLM(config).eval()
    ours = Decoder(
        ModelSettings(
            vocab_size=97,
            width=40,
            num_layers=LAYERS,
            num_heads=HEADS,
            num_kv_heads=2,
            head_size=HEAD_SIZE,
            feedforward_width=56,
            max_context=64,
            tied_head=False,
            rope=RopeSettings(base=500.0, fraction=0.25),
            gates=(GateSpec(position="sdpa_output", granularity="elementwise"),),
        )
    )
    randomise(theirs, seed=0)
    randomise(ours, seed=1)
    return ours, theirs


@pytest.mark.parametrize("direction", ["theirs to ours", "ours to theirs"])
def test_logits_and_gradients(direction: str) -> None:
    ours, theirs = build_pair()
    if direction == "theirs to ours":
        ours.load_state_dict(to_ours(theirs.state_dict()))
    else:
        theirs.load_state_dict(to_theirs(ours.state_dict()))
    logits, expected = ours(token_ids()), theirs(token_ids()).logits
    assert expected.std() > 1
    assert_all_close({"logits": logits}, {"logits": expected})
    assert_all_close(gradients(ours, logits), to_ours(gradients(theirs, expected), norm_offset=0.0))


def test_rows_split_the_wrong_way_are_seen() -> None:
    """All query rows, then all gate rows (layout L6) has the right shapes and other logits."""
    ours, theirs = build_pair()
    weights = to_ours(theirs.state_dict())
    for name, weight in theirs.state_dict().items():
        if name.endswith("q_proj.weight"):
            weights[name], weights[name.replace("q_proj.weight", GATE)] = weight.chunk(2)
    ours.load_state_dict(weights)
    assert (ours(token_ids()) - theirs(token_ids()).logits).abs().max() > 0.1
