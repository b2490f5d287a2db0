"""Reading through a pruned cache against a whole pass that masks the same keys by head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pruned_models import (
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    LAYERS,
    build_decoder,
    build_foreign,
    masked_logits,
    tokens_of,
    whole_logits,
)  # fmt: skip

from gatelab.longcontext.kv_pruning.cache import LayerKeys
from gatelab.longcontext.kv_pruning.driver import PrunedReader, foresee, pruned
from gatelab.longcontext.kv_pruning.presses import PRESSES, build_press
from gatelab.model.decoder import Decoder
from gatelab.model.layer_settings import LatentSettings, SinkSettings

CONTEXT, KEYS = 21, 6
MODELS = ("gated", "headwise", "ungated", "sink", "windowed", "llama", "qwen3_next", "gemma3", "laguna")
FOREIGN = ("llama", "qwen3_next", "gemma3", "laguna")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def build(name: str) -> Any:
    if name in FOREIGN:
        pytest.importorskip("transformers")
        return build_foreign(name)
    if name == "windowed":
        return build_decoder(windowed=True)
    if name == "sink":
        return build_decoder(None, sink=SinkSettings(kind="learned_key_value"))
    return build_decoder({"gated": "sdpa_elementwise", "headwise": "sdpa_headwise", "ungated": None}[name])


Kept = dict[int, list[list[set[int]]]]


def tolerance(name: str) -> float:
    """Foreign models compute norms and rotations in float32."""
    return 2e-5 if name in FOREIGN else 1e-10


def kept_keys(reader: PrunedReader) -> Kept:
    """What a cut left, from the layers without a window: layer, sample and key/value head to positions."""
    return {
        number: [
            [{int(place) for place in head.positions[sample] if place >= 0} for head in layer.heads]
            for sample in range(len(layer.heads[0].positions))
        ]
        for number, layer in reader.layers.items()
        if layer.window is None
    }


@pytest.mark.parametrize("name", MODELS)
def test_keeping_everything_changes_nothing(name: str) -> None:
    model, tokens = build(name), tokens_of()
    expected = whole_logits(model, tokens)
    with pruned(model, build_press("h2o")) as reader:
        logits = [reader.read(tokens[:, :CONTEXT])]
        reader.cut(CONTEXT)
        logits += [reader.read(tokens[:, CONTEXT:30]), reader.read(tokens[:, 30:])]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=0, atol=tolerance(name))
    assert torch.equal(whole_logits(model, tokens), expected)


@pytest.mark.parametrize("allocation", ["uniform", "heads", "both"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "sink"])
def test_a_cut_cache_equals_masks_by_head(name: str, allocation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gates = torch.tensor([[0.1, 0.5], [0.6, 0.1], [0.3, 0.3]])
    monkeypatch.setattr(LayerKeys, "mean_gates", property(lambda self: gates))
    model, tokens = build(name), tokens_of()
    with pruned(model, build_press("attention_value"), allocation, num_recent=2) as reader:
        reader.read(tokens[:, :CONTEXT])
        reader.cut(KEYS)
        kept, num_held = kept_keys(reader), reader.num_held()
        logits = reader.read(tokens[:, CONTEXT:])
    assert num_held == len(kept) * KV_HEADS * len(tokens) * KEYS
    sizes = {len(keys) for layer in kept.values() for sample in layer for keys in sample}
    assert sizes == ({KEYS} if allocation == "uniform" else {KEYS - 3, KEYS, KEYS + 3, KEYS - 4, KEYS + 4} & sizes)
    expected = masked_logits(
        model, tokens, lambda layer, b, k, t, s: t < CONTEXT or s >= CONTEXT or s in kept[layer][b][k]
    )
    torch.testing.assert_close(logits, expected[:, CONTEXT:], rtol=0, atol=tolerance(name))
    assert (logits - whole_logits(model, tokens)[:, CONTEXT:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["gated", "headwise", "qwen3_next"])
def test_mean_gates_are_the_groups(name: str) -> None:
    model, tokens = build(name), tokens_of()
    with pruned(model, build_press("h2o")) as reader:
        reader.read(tokens[:, :CONTEXT])
        reader.read(tokens[:, CONTEXT:])
        found = torch.stack([layer.mean_gates for layer in reader.layers.values()])
    if name == "qwen3_next":
        layers = [layer.self_attn.q_proj for layer in model.model.layers]
    else:
        layers = [layer.self_attn.gates["sdpa_output"].projection for layer in model.model.layers]
    outputs: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda module, inputs, output: outputs.append(output)) for layer in layers]
    whole_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    logits = torch.stack(outputs).unflatten(-1, (HEADS, -1))
    if name == "qwen3_next":
        logits = logits[..., HEAD_SIZE:]
    expected = logits.sigmoid().mean((2, -1)).unflatten(-1, (KV_HEADS, -1)).mean(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_heads_keep_different_keys_and_all_keep_the_newest() -> None:
    model, tokens = build("gated"), tokens_of()
    with pruned(model, build_press("h2o"), num_recent=2) as reader:
        reader.read(tokens[:, :CONTEXT])
        reader.cut(KEYS)
        kept = kept_keys(reader)
    heads = [keys for layer in kept.values() for sample in layer for keys in sample]
    assert all({CONTEXT - 2, CONTEXT - 1} <= keys for keys in heads)
    assert len({frozenset(keys) for keys in heads}) > LAYERS


def test_at_most_half_of_a_budget_is_for_the_newest() -> None:
    model, tokens = build("gated"), tokens_of()
    with pruned(model, build_press("key_norm"), num_recent=32) as reader:
        reader.read(tokens[:, :CONTEXT])
        norms = -reader.layers[1].heads[0].scores[0]
        reader.cut(KEYS)
        kept = kept_keys(reader)[1][0][0]
    smallest = norms[: CONTEXT - KEYS // 2].argsort()[: KEYS - KEYS // 2].tolist()
    assert kept == {*range(CONTEXT - KEYS // 2, CONTEXT), *smallest}


def test_streaming_holds_the_budget_and_sees_what_is_left() -> None:
    """StreamingLLM, one token at a time: each query sees the first four keys, the three before it, and itself."""
    model, tokens = build("gated"), tokens_of()
    with pruned(model, build_press("streaming_llm"), num_recent=0) as reader:
        logits = reader.stream(tokens, 7, step=1)
        assert reader.num_held() == LAYERS * KV_HEADS * len(tokens) * 7
    expected = masked_logits(model, tokens, lambda layer, b, k, t, s: s < 4 or t - s <= 3)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["gated", "qwen3_next"])
def test_accumulated_scores_do_not_depend_on_the_pieces(name: str) -> None:
    model, tokens = build(name), tokens_of()
    for press in ("h2o", "gated_attention", "self_gate", "key_norm", "tova"):
        with pruned(model, build_press(press)) as reader:
            reader.read(tokens)
            at_once = [head.scores for layer in reader.layers.values() for head in layer.heads]
        with pruned(model, build_press(press)) as reader:
            for piece in tokens.split(5, dim=1):
                reader.read(piece)
            by_pieces = [head.scores for layer in reader.layers.values() for head in layer.heads]
        for one, other in zip(at_once, by_pieces, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("press", [name for name in PRESSES if name not in ("value_gate", "oracle")])
def test_every_press_streams(press: str) -> None:
    model, tokens = build("gated"), tokens_of()
    with pruned(model, build_press(press), "both", num_recent=2) as reader:
        logits = reader.stream(tokens, KEYS, step=4)
        assert reader.num_held() == LAYERS * KV_HEADS * len(tokens) * KEYS
    assert logits.isfinite().all()


def test_value_gates_are_pruned_by() -> None:
    model, tokens = build_decoder("value_elementwise"), tokens_of()
    with pruned(model, build_press("value_gate"), num_recent=0) as reader:
        reader.read(tokens[:, :CONTEXT])
        norms = reader.layers[0].heads[1].values.norm(dim=-1)
        reader.cut(KEYS)
    kept = kept_keys(reader)[0]
    for sample in range(len(tokens)):
        assert kept[sample][1] == set(norms[sample].topk(KEYS).indices.tolist())


def test_a_snapshot_goes_back() -> None:
    model, tokens = build("gated"), tokens_of()
    with pruned(model, build_press("h2o"), num_recent=2) as reader:
        reader.read(tokens[:, :CONTEXT])
        whole = reader.snapshot()
        reader.cut(3)
        first = reader.read(tokens[:, CONTEXT:], observe=False)
        reader.restore(whole)
        assert reader.length == CONTEXT
        untouched = reader.read(tokens[:, CONTEXT:], observe=False)
        reader.restore(whole)
        reader.cut(3)
        again = reader.read(tokens[:, CONTEXT:], observe=False)
    torch.testing.assert_close(untouched, whole_logits(model, tokens)[:, CONTEXT:])
    assert torch.equal(first, again) and not torch.allclose(first, untouched)


def test_the_oracle_of_what_comes_beats_chance() -> None:
    model, tokens = build("gated"), tokens_of()
    expected = whole_logits(model, tokens)[:, CONTEXT:].log_softmax(-1)
    errors = {}
    for name, press in (
        ("oracle", foresee(model, tokens[:, :CONTEXT], tokens[:, CONTEXT:])),
        *((f"random {seed}", build_press("random", seed)) for seed in range(5)),
    ):
        with pruned(model, press, num_recent=0) as reader:
            reader.read(tokens[:, :CONTEXT])
            reader.cut(CONTEXT // 2)
            logits = reader.read(tokens[:, CONTEXT:], observe=False).log_softmax(-1)
        errors[name] = float((expected.exp() * (expected - logits)).sum(-1).mean())
    assert errors["oracle"] < min(error for name, error in errors.items() if name != "oracle")


def test_everything_is_restored() -> None:
    model = build("gated")
    before = [(layer.self_attn.kernel, layer.self_attn.recorder) for layer in model.model.layers]
    with pytest.raises(RuntimeError, match="mine"), pruned(model, None):
        raise RuntimeError("mine")
    assert [(layer.self_attn.kernel, layer.self_attn.recorder) for layer in model.model.layers] == before


def test_mistakes_are_named() -> None:
    model, tokens = build("gated"), tokens_of()
    with pruned(model, build_press("h2o")) as reader:
        reader.read(tokens)
        with pytest.raises(ValueError, match="a budget of 0 keys leaves nothing to attend to; keep at least 1"):
            reader.cut(0)
        reader.read(tokens[:, :5], observe=False)
        with pytest.raises(ValueError, match="the cache has no scores of its newest keys; read them with a press"):
            reader.cut(3)
    with pruned(model, None) as reader:
        reader.read(tokens)
        with pytest.raises(ValueError, match="no scores of its newest keys"):
            reader.cut(3)
    with pytest.raises(ValueError, match="causal=False"), pruned(build_decoder(causal=False), None):
        pass
    latent = LatentSettings(key_value_rank=10, unrotated_size=4, rotated_size=HEAD_SIZE - 4, value_size=7)
    settings = build_decoder().settings.model_copy(update={"num_kv_heads": HEADS, "qk_norm": False, "latent": latent})
    message = "latent attention caches one latent for all heads, and pruning drops keys and values head by head"
    with pytest.raises(ValueError, match=message), pruned(Decoder(settings), None):
        pass


def test_models_that_cannot_be_pruned_are_refused() -> None:
    pytest.importorskip("transformers")
    tokens = tokens_of()
    with (
        pytest.raises(ValueError, match=r"layer 0 of the model \(linear_attention layer\) holds a state"),
        pruned(build_foreign("qwen3_next_hybrid"), None) as reader,
    ):
        reader.read(tokens)
    wanted = "press self_gate needs a gate on the attention output"
    with pytest.raises(ValueError, match=wanted), pruned(build_foreign("llama"), build_press("self_gate")) as reader:
        reader.read(tokens)
    with pruned(build_foreign("llama"), build_press("h2o"), "heads") as reader:
        reader.read(tokens)
        with pytest.raises(ValueError, match="allocation 'heads' divides the budget by mean gate scores"):
            reader.cut(5)


def test_a_groups_heads_share_one_decision() -> None:
    assert HEADS > KV_HEADS
    with pruned(build("gated"), build_press("h2o")) as reader:
        reader.read(tokens_of())
    assert [len(layer.heads) for layer in reader.layers.values()] == [KV_HEADS] * LAYERS
