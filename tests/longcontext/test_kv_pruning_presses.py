"""Every press against its definition, written with loops over whole attention maps in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gatelab.diagnose import attention
from gatelab.diagnose.attention import attend
from gatelab.diagnose.calls import AttentionCall, Visibility
from gatelab.longcontext.kv_pruning.observed import Observed, last_queries
from gatelab.longcontext.kv_pruning.presses import PRESSES, Fixed, build_press

B, P, T, D, H, K, C, Cv = 3, 5, 12, 40, 6, 2, 8, 7
S, GROUP, SCALE, SOFTCAP = P + T, H // K, 0.3, 1.5
CASES = ("plain", "earlier_keys", "vacant_slots", "learned_sinks", "softcap", "headwise", "shared_gate")


class Truth(NamedTuple):
    """A call, whose keys have been cut before or not, and its whole map (B H T S)."""

    observed: Observed
    weights: Tensor
    visible: Tensor


def random_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_truth(case: str) -> Truth:
    num_earlier = 0 if case == "plain" else P
    num_keys = num_earlier + T
    query, key = 1.5 * random_numbers(B, T, H, C, seed=1), 1.5 * random_numbers(B, num_keys, K, C, seed=2)
    value, weight = random_numbers(B, num_keys, K, Cv, seed=3), random_numbers(D, H * Cv, seed=4)
    channels = {"headwise": (H, 1), "shared_gate": (1, Cv)}.get(case, (H, Cv))
    gate = random_numbers(B, T, *channels, seed=5).sigmoid()
    real = None
    if case == "vacant_slots":
        real = torch.ones(B, num_keys, dtype=torch.bool)
        real[1, 3:5], real[2, 1:5] = False, False
    sinks = random_numbers(1, H, 1, seed=6) if case == "learned_sinks" else None
    softcap = SOFTCAP if case == "softcap" else None
    sight = Visibility(T, num_keys, True, real=real)
    options = {"scale": SCALE, "visibility": sight, "softcap": softcap, "learned_sinks": sinks}
    output, lse = attend(query, key, value, **options)
    call = AttentionCall(
        0, query, key, value, output, lse, **options, scores={"sdpa_output": gate}, output_weight=weight
    )
    positions = torch.arange(num_keys) + 20
    positions[:num_earlier] = torch.tensor([0, 2, 3, 9, 11])[:num_earlier]
    positions = positions.expand(B, K, -1)
    if real is not None:
        positions = torch.where(real[:, None], positions, -1)
    observed = Observed(call, positions, random_numbers(B, K, num_earlier, seed=7).abs())
    visible = torch.tensor(
        [[[s <= num_earlier + t and (real is None or bool(real[b, s])) for s in range(num_keys)] for t in range(T)]
         for b in range(B)]
    )  # fmt: skip
    return Truth(observed, naive_map(call, visible), visible)


def naive_map(call: AttentionCall, visible: Tensor) -> Tensor:
    weights = torch.zeros(B, H, T, call.key.shape[1], dtype=torch.float64)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, (B, H, T))).tolist():
        seen = [s for s in range(call.key.shape[1]) if visible[b, t, s]]
        logits = {s: SCALE * float(call.query[b, t, h] @ call.key[b, s, h // GROUP]) for s in seen}
        if call.softcap is not None:
            logits = {s: call.softcap * math.tanh(logit / call.softcap) for s, logit in logits.items()}
        total = sum(map(math.exp, logits.values()))
        if call.learned_sinks is not None:
            total += math.exp(call.learned_sinks[0, h, 0])
        for s, logit in logits.items():
            weights[b, h, t, s] = math.exp(logit) / total
    return weights


def gate_of(call: AttentionCall, b: int, t: int, h: int) -> Tensor:
    gate = call.scores["sdpa_output"]
    return gate[b, t, h if gate.shape[2] > 1 else 0]


def projected(call: AttentionCall, h: int, vector: Tensor) -> Tensor:
    return call.output_weight[:, h * Cv : (h + 1) * Cv] @ vector


def of_pairs(truth: Truth, share: Callable[[int, int, int, int], Tensor | float]) -> Tensor:
    """sum over queries of a share of each (sample, query, query head, key), then the mean over each group."""
    totals = torch.zeros(B, H, truth.weights.shape[3], dtype=torch.float64)
    for b, h, t, s in torch.cartesian_prod(*map(torch.arange, truth.weights.shape)).tolist():
        if truth.visible[b, t, s]:
            totals[b, h, s] += share(b, t, h, s)
    return totals.unflatten(1, (K, GROUP)).mean(2)


def plus_earlier(truth: Truth, scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[..., : truth.observed.earlier.shape[2]] += truth.observed.earlier
    return scores


def naive_h2o(truth: Truth) -> Tensor:
    return plus_earlier(truth, of_pairs(truth, lambda b, t, h, s: truth.weights[b, h, t, s]))


def naive_attention_value(truth: Truth) -> Tensor:
    call = truth.observed.call

    def share(b: int, t: int, h: int, s: int) -> Tensor:
        return truth.weights[b, h, t, s] * projected(call, h, call.value[b, s, h // GROUP]).norm()

    return plus_earlier(truth, of_pairs(truth, share))


def naive_gated_attention(truth: Truth) -> Tensor:
    call = truth.observed.call

    def share(b: int, t: int, h: int, s: int) -> Tensor:
        passed = gate_of(call, b, t, h) * call.value[b, s, h // GROUP]
        return truth.weights[b, h, t, s] * projected(call, h, passed).norm()

    return plus_earlier(truth, of_pairs(truth, share))


def naive_tova(truth: Truth) -> Tensor:
    scores = of_pairs(truth, lambda b, t, h, s: truth.weights[b, h, t, s] if t == T - 1 else 0.0)
    scores[..., -1] = torch.inf
    return scores


def naive_snapkv(truth: Truth, window: int) -> Tensor:
    scores = of_pairs(truth, lambda b, t, h, s: truth.weights[b, h, t, s] / window if t >= T - window else 0.0)
    num_before = scores.shape[2] - window
    pooled = torch.full_like(scores, torch.inf)
    for s in range(num_before):
        around = [scores[..., n] for n in range(s - 2, s + 3) if 0 <= n < num_before]
        pooled[..., s] = sum(around) / 5
    return pooled


def naive_self_gate(truth: Truth) -> Tensor:
    new = torch.zeros(B, K, T, dtype=torch.float64)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, (B, H, T))).tolist():
        new[b, h // GROUP, t] += gate_of(truth.observed.call, b, t, h).mean() / GROUP
    return torch.cat((truth.observed.earlier, new), dim=-1)


def naive_oracle(truth: Truth) -> Tensor:
    """Attention computed again without the key, through the gate and the projection, against that with it."""
    call, weights = truth.observed.call, truth.weights
    errors = torch.zeros(B, K, weights.shape[3], dtype=torch.float64)
    for b, k, t, s in torch.cartesian_prod(*map(torch.arange, (B, K, T, weights.shape[3]))).tolist():
        others = [n for n in range(weights.shape[3]) if n != s and truth.visible[b, t, n]]
        if not truth.visible[b, t, s] or not others:
            continue
        change = torch.zeros(D, dtype=torch.float64)
        for h in range(k * GROUP, (k + 1) * GROUP):
            outputs = []
            for keys in ([*others, s], others):
                rest = 1 - sum(float(weights[b, h, t, n]) for n in range(weights.shape[3]) if n not in keys)
                mixed = sum(weights[b, h, t, n] / rest * call.value[b, n, k] for n in keys)
                outputs.append(projected(call, h, gate_of(call, b, t, h) * mixed))
            change += outputs[0] - outputs[1]
        errors[b, k, s] += change.norm()
    return errors


NAIVE = {
    "h2o": naive_h2o,
    "attention_value": naive_attention_value,
    "gated_attention": naive_gated_attention,
    "tova": naive_tova,
    "snapkv": lambda truth: naive_snapkv(truth, T),
    "self_gate": naive_self_gate,
    "oracle": naive_oracle,
    "key_norm": lambda truth: -truth.observed.call.key.square().sum(-1).sqrt().transpose(1, 2),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, so that sums run over several."""
    monkeypatch.setattr(attention, "BLOCK_ENTRIES", 4 * GROUP * S)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAIVE)
def test_scores_are_those_of_the_definition(name: str, case: str) -> None:
    truth = make_truth(case)
    found = build_press(name).score(truth.observed).double()
    real = truth.observed.positions >= 0
    expected = NAIVE[name](truth)
    assert found.shape == expected.shape == (B, K, truth.weights.shape[3])
    torch.testing.assert_close(found[real], expected[real], rtol=1e-9, atol=1e-9)


def test_float32_is_close_to_the_definition() -> None:
    truth = make_truth("earlier_keys")
    call = truth.observed.call
    narrow = {name: getattr(call, name).float() for name in ("query", "key", "value", "output_weight", "output", "lse")}
    scores = {"sdpa_output": call.scores["sdpa_output"].float()}
    observed = replace(truth.observed, call=replace(call, scores=scores, **narrow))
    for name in ("h2o", "gated_attention", "attention_value"):
        torch.testing.assert_close(build_press(name).score(observed).double(), NAIVE[name](truth), rtol=2e-5, atol=1e-6)


def test_snapkv_looks_through_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gatelab.longcontext.kv_pruning.presses.SNAP_WINDOW", 4)
    for case in ("plain", "earlier_keys", "learned_sinks"):
        truth = make_truth(case)
        torch.testing.assert_close(build_press("snapkv").score(truth.observed), naive_snapkv(truth, 4))


def test_constant_gates_are_the_ungated_form() -> None:
    truth = make_truth("earlier_keys")
    half = {"sdpa_output": torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64)}
    observed = replace(truth.observed, call=replace(truth.observed.call, scores=half))
    gated, ungated = (build_press(name).score(observed) for name in ("gated_attention", "attention_value"))
    earlier = torch.nn.functional.pad(observed.earlier, (0, T))
    torch.testing.assert_close(gated - earlier, (ungated - earlier) / 2)
    assert not torch.allclose(build_press("gated_attention").score(truth.observed), gated)


def test_streaming_llm_keeps_the_first_four_tokens_of_the_text() -> None:
    scores = build_press("streaming_llm").score(make_truth("vacant_slots").observed)
    assert scores[0, 0, :7].tolist() == [torch.inf, torch.inf, torch.inf, 9, 11, 25, 26]


def test_random_scores_are_drawn_once_for_each_key() -> None:
    truth = make_truth("earlier_keys")
    one, two, other = (build_press("random", seed).score(truth.observed) for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert torch.equal(one[..., :P], truth.observed.earlier)
    assert one[..., P:].min() >= 0 and one[..., P:].max() < 1 and one[..., P:].unique().numel() == B * K * T


def test_value_gates_weigh_the_value_that_attention_reads() -> None:
    observed = make_truth("earlier_keys").observed
    gated = replace(observed.call, scores={"value": torch.ones(B, T, K, 1)})
    scores = build_press("value_gate").score(replace(observed, call=gated))
    torch.testing.assert_close(scores, gated.value.square().sum(-1).sqrt().transpose(1, 2))


@pytest.mark.parametrize("name", ["gated_attention", "self_gate", "value_gate"])
def test_a_press_that_needs_a_gate_says_so(name: str) -> None:
    observed = make_truth("plain").observed
    what = "value" if name == "value_gate" else "attention output"
    bare = replace(observed, call=replace(observed.call, scores={}, layer=3))
    with pytest.raises(ValueError, match=f"press {name} needs a gate on the {what}, and layer 3 of the model has none"):
        build_press(name).score(bare)
    position = "value" if name == "value_gate" else "sdpa_output"
    added = replace(observed.call, scores={position: torch.ones(1, 1, 1, 1)}, added=frozenset({position}))
    with pytest.raises(ValueError, match=f"press {name} needs a gate that multiplies the {what}; that of layer 0"):
        build_press(name).score(replace(observed, call=added))


def test_a_hidden_output_projection_is_named() -> None:
    observed = make_truth("plain").observed
    hidden = replace(observed, call=replace(observed.call, output_weight=None))
    for name in ("attention_value", "gated_attention", "oracle"):
        with pytest.raises(ValueError, match=f"press {name} needs the output projection's weight, which layer 0"):
            build_press(name).score(hidden)


def test_unknown_presses_get_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="there is no press 'snap_kv'; did you mean 'snapkv'"):
        build_press("snap_kv")
    assert len(PRESSES) == 11


def test_given_scores_are_handed_out_head_by_head() -> None:
    first, second = torch.ones(B, S), torch.zeros(B, S)
    press, observed = Fixed({0: [first, second]}), make_truth("earlier_keys").observed
    assert torch.equal(press.score(observed)[:, 0], first)
    assert torch.equal(press.score(observed)[:, 0], second)


def test_last_queries_see_what_they_saw() -> None:
    call = make_truth("learned_sinks").observed.call
    call = replace(call, learned_sinks=call.learned_sinks.expand(B, H, T))
    last = last_queries(call, 3)
    assert last.visibility.past == S - 3 and last.learned_sinks.shape == (B, H, 3)
    again, lse = attend(
        last.query, last.key, last.value, scale=SCALE, visibility=last.visibility, learned_sinks=last.learned_sinks
    )
    torch.testing.assert_close(again, call.output[:, -3:])
    torch.testing.assert_close(lse, call.lse[:, :, -3:])
