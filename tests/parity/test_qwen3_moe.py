"""Qwen3-MoE of transformers: logits, gradients, and its load-balancing loss."""

from __future__ import annotations

import pytest
import torch
from parity_checks import SIZES, assert_all_close, gradients, randomise, token_ids

from gatelab.model.decoder import Decoder
from gatelab.model.masks import PADDING
from gatelab.model.moe import balance_loss, pooled_balance_loss
from gatelab.model.settings import MixtureSettings, ModelSettings

transformers = pytest.importorskip("transformers")


def build_pair(renormalize: bool, expert_width: int) -> tuple[Decoder, torch.nn.Module]:
    """Both models, each with random weights of its own."""
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=expert_width,
        norm_topk_prob=renormalize,
        decoder_sparse_step=1,
        experts_implementation="eager",
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    theirs = transformers.Qwen3MoeForCausalLM(config).eval()
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
            tied_head=False,
            mixture=MixtureSettings(
                num_experts=5, experts_per_token=2, expert_width=expert_width, renormalize=renormalize
            ),
        )
    )
    randomise(theirs, seed=0)
    randomise(ours, seed=1)
    return ours, theirs


@pytest.mark.parametrize("expert_width", [24, 27], ids=["grouped kernel", "loop"])
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalised", "not renormalised"])
@pytest.mark.parametrize("direction", ["theirs to ours", "ours to theirs"])
def test_logits_and_gradients(direction: str, renormalize: bool, expert_width: int) -> None:
    ours, theirs = build_pair(renormalize, expert_width)
    if direction == "theirs to ours":
        ours.load_state_dict(theirs.state_dict())
    else:
        theirs.load_state_dict(ours.state_dict())
    logits, expected = ours(token_ids()), theirs(token_ids()).logits
    assert expected.std() > 1
    assert_all_close({"logits": logits}, {"logits": expected})
    assert_all_close(gradients(ours, logits), gradients(theirs, expected))


@pytest.mark.parametrize("padded", [False, True])
def test_pooled_balance_loss_is_that_of_transformers(padded: bool) -> None:
    """And ours differs from it: 1 instead of k at balance, and each layer by itself."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    ours, theirs = build_pair(renormalize=True, expert_width=24)
    ours.load_state_dict(theirs.state_dict())
    seen = torch.ones(3, 17, dtype=torch.bool)
    if padded:
        seen = torch.arange(17) < torch.tensor([[5], [17], [11]])
    router = ours.hidden(token_ids(), torch.where(seen, 0, PADDING)).router
    assert router is not None
    mask = seen.long() if padded else None
    output = theirs(token_ids(), attention_mask=mask, output_router_logits=True)
    expected = load_balancing_loss_func(output.router_logits, 5, 2, mask)
    loss = pooled_balance_loss(router)
    assert_all_close({"loss": loss}, {"loss": expected})
    assert_all_close({"aux_loss": loss}, {"aux_loss": output.aux_loss})
    assert abs(loss.item() - 2 * balance_loss(router).item()) > 1e-3

    name = "model.layers.0.mlp.gate.weight"
    (gradient,) = torch.autograd.grad(loss, ours.get_parameter(name))
    (expected_gradient,) = torch.autograd.grad(output.aux_loss, theirs.get_parameter(name))
    assert_all_close({"router": gradient}, {"router": expected_gradient})
