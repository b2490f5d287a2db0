"""The Hugging Face form computes what our decoder computes, on every path of transformers."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from tiny_hugging_face import MODELS, V, greedy, tiny_decoder, tiny_pair, tiny_settings, token_ids  # noqa: E402

from gatelab.diagnose.measure import measure  # noqa: E402
from gatelab.interop.huggingface import from_decoder, to_decoder  # noqa: E402
from gatelab.interop.huggingface_attention import eager_attention  # noqa: E402
from gatelab.interop.probe import attach_hugging_face  # noqa: E402
from gatelab.model.settings import SinkSettings  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def attention_function() -> Iterator[Callable[[str, Any], None]]:
    """Registers an attention function without a mask function of its own, for one test."""
    names = []

    def register(name: str, function: Any) -> None:
        transformers.AttentionInterface.register(name, function)
        names.append(name)

    yield register
    for name in names:
        del transformers.AttentionInterface._global_mapping[name]


def causal(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **keywords: Any) -> Any:
    """An attention function that makes its own causal mask."""
    triangle = torch.full((query.shape[2], key.shape[2]), -torch.inf).triu(1)
    return eager_attention(module, query, key, value, triangle, keywords["scaling"])


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "disable_compile": True, **options}
    return model.generate(ids, attention_mask=mask, **options)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_decoder(name: str) -> None:
    decoder, model = tiny_pair(name)
    expected = decoder(token_ids())
    assert torch.equal(model(token_ids()).logits, expected)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(token_ids()).logits, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_shared_both_ways(name: str) -> None:
    decoder, model = tiny_pair(name)
    again = to_decoder(model)
    ours, theirs = dict(decoder.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys() == dict(again.named_parameters()).keys()
    assert all(theirs[name] is parameter for name, parameter in ours.items())
    assert all(again.get_parameter(name) is parameter for name, parameter in ours.items())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == decoder.settings.tied_head
    assert torch.equal(again(token_ids()), decoder(token_ids()))


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_our_own_decode(name: str, implementation: str, cache: str | None) -> None:
    decoder, model = tiny_pair(name)
    model.set_attn_implementation(implementation)
    prompt = token_ids(num_tokens=9)
    expected, clear = greedy(decoder, prompt, 8)
    assert clear.float().mean() > 0.5
    found = generate(model, prompt, cache_implementation=cache)
    assert torch.equal(found[:, 9:][clear], expected[:, 9:][clear])


@pytest.mark.parametrize("name", MODELS)
def test_left_padding_changes_nothing(name: str) -> None:
    decoder, model = tiny_pair(name)
    ids, padding = token_ids(num_tokens=9), torch.tensor([0, 3, 5])
    mask = (torch.arange(9) >= padding[:, None]).long()
    logits, tokens = model(ids, attention_mask=mask, position_ids=_positions(mask)).logits, generate(model, ids, mask)
    for row, start in enumerate(padding):
        alone = ids[row : row + 1, start:]
        torch.testing.assert_close(logits[row : row + 1, start:], decoder(alone), atol=2e-5, rtol=0)
        expected, clear = greedy(decoder, alone, 8)
        assert torch.equal(tokens[row, 9:][clear[0]], expected[0, 9 - start :][clear[0]])


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def test_packed_positions_are_documents() -> None:
    decoder, model = tiny_pair("windows")
    lengths = (10, 7)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(3, -1)
    documents = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths)).expand(3, -1)
    found = model(token_ids(), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, decoder(token_ids(), documents=documents), atol=1e-5, rtol=0)


def naive_beams(decoder: Any, ids: Tensor, num_beams: int, num_tokens: int) -> Tensor:
    """The best of ``num_beams`` sequences that are extended by every token and cut back, step by step."""
    beams = [(0.0, ids)]
    for _ in range(num_tokens):
        longer = []
        for score, tokens in beams:
            chances = decoder(tokens)[0, -1].log_softmax(-1)
            for token in range(V):
                longer.append((score + chances[token].item(), torch.cat((tokens, torch.tensor([[token]])), dim=1)))
        beams = sorted(longer, key=lambda beam: -beam[0])[:num_beams]
    return beams[0][1]


@torch.no_grad()
def test_beam_search_is_the_naive_one() -> None:
    decoder, model = tiny_pair("elementwise")
    differs_from_greedy = 0
    for seed in range(4):
        prompt = token_ids(1, 5, seed)
        found = generate(model, prompt, num_beams=4, max_new_tokens=3)
        assert torch.equal(found, naive_beams(decoder, prompt, 4, 3))
        differs_from_greedy += not torch.equal(found, greedy(decoder, prompt, 3)[0])
    assert differs_from_greedy


@pytest.mark.parametrize("name", ["elementwise", "mixture", "windows"])
def test_gradients_are_equal_with_and_without_checkpointing(name: str) -> None:
    decoder, model = tiny_pair(name)
    model.train()
    found: list[dict[str, Tensor]] = []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable()
        model.zero_grad()
        model(token_ids(), labels=token_ids()).loss.backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())
    decoder.zero_grad()
    logits = decoder(token_ids())[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, token_ids()[:, 1:].flatten()).backward()
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(found[0][name], parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "of our own"])
def test_no_attention_implementation_forgets_the_gate(
    implementation: str, attention_function: Callable[[str, Any], None]
) -> None:
    attention_function("of our own", causal)
    decoder, model = tiny_pair("elementwise")
    model.set_attn_implementation(implementation)
    expected = decoder(token_ids())
    torch.testing.assert_close(model(token_ids()).logits, expected, atol=2e-5, rtol=0)
    for layer in decoder.model.layers:
        layer.self_attn.gates["sdpa_output"].forward = lambda y, scores: y  # type: ignore[method-assign]
    assert (decoder(token_ids()) - expected).abs().max() > 0.1
    assert torch.allclose(model(token_ids()).logits, expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_has_the_gate() -> None:
    decoder = tiny_decoder(tiny_settings(num_layers=1, layers=({"window": 5},)))
    model = from_decoder(decoder)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        torch.testing.assert_close(model(token_ids()).logits, decoder(token_ids()), atol=2e-5, rtol=0)


def test_flash_attention_is_reached_by_its_name() -> None:
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash_attn is installed; it needs a GPU")
    _, model = tiny_pair("elementwise")
    with pytest.raises((ImportError, ValueError), match=r"(?i)flash"):
        model.set_attn_implementation("flash_attention_2")


def test_attention_weights_and_hidden_states_are_handed_out() -> None:
    decoder, model = tiny_pair("windows")
    model.set_attn_implementation("eager")
    output = model(token_ids(), output_attentions=True, output_hidden_states=True)
    assert [tuple(weights.shape) for weights in output.attentions] == [(3, 6, 17, 17), (3, 4, 17, 17), (3, 6, 17, 17)]
    assert (output.attentions[0].tril(-5) == 0).all()
    assert (output.attentions[1][:, :, 16] > 0).all()
    assert len(output.hidden_states) == 4
    assert torch.equal(output.hidden_states[0], decoder.model.embed_tokens(token_ids()))


def test_a_cache_continues_under_its_old_name() -> None:
    _, model = tiny_pair("windows")
    first = model(token_ids()[:, :10], use_cache=True)
    found = model(token_ids()[:, 10:], past_key_values=first.cache).logits
    torch.testing.assert_close(found, model(token_ids()).logits[:, 10:], atol=1e-5, rtol=0)


def test_embeddings_may_take_the_place_of_tokens() -> None:
    _, model = tiny_pair("biases and scale")
    embeds = model.get_input_embeddings()(token_ids())
    assert torch.equal(model(inputs_embeds=embeds).logits, model(token_ids()).logits)
    with pytest.raises(ValueError, match="give either input_ids or inputs_embeds"):
        model(token_ids(), inputs_embeds=embeds)
    with pytest.raises(ValueError, match="give either input_ids or inputs_embeds"):
        model()


def test_resizing_the_vocabulary_changes_the_settings() -> None:
    _, model = tiny_pair("biases and scale")
    model.resize_token_embeddings(V + 7, mean_resizing=False)
    decoder = to_decoder(model)
    assert decoder.settings.vocab_size == model.config.vocab_size == V + 7
    assert torch.equal(decoder(token_ids()), model(token_ids()).logits)


def test_a_copy_is_a_copy() -> None:
    _, model = tiny_pair("elementwise")
    expected, twin = model(token_ids()).logits, copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(token_ids()).logits, expected)


def test_a_rotation_changed_in_place_is_refused() -> None:
    _, model = tiny_pair("elementwise")
    copy.deepcopy(model)(token_ids())
    model.config.gatelab["rope"]["base"] = 77.0
    with pytest.raises(ValueError, match=r"the rotation in config\.gatelab was changed in place"):
        model(token_ids())


def test_what_transformers_cannot_express_is_refused() -> None:
    with pytest.raises(ValueError, match="causal=False generates no text; it has no Hugging Face form"):
        from_decoder(tiny_decoder(tiny_settings(causal=False)))
    with pytest.raises(ValueError, match="attention functions know no sink learned_key_value; no Hugging Face form"):
        from_decoder(tiny_decoder(tiny_settings(sink=SinkSettings(kind="learned_key_value"))))
    with pytest.raises(ValueError, match=r"knows one sliding window for a model, and this one has \[4, 6\]"):
        from_decoder(tiny_decoder(tiny_settings(layers=({"window": 4}, {"window": 6}))))


@pytest.mark.parametrize("name", ["elementwise", "headwise with sandwich norms", "windows", "control"])
def test_the_probe_measures_both_forms_alike(name: str) -> None:
    decoder, model = tiny_pair(name)
    ours = measure(decoder, token_ids()).summary()
    theirs = measure(model, token_ids(), attach=attach_hugging_face).summary()
    assert ours.keys() == theirs.keys()
    assert {k: v for k, v in theirs.items() if v is not None} == {
        k: pytest.approx(v, rel=1e-4, abs=1e-6) for k, v in ours.items() if v is not None
    }


def test_the_form_of_vllm_is_met(attention_function: Callable[[str, Any], None]) -> None:
    """Its backend builds the base model alone, calls one flat row, and finds its own layers in the keywords."""
    seen = []

    def vllm(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **keywords: Any) -> Any:
        seen.append((keywords["attention_instances"][module.layer_idx], mask, keywords["scaling"]))
        return causal(module, query, key, value, mask, **keywords)

    attention_function("vllm", vllm)
    _, model = tiny_pair("elementwise")
    base = model.model
    expected = base(token_ids(1)).last_hidden_state
    base.config._attn_implementation = "vllm"
    found = base(
        input_ids=token_ids(1),
        position_ids=torch.arange(17)[None],
        use_cache=False,
        attention_instances={0: "first", 1: "second"},
        return_dict=False,
    )
    assert seen == [("first", None, 8**-0.5), ("second", None, 8**-0.5)]
    torch.testing.assert_close(found[0], expected, atol=2e-5, rtol=0)
    assert base.is_backend_compatible()
    assert base.supports_tp_plan and base.supports_pp_plan


def test_nothing_imports_transformers_before_it_is_needed() -> None:
    code = "import sys, gatelab.interop; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
