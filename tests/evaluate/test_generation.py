"""Greedy generation equals a loop that reads everything anew for each token, whatever is beside a prompt."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny_decoder, train_backend
from torch import nn

from gatelab.data.tokenizer import Tokenizer
from gatelab.evaluate.generation import generate, stop_ids_of
from gatelab.evaluate.model_tokenizer import ModelTokenizer, from_gatelab
from gatelab.evaluate.models import OpenedModel
from gatelab.interop.probe import attach_hugging_face
from gatelab.model.decoder import Decoder
from gatelab.model.settings import LayerSettings, MixtureSettings, SinkSettings

LENGTHS, NEW = (23, 5, 14, 1), 18
MIXTURE = MixtureSettings(num_experts=5, experts_per_token=2, expert_width=24)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated": ("sdpa_elementwise", {}),
    "ungated": ("none", {}),
    "value gate": ("value_elementwise", {}),
    "windows": ("none", {"layers": (LayerSettings(window=6), LayerSettings(), LayerSettings(window=6))}),
    "mixture": ("none", {"mixture": MIXTURE}),
    "learned sink": ("none", {"sink": SinkSettings(kind="learned_key_value")}),
}


def decoder_of(name: str = "gated", **changes: Any) -> Decoder:
    """A decoder that says more than its last token again: its head is its own and its weights are wide."""
    gate, own = MODELS[name]
    return tiny_decoder(gate, tied_head=False, init_std=0.3, **own, **changes)


def prompts_of(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [[0, *torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()][:length] for length in lengths]


def opened(model: nn.Module, max_context: int | None = 131) -> OpenedModel:
    tokenizer = ModelTokenizer(encode=lambda text: [], decode=lambda ids: "", bos_id=0, num_bos_added=0, vocab_size=320)
    attach = None if isinstance(model, Decoder) else attach_hugging_face
    return OpenedModel("tiny", "gatelab", model, tokenizer, max_context, attach)


@torch.no_grad()
def by_reading_anew(model: Any, prompt: Sequence[int], num_new: int, stop_ids: Collection[int] = ()) -> list[int]:
    """The oracle: no cache, no padding, no batch."""
    ids = list(prompt)
    for _ in range(num_new):
        output = model(torch.tensor([ids]))
        logits = output if isinstance(output, torch.Tensor) else output.logits
        token = int(logits[0, -1].argmax())
        if token in stop_ids:
            break
        ids.append(token)
    return ids[len(prompt) :]


@pytest.mark.parametrize("chunk", [3, 512])
@pytest.mark.parametrize("name", MODELS)
def test_ragged_prompts_give_the_tokens_of_reading_anew(name: str, chunk: int) -> None:
    decoder = decoder_of(name)
    expected = [by_reading_anew(decoder, prompt, NEW) for prompt in prompts_of()]
    assert len({token for row in expected for token in row}) > 10, "the rows say something"
    assert generate(opened(decoder), prompts_of(), NEW, prefill_chunk=chunk) == expected


@pytest.mark.parametrize("chunk", [4, 512])
def test_prompts_of_one_length_need_no_padding(chunk: int) -> None:
    decoder, prompts = decoder_of(), prompts_of((11, 11, 11))
    expected = [by_reading_anew(decoder, prompt, NEW) for prompt in prompts]
    assert generate(opened(decoder), prompts, NEW, prefill_chunk=chunk) == expected
    assert [generate(opened(decoder), [prompt], NEW)[0] for prompt in prompts] == expected


def test_each_row_ends_at_its_own_stop_token() -> None:
    decoder, prompts = decoder_of(), prompts_of()
    free = [by_reading_anew(decoder, prompt, NEW) for prompt in prompts]
    stop_ids = {free[0][4], free[1][0], free[2][NEW - 1]}
    expected = [by_reading_anew(decoder, prompt, NEW, stop_ids) for prompt in prompts]
    assert expected[1] == [] and len({len(row) for row in expected}) > 1
    assert generate(opened(decoder), prompts, NEW, stop_ids) == expected


def test_the_batch_ends_when_every_row_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prompts = decoder_of(), prompts_of((9, 4))
    first = {by_reading_anew(decoder, prompt, 1)[0] for prompt in prompts}
    calls = []
    hidden = decoder.hidden
    monkeypatch.setattr(
        decoder, "hidden", lambda ids, *rest, **named: (calls.append(1), hidden(ids, *rest, **named))[1]
    )
    assert generate(opened(decoder), prompts, NEW, first) == [[], []]
    assert len(calls) == 1


def test_the_head_sees_one_position_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, seen = decoder_of(), []
    logits = decoder.logits
    monkeypatch.setattr(decoder, "logits", lambda state: (seen.append(state.shape[:2]), logits(state))[1])
    generate(opened(decoder), prompts_of(), 3)
    assert seen == [(4, 1)] * 3


def test_the_context_is_full_to_its_last_token() -> None:
    decoder = decoder_of(max_context=30)
    (prompt,) = prompts_of((20,))
    assert len(generate(opened(decoder, 30), [prompt], 11)[0]) == 11
    message = "prompt 1 of 20 tokens and 12 new ones need 31 tokens of context, and tiny was made for 30; shorten it"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        generate(opened(decoder, 30), [[0], prompt], 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[0], []], 3), "prompt 1 is empty; start it with BOS"),
        (([[0]], 0), "max_new_tokens=0 generates nothing; take at least 1"),
        (([[0]], 3, (), 0), "prefill_chunk=0 generates nothing; take at least 1"),
    ],
)
def test_what_can_not_be_generated_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        generate(opened(decoder_of()), *arguments)


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tiny sees later tokens \(causal=False\), so it can't generate; open a"):
        generate(opened(decoder_of(causal=False)), [[0]], 2)


def test_no_prompts_give_no_rows() -> None:
    assert generate(opened(decoder_of()), [], 2) == []


def hugging_face_model(family: str) -> Any:
    """A random model whose own generation settings are anything but greedy."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131,
        "bos_token_id": 0,
        "eos_token_id": 5,
        "pad_token_id": 1,
    }
    layers = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    mamba = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4}
    configs = {
        "llama": transformers.LlamaConfig(**sizes),
        "gemma3": transformers.Gemma3TextConfig(**sizes, **layers, head_dim=8),
        "jamba": transformers.JambaConfig(**sizes, **mamba),
    }
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(configs[family]).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=module.weight.shape[1] ** -0.5)
    model.config.use_cache = False
    model.generation_config.update(
        do_sample=True, temperature=3.0, repetition_penalty=7.0, eos_token_id=[5, 9], no_repeat_ngram_size=1
    )
    return model


@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("family", ["llama", "gemma3", "jamba"])
def test_models_of_transformers_generate_greedily_whatever_their_settings_say(family: str, chunk: int) -> None:
    model, prompts = hugging_face_model(family), prompts_of((23, 6, 14))
    own = model.generation_config
    expected = [by_reading_anew(model, prompt, NEW) for prompt in prompts]
    assert generate(opened(model), prompts, NEW, prefill_chunk=chunk) == expected
    stop_ids = {expected[0][3], expected[1][-1]}
    stopped = [by_reading_anew(model, prompt, NEW, stop_ids) for prompt in prompts]
    assert stopped != expected
    assert generate(opened(model), prompts, NEW, stop_ids, prefill_chunk=chunk) == stopped
    assert model.generation_config is own


def test_a_text_ends_at_the_next_bos_of_a_run_and_at_eos_elsewhere() -> None:
    ours = replace(opened(decoder_of()), tokenizer=from_gatelab(Tokenizer(train_backend(), "<s>")))
    assert stop_ids_of(ours) == {0} and stop_ids_of(opened(decoder_of())) == frozenset()
    theirs = opened(hugging_face_model("llama"))
    assert stop_ids_of(theirs) == {5, 9}
    named = replace(theirs, tokenizer=replace(theirs.tokenizer, source=SimpleNamespace(eos_token_id=7)))
    assert stop_ids_of(named) == {5, 7, 9}
