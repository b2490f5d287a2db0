"""Any Hugging Face decoder inside the probe: equal to its eager attention, and as it was afterwards."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from family_comparison import Listener, compare, listen, state_kept  # noqa: E402
from tiny_families import FAMILIES, LAYERS, REFUSED, SIZES, batch, build  # noqa: E402

from gatelab.diagnose.measure import measure  # noqa: E402
from gatelab.interop.probe import attach_hugging_face  # noqa: E402

SKIPPED = {
    "qwen3_next": {0: "linear_attention layer", 2: "linear_attention layer"},
    "qwen3_5": {0: "linear_attention layer", 2: "linear_attention layer"},
    "jamba": {0: "linear_attention layer", 2: "linear_attention layer"},
    "lfm2": {0: "conv layer", 2: "conv layer"},
    "lfm3": {0: "conv layer"},
}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("left_padded", [False, True], ids=["unpadded", "left_padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_eager_attention(family: str, left_padded: bool) -> None:
    found = compare(family, left_padded)
    assert found.logit_error < 1e-5
    assert found.mass_error < 1e-6
    assert found.skipped == SKIPPED.get(family, {})
    assert sorted([*found.seen, *found.skipped]) == list(range(LAYERS)) == list(range(found.num_layers))


@pytest.mark.parametrize("family", REFUSED)
def test_families_with_their_own_attention_are_refused(family: str) -> None:
    model = build(family)
    with state_kept(model), pytest.raises(ValueError, match=f"{family} computes attention in its own code"):
        listen(model, batch(False)[0])


def test_hidden_states_are_those_of_the_layers() -> None:
    model = build("llama")
    tokens, _ = batch(False)
    _, listener = listen(model, tokens)
    expected = model(tokens, output_hidden_states=True).hidden_states
    for layer in (-1, 0, 1):
        torch.testing.assert_close(listener.hidden[layer], expected[layer + 1], atol=1e-5, rtol=0)
    assert sorted(listener.hidden) == [-1, 0, 1, 2]
    assert listener.expected_layers == LAYERS
    assert listener.missing_layers() == []


def test_a_decoder_without_its_head_hands_over_the_same() -> None:
    model = build("qwen3")
    tokens, _ = batch(False)
    calls = [listen(part, tokens)[1].calls for part in (model, model.model)]
    torch.testing.assert_close(calls[0][2].output, calls[1][2].output, atol=0, rtol=0)


def test_packed_documents_see_themselves_alone() -> None:
    model = build("llama")
    tokens, _ = batch(False)
    positions = torch.cat((torch.arange(12), torch.arange(8))).expand(3, -1)
    expected = model(tokens, position_ids=positions, use_cache=False).logits
    output, listener = listen(model, tokens, position_ids=positions)
    torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=0)
    assert listener.calls[0].visibility.documents[0].tolist() == [0] * 12 + [1] * 8


def test_measure_takes_the_probe() -> None:
    model = build("qwen3_next")
    tokens, _ = batch(False)
    expected = model(tokens, output_attentions=True).attentions[-1][..., 0].mean().detach()
    measured = measure(model, tokens, attach=attach_hugging_face).summary()
    assert measured["first_token_attention"] == pytest.approx(float(expected), abs=1e-6)
    assert measured["gate_mean"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_everything_is_restored(family: str) -> None:
    model = build(family)
    tokens, _ = batch(False)
    before = model(tokens).logits
    with state_kept(model):
        listen(model, tokens)
    assert torch.equal(model(tokens).logits, before)


def test_everything_is_restored_after_an_error() -> None:
    model = build("llama")
    with state_kept(model), pytest.raises(RuntimeError, match="mine"), attach_hugging_face(model, Listener()):
        raise RuntimeError("mine")


def test_two_models_at_once() -> None:
    first, second = build("llama", seed=1), build("llama", seed=2)
    tokens, _ = batch(False)
    one, two = Listener(), Listener()
    with torch.no_grad(), attach_hugging_face(first, one), attach_hugging_face(second, two):
        first(tokens)
        assert (len(one.calls), len(two.calls)) == (LAYERS, 0)
        second(tokens)
    assert not torch.equal(one.calls[0].output, two.calls[0].output)


@pytest.mark.parametrize("keyword", ["indices", "position_bias"])
def test_unknown_keywords_are_refused(keyword: str) -> None:
    model = build("llama")
    wanted = f"LlamaAttention asks its attention function for {keyword}, which may change the mathematics"
    with state_kept(model), pytest.raises(ValueError, match=wanted):
        listen(model, batch(False)[0], **{keyword: torch.ones(1)})


def test_dropout_is_refused() -> None:
    config = transformers.LlamaConfig(**SIZES, attention_dropout=0.1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    with pytest.raises(ValueError, match=r"LlamaAttention drops attention with probability 0\.1; call model\.eval"):
        listen(model, batch(False)[0])


def test_a_mask_of_the_users_own_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaAttention uses a mask of its own; it cannot be measured"):
        listen(build("llama"), batch(False)[0], attention_mask=torch.zeros(3, 1, 20, 20))


def test_earlier_keys_are_seen_without_a_mask_of_their_size() -> None:
    model = build("llama")
    tokens, _ = batch(False)
    cache = model(tokens[:, :13], use_cache=True).past_key_values
    output, listener = listen(model, tokens[:, 13:], past_key_values=cache)
    torch.testing.assert_close(output.logits, model(tokens).logits[:, 13:], atol=1e-5, rtol=0)
    assert (listener.calls[0].visibility.num_queries, listener.calls[0].visibility.num_keys) == (7, 20)


class OwnAttention(nn.Module):
    """Attention that never asks transformers for its attention function."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_a_layer_that_bypasses_the_function_is_refused() -> None:
    model = build("llama")
    model.model.layers[1].self_attn = OwnAttention()
    wanted = r"layer 1 \(LlamaDecoderLayer\) ignored the registered attention function"
    with state_kept(model), pytest.raises(ValueError, match=wanted):
        listen(model, batch(False)[0])


UNKNOWN_SIZES = {"DeepseekV4Config": {"n_routed_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}}
# Configuration of a family whose attention does what ours does not know -> why it is refused.
UNKNOWN = {
    "DiffLlamaConfig": r"layer 0 \(DiffLlamaAttention\) attends twice; it cannot be measured",
    "DogeConfig": "doge changes its attention mask; it cannot be measured",
    "InklingTextConfig": "InklingAttention asks its attention function for position_bias",
    "DeepseekV4Config": r"hidden states of shape \(3, 20, 4, 48\), not \(B, T, D\)",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_attention_of_another_kind_is_refused(name: str) -> None:
    config = getattr(transformers, name)(**SIZES, **UNKNOWN_SIZES.get(name, {}))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with state_kept(model), pytest.raises(ValueError, match=UNKNOWN[name]):
        listen(model, batch(False)[0])


def test_only_decoders_of_hugging_face_can_be_attached() -> None:
    with pytest.raises(ValueError, match="Linear is no Hugging Face model"):
        listen(nn.Linear(2, 3))
    config = transformers.T5Config(vocab_size=97, d_model=16, num_layers=1, num_heads=2, d_kv=8, d_ff=24)
    with pytest.raises(ValueError, match="t5 is an encoder with a decoder; only decoders can be measured"):
        listen(transformers.T5ForConditionalGeneration(config))


def test_transformers_is_needed_when_it_is_used_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, gatelab.interop.probe; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers; pip install 'gatelab\[hf\]'"):
        listen(nn.Linear(2, 3))
