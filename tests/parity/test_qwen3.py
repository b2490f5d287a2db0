"""Qwen3 of transformers: the same names, the same logits, the same gradients."""

from __future__ import annotations

import pytest
import torch
from parity_checks import SIZES, assert_all_close, gradients, randomise, token_ids
from torch import Tensor

from gatelab.model.cache import KVCache
from gatelab.model.decoder import Decoder
from gatelab.model.masks import PADDING
from gatelab.model.settings import ModelSettings, RopeSettings

transformers = pytest.importorskip("transformers")


def build_pair(tied: bool) -> tuple[Decoder, torch.nn.Module]:
    """Both models, each with random weights of its own."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=tied, rope_parameters=rope)
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    ours = Decoder(
        ModelSettings(
            vocab_size=97,
            width=40,
            num_layers=2,
            num_heads=6,
            num_kv_heads=2,
            head_size=8,
            feedforward_width=56,
            max_context=64,
            tied_head=tied,
            rope=RopeSettings(base=500.0),
        )
    )
    randomise(theirs, seed=0)
    randomise(ours, seed=1)
    return ours, theirs


def weights_of(model: torch.nn.Module, tied: bool) -> dict[str, Tensor]:
    """The state dict, without the head's second name for the embedding."""
    return {name: weight for name, weight in model.state_dict().items() if not (tied and name == "lm_head.weight")}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("direction", ["theirs to ours", "ours to theirs"])
def test_logits_and_gradients(direction: str, tied: bool) -> None:
    ours, theirs = build_pair(tied)
    if direction == "theirs to ours":
        ours.load_state_dict(weights_of(theirs, tied))
    else:
        missing, unexpected = theirs.load_state_dict(weights_of(ours, tied), strict=False)
        assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
    logits, expected = ours(token_ids()), theirs(token_ids()).logits
    assert expected.std() > 1
    assert_all_close({"logits": logits}, {"logits": expected})
    assert_all_close(gradients(ours, logits), gradients(theirs, expected))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # its name before 5.24
@torch.no_grad()
def test_left_padding_and_decoding() -> None:
    ours, theirs = build_pair(tied=True)
    ours.load_state_dict(weights_of(theirs, tied=True))
    ids, lengths = token_ids(), torch.tensor([5, 17, 11])
    seen = torch.arange(17) >= 17 - lengths[:, None]
    cache = KVCache(num_layers=2)
    logits = ours(ids, torch.where(seen, 0, PADDING), cache)
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    output = theirs(ids, attention_mask=seen.long(), position_ids=positions, use_cache=True)
    assert_all_close({"prefill": logits[seen]}, {"prefill": output.logits[seen]})
    step = ours(ids[:, :1], cache=cache)
    seen = torch.cat((seen, torch.ones(3, 1, dtype=torch.bool)), 1)
    expected = theirs(
        ids[:, :1],
        attention_mask=seen.long(),
        position_ids=lengths[:, None],
        past_key_values=output.past_key_values,
    ).logits
    assert_all_close({"step": step}, {"step": expected})
